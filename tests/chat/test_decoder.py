"""From deltas to events: characters, stop strings, counts, log probabilities, ends."""

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redline.chat.decoder import Decoder
from redline.chat.events import End, Event, Text
from redline.chat.stops import StopStrings
from redline.chat.tokenizer import Tokenizer
from redline.messages.delta import Delta
from redline.messages.step import TokenLogprobs
from tests.chat.streams import JOB, answer, call, calls, end, logprobs, pushed, section, text, thought, tokens_of
from tests.work import costs, lines


def decoder(tokenizer: Tokenizer, *stop: str, parse: bool = True, thinking: bool = False) -> Decoder:
    return Decoder(tokenizer, thinking, stop, tokenizer.stop_ids, 7, parse)


def delta(*tokens: int) -> Delta:
    return Delta(job=JOB, tokens=tokens)


def test_a_character_is_shown_when_its_last_byte_has_come(tiny: Tokenizer):
    reader = decoder(tiny)
    shown = [reader.push(delta(byte)) for byte in "é🙂".encode()]
    assert shown == [[], [Text(text="é")], [], [], [], [Text(text="🙂")]]


def test_half_a_character_at_the_very_end_is_replaced(tiny: Tokenizer):
    assert text(pushed(tiny, [[0x61, 0xF0, 0x9F]])) == "a\ufffd"


def test_half_a_character_before_a_control_token_is_replaced(tiny: Tokenizer):
    assert thought(pushed(tiny, [[0x61, 0xC3, tiny.special("</think>"), 0x62]], thinking=True)) == "a\ufffd"


def test_the_events_of_one_delta_are_few(tiny: Tokenizer):
    reader = decoder(tiny, thinking=True)
    events = reader.push(delta(*tokens_of(tiny, "one two three</think>four five")))
    assert [type(event).__name__ for event in events] == ["Thought", "Text"]


def test_a_stop_string_ends_the_answer_right_before_it(tiny: Tokenizer):
    events = answer(tiny, "one two STOP three", stop=("STOP",))
    assert text(events) == "one two "
    assert (end(events).finish, end(events).stop) == ("stop", "STOP")


def test_no_part_of_a_stop_string_is_ever_shown(tiny: Tokenizer):
    reader = decoder(tiny, "STOP")
    shown = [text(reader.push(delta(byte))) for byte in b"a STO STOP"]
    assert shown == ["a", " ", "", "", "", "STO ", "", "", "", ""]
    assert reader.stopped


def test_text_that_was_almost_a_stop_string_is_shown_at_the_end(tiny: Tokenizer):
    events = answer(tiny, "a STO", stop=("STOP",))
    assert (text(events), end(events).stop) == ("a STO", None)


def test_the_earliest_of_several_stop_strings_counts(tiny: Tokenizer):
    events = answer(tiny, "a b c", stop=("c", "b"))
    assert (text(events), end(events).stop) == ("a ", "b")


def test_a_stop_string_is_shown_where_asked_for(tiny: Tokenizer):
    events = answer(tiny, "one STOP two", stop=("STOP",), include_stop_str=True)
    assert text(events) == "one STOP"


def test_a_stop_string_that_overlaps_itself_is_found(tiny: Tokenizer):
    assert text(answer(tiny, "aaab", stop=("aab",))) == "a"


def test_nothing_comes_after_a_stop_string(tiny: Tokenizer):
    reader = decoder(tiny, "STOP")
    (shown, last) = reader.push(delta(*b"a STOP b"))
    assert shown == Text(text="a ")
    assert isinstance(last, End)
    assert last.completion_tokens == 6  # tokens after the stop string are not part of the answer
    assert reader.push(delta(*b"c")) == []
    assert reader.push(Delta(job=JOB, finish="aborted")) == []


@pytest.mark.parametrize("parse", [True, False])
def test_half_a_character_behind_a_stop_string_is_not_shown(tiny: Tokenizer, parse: bool):
    stops = StopStrings(("a",))
    assert (stops.push("xa"), stops.push("y"), stops.flush()) == ("x", "", "")
    ranks = {bytes([value]): value for value in range(256)} | {b"a\xc3": 256}
    names = {257: "[EOS]", 258: "<|im_end|>"}
    reader = Decoder(Tokenizer(ranks, names), False, ("a",), (257,), 1, parse)
    assert text(reader.push(Delta(job=JOB, tokens=(0x78, 256), finish="length"))) == "x"


