"""JSON data: the object is valid and agrees with the text, and held-out records stay out of training."""

import json
import random
from typing import Any

import jsonschema
import pytest

from nano.data_json import extract, families
from nano.data_json_topics import FRAMES, HELD_FRAMES, HELD_RECORDS, RECORDS
from nano.sample import Sample, Split
from redline.bench.quality.checks import grade

SPLITS: tuple[Split, ...] = ("train", "values", "families")


def draw(split: Split, count: int, seed: int = 1) -> list[Sample]:
    rng = random.Random(seed)
    return [extract(rng, split) for _ in range(count)]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


def facts(value: Any) -> list[Any]:
    """The values in the text: like leaves, but a list of words is one value."""
    match value:
        case dict():
            return [fact for each in value.values() for fact in facts(each)]
        case [dict(), *_]:
            return [fact for each in value for fact in facts(each)]
        case _:
            return [value]


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_is_valid_and_the_check_accepts_it(split: Split) -> None:
    for sample in draw(split, 50):  # each has a schema of its own; checking it takes 15 ms
        assert sample.check
        content = sample.messages[-1]["content"]
        assert json.loads(content) == sample.check["json"]["value"]
        jsonschema.validate(json.loads(content), sample.check["json"]["schema"])
        assert grade(sample.check, content, []).ok
        assert sample.thinking or split == "train"


def test_every_value_is_in_the_prompt_and_in_the_thinking() -> None:
    for sample in draw("families", 250):
        asked, answer = sample.messages[-2]["content"], sample.messages[-1]
        for leaf in leaves(json.loads(answer["content"])):
            assert json.dumps(leaf, ensure_ascii=False) in answer["reasoning_content"]
            if isinstance(leaf, str) or (isinstance(leaf, int | float) and not isinstance(leaf, bool)):
                assert str(leaf) in asked, (leaf, asked)


def test_the_thinking_copies_the_words_of_the_text_for_every_value() -> None:
    for sample in draw("families", 250):
        asked, answer = sample.messages[-2]["content"], sample.messages[-1]
        told = [
            line.split(": ", 1)[1].split(" -> ") for line in answer["reasoning_content"].split("\n") if " -> " in line
        ]
        assert len(told) >= 1
        for words, value in told:
            assert words in asked
            plain = json.loads(value)
            assert isinstance(plain, bool | list) or str(plain) in words


def test_keys_come_in_the_order_of_the_schema() -> None:
    for sample in draw("train", 500):
        assert sample.check
        schema, value = sample.check["json"]["schema"], json.loads(sample.messages[-1]["content"])
        assert list(value) == [name for name in schema["properties"] if name in value]


def test_held_out_records_and_frames_never_reach_training() -> None:
    assert not set(RECORDS) & set(HELD_RECORDS)
    assert not set(FRAMES) & set(HELD_FRAMES)
    openings = [frame.split("{")[0] for frame in HELD_FRAMES if len(frame.split("{")[0]) > 20]
    assert openings
    for sample in draw("train", 1000):
        asked = sample.messages[-2]["content"]
        assert not [opening for opening in openings if asked.startswith(opening)]
        assert not [record for record in HELD_RECORDS if f"a {record}" in asked or f"an {record}" in asked], asked


def test_every_evaluation_text_tells_a_value_that_training_never_does() -> None:
    def told(sample: Sample) -> set[str]:
        assert sample.check
        return {json.dumps(each) for each in facts(sample.check["json"]["value"])}

    trained = set[str]().union(*(told(sample) for sample in draw("train", 3000)))
    for split in ("values", "families"):
        assert all(told(sample) - trained for sample in draw(split, 300))


def test_a_fifth_of_the_families_is_held_out() -> None:
    train, held = families("json")
    assert held >= 0.2 * (train + held)


def test_the_same_seed_makes_the_same_samples() -> None:
    assert draw("train", 60, seed=8) == draw("train", 60, seed=8)
    assert draw("train", 60, seed=8) != draw("train", 60, seed=9)
