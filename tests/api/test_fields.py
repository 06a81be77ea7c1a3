"""Request fields of other servers: each one is supported, ignored or rejected by name, as docs/api.md lists."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import BadRequestError
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from redline.api.config import Defaults, Limits
from redline.api.openai import requests as dialect
from redline.chat.template import K2, K2_6, K2_7, K2_THINKING, Style, encode
from redline.errors import RequestError
from redline.messages.job import OPTIONS, Thinking
from redline.messages.sampling_option import Api
from tests.api.fake_engine import say
from tests.api.test_chat import CALLS, HELLO, ask, chunks, joined
from tests.api.world import END, MODEL, TOKENIZER, World, answer, ids
from tests.waiting import eventually

pytestmark = pytest.mark.anyio
PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# -- the page and the code


def listed(*sections: str) -> dict[str, str]:
    """Field -> supported, ignored or rejected, of the page's tables under these headings."""
    found: dict[str, str] = {}
    for section in sections:
        table = PAGE.split(f"\n### {section}\n")[1].split("\n##")[0]
        for fields, here in re.findall(r"^\| (`.*?) \|[^|]*\| (supported|ignored|rejected) \|", table, re.MULTILINE):
            for field in re.findall(r"`(\w+)`", fields):
                assert field not in found, field
                found[field] = here
    return found


def test_the_page_and_the_chat_route_agree() -> None:
    page = listed("Both routes", "Sampling options", "Chat completions")
    known = set(dialect._Chat.__struct_fields__)
    refused = {*dialect._Refused.__struct_fields__, "echo"}
    assert {field for field, here in page.items() if here == "rejected"} == refused
    assert {field for field, here in page.items() if here == "supported"} == known - refused
    assert not known & {field for field, here in page.items() if here == "ignored"}


def test_the_page_and_the_completions_route_agree() -> None:
    page = listed("Both routes", "Sampling options", "Completions")
    known = set(dialect._Completion.__struct_fields__)
    refused = set(dialect._Refused.__struct_fields__)
    of_chats = {field for field, here in listed("Chat completions").items() if here == "rejected"} - {"echo"}
    assert {field for field, here in page.items() if here == "rejected"} | of_chats == refused
    assert {field for field, here in page.items() if here == "supported"} == known - refused
    assert not known & {field for field, here in page.items() if here == "ignored"}


def test_the_page_has_the_table_of_sampling_options() -> None:
    rows: list[str] = []
    for option in OPTIONS.values():
        names = {Api.RESPONSES: "Responses", Api.ANTHROPIC: "Anthropic"}
        others = [name for api, name in names.items() if api in option.apis]
        notes = [note for note in (option.note, *(["file"] if option.file else []), *others) if note]
        default = f"{option.neutral:g}" if isinstance(option.neutral, int | float) else "none"
        default = "random" if option.name == "seed" else default
        bounds = " | ".join(f"{bound:,}" for bound in (option.ge, option.le))
        rows.append(f"| `{option.name}` | {option.owner} | supported | {bounds} | {default} | {'; '.join(notes)} |")
    assert "\n".join(rows) in PAGE


def test_the_page_knows_every_field_of_the_official_client() -> None:
    chat = set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    raw = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert chat <= set(listed("Both routes", "Sampling options", "Chat completions"))
    assert raw <= set(listed("Both routes", "Sampling options", "Completions"))