def test_an_end_without_a_stop_string_is_not_stopped(tiny: Tokenizer):
    reader = decoder(tiny, "STOP")
    reader.push(Delta(job=JOB, tokens=(97,), finish="length"))
    assert not reader.stopped


def test_stop_strings_leave_reasoning_and_arguments_alone(tiny: Tokenizer):
    output = "a STOP b</think>c" + section(call("functions.f:0", '"STOP"'))
    events = answer(tiny, output, thinking=True, stop=("STOP",))
    assert (thought(events), text(events)) == ("a STOP b", "c")
    assert calls(events) == [("functions.f:0", "f", '"STOP"')]


def test_whitespace_before_a_stop_string_is_answer(tiny: Tokenizer):
    assert text(answer(tiny, "\n\nSTOP", stop=("STOP",))) == "\n\n"


def test_stop_strings_work_at_hostile_lengths():
    stops = StopStrings(("a" * 4_000 + "b",))
    shown = "".join(stops.push("a" * 50) for _ in range(200))
    assert len(shown) == 10_000 - 4_000
    assert stops.push("b") == ""
    assert stops.found


def naive(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    """The expected output of StopStrings, computed by searching the whole text."""
    shown: list[str] = []
    held = ""
    for piece in pieces:
        held += piece
        if begins := [(held.find(stop), stop) for stop in stops if stop in held]:
            begin, found = min(begins, key=lambda match: match[0])
            return [*shown, held[:begin]], found
        ends = [held[begin:] for begin in range(len(held) + 1)]
        kept = next(end for end in ends if any(stop.startswith(end) for stop in stops))
        shown.append(held[: len(held) - len(kept)])
        held = kept
    return [*shown, held], None


letters = st.text("ab", max_size=5)


@example(["abb", "b"], ["ab"])
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.lists(letters, max_size=12))
def test_the_automaton_finds_what_looking_at_everything_finds(stops: list[str], pieces: list[str]):
    search = StopStrings(tuple(stops))
    shown: list[str] = []
    for piece in pieces:
        shown.append(search.push(piece))
        if search.found is not None:
            break
    else:
        shown.append(search.flush())
    assert (shown, search.found) == naive(tuple(stops), pieces)


def test_a_token_costs_the_same_however_long_the_stop_strings_are():
    def feed(length: int) -> int:
        others = (f"a{chr(ord('c') + index)}" + "x" * (length - 2) for index in range(15))
        stops = StopStrings(("a" * (length - 1) + "b", *others))
        stops.push("a" * length)
        return lines(lambda: [stops.push("aaaa") for _ in range(500)])

    assert feed(1024) == feed(32)


@pytest.mark.parametrize(
    "before",
    [
        "<think>",
        "",
        "a</think>",
        "</think><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        "<|tool_call_section_¦begin|>",
        "a</think>b<|tool_call_section_¦begin|>",
    ],
)
def test_whitespace_that_is_held_back_costs_no_more_than_its_length(tiny: Tokenizer, before: str):
    def feed(count: int) -> tuple[int, int]:
        def read(part: Callable[[], object]) -> None:
            reader = decoder(tiny, thinking=True)
            reader.push(delta(*tokens_of(tiny, before)))
            for _ in range(count):
                reader.push(spaces)
                part()

        return costs(read)

    spaces = delta(*tokens_of(tiny, "    ") * 40)
    (lines_short, bytes_short), (lines_long, bytes_long) = feed(40), feed(200)
    assert lines_long < 6 * lines_short
    assert bytes_long < 8 * bytes_short  # 5 times if linear, 25 times if quadratic


def test_a_header_without_an_end_is_no_call(tiny: Tokenizer):
    assert calls(answer(tiny, call("functions.f:" + "0" * 1012, "{}"))) == [("functions.f:" + "0" * 1012, "f", "{}")]
    assert calls(answer(tiny, call("functions.f:" + "0" * 1013, "{}"))) == []


def test_the_models_own_end_is_counted_and_not_shown_or_reported(tiny: Tokenizer):
    events = answer(tiny, "hello<|im_end|>", skip_special_tokens=False)
    last = end(events)
    assert (text(events), last.stop, last.completion_tokens) == ("hello", None, 2)


