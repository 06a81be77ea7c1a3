"""Tool-calling data: declared, valid, in canonical order, and with names and topics that training never sees."""

import json
import random
from typing import Any

import jsonschema
import pytest

from nano.data_tools import GENERATORS, families, held_name
from nano.data_tools_topics import FRAMES, HELD_FRAMES, HELD_NOUNS, HELD_TOPICS, NOUNS, TOPICS
from nano.sample import Sample, Split
from redline.bench.quality.checks import GradedCall, grade

SPLITS: tuple[Split, ...] = ("train", "values", "families")


def draw(kind: str, split: Split, count: int, seed: int = 1) -> list[Sample]:
    rng = random.Random(seed)
    return [GENERATORS[kind][0](rng, split) for _ in range(count)]


def declared(sample: Sample) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}


def calls(sample: Sample) -> list[Any]:
    return [call for message in sample.messages for call in message.get("tool_calls", [])]


def ordered(schema: dict[str, Any]) -> list[str]:
    """Parameters in the order of the TypeScript declaration."""
    return sorted(schema["properties"], key=lambda name: (name not in schema.get("required", []), name))


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("split", SPLITS)
def test_calls_fit_their_declaration_in_its_order_and_ids_count_up(kind: str, split: Split) -> None:
    for sample in draw(kind, split, 100):
        functions = declared(sample)
        assert len(functions) == len(sample.tools)
        for index, call in enumerate(calls(sample)):
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert call["id"] == f"functions.{name}:{index}"
            jsonschema.validate(arguments, functions[name] | {"additionalProperties": False})
            assert list(arguments) == [key for key in ordered(functions[name]) if key in arguments]
            assert call["function"]["arguments"] == json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_check_accepts_the_samples_own_answer(kind: str, split: Split) -> None:
    for sample in draw(kind, split, 100):
        last = sample.messages[-1]
        made: list[GradedCall] = [call["function"] for call in last.get("tool_calls", [])]
        assert sample.check
        assert all(value not in ([], "") for value in sample.check.values()), sample
        assert grade(sample.check, last["content"], made).ok, sample
        assert bool(made) == (kind in ("tool_call", "tool_multi"))
        assert len(made) in {"tool_call": (1,), "tool_multi": (2, 3)}.get(kind, (0,))


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_thinking_judges_every_function_and_names_every_parameter(kind: str) -> None:
    for sample in draw(kind, "values", 200):
        assert sample.thinking
        for message in sample.messages:
            if not message.get("tool_calls"):
                continue
            lines = message["reasoning_content"].split("\n")
            called = [call["function"]["name"] for call in message["tool_calls"]]
            functions = declared(sample)
            wants, judged = lines[: len(called)], lines[len(called) : len(called) + len(functions)]
            assert [want.split(": ")[0] for want in wants] == ["Want", *["Also"] * (len(called) - 1)]
            assert [line.split(": ")[0] for line in judged] == list(functions)
            wanted = {want.split(": ")[1] for want in wants}
            for line in judged:
                name, action, verdict = line.split(": ")
                assert verdict.startswith("yes") == (name in called) == (action in wanted), lines
            rest = lines[len(called) + len(functions) :]
            for number, name in enumerate(called, 1):
                assert rest.pop(0) in (name, f"{number}. {name}")
                for parameter in ordered(functions[name]):
                    inner = functions[name]["properties"][parameter].get("properties", ())
                    for path in [f"{parameter}.{key}" for key in inner] or [parameter]:
                        assert any(line.startswith(f"{path}: ") for line in rest), (path, lines)
                count = sum(len(each.get("properties", (0,))) for each in functions[name]["properties"].values())
                rest = rest[count:]
            assert not rest


@pytest.mark.parametrize("kind", ["tool_call", "tool_multi"])
def test_the_pieces_of_the_wish_are_the_users_words_and_hold_every_value(kind: str) -> None:
    for sample in draw(kind, "families", 400):
        said, answer = sample.messages[-2]["content"], sample.messages[-1]
        wants = [line for line in answer["reasoning_content"].split("\n") if line.startswith(("Want: ", "Also: "))]
        for want, call in zip(wants, answer["tool_calls"], strict=True):
            pieces = want.split(": ", 2)[2] if want.count(": ") > 1 else ""
            assert all(piece in said for piece in pieces.split(" | ")), (want, said)
            for value in json.loads(call["function"]["arguments"]).values():
                if isinstance(value, str):
                    assert value in pieces or value.capitalize() in pieces, (value, want)


def test_every_string_argument_is_in_the_users_words() -> None:
    for sample in draw("tool_call", "values", 400):
        said = sample.messages[-2]["content"].casefold()
        for value in sample.check["tool_calls"][0]["arguments"].values() if sample.check else ():
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, str):
                    assert part.casefold() in said, (part, said)
                elif not isinstance(part, bool | dict):
                    assert str(part) in said, (part, said)


@pytest.mark.parametrize("kind", GENERATORS)
def test_function_names_of_the_families_split_never_reach_training(kind: str) -> None:
    for split in SPLITS:
        for sample in draw(kind, split, 100):
            assert {held_name(name) for name in declared(sample)} == {split == "families"}


def test_every_evaluation_call_has_an_argument_that_training_never_has() -> None:
    def said(sample: Sample) -> set[str]:
        arguments = [json.loads(call["function"]["arguments"]) for call in calls(sample)]
        return {json.dumps(value) for each in arguments for value in each.values()}

    trained = set[str]().union(*(said(sample) for sample in draw("tool_call", "train", 4000)))
    for split in ("values", "families"):
        assert all(said(sample) - trained for sample in draw("tool_call", split, 300))


def test_held_out_topics_nouns_and_wordings_never_reach_training() -> None:
    assert not set(NOUNS) & set(HELD_NOUNS)
    assert not set(FRAMES) & set(HELD_FRAMES)
    assert not set(TOPICS) & set(HELD_TOPICS)
    held = [about for topic in HELD_TOPICS.values() for about in topic.about]
    # these also name rooms and products
    held += [f" {noun} " for noun in HELD_NOUNS if noun not in ("garden", "machine", "garage")]
    for kind in GENERATORS:
        for sample in draw(kind, "train", 400):
            told = json.dumps([tool["function"].get("description", "") for tool in sample.tools])
            assert not [text for text in held if text in told], told


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_fifth_of_the_families_is_held_out(kind: str) -> None:
    train, held = families(kind)
    assert held >= 0.2 * (train + held)


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_same_seed_makes_the_same_samples(kind: str) -> None:
    assert draw(kind, "train", 40, seed=8) == draw(kind, "train", 40, seed=8)
    assert draw(kind, "train", 40, seed=8) != draw(kind, "train", 40, seed=9)
