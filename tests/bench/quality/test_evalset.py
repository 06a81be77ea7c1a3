"""The evaluation sets are reproducible, distinct, and answerable: the generator's own answers pass their checks."""

import json
import random
from pathlib import Path

import pytest

from nano.evalset import QUESTIONS, as_prompt, draw, graded_kinds, long_texts, of_split, paired, write
from nano.sample import Sample, Split
from redline.bench.quality.prompts import read_sets


def test_the_same_seed_makes_the_same_sets() -> None:
    assert list(of_split("families", 3, 3)) == list(of_split("families", 3, 3))
    assert paired(20) == paired(20)
    assert list(of_split("families", 3, 3, seed=1)) != list(of_split("families", 3, 3, seed=2))


def test_prompts_differ_and_end_before_the_answer() -> None:
    for split in ("values", "families"):
        prompts = [json.dumps([prompt["messages"], prompt.get("tools")]) for prompt in of_split(split, 9, 9)]
        assert len(set(prompts)) == len(prompts)
        assert all(prompt["messages"][-1]["role"] != "assistant" for prompt in of_split(split, 9, 9))


def test_a_larger_set_begins_with_a_smaller_one() -> None:
    kind, generator = next(iter(graded_kinds().items()))
    small = list(draw(kind, generator, "values", 5, seed=1))
    assert list(draw(kind, generator, "values", 9, seed=1))[:5] == small
    assert len(small) == 5


def test_a_kind_with_little_to_say_gives_what_it_has() -> None:
    def yes_or_no(rng: random.Random, _: Split) -> Sample:
        word = rng.choice(["yes", "no"])
        turns = [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]
        return Sample("echo", turns, check={"equals": word})

    assert len(list(draw("echo", yes_or_no, "values", 50, seed=1))) == 2


def test_what_is_written_is_read_by_the_evaluation(tmp_path: Path) -> None:
    write(tmp_path / "values.jsonl", of_split("values", 2, 1))
    write(tmp_path / "values.recall.jsonl.gz", long_texts("values", 2))
    prompts = read_sets(tmp_path)["values"]
    assert {prompt.kind for prompt in prompts} >= {"recall", "arithmetic", "tools", "code", "json", "lexicon"}
    assert {"add", "tool_call"}.isdisjoint(prompt.kind for prompt in prompts)
    assert all(prompt.thinking for prompt in prompts)


def test_an_answer_that_fails_its_own_check_is_noticed() -> None:
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "3"}]
    with pytest.raises(AssertionError, match="3 instead of 2"):
        as_prompt(Sample("add", turns, check={"number": 2}))


def shared(a: str, b: str) -> int:
    """The number of characters in the common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_questions_about_one_text_share_all_but_their_end() -> None:
    first, other, second = [prompt["messages"][0]["content"] for prompt in long_texts("families", 2 * QUESTIONS)][:3]
    assert shared(first, second) > 0.97 * len(first)
    assert shared(first, other) < 0.1 * len(first)


def test_a_planted_value_is_in_the_text_and_never_in_its_question() -> None:
    for prompt in long_texts("values", 2 * QUESTIONS):
        [value] = prompt["check"]["contains"]
        text, question = prompt["messages"][0]["content"].rsplit("\n\n", 1)
        assert value in text[-3000:]
        assert value not in question
