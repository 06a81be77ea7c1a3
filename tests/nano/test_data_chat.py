"""Conversation: answers pass their checks, held-out topics and wordings stay out of training, refusals are honest."""

import random
import re

import pytest

from nano.data_chat import CANNOT, GENERATORS, IMPOSSIBLE, JOBS_ON_TEXT, MEMORIES, TALKS, earlier, families
from nano.sample import Sample, Split
from redline.bench.quality.checks import grade


def drawn(kind: str, split: Split, count: int = 1_000) -> list[Sample]:
    rng = random.Random(f"{kind} {split}")
    return [GENERATORS[kind][0](rng, split) for _ in range(count)]


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("split", ["train", "values", "families"])
def test_every_answer_passes_its_check(kind: str, split: Split) -> None:
    for sample in drawn(kind, split):
        assert sample.check
        verdict = grade(sample.check, sample.messages[-1]["content"], [])
        assert verdict.ok, (verdict, sample)
        assert not any(mark in message["content"] for message in sample.messages for mark in "{}"), sample


@pytest.mark.parametrize("kind", GENERATORS)
def test_turns_alternate_after_an_optional_system_prompt(kind: str) -> None:
    for sample in drawn(kind, "train"):
        roles = [message["role"] for message in sample.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_fifth_of_the_wordings_is_held_out(kind: str) -> None:
    train, held = families(kind)
    assert held / (train + held) >= 0.2


def test_held_out_wordings_never_appear_in_training() -> None:
    said = {
        message["content"].lower().strip("?!. :)")
        for kind in GENERATORS
        for sample in drawn(kind, "train", 10_000)
        for message in sample.messages
        if message["role"] == "user"
    }
    lists = [
        *(talk.said for talk in TALKS),
        *(memory.asked for memory in MEMORIES),
        *(case.asked for case in IMPOSSIBLE),
    ]
    for held in (wording for said_list in lists for wording in said_list.held):
        assert "{" in held or held.lower().strip("?!. :)") not in said, held
    for job in JOBS_ON_TEXT:
        for held in job.said.held:
            pattern = re.compile(re.escape(held.lower().rstrip(".?")).replace(r"\{x\}", ".+"))
            if not any(pattern.match(wording.lower()) for other in JOBS_ON_TEXT for wording in other.said.train):
                assert not any(pattern.match(prompt) for prompt in said), held


def test_a_request_that_cannot_be_met_is_refused_and_its_near_miss_is_not() -> None:
    samples = drawn("refusal", "train", 2_000)
    refused = [any(word in s.messages[-1]["content"] for word in CANNOT) for s in samples]
    asked_to = [s.check is not None and "contains_any" in s.check for s in samples]
    assert refused == asked_to
    assert 0.2 < 1 - sum(refused) / len(refused) < 0.45


def test_what_is_asked_for_was_said_in_an_earlier_turn() -> None:
    rng = random.Random(0)
    for _ in range(300):
        sample = earlier(rng, "values")
        assert sample.check
        (value,) = sample.check["contains"]
        assert any(value in message["content"] for message in sample.messages[:-2])
        assert value not in re.findall(r"\w+", sample.messages[-2]["content"])


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_seed_gives_the_same_samples(kind: str) -> None:
    assert drawn(kind, "train", 50) == drawn(kind, "train", 50)
