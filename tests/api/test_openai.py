"""Parsing of requests: every limit, and every error with the field that caused it."""

from typing import Any

import msgspec
import pytest

from redline.api.ask import WHAT_IS_LEFT
from redline.api.config import Defaults, Limits
from redline.api.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Streaming,
    read_chat,
    read_completion,
    read_tokenize,
)
from redline.chat.conversation import Conversation
from redline.errors import RequestError
from redline.messages.job import Sampling

HELLO = [{"role": "user", "content": "hello"}]
BOUNDS = (Limits(), Defaults())
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CUSTOM = {"type": "custom", "custom": {"name": "c"}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    """A tool_choice of these functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chat(defaults: Defaults = Defaults(), **fields: Any) -> ChatRequest:  # noqa: B008
    return read_chat(msgspec.json.encode({"messages": HELLO, **fields}), Limits(), defaults)


def completion(**fields: Any) -> CompletionRequest:
    return read_completion(msgspec.json.encode({"prompt": "hello", **fields}), Limits(), Defaults())


def conversation(**fields: Any) -> Conversation:
    (prompt,) = chat(**fields).ask.prompts
    assert isinstance(prompt, Conversation)
    return prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 65}, "n"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": 0.0099}, "repetition_penalty"),
        ({"repetition_penalty": 10.1}, "repetition_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"frequency_penalty": 1e300}, "frequency_penalty"),
        ({"top_p": -1e-320}, "top_p"),
        ({"top_k": (1 << 20) + 1}, "top_k"),
        ({"top_k": 1 << 70}, "top_k"),
        ({"min_p": -1e-320}, "min_p"),
        ({"max_tokens": (1 << 31) - 1}, "max_tokens"),
        ({"max_completion_tokens": 1 << 64}, "max_completion_tokens"),
        ({"min_tokens": (1 << 31) - 1}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [1 << 31]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"logit_bias": {"1": -100.5}}, "logit_bias[...]"),
        ({"logit_bias": {str(1 << 31): 1}}, "logit_bias"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"seed": -(1 << 63) - 1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["x" * 1024, "y" * 1024, "z"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"seed": 1 << 64}, "seed"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"tools": [{**TOOL, "type": "functions"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}, "tools": [TOOL]}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowed(), "tools": [TOOL]}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("f", "g"), "tools": [TOOL]}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("f", mode="none"), "tools": [TOOL]}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "c"}}, "tools": [CUSTOM, TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "c"}}, "tools": [CUSTOM, TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function.name"),
        ({"tool_choice": "required", "tools": [CUSTOM]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [TOOL], "min_tokens": 3}, "min_tokens"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"best_of": 2}, "best_of"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"description": "\\ud800"}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"properties": {"\\udc00": {}}}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": HELLO * 4097}, "messages"),
        ({"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [*HELLO, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_chat_request_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert " - at " not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_completion_request_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        completion(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 400, "1e-40x"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "presence_penalty"])
def test_a_number_that_is_none_or_beyond_float64_is_refused(field: str, number: str) -> None:
    with pytest.raises(RequestError):
        read_chat(b'{"messages":[{"role":"user","content":"x"}],"%b":%b}' % (field.encode(), number.encode()), *BOUNDS)


def test_numbers_at_their_bounds_are_served() -> None:
    for field, values in {
        "repetition_penalty": (0.01, 10),
        "temperature": (0, 5e-324, 2),
        "top_p": (5e-324, 1),
        "top_k": (0, 1 << 20),
        "presence_penalty": (-2, 2),
    }.items():
        for value in values:
            assert getattr(chat(**{field: value}).ask.sampling, field) == value


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": "\xff"}', b'{"messages":' + b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        read_chat(body, Limits(), Defaults())


@pytest.mark.parametrize("depth", [64, 65])
def test_parameters_may_be_nested_as_deep_as_the_bound_says(depth: int) -> None:
    deep: Any = "end"
    for level in range(depth):
        deep = {"a": deep} if level % 2 or level == depth - 1 else [deep]
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    if depth == 64:
        assert conversation(tools=[tool]).tools[0].parameters == deep
    else:
        with pytest.raises(RequestError, match="64 levels deep"):
            chat(tools=[tool])


def test_a_body_nested_beyond_reason_is_refused_not_recursed_into() -> None:
    deep: dict[str, Any] = {}
    for _ in range(65):
        deep = {"items": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(RequestError, match="nested"):
        chat(tools=[tool])
    body = b'{"messages":[{"role":"user","content":"x"}],"response_format":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    with pytest.raises(RequestError, match="nested"):
        read_chat(body + b"}", Limits(), Defaults())


def test_fields_that_we_do_not_know_or_that_change_nothing_are_ignored() -> None:
    request = chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        functions=None,
        guided_json=None,
        best_of=1,
        tool_choice="auto",
        skip_special_tokens=True,
        continue_final_message=False,
    )
    assert request.stream is None


def test_silence_means_the_defaults_and_all_that_is_left() -> None:
    ask = chat(defaults=Defaults(sampling=Sampling(max_tokens=1, temperature=0.6, top_p=0.95, top_k=40))).ask
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.top_k) == (0.6, 0.95, 40)
    assert ask.sampling.max_tokens == WHAT_IS_LEFT
    assert ask.seed is None
    assert ask.n == 1
    assert chat().ask.sampling.temperature == 1.0


def test_every_sampling_field_reaches_the_engine() -> None:
    ask = chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=-7,
        stop=["a", "b"],
        stop_token_ids=[5],
        min_tokens=2,
        max_completion_tokens=9,
        ignore_eos=True,
        logit_bias={"3": -100},
        logprobs=True,
        top_logprobs=4,
        prompt_logprobs=1,
        n=3,
        cache_salt="mine",
    ).ask
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.2, 0.3, 1.1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_ids) == (9, 2, (5,))
    assert (sampling.logit_bias, sampling.logprobs, sampling.prompt_logprobs) == (((3, -100.0),), 4, 1)
    assert (ask.seed, ask.stop, ask.n, ask.ignore_eos, ask.salt) == (-7, ("a", "b"), 3, True, "mine")


def test_messages_in_every_spelling_become_one_conversation() -> None:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = conversation(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"},
            {"role": "assistant", "content": "done", "reasoning_content": "ah", "tool_calls": None},
        ]
    ).messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert (messages[1].content, messages[1].name) == ("ab", "ann")
    assert (messages[2].content, messages[2].reasoning) == ("", "hm")
    assert (messages[2].tool_calls[0].id, messages[2].tool_calls[0].arguments) == ("functions.f:0", '{"x":1}')
    assert messages[3].tool_call_id == "functions.f:0"
    assert messages[4].reasoning == "ah"


@pytest.mark.parametrize(
    ("fields", "thinking", "preserve"),
    [
        ({}, True, False),
        ({"chat_template_kwargs": {"thinking": False}}, False, False),
        ({"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True}}, False, True),
        ({"thinking": {"type": "disabled"}}, False, False),
        ({"thinking": {"type": "enabled", "keep": "all"}}, True, True),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}, True, False),
        ({"reasoning_effort": "none"}, False, False),
        ({"reasoning_effort": "low"}, True, False),
    ],
)
def test_thinking_in_every_spelling(fields: dict[str, Any], thinking: bool, preserve: bool) -> None:
    prompt = conversation(**fields)
    assert (prompt.thinking, prompt.preserve_thinking) == (thinking, preserve)


def test_thinking_may_be_off_by_default() -> None:
    (prompt,) = chat(defaults=Defaults(thinking=False)).ask.prompts
    assert isinstance(prompt, Conversation)
    assert not prompt.thinking


def test_a_choice_of_allowed_tools_bounds_what_is_called_and_not_what_is_declared() -> None:
    others = [{"type": "function", "function": {"name": f"other_{index}" * 20}} for index in range(200)]
    for mode in ("auto", "required"):
        read = chat(tools=[TOOL, *others], tool_choice=allowed("f", "other_3" * 20, mode=mode)).ask
        assert (read.calls.mode, read.calls.names) == (mode, {"f", "other_3" * 20})
        assert read.prompts == chat(tools=[TOOL, *others]).ask.prompts
    everything = allowed(*(f"other_{index}" * 20 for index in range(200)))
    assert len(chat(tools=others, tool_choice=everything).ask.calls.names or ()) == 200


def test_a_tool_that_is_no_function_is_left_out_with_its_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    custom = {"id": "c2", "type": "custom", "custom": {"name": "c", "input": "x"}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call, custom]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [{**custom, "id": "c3"}]},
        {"role": "tool", "tool_call_id": "c3", "content": "three"},
    ]
    tools = [CUSTOM, TOOL, {"type": "web_search"}, CUSTOM]
    read = conversation(messages=history, tools=tools)
    plain = conversation(messages=[*HELLO, {**history[1], "tool_calls": [call]}, history[2]], tools=[TOOL])
    assert chat(messages=history, tools=tools).left_out == ("custom", "web_search")
    assert read.messages == plain.messages
    [tool] = read.tools
    assert (tool.name, tool.param) == ("f", "tools[1].function.parameters")


def test_tool_choice_none_hides_the_tools() -> None:
    assert [tool.name for tool in conversation(tools=[TOOL]).tools] == ["f"]
    assert conversation(tools=[TOOL], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_a_prompt_in_every_shape(prompt: Any, read: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).ask.prompts == read


def test_echo_asks_for_the_prompts_logprobs_too() -> None:
    request = completion(echo=True, logprobs=2, max_tokens=0)
    assert request.echo
    assert (request.ask.sampling.prompt_logprobs, request.ask.sampling.max_tokens) == (2, 0)
    assert completion(logprobs=2).ask.sampling.prompt_logprobs is None


def test_stream_options_say_where_usage_stands() -> None:
    assert chat(stream=True).stream == Streaming()
    assert chat(stream=True, stream_options={"include_usage": True}).stream == Streaming(usage=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=options).stream == Streaming(usage=True, continuous=True)


def test_tokenize_wants_a_prompt_or_messages_and_not_both() -> None:
    for fields in ({}, {"prompt": "a", "messages": HELLO}):
        with pytest.raises(RequestError):
            read_tokenize(msgspec.json.encode(fields), Limits(), Defaults())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "keep": "all"}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
def test_tokenize_reads_the_conversation_that_a_chat_request_is(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({"messages": HELLO, **fields})
    assert read_tokenize(body, Limits(), Defaults()).prompt == conversation(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"chat_template": "x"}, "chat_template"),
        ({"documents": [{}]}, "documents"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_tokenize_refuses_what_a_chat_request_refuses_for_its_prompt(fields: dict[str, Any], param: str) -> None:
    for read in (read_chat, read_tokenize):
        with pytest.raises(RequestError) as caught:
            read(msgspec.json.encode({"messages": HELLO, **fields}), Limits(), Defaults())
        assert caught.value.param == param
