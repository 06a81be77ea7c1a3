"""The fast path for plain tokens shows the same as the full decoder."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.chat.decoder import Decoder
from redline.chat.events import Event, Text, Thought
from redline.chat.shown import shown
from redline.chat.tokenizer import Tokenizer
from redline.errors import RequestError
from redline.messages.delta import Delta
from tests.chat.streams import JOB, tokens_of

MARKS = ("think", "/think", "|tool_calls_section_begin|", "|tool_call_section_begin|", "|tool_call_begin|")
MORE_MARKS = ("|tool_call_argument_begin|", "|tool_call_end|")
WORDS = ("hello the", " ", "\n", "<", "é🙂", "functions.f:0", "a b", "{}")
PIECES = st.sampled_from([*WORDS, *(f"<{mark}>" for mark in MARKS + MORE_MARKS)])


def decoder(tokenizer: Tokenizer, thinking: bool, parse: bool, *stop: str) -> Decoder:
    return Decoder(tokenizer, thinking, stop, tokenizer.stop_ids, 7, parse)


def events_of(reader: Decoder, deltas: Sequence[Delta]) -> list[list[Event]]:
    return [list(reader.push(delta)) for delta in deltas]


@given(
    pieces=st.lists(PIECES, max_size=12),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    bytes_between=st.lists(st.integers(0, 255), max_size=4),
    thinking=st.booleans(),
    parse=st.booleans(),
    stop=st.sampled_from([(), ("b",)]),
)
def test_every_delta_shows_what_the_reader_makes_of_it(
    tiny: Tokenizer,
    pieces: list[str],
    sizes: list[int],
    bytes_between: list[int],
    thinking: bool,
    parse: bool,
    stop: tuple[str, ...],
):
    tokens = [*tokens_of(tiny, "".join(pieces[:6])), *bytes_between, *tokens_of(tiny, "".join(pieces[6:]))]
    deltas: list[Delta] = []
    while tokens:
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(Delta(job=JOB, tokens=tuple(tokens[:size]), proposed=size, accepted=size - 1))
        tokens = tokens[size:]
    deltas.append(Delta(job=JOB, finish="length"))
    reader = decoder(tiny, thinking, parse, *stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.chat.decoder.shown", lambda _: ({}, {}))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        patch.setattr("redline.chat.parser.Parser.steady", lambda _: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        patch.setattr("redline.chat.parser.PlainText.steady", lambda _: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        careful = events_of(decoder(tiny, thinking, parse, *stop), deltas)
    assert events_of(reader, deltas) == careful


def test_a_plain_token_shows_one_and_the_same_event_each_time(tiny: Tokenizer):
    reader = decoder(tiny, False, True)
    hello, the = (Delta(job=JOB, tokens=tuple(tokens_of(tiny, text))) for text in ("hello", " the"))
    reader.push(hello)
    (first,), (second,) = reader.push(the), reader.push(the)
    assert first == Text(text=" the")
    assert first is second


@pytest.mark.parametrize("token", [0x3C, 0xC3, 0xA9])
def test_what_the_format_may_look_at_and_pieces_of_characters_are_not_plain(tiny: Tokenizer, token: int):
    texts, thoughts = shown(tiny)
    assert (texts[token], thoughts[token]) == ((), ())


def test_control_tokens_are_not_plain(tiny: Tokenizer):
    texts, thoughts = shown(tiny)
    assert {texts[token] + thoughts[token] for token in tiny.specials.values()} == {()}


def test_space_that_may_end_the_reasoning_is_not_plain_there(tiny: Tokenizer):
    texts, thoughts = shown(tiny)
    assert (texts[0x20], thoughts[0x20]) == ((Text(text=" "),), ())
    assert thoughts[0x61] == (Thought(text="a"),)


def test_an_id_that_is_no_token_is_refused(tiny: Tokenizer):
    reader = decoder(tiny, False, True)
    reader.push(Delta(job=JOB, tokens=(0x61,)))
    with pytest.raises(RequestError, match="token id 999999"):
        reader.push(Delta(job=JOB, tokens=(999_999,)))