REFUSED: list[tuple[str, Any]] = [
    ("verbosity", "low"),
    ("priority", 1), ("kv_transfer_params", {"do_remote_decode": True}), ("regex", "a+"), ("ebnf", 'root ::= "a"'),
    ("structural_tag", '{"type": "structural_tag"}'), ("json_schema", "{}"), ("separate_reasoning", False),
    ("stream_reasoning", False), ("stop_regex", "a"), ("no_stop_trim", True), ("lora_path", "x"), ("extra_key", "x"),
    ("return_hidden_states", True), ("vllm_xargs", {"a": 1}), ("input_ids", [1]),
    ("custom_logit_processor", "x"), ("bootstrap_room", 7), ("echo", True), ("moderation", {"model": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_field_that_would_change_the_answer_is_refused_by_its_name(field: str, value: Any) -> None:
    async with World(answer("a")) as world:
        with pytest.raises(BadRequestError) as refused:
            await ask(world, extra_body={field: value})
    assert (refused.value.param, world.engine.jobs) == (field, [])
    assert field in refused.value.message


async def test_values_that_change_nothing_pass() -> None:
    nothing = {
        "verbosity": "medium", "priority": 0, "kv_transfer_params": None, "regex": None, "separate_reasoning": True,
        "stream_reasoning": True, "echo": False, "no_stop_trim": False, "thinking_token_budget": None, "vllm_xargs": {},
        "partial": True, "stream_interval": 1,
    }  # fmt: skip
    async with World(answer("a")) as world:
        assert (await ask(world, extra_body=nothing)).choices[0].message.content == "a"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "bogus"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"thinking": False, "tone": "curt"}}, "chat_template_kwargs.tone"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"reasoning": {"effort": "bogus"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": 9.5}}, "reasoning"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"include_reasoning": 0}, "include_reasoning"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
async def test_a_word_that_means_nothing_is_refused_where_it_stands(fields: dict[str, Any], param: str) -> None:
    async with World(answer("a")) as world:
        with pytest.raises(BadRequestError) as refused:
            await ask(world, extra_body=fields)
    assert refused.value.param == param


# -- thinking


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
async def test_an_effort_is_to_think_or_not_to(effort: str) -> None:
    async with World(answer("a")) as world:
        await ask(world, reasoning_effort=effort)
    opening = "<think></think>" if effort == "none" else "<think>"
    assert TOKENIZER.decode_bytes(world.engine.jobs[0].tokens).decode().endswith(f"<|im_middle|>{opening}")


async def test_enable_thinking_is_served_wherever_it_stands() -> None:
    async with World(say([*ids("yes"), END])) as world:
        for body in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
            message = (await ask(world, extra_body=body)).choices[0].message
            assert (message.content, hasattr(message, "reasoning_content")) == ("yes", False)
        count = await world.http.post("/tokenize", json={"messages": HELLO, "enable_thinking": False})
    assert count.json()["tokens"] == list(world.engine.jobs[0].tokens)


@pytest.mark.parametrize("per_delta", [1, 4, 100])
async def test_reasoning_may_be_kept_to_ourselves(per_delta: int) -> None:
    async with World(answer("yes", thought="a secret", per_delta=per_delta)) as world:
        whole = await ask(world, extra_body={"include_reasoning": False})
        stream = await chunks(world, extra_body={"include_reasoning": False})
    assert whole.choices[0].message.content == joined(stream, "content") == "yes"
    assert "secret" not in whole.model_dump_json() + "".join(chunk.model_dump_json() for chunk in stream)
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(ids("a secret"))


# -- token ids


@pytest.mark.parametrize("per_delta", [1, 3, 100])
async def test_token_ids_are_told_streamed_or_not(per_delta: int) -> None:
    said = ids("hm</think>héllo<|im_end|>")
    async with World(answer("héllo", thought="hm", per_delta=per_delta)) as world:
        whole = await ask(world, n=2, extra_body={"return_token_ids": True})
        stream = await chunks(world, n=2, extra_body={"return_token_ids": True})
        bare = await ask(world)
    assert whole.prompt_token_ids == stream[0].prompt_token_ids == list(world.engine.jobs[0].tokens)
    assert [choice.token_ids for choice in whole.choices] == [said, said]
    for index in range(2):
        pieces = [choice for chunk in stream for choice in chunk.choices if choice.index == index]
        assert [token for piece in pieces for token in getattr(piece, "token_ids", None) or ()] == said
    assert not hasattr(bare, "prompt_token_ids")
    assert not hasattr(bare.choices[0], "token_ids")


async def test_token_ids_end_where_the_answer_does() -> None:
    async with World(answer("one two three", per_delta=100)) as world:
        whole = await ask(world, stop=["two"], extra_body={"return_token_ids": True})
    assert TOKENIZER.decode_bytes(whole.choices[0].token_ids).decode() == "</think>one two"


@pytest.mark.parametrize("echo", [False, True])
async def test_completions_tell_token_ids_in_the_choice(echo: bool) -> None:
    async with World(say([*ids("yes"), END])) as world:
        fields: dict[str, Any] = {"model": MODEL, "prompt": ["ab", "c"], "echo": echo}
        fields["extra_body"] = {"return_token_ids": True}
        whole = await world.client.completions.create(**fields)
        stream = [chunk async for chunk in await world.client.completions.create(**fields, stream=True)]
    choices: list[Any] = whole.choices
    for index, prompt in enumerate(("ab", "c")):
        assert choices[index].prompt_token_ids == ids(prompt)
        assert choices[index].token_ids == [*ids("yes"), END]
        pieces = [choice for chunk in stream for choice in chunk.choices if choice.index == index]
        assert pieces[0].prompt_token_ids == ids(prompt)
        assert [token for piece in pieces for token in getattr(piece, "token_ids", ())] == [*ids("yes"), END]


# -- a message to go on with

BEGUN = [*HELLO, {"role": "assistant", "content": "Once upon", "partial": True}]
OPEN = "<|im_assistant|>assistant<|im_middle|>"


async def test_a_partial_message_is_gone_on_with_and_counted_by_tokenize() -> None:
    async with World(say([*ids(" a time"), END])) as world:
        whole = await ask(world, messages=BEGUN)
        stream = await chunks(world, messages=BEGUN)
        count = await world.http.post("/tokenize", json={"messages": BEGUN})
    assert whole.choices[0].message.content == joined(stream, "content") == " a time"
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    tokens = world.engine.jobs[0].tokens
    assert TOKENIZER.decode_bytes(tokens).decode().endswith(f"<|im_end|>{OPEN}<think></think>Once upon")
    assert (count.json()["tokens"], whole.usage.prompt_tokens) == (list(tokens), len(tokens))


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}])
async def test_continue_final_message_is_the_same(more: dict[str, Any]) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    async with World(answer("a")) as world:
        await ask(world, messages=BEGUN)
        await ask(world, messages=messages, extra_body={"continue_final_message": True, **more})
        count = await world.http.post("/tokenize", json={"messages": messages, "continue_final_message": True, **more})
    first, second = world.engine.jobs
    assert list(first.tokens) == list(second.tokens) == count.json()["tokens"]


