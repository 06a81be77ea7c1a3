"""Made-up words: a sample stays right when some of its words become strings of arbitrary pieces."""

import json
import random

import pytest

from nano import data_json, data_recall, data_tools
from nano.sample import Generator
from nano.substitute import substitute, vocabulary_pieces

PIECES = ["qu", "ost", "render", "tion", "velt", "ang", "isk"]
CASES = [
    pytest.param(module.GENERATORS[kind][0], id=kind)
    for module, kind in (
        (data_tools, "tool_call"),
        (data_tools, "tool_multi"),
        (data_json, "json"),
        (data_recall, "reading"),
    )
]


@pytest.mark.parametrize("generator", CASES)
def test_what_is_called_and_what_is_declared_change_together(generator: Generator) -> None:
    rng = random.Random(0)
    changed = 0
    for _ in range(300):
        before = generator(rng, "train")
        after = substitute(rng, before, PIECES)
        changed += after.messages != before.messages
        assert [m["role"] for m in after.messages] == [m["role"] for m in before.messages]
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in after.tools}
        for call in after.messages[-1].get("tool_calls") or []:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert call["id"].startswith(f"functions.{name}:")
            assert set(arguments) <= set(declared[name].get("properties", {}))
    assert changed > 200


def test_a_made_up_word_stands_wherever_the_old_one_stood() -> None:
    rng = random.Random(1)
    sample = data_recall.reading(rng, "train")
    sample.messages = [
        {"role": "user", "content": "Zara keeps a lantern. Who keeps the lantern?"},
        {"role": "assistant", "content": "Zara keeps the lantern."},
    ]
    after = substitute(rng, sample, PIECES)
    question, answer = (message["content"] for message in after.messages)
    assert question != "Zara keeps a lantern. Who keeps the lantern?"
    noun = answer.rstrip(".").split()[-1]
    assert question.count(noun) == 2


def test_pieces_are_short_words_of_small_letters() -> None:
    assert vocabulary_pieces([b" the", b"Q", b"12", b"abcdefgh", "ä".encode(), b"ing", b"THE"]) == ["ing", "the"]
