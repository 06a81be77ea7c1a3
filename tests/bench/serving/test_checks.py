"""Wrong token counts of a server are reported by row; differences that tokenisation explains are not."""

from typing import Any

import pytest

from redline.bench.serving.checks import mismatches, usage_checks
from redline.bench.serving.records import Usage
from tests.bench.serving.answers import answer


class Words:
    """A vocabulary in which each word is a token."""

    def encode(self, text: str) -> list[int]:
        return list(range(len(text.split())))


def usage(**more: int) -> Usage:
    return Usage(**({"prompt_tokens": 10, "completion_tokens": 6} | more))


def found(counts: Words | None = None, **given: Any) -> list[str]:
    return [mismatch.check for mismatch in usage_checks(answer(**given), counts)]


FIVE = {"tokens": (1, 1, 1, 1, 1)}
PROSE = {"text": "word " * 100, "at": tuple(0.1 * n for n in range(1, 101)), "max_tokens": 400}


@pytest.mark.parametrize(
    "given",
    [
        {"usage": usage(), **FIVE},  # the end-of-turn token is counted, and carries no text
        {"usage": usage(completion_tokens=5), **FIVE},
        {"usage": usage(completion_tokens=17)},  # five events, with accepted draft tokens
        {"usage": usage(cached_tokens=10)},
        {"usage": usage(reasoning_tokens=3), "kinds": "ttaaa", "thinking": "hm"},
        {"usage": usage(completion_tokens=64), "finish": "length", "max_tokens": 64},
        {"at": (), "failure": "stalled", "usage": usage(completion_tokens=900)},
    ],
)
def test_what_adds_up_is_not_told(given: dict[str, Any]):
    assert found(**given) == []


@pytest.mark.parametrize(
    ("check", "given"),
    [
        ("output tokens", {"usage": usage(completion_tokens=4), **FIVE}),
        ("output tokens", {"usage": usage(completion_tokens=20), **FIVE}),
        ("output tokens", {"usage": usage(completion_tokens=1)}),
        ("length", {"usage": usage(completion_tokens=65)}),
        ("prompt tokens", {"usage": usage(prompt_tokens=14)}),
        ("prompt tokens", {"usage": usage(prompt_tokens=7)}),
        ("cached tokens", {"usage": usage(cached_tokens=11)}),
        ("thinking tokens", {"usage": usage(reasoning_tokens=7), "kinds": "ttaaa", "thinking": "hm"}),
        ("thinking tokens", {"usage": usage(reasoning_tokens=5)}),
        ("usage", {"usage": Usage(prompt_tokens=10)}),
    ],
)
def test_what_does_not_add_up_is_told(check: str, given: dict[str, Any]):
    assert found(**given) == [check]


def test_text_that_is_encoded_anew_tells_a_count_that_is_far_off():
    assert found(Words(), usage=usage(completion_tokens=101), **PROSE) == []
    assert found(Words(), usage=usage(completion_tokens=150), **PROSE) == []
    assert found(Words(), usage=usage(completion_tokens=160), **PROSE) == ["text"]
    assert found(Words(), usage=usage(completion_tokens=45), **PROSE) == ["output tokens", "text"]
    lost = PROSE | {"text": "\ufffd " + PROSE["text"]}
    assert found(Words(), usage=usage(completion_tokens=160), **lost) == []


def test_in_many_answers_a_smaller_share_is_much():
    def many(tokens: int, **extra: Any) -> list[Any]:
        said = usage(completion_tokens=tokens)
        return [answer(index, usage=said, extra=extra, **PROSE) for index in range(20)]

    assert mismatches(many(108), Words()) == []
    (mismatch,) = mismatches(many(125), Words())
    assert (mismatch.index, mismatch.said, mismatch.seen) == (None, 2500, 2000)
    assert mismatches(many(125, ignore_eos=True), Words()) == [], "ignored end-of-turn tokens carry no text"


def test_a_server_that_sells_more_tokens_than_it_sends_is_told_by_row():
    honest, lying = answer(0, **FIVE), answer(7, usage=usage(completion_tokens=10), **FIVE)
    (mismatch,) = mismatches([honest, lying])
    assert (mismatch.index, mismatch.said, mismatch.seen) == (7, 10, 5)
    assert mismatch.text == "usage reports 10 output tokens, the events contained 5"