@pytest.mark.parametrize(
    ("style", "message", "ending"),
    [
        (K2, {"content": "{"}, "{"),
        (K2_THINKING, {"content": "{"}, "<think></think>{"),
        (K2_6, {"content": "x", "reasoning_content": "hm"}, "<think>hm</think>x"),
        (K2_6, {"content": "", "reasoning_content": "hm"}, "<think>hm"),
        (K2_7, {"content": "", "reasoning": "hm"}, "<think>hm"),
        (K2_6, {"content": ""}, "<think>"),
    ],
)
async def test_what_has_begun_stays_open_in_every_member_of_the_family(
    style: Style, message: dict[str, Any], ending: str
) -> None:
    body = msgspec.json.encode({"messages": [*HELLO, {"role": "assistant", "partial": True, **message}]})
    (prompt,) = dialect.read_chat(body, Limits(), Defaults()).ask.prompts
    text = TOKENIZER.decode_bytes(encode(prompt, TOKENIZER, style)).decode()  # type: ignore[arg-type]
    assert text.endswith(f"{OPEN}{ending}")


async def test_reasoning_that_has_begun_is_gone_on_with() -> None:
    message = {"role": "assistant", "content": "", "reasoning_content": "let me", "partial": True}
    async with World(answer("yes", thought=" see")) as world:
        whole = await ask(world, messages=[*HELLO, message])
    assert (whole.choices[0].message.reasoning_content, whole.choices[0].message.content) == (" see", "yes")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{**BEGUN[1]}, *HELLO]}, "messages[0].partial"),
        ({"messages": [{**HELLO[0], "partial": True}]}, "messages[0].partial"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ({"messages": BEGUN, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": BEGUN, "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"messages": [{**BEGUN[1], "tool_calls": [{"id": "x", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        dialect.read_chat(msgspec.json.encode(fields), Limits(), Defaults())
    assert refused.value.param == param


# -- one call at most


@pytest.mark.parametrize("per_delta", [1, 7, 200])
async def test_without_parallel_calls_the_answer_ends_after_the_first(per_delta: int) -> None:
    async with World(answer(CALLS, per_delta=per_delta)) as world:
        whole = await ask(world, tools=[GET], parallel_tool_calls=False)
        stream = await chunks(world, tools=[GET], parallel_tool_calls=False)
        both = await ask(world, tools=[GET])
    (call,) = whole.choices[0].message.tool_calls
    assert (call.id, call.function.arguments) == ("functions.get:0", '{"city": "Rome"}')
    assert whole.choices[0].finish_reason == stream[-1].choices[0].finish_reason == "tool_calls"
    pieces = [one for chunk in stream for choice in chunk.choices for one in choice.delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0}
    assert whole.usage.completion_tokens == len(ids("</think>" + CALLS.partition("<|tool_call_end|>")[0])) + 1
    assert len(both.choices[0].message.tool_calls) == 2


async def test_the_job_is_aborted_where_its_one_call_ends() -> None:
    async with World(answer(CALLS + "x" * 500)) as world:
        await ask(world, parallel_tool_calls=False)
        await eventually(lambda: len(world.engine.aborted) == 1)
        assert world.engine.sent < 200


# -- bounds on thinking


async def thinking_of(**fields: Any) -> Thinking | None:
    """The limit on thinking tokens in the job of a request."""
    async with World(answer("a")) as world:
        await ask(world, extra_body=fields)
        grammar = world.engine.jobs[0].sampling.grammar
    return None if grammar is None else grammar.thinking


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"thinking_token_budget": 64}, 64),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_budget": 9.0, "thinking_token_budget": 64}, 9),
        ({"thinking": {"type": "enabled", "budget_tokens": 9.0}}, 9),
        ({"chat_template_kwargs": {"thinking_budget": 9.0}}, 9),
        ({"reasoning": {"max_tokens": 9.0, "effort": "high"}}, 9),
        ({"reasoning": {"max_tokens": 9, "enabled": False}}, None),
        ({"max_tokens": 100, "response_format": {"type": "json_object"}}, 74),
        ({"max_tokens": 100, "thinking_budget": 90, "response_format": {"type": "json_object"}}, 74),
        ({"max_tokens": 100, "thinking_budget": 30, "response_format": {"type": "json_object"}}, 30),
        ({"max_tokens": 1, "response_format": {"type": "json_object"}}, 0),
        ({"max_tokens": 100, "tools": [GET], "tool_choice": "required"}, 74),
        ({"max_tokens": 100, "tools": [GET]}, None),
        ({"max_tokens": 100}, None),
        ({"thinking_budget": 9, "enable_thinking": False}, None),
    ],
)
async def test_thinking_has_the_bound_that_was_asked_for_and_leaves_room(fields: dict[str, Any], most: int | None):
    found = await thinking_of(**fields)
    assert (None if found is None else found.most) == most
    if found is not None:
        assert found.end == TOKENIZER.special("</think>") == found.ends[0]


async def test_thinking_that_the_prompt_has_counts():
    thoughts = {"role": "assistant", "content": "", "reasoning_content": "one two three", "partial": True}
    messages = [{"role": "user", "content": "hi"}, thoughts]
    spent = len(TOKENIZER.encode("one two three"))
    found = await thinking_of(messages=messages, thinking_budget=20)
    assert found is not None
    assert found.most == 20 - spent


# -- proposers


@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_stream_says_who_proposed_each_piece(logprobs: bool) -> None:
    script = answer("abcdefgh", thought="hm", per_delta=4, drafts=2)
    async with World(script) as world:
        told = await chunks(
            world, logprobs=logprobs, n=2, stream_options={"include_usage": True, "include_proposers": True}
        )
        bare = await chunks(world, logprobs=logprobs, n=2, stream_options={"include_usage": True})
    for index in range(2):
        pieces = [
            choice for chunk in told for choice in chunk.choices if choice.index == index and choice.delta.content
        ]
        # Deltas: h m </think> a | b c d e | f g h <|im_end|>; in each, two tokens are accepted drafts.
        assert [(piece.delta.content, piece.proposer) for piece in pieces] == [
            ("a", "target"), ("bc", "learned"), ("de", "target"), ("fg", "learned"), ("h", "target")
        ]  # fmt: skip
        thought = [
            choice
            for chunk in told
            for choice in chunk.choices
            if choice.index == index and getattr(choice.delta, "reasoning_content", None)
        ]
        assert [(piece.delta.reasoning_content, piece.proposer) for piece in thought] == [("hm", "learned")]
        if logprobs:
            assert [len(piece.logprobs.content) for piece in pieces] == [2, 2, 2, 2, 1]
    assert not any(hasattr(choice, "proposer") for chunk in bare for choice in chunk.choices)
    came = [choice.elapsed_ms for chunk in told for choice in chunk.choices if choice.index == 0]
    assert came == sorted(came), "each is the time at which its tokens arrived from the engine"
    assert came[0] > 0
    assert told[-1].usage == bare[-1].usage, "the counts are the same"


async def test_completions_say_who_proposed_each_piece() -> None:
    async with World(say([*ids("abcdef"), END], per_delta=4, drafts=3)) as world:
        fields: dict[str, Any] = {"model": MODEL, "prompt": "x", "stream": True}
        fields["stream_options"] = {"include_proposers": True}
        pieces = [chunk.choices[0] async for chunk in await world.client.completions.create(**fields)]
    assert [(piece.text, piece.proposer) for piece in pieces if piece.text] == [
        ("abc", "learned"), ("d", "target"), ("ef", "learned")
    ]  # fmt: skip


async def test_a_stop_string_within_the_drafts_ends_the_answer_there() -> None:
    async with World(answer("one two three", per_delta=16, drafts=12)) as world:
        told = await chunks(world, stop=["two"], stream_options={"include_usage": True, "include_proposers": True})
        bare = await chunks(world, stop=["two"], stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told if chunk.choices) == "one "
    assert told[-1].usage.completion_tokens == bare[-1].usage.completion_tokens
