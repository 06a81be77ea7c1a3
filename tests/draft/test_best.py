"""The choice of the drafter to export, and the reasons printed for it."""

from collections.abc import Sequence

import pytest

from redline.draft.best import better, difference
from redline.draft.evaluate import Pooled

ROUNDS = 20


def pooled(accepted: Sequence[int]) -> Pooled:
    """Figures of prompts of 20 rounds each; accepted: draft tokens accepted per prompt."""
    length = 1 + sum(accepted) / (ROUNDS * len(accepted))
    counts = {f"{number}": (ROUNDS, one) for number, one in enumerate(accepted)}
    total = ROUNDS * len(accepted)
    return Pooled(k=3, mode="greedy", rounds=total, length=length, low=length, high=length, by_prompt=counts)


UNLIKE = [5, 50, 20, 35] * 10  # prompts differ far more than drafters do
MORE = [one + 2 + number % 2 for number, one in enumerate(UNLIKE)]


def said(**drafters: Sequence[int]) -> tuple[str, list[str]]:
    return better({name: {(3, "greedy"): pooled(accepted)} for name, accepted in drafters.items()})


def test_a_difference_is_paired_prompt_by_prompt():
    mean, low, high = difference(pooled(MORE), pooled(UNLIKE))
    assert mean == pytest.approx(2.5 / ROUNDS)
    assert 0 < low < mean < high < 0.2


def test_prompts_that_only_one_was_asked_do_not_count():
    mean, _, _ = difference(pooled([*MORE, 60, 60]), pooled(UNLIKE))
    assert mean == pytest.approx(2.5 / ROUNDS)


def test_the_better_one_is_exported_and_the_lines_say_why():
    name, (why, control) = said(base=UNLIKE, mined=MORE, control=UNLIKE)
    assert name == "mined"
    assert why == (
        "exported: mined, with 2.500 tokens per round; base has 2.375; no interval of mined - base includes 0"
    )
    assert control.endswith("mined has +0.125 tokens per round; no interval includes 0: mining helped")
    name, (why,) = said(base=MORE, mined=UNLIKE)
    assert name == "base"
    assert why.startswith("exported: base, with 2.500 tokens per round; mined has 2.375")


def test_what_is_not_told_apart_is_said():
    other = [one + 2 * (-1) ** number for number, one in enumerate(UNLIKE)]
    name, (why, control) = said(base=UNLIKE, mined=other, control=other)
    assert name == "base", "of two that are alike the first, which took less"
    assert why.endswith("1 of 1 intervals of mined - base include 0: the difference is not significant")
    assert control.endswith("1 of 1 intervals include 0: no significant effect of mining")


def test_where_nothing_was_measured_the_mined_one_is_exported():
    assert better({"base": {}, "mined": {}})[0] == "mined"