def test_a_stop_id_is_shown_where_asked_for(tiny: Tokenizer):
    events = answer(tiny, "hello<|im_end|>", skip_special_tokens=False, include_stop_str=True)
    assert text(events) == "hello<|im_end|>"


def test_any_token_can_be_a_stop_id(tiny: Tokenizer):
    reader = Decoder(tiny, False, (), (*tiny.stop_ids, 0x62), 7, parse=True)
    events = reader.push(Delta(job=JOB, tokens=(0x61, 0x62), finish="stop"))
    assert (text(events), end(events).stop) == ("a", 0x62)


def test_a_raw_completion_shows_the_chat_marks_and_skips_other_control_tokens(tiny: Tokenizer):
    output = "a<think>b</think><|tool_call_begin|>c<|im_user|>d<|im_end|>"
    assert text(answer(tiny, output, parse=False)) == "a<think>b</think><|tool_call_begin|>cd"
    everything = answer(tiny, output, parse=False, skip_special_tokens=False)
    assert text(everything) == "a<think>b</think><|tool_call_begin|>c<|im_user|>d"


def test_counts_are_those_of_the_job(tiny: Tokenizer):
    reader = decoder(tiny, thinking=True)
    reader.push(Delta(job=JOB, tokens=tuple(tokens_of(tiny, "hello the</think>")), cached_tokens=5))
    tokens = tokens_of(tiny, "and" + section(call("functions.f:0", "{}")) + "<|im_end|>")
    last = end(reader.push(Delta(job=JOB, tokens=tuple(tokens), finish="stop", cached_tokens=5)))
    assert last == End(
        finish="stop",
        prompt_tokens=7,
        completion_tokens=3 + len(tokens),
        cached_tokens=5,
        reasoning_tokens=2,
        tool_calls=1,
    )


def test_drafts_are_counted_as_far_as_the_answer_goes(tiny: Tokenizer):
    reader = decoder(tiny, "STOP")
    reader.push(Delta(job=JOB, tokens=tuple(b"abc"), proposed=3, accepted=2))
    reader.push(Delta(job=JOB, tokens=tuple(b"d"), proposed=3, accepted=0))
    reader.push(Delta(job=JOB, tokens=tuple(b"e")))
    last = end(reader.push(Delta(job=JOB, tokens=tuple(b"STOP of it"), proposed=12, accepted=9)))
    assert (last.completion_tokens, last.accepted_tokens, last.rejected_tokens) == (9, 2 + 4, 1 + 3 + 3)


def test_an_error_ends_the_answer_with_its_reason(tiny: Tokenizer):
    events = decoder(tiny).push(Delta(job=JOB, tokens=(97,), finish="error", error="the worker ended"))
    assert (text(events), end(events).finish, end(events).error) == ("a", "error", "the worker ended")


def with_logprobs(tokens: list[int]) -> Delta:
    items = tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1) for token in tokens)
    return Delta(job=JOB, tokens=tuple(tokens), logprobs=items, finish="stop")


def test_every_shown_token_has_its_log_probability_and_bytes(tiny: Tokenizer):
    tokens = tokens_of(tiny, "hello é<|im_end|>")
    events: list[Event] = decoder(tiny).push(with_logprobs(tokens))
    assert logprobs(events) == [b"hello", b" ", b"\xc3", b"\xa9"]


def test_log_probabilities_end_with_the_stop_string(tiny: Tokenizer):
    assert logprobs(decoder(tiny, "ST").push(with_logprobs(list(b"aSTb")))) == [b"a", b"S", b"T"]


def test_prompt_log_probabilities_are_kept(tiny: Tokenizer):
    items = [TokenLogprobs(token=97, logprob=-float(place), rank=1) for place in range(3)]
    reader = decoder(tiny, parse=False)
    assert reader.push(Delta(job=JOB, prompt_logprobs=tuple(items[:2]))) == []
    reader.push(Delta(job=JOB, tokens=(97,), prompt_logprobs=tuple(items[2:])))
    reader.push(Delta(job=JOB, tokens=(97,)))
    assert reader.prompt_logprobs == items


@pytest.mark.parametrize("parse", [True, False])
def test_an_end_alone_is_enough(tiny: Tokenizer, parse: bool):
    (last,) = decoder(tiny, parse=parse).push(Delta(job=JOB, finish="length"))
    assert last == End(finish="length", prompt_tokens=7, completion_tokens=0, cached_tokens=0)
