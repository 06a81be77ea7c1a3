"""Bugs that other servers shipped for this model family, by their numbers in our list: the client's view of each.

Rules of the parser and of the template have tests of their own (tests/chat); here every number is one request.
"""

import asyncio
import json
import re
from typing import Any

import pytest

from redline.chat.conversation import Conversation, Message, ToolCall
from redline.chat.template import K2_6, render
from redline.chat.tokenizer import Special
from tests.api.fake_engine import say
from tests.api.test_chat import HELLO, ask, chunks, joined
from tests.api.world import END, TOKENIZER, World, answer, ids

pytestmark = pytest.mark.anyio
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
TOOLS = [TOOL, {"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def call(id: str = "functions.get:0", arguments: str = '{"a":1}') -> str:
    return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*made: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"


async def told(output: str, thought: str = "hm", per_delta: int = 1, **fields: Any) -> tuple[str, str, list[Any]]:
    """(reasoning, content, calls as (id, name, arguments)) of an answer, which is the same whole and streamed."""
    fields = {"tools": TOOLS, **fields}
    async with World(answer(output, thought=thought, per_delta=per_delta), max_model_len=1 << 20) as world:
        whole = (await ask(world, **fields)).choices[0].message
        stream = await chunks(world, **fields)
    made = [(one.id, one.function.name, one.function.arguments) for one in whole.tool_calls or ()]
    streamed: dict[int, list[str]] = {}
    for piece in [one for chunk in stream for one in chunk.choices[0].delta.tool_calls or ()]:
        at = streamed.setdefault(piece.index, ["", "", ""])
        at[0] += piece.id or ""
        assert piece.function is not None
        at[1] += piece.function.name or ""
        at[2] += piece.function.arguments or ""
    assert [tuple(streamed[index]) for index in range(len(streamed))] == made
    reasoning, content = getattr(whole, "reasoning_content", ""), whole.content or ""
    assert (joined(stream, "reasoning_content"), joined(stream, "content")) == (reasoning, content)
    return reasoning, content, made


async def prompt_of(messages: list[Any], **fields: Any) -> str:
    async with World(answer("a")) as world:
        await ask(world, messages=messages, **fields)
    return TOKENIZER.decode_bytes(world.engine.jobs[0].tokens).decode()


def turn(id: str, name: str = "Read", arguments: str = "{}") -> list[Any]:
    made = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": id, "content": "ok"},
    ]


GET = ("functions.get:0", "get", '{"a":1}')


async def test_bug_01_foreign_ids_in_the_history_are_made_native() -> None:
    prompt = await prompt_of(turn("call_8f3"))
    assert "call_8f3" not in prompt
    assert prompt.count("functions.Read:0") == 2


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get"}}])
async def test_bug_02_calls_keep_the_models_own_ids_whatever_the_tool_choice(choice: Any) -> None:
    assert (await told(section(call()), tools=TOOLS, tool_choice=choice))[2] == [GET]


async def test_bug_03_an_answers_ids_survive_the_round_trip() -> None:
    _, _, [(id, name, arguments)] = await told(section(call("functions.Read:7", '{"b":2}')))
    prompt = await prompt_of(turn(id, name, arguments))
    assert call("functions.Read:7", '{"b":2}') in prompt
    assert "## Return of functions.Read:7" in prompt


async def test_bug_04_an_id_that_names_no_function_is_no_call_and_the_answer_is_not_lost() -> None:
    reasoning, content, made = await told("Look." + section(call("call00003"), call()))
    assert (reasoning, content, made) == ("hm", "Look.", [GET])


async def test_bug_05_several_calls_in_one_section() -> None:
    made = (await told(section(call(), call("functions.Read:1", '{"b":[2]}'), call("functions.get:2", "{}"))))[2]
    assert made == [GET, ("functions.Read:1", "Read", '{"b":[2]}'), ("functions.get:2", "get", "{}")]


async def test_bug_06_and_07_no_mark_leaks_and_a_section_has_no_size() -> None:
    arguments = json.dumps({"text": "x" * 20_000})
    reasoning, content, made = await told(f"On it.{section(call(arguments=arguments))}noise</think>", per_delta=50)
    assert (reasoning, content) == ("hm", "On it.")
    assert made == [("functions.get:0", "get", arguments)]


async def test_bug_08_arguments_may_hold_line_ends() -> None:
    arguments = '{\n  "text": "a\\nb",\n\n  "more": 1\n}'
    assert (await told(section(call(arguments=arguments))))[2][0][2] == arguments


async def test_bug_09_content_before_the_section_is_kept() -> None:
    assert (await told(f"First, a look.\n{section(call())}"))[1:] == ("First, a look.\n", [GET])


@pytest.mark.parametrize("per_delta", [2, 3, 5, 8, 13, 100])
async def test_bug_10_a_delta_may_hold_the_end_of_a_call_and_the_next_ones_begin(per_delta: int) -> None:
    made = (await told(section(call(), call("functions.get:1", '{"b":2}')), per_delta=per_delta))[2]
    assert made == [GET, ("functions.get:1", "get", '{"b":2}')]


async def test_bug_11_many_streams_at_once_have_no_empty_call_deltas() -> None:
    output = section(call(arguments=json.dumps({"text": "y" * 1500})), call("functions.get:1", "{}"))
    async with World(answer(output, per_delta=3)) as world:
        streams = await asyncio.gather(*(chunks(world, tools=TOOLS) for _ in range(12)))
    for stream in streams:
        deltas = [chunk.choices[0].delta.tool_calls for chunk in stream]
        assert [] not in deltas
        pieces = [piece for delta in deltas if delta for piece in delta]
        assert all(piece.id or (piece.function and piece.function.arguments) for piece in pieces)
        assert {piece.index for piece in pieces} == {0, 1}


async def test_bug_12_reasoning_is_never_content_streamed_or_not() -> None:
    assert await told("Yes.", thought="I wonder") == ("I wonder", "Yes.", [])


@pytest.mark.parametrize("fields", [{"enable_thinking": False}, {"thinking": False}])
async def test_bug_13_an_instant_answer_is_content_under_both_names(fields: dict[str, bool]) -> None:
    async with World(say([*ids("Yes."), END])) as world:
        message = (await ask(world, extra_body={"chat_template_kwargs": fields})).choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == ("Yes.", None)
    assert TOKENIZER.decode_bytes(world.engine.jobs[0].tokens).endswith(b"<think></think>")


async def test_bug_14_a_forced_call_comes_with_thinking_as_well() -> None:
    assert await told(section(call()), tools=[TOOL], tool_choice="required") == ("hm", "", [GET])


async def test_bug_15_tools_end_reasoning_that_has_no_end() -> None:
    tokens = [*ids(f"I need it.{section(call())}"), END]
    async with World(say(tokens)) as world:
        message = (await ask(world, tools=TOOLS)).choices[0].message
    assert (message.reasoning_content, message.content) == ("I need it.", None)
    assert message.tool_calls[0].id == GET[0]


async def test_bug_16_text_between_section_and_call_is_noise() -> None:
    output = f"<|tool_calls_section_begin|>Calling now: {call()}\n<|tool_calls_section_end|>"
    assert (await told(output))[1:] == ("", [GET])


@pytest.mark.parametrize("name", ["get-weather", "a.b", "получить", "ns:tool"])
async def test_bug_17_names_of_every_kind_and_long_arguments_stream(name: str) -> None:
    arguments = json.dumps({"optional": None, "text": "z" * 3000})
    made = (await told("Text." + section(call(f"functions.{name}:4", arguments)), per_delta=7))[1:]
    assert made == ("Text.", [(f"functions.{name}:4", name, arguments)])


async def test_bug_18_arguments_are_text_that_is_neither_encoded_twice_nor_decoded() -> None:
    arguments = '{"text":"\\"quoted\\" \\u00e9"}'
    assert (await told(section(call(arguments=arguments))))[2][0][2] == arguments
    assert call("functions.Read:0", arguments) in await prompt_of(turn("x", arguments=arguments))
    as_object = turn("x", arguments={"a": 1})  # type: ignore[arg-type]
    assert call("functions.Read:0", '{"a":1}') in await prompt_of(as_object)


async def test_bug_19_ids_that_a_client_has_sanitised_are_made_native() -> None:
    prompt = await prompt_of(turn("functions_Read_0"))
    assert "functions_Read_0" not in prompt
    assert prompt.count("functions.Read:0") == 2


async def test_bug_20_the_prompt_holds_think_and_the_answer_need_not() -> None:
    assert await told("Yes.", thought="as I was saying") == ("as I was saying", "Yes.", [])
    assert await told("Yes.", thought="<think>as I was saying") == ("as I was saying", "Yes.", [])


@pytest.mark.parametrize("content", ["", None, []])
async def test_bug_21_empty_content_is_empty_and_the_generation_prompt_is_there(content: Any) -> None:
    messages = turn("functions.Read:0")
    messages[1]["content"] = content
    prompt = await prompt_of(messages)
    assert prompt.endswith("<|im_assistant|>assistant<|im_middle|><think>")
    assert "<|im_middle|><think></think><|tool_calls_section_begin|>" in prompt
    assert "[]" not in prompt
    assert "None" not in prompt


def test_every_number_of_the_list_has_a_test() -> None:
    numbers = {int(number) for name in globals() for number in re.findall(r"(?<=_)[0-9]{2}(?=_)", name)}
    assert numbers == set(range(1, 22))


def test_a_history_of_both_kinds_of_ids_has_no_two_alike() -> None:
    made = [ToolCall(id=id, name="f", arguments="{}") for id in ("functions.f:1", "x", "y")]
    conversation = Conversation(messages=(Message(role="assistant", tool_calls=tuple(made)),))
    pieces = render(conversation, K2_6)
    begun = [pieces[at + 1] for at, piece in enumerate(pieces) if piece == Special("<|tool_call_begin|>")]
    assert len({*begun}) == len(begun) == 3
