"""Bounds on thinking: the same in CUDA graphs as in eager steps, with and without drafts, for several choices, and
after a pre-emption.
"""

import functools
from typing import Any

import pytest

from redline.messages.job import Grammar, Job, Thinking
from redline.worker.config import DraftConfig
from tests.run.graphs.test_grammar_in_rounds import (
    DRAWN,
    KINDS,
    PLAIN,
    THOUGHT,
    answers,
    asked,
    led,
    opened,
)
from tests.tiny_model import Answer, job

MOST = (0, 1, 7, 40)


def bounded(name: str, most: int, **how: Any) -> Job:
    """A job for a model of random weights, which rarely ends its thinking."""
    grammar = Grammar(text="", thinking=Thinking(most=most, end=THOUGHT, ends=(THOUGHT,)))
    return job(name, range(20 + most, 60 + most), **{"max_tokens": 60, "grammar": grammar, **how})


def with_form(most: int) -> Job:
    """A bound before a schema, in an answer that would not end its thinking without the bound."""
    form = asked("", 3, {"type": "object", "properties": {"a": {"type": "boolean"}}}, thinks=True).sampling.grammar
    assert form is not None
    grammar = Grammar(
        text=form.text,
        after=form.after,
        banned=form.banned,
        thinking=Thinking(most=most, end=THOUGHT, ends=(THOUGHT,)),
    )
    return job("with a form", range(30, 70), max_tokens=60, grammar=grammar)


JOBS = [
    bounded(f"{name} {most}", most, **how)
    for most in MOST
    for name, how in (("greedy", {}), ("drawn", DRAWN), ("another choice", {**DRAWN, "seed": 6}))
]
JOBS.append(with_form(11))


@functools.cache
def by_the_host() -> dict[str, Answer]:
    return answers(opened(), [*JOBS, *PLAIN])


def test_thinking_ends_where_its_budget_does_and_not_before():
    for one in JOBS:
        assert one.sampling.grammar is not None
        assert one.sampling.grammar.thinking is not None
        most = one.sampling.grammar.thinking.most
        free = answers(opened(), [job(one.id, one.tokens, **plain(one))])[one.id].tokens if most == 7 else None
        tokens = by_the_host()[one.id].tokens
        assert tokens.index(THOUGHT) <= most
        if free is not None and THOUGHT not in free[:most]:
            assert tokens[: most + 1] == (*free[:most], THOUGHT), "the tokens before the bound must not change"
    assert any(by_the_host()[one.id].tokens.index(THOUGHT) == 40 for one in JOBS if "40" in one.id)
    assert {one.id: by_the_host()[one.id] for one in PLAIN} == {one.id: led()[one.id] for one in PLAIN}


def plain(one: Job) -> dict[str, Any]:
    """The same sampling without the bound."""
    sampling = one.sampling
    return {"max_tokens": 60, "temperature": sampling.temperature, "seed": sampling.seed, "seeded": sampling.seeded}


@KINDS
@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
def test_drafts_and_rounds_give_what_the_host_gives(speculation: DraftConfig | None, captured: bool):
    engine = opened(speculation, captured=captured)
    assert answers(engine, [*JOBS, *PLAIN]) == by_the_host()
    assert not captured or engine.runner.led == {}


@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
def test_a_job_that_is_thrown_out_has_what_is_left_of_its_budget(captured: bool):
    engine = opened(captured=captured, pages=5)
    assert answers(engine, JOBS) == {one.id: by_the_host()[one.id] for one in JOBS}
    assert engine.planner.load().preemptions > 0


def test_a_row_has_masks_only_where_it_may_reach_its_bound():
    engine = opened(captured=True)
    captured = engine.runner._captured
    assert captured is not None
    counted: list[int] = []
    masks = captured.masks
    captured.masks = lambda rows, positions: counted.append(len(given := masks(rows, positions))) or given  # type: ignore[method-assign]
    answers(engine, [bounded("far", 50, max_tokens=70)])
    assert len(counted) >= 65
    assert 1 <= sum(counted) <= 35, "no mask at first, and none after the end"
    assert not any(counted[:20])
    assert not any(counted[60:])
