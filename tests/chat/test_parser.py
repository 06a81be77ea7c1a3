"""Parsing of answers, token by token. Most tests here guard against a bug that another server shipped."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.chat.tokenizer import Tokenizer
from redline.messages.delta import Finish
from tests.chat.streams import answer, call, calls, end, pushed, section, shows_a_mark, text, thought, tokens_of

WEATHER = call("functions.get_weather:0", '{"city":"Oslo"}')
OSLO = ("functions.get_weather:0", "get_weather", '{"city":"Oslo"}')


def test_reasoning_then_answer(tiny: Tokenizer):
    events = answer(tiny, "Let me think.</think>Yes.<|im_end|>", thinking=True)
    assert (thought(events), text(events)) == ("Let me think.", "Yes.")


def test_a_leading_think_is_swallowed(tiny: Tokenizer):
    events = answer(tiny, "<think>Hm</think>Yes", thinking=True)
    assert (thought(events), text(events)) == ("Hm", "Yes")


def test_reasoning_needs_no_leading_think(tiny: Tokenizer):  # smg #1873: the prompt already contains it
    assert thought(answer(tiny, "Hm</think>Yes", thinking=True)) == "Hm"


def test_an_instant_answer_is_all_content(tiny: Tokenizer):  # ik_llama.cpp #1685, vllm #43728
    events = answer(tiny, "Yes.<|im_end|>", thinking=False)
    assert (thought(events), text(events)) == ("", "Yes.")


@pytest.mark.parametrize("output", ["a</think>b", "<think>a</think>b", "a<think>b"])
def test_think_marks_never_appear_in_content(tiny: Tokenizer, output: str):  # vllm #36207, #36969
    assert text(answer(tiny, output, thinking=False)) == "ab"


def test_empty_reasoning_shows_nothing(tiny: Tokenizer):
    events = answer(tiny, "\n</think>Yes", thinking=True)
    assert (thought(events), text(events)) == ("", "Yes")


def test_whitespace_at_the_end_of_reasoning_is_no_part_of_it(tiny: Tokenizer):
    events = answer(tiny, "One. \n\n Two.\n \n</think>\n\nYes \n", thinking=True)
    assert (thought(events), text(events)) == ("One. \n\n Two.", "\n\nYes \n")


def test_reasoning_that_never_ends_is_reasoning(tiny: Tokenizer):
    events = answer(tiny, "on and on", thinking=True, finish="length")
    assert (thought(events), text(events)) == ("on and on", "")


@pytest.mark.parametrize("marks", [section(WEATHER), WEATHER])
def test_a_tool_call_ends_reasoning_that_lacks_its_end(
    tiny: Tokenizer, marks: str
):  # vllm #34955, #32216, sglang #19552
    events = answer(tiny, f"I need the weather.\n{marks}<|im_end|>", thinking=True)
    assert (thought(events), text(events), calls(events)) == ("I need the weather.", "", [OSLO])
    assert not shows_a_mark(events)


def test_a_call_has_the_models_own_id(tiny: Tokenizer):  # vllm #29596: not chatcmpl-tool-<hex>
    events = answer(tiny, section(WEATHER))
    assert calls(events) == [OSLO]
    assert end(events).tool_calls == 1


def test_several_calls_in_one_section(tiny: Tokenizer):  # vllm #24478
    events = answer(tiny, section(WEATHER, call("functions.f:1", "{}"), call("functions.g:2", '{"a":[1]}')))
    assert calls(events) == [OSLO, ("functions.f:1", "f", "{}"), ("functions.g:2", "g", '{"a":[1]}')]


def test_a_call_end_and_the_next_begin_may_share_a_delta(tiny: Tokenizer):  # vllm #38274
    tokens = tokens_of(tiny, section(WEATHER, call("functions.f:1", '{"long":"argument"}')))
    end_of_first = tokens.index(tiny.special("<|tool_call_end|>"))
    parts = [tokens[: end_of_first - 2], tokens[end_of_first - 2 : end_of_first + 3], tokens[end_of_first + 3 :]]
    assert calls(pushed(tiny, parts)) == [OSLO, ("functions.f:1", "f", '{"long":"argument"}')]


def test_content_before_the_section_is_kept(tiny: Tokenizer):  # vllm #38353
    events = answer(tiny, f"Hm</think>I'll look.\n{section(WEATHER)}", thinking=True)
    assert (thought(events), text(events), calls(events)) == ("Hm", "I'll look.\n", [OSLO])


def test_whitespace_before_tools_is_no_content(tiny: Tokenizer):
    assert text(answer(tiny, f"Hm</think>\n\n {section(WEATHER)}", thinking=True)) == ""


def test_an_answer_of_whitespace_is_shown_at_the_end(tiny: Tokenizer):
    assert text(answer(tiny, " \n")) == " \n"


@pytest.mark.parametrize("noise", [" \n", "Calling:", "</think>", "<|im_middle|>"])
def test_text_between_section_and_call_is_noise(tiny: Tokenizer, noise: str):  # vllm #28543, Kimi-K2 #89
    output = f"<|tool_calls_section_begin|>{noise}{WEATHER}{noise}{call('functions.f:1', '{}')}{noise}"
    events = answer(tiny, f"{output}<|tool_calls_section_end|>{noise}<|im_end|>")
    assert (text(events), [name for _, name, _ in calls(events)]) == ("", ["get_weather", "f"])


def test_text_behind_the_section_is_noise(tiny: Tokenizer):
    assert text(answer(tiny, f"Look.{section(WEATHER)}That is all.")) == "Look."


def test_a_second_section_is_read_too(tiny: Tokenizer):
    events = answer(tiny, section(WEATHER) + "\n" + section(call("functions.f:1", "{}")))
    assert [id for id, _, _ in calls(events)] == ["functions.get_weather:0", "functions.f:1"]


def test_a_section_end_closes_an_open_call(tiny: Tokenizer):
    begun = WEATHER.removesuffix("<|tool_call_end|>")
    assert calls(answer(tiny, f"<|tool_calls_section_begin|>{begun}<|tool_calls_section_end|>noise")) == [OSLO]


def test_the_next_call_closes_an_open_one(tiny: Tokenizer):
    begun = WEATHER.removesuffix("<|tool_call_end|>")
    assert len(calls(answer(tiny, section(begun, call("functions.f:1", "{}"))))) == 2


def test_the_end_closes_an_open_call(tiny: Tokenizer):
    assert calls(answer(tiny, WEATHER.removesuffix("<|tool_call_end|>") + "<|im_end|>")) == [OSLO]


@pytest.mark.parametrize("arguments", ["", " \n"])
def test_empty_arguments_are_an_empty_object(tiny: Tokenizer, arguments: str):  # sglang #12932 and relatives
    assert calls(answer(tiny, section(call("functions.f:0", arguments)))) == [("functions.f:0", "f", "{}")]


def test_a_call_without_arguments_mark_has_none(tiny: Tokenizer):
    output = "<|tool_call_begin|>functions.f:0<|tool_call_end|>"
    assert calls(answer(tiny, section(output))) == [("functions.f:0", "f", "{}")]


def test_arguments_that_were_cut_off_are_not_made_whole(tiny: Tokenizer):
    begun = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    assert calls(answer(tiny, begun, finish="length")) == [("functions.f:0", "f", "")]
    assert calls(answer(tiny, begun + '{"a', finish="length")) == [("functions.f:0", "f", '{"a')]
    assert calls(answer(tiny, "<|tool_call_begin|>functions.f:1", finish="length")) == []


def test_arguments_are_passed_on_verbatim(tiny: Tokenizer):  # Kimi-K2 #26, vllm #38441
    arguments = ' {"text":\n "a\\nb",\n\t"é🙂": "</s><|x|>"}\n'
    assert calls(answer(tiny, section(call("functions.f:0", arguments)))) == [("functions.f:0", "f", arguments)]


def test_think_tokens_inside_arguments_are_text(tiny: Tokenizer):
    arguments = '{"html":"<think>x</think>"}'
    assert calls(answer(tiny, section(call("functions.f:0", arguments))))[0][2] == arguments


def test_arguments_have_no_size_limit(tiny: Tokenizer):  # vllm #37184, #34442, #54701, sglang #23363
    arguments = '{"text":"' + "the and " * 20_000 + '"}'
    tokens = tokens_of(tiny, section(call("functions.f:0", arguments), WEATHER))
    made = calls(pushed(tiny, [[token] for token in tokens]))
    assert made == [("functions.f:0", "f", arguments), OSLO]


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("functions.get-weather:0", "get-weather"),  # sglang #20878
        ("functions.a.b_c:12", "a.b_c"),
        ("get_weather:3", "get_weather"),
        ("functions.a:b:1", "a:b"),
        ("functions.查询:0", "查询"),
    ],
)
def test_names_of_every_kind(tiny: Tokenizer, id: str, name: str):
    assert calls(answer(tiny, section(call(f" {id}\n", "{}")))) == [(id, name, "{}")]


@pytest.mark.parametrize("header", ["", "get_weather", "functions.f", "call00003", "functions.f:x", ":3"])
def test_a_header_that_names_no_call_drops_that_call_only(tiny: Tokenizer, header: str):  # vllm #27565: no IndexError
    events = answer(tiny, section(call(header, '{"a":1}'), WEATHER))
    assert (text(events), calls(events)) == ("", [OSLO])


def test_the_singular_spelling_before_a_call_is_no_content(tiny: Tokenizer):
    output = f"Look.<|tool_call_section¦_begin|>\n{WEATHER}"
    events = answer(tiny, output)
    assert (text(events), calls(events)) == ("Look.", [OSLO])
    events = answer(tiny, f"Hm {output}", thinking=True)
    assert (thought(events), calls(events)) == ("Hm Look.", [OSLO])


@pytest.mark.parametrize(
    "output", ["a <|tool_call_section_begin|> b", "a <|tool_call_section_begin|>", "a <|tool", "a <"]
)
@pytest.mark.parametrize("thinking", [True, False])
def test_marks_that_are_only_spelled_are_text(tiny: Tokenizer, output: str, thinking: bool):
    events = answer(tiny, output, thinking=thinking)
    assert text(events) + thought(events) == output


def test_stray_marks_change_nothing(tiny: Tokenizer):
    output = "a<|tool_call_end|>b<|tool_calls_section_end|>c<|tool_call_argument_begin|>d"
    assert text(answer(tiny, output)) == "abcd"


def test_other_control_tokens_are_not_shown_unless_asked_for(tiny: Tokenizer):  # vllm #30238
    reserved = tiny.name(tiny.special("[BOS]") + 5)
    output = f"a<|im_user|>b{reserved}[PAD]<|im_end|>"
    assert text(answer(tiny, output)) == "ab"
    assert text(answer(tiny, output, skip_special_tokens=False)) == f"a<|im_user|>b{reserved}[PAD]"


def test_keeping_special_tokens_does_not_show_the_formats_own(tiny: Tokenizer):  # dynamo #9227, the other way round
    output = f"Hm</think>Look.{section(WEATHER)}"
    events = answer(tiny, output, thinking=True, skip_special_tokens=False)
    assert (thought(events), text(events), calls(events)) == ("Hm", "Look.", [OSLO])


@pytest.mark.parametrize("behind", ["", "<|tool_calls_section_end|>", call("functions.g:1", "{}"), "noise"])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_where_one_call_may_be_made_the_answer_ends_with_it(tiny: Tokenizer, behind: str, finish: Finish):
    events = answer(tiny, f"Hm</think>Look.{section(WEATHER + behind)}", thinking=True, finish=finish, most_calls=1)
    assert (text(events), calls(events)) == ("Look.", [OSLO])
    assert (end(events).finish, end(events).stop) == ("stop", None)
    assert end(events).completion_tokens == len(
        tokens_of(tiny, f"Hm</think>Look.<|tool_calls_section_begin|>{WEATHER}")
    )


def test_a_call_that_is_dropped_is_not_the_one_that_may_be_made(tiny: Tokenizer):
    assert calls(answer(tiny, section(call("nothing", "{}"), WEATHER, WEATHER), most_calls=1)) == [OSLO]


def test_one_call_that_lacks_its_end_or_its_arguments_ends_the_answer_too(tiny: Tokenizer):
    begun = WEATHER.removesuffix("<|tool_call_end|>")
    assert calls(answer(tiny, section(begun, call("functions.g:1", "{}")), most_calls=1)) == [OSLO]
    bare = "<|tool_call_begin|>functions.f:0<|tool_call_end|>"
    assert calls(answer(tiny, section(bare, WEATHER), most_calls=1)) == [("functions.f:0", "f", "{}")]


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|im_user|>", "functions.f:0", "g-h:1", "{}", '{"a":"é"}',
        "<|tool_call_section_begin|>", "<|tool", "<", "STOP", "ST", "OP", " ", "\n", "hello", "the", "🙂", "查",
        WEATHER,
    ]
)  # fmt: skip
BYTES = st.integers(0, 255)  # the ids of single bytes: text that is not valid UTF-8


@st.composite
def splits(draw: st.DrawFn, tiny: Tokenizer) -> tuple[list[int], list[list[int]]]:
    """A token stream, and the same stream split into deltas."""
    tokens: list[int] = []
    for piece in draw(st.lists(PIECES | BYTES, max_size=25)):
        tokens += [piece] if isinstance(piece, int) else tokens_of(tiny, piece)
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    return tokens, [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_the_stream_joined_is_the_answer_whole(tiny: Tokenizer, data: st.DataObject):
    tokens, parts = data.draw(splits(tiny))
    thinking, parse = data.draw(st.booleans()), data.draw(st.booleans())
    stop = data.draw(st.sampled_from([(), ("STOP",), ("OP", "STOP", "\ufffd"), (" ", "hello the")]))
    finish = data.draw(st.sampled_from(["stop", "length", "aborted"]))
    options: dict[str, Any] = {
        **{option: data.draw(st.booleans()) for option in ("include_stop_str", "skip_special_tokens")},
        "most_calls": data.draw(st.sampled_from([None, 0, 1])),
        "min_tokens": data.draw(st.sampled_from([0, 3])),
    }
    whole = pushed(tiny, [tokens], thinking, stop, finish, parse, **options)
    assert pushed(tiny, parts, thinking, stop, finish, parse, **options) == whole
    assert pushed(tiny, [[token] for token in tokens] or [[]], thinking, stop, finish, parse, **options) == whole


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_mark_is_ever_shown(tiny: Tokenizer, data: st.DataObject):
    words = st.sampled_from(["hello", " ", "{}", "functions.f:0", *(f"<{x}think>" for x in ("", "/"))])
    marks = st.sampled_from([f"<|tool_call{x}|>" for x in ("s_section_begin", "s_section_end", "_begin", "_end")])
    output = "".join(data.draw(st.lists(words | marks, max_size=20)))
    assert not shows_a_mark(answer(tiny, output, thinking=data.draw(st.booleans())))
