"""Anthropic's Messages through the official client, whole and streamed, over a scripted engine."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.api.anthropic.requests import MessagesRequest, read_messages
from redline.api.config import Defaults, Limits
from redline.api.responses.sealed import seal
from redline.chat.conversation import Conversation
from redline.chat.template import encode
from redline.errors import RequestError
from redline.messages.delta import Delta
from tests.api.fake_engine import say
from tests.api.world import CALLS, MODEL, TOKENIZER, World, answer, ids, named_events

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

pytestmark = pytest.mark.anyio
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {
    "name": "get",
    "description": "the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THINK = {"type": "enabled", "budget_tokens": 1024}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
MESSAGES = "/v1/messages"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def client_of(world: World) -> "AsyncAnthropic":
    from anthropic import AsyncAnthropic  # the import takes 3 s in each process that collects this file

    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(world.app), base_url="http://redline")
    return AsyncAnthropic(base_url="http://redline", api_key="none", http_client=http, max_retries=0)


async def ask(world: World, **fields: Any) -> Any:
    async with client_of(world) as client:
        return await client.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 2000, **fields})


async def events(world: World, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The raw events of a stream: name and data."""
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2000, "stream": True, **fields}
    response = await world.http.post(MESSAGES, json=body)
    assert response.status_code == 200, response.text
    return named_events(response.text)


def request(**fields: Any) -> MessagesRequest:
    body = {"messages": HELLO, "max_tokens": 100, **fields}
    return read_messages(msgspec.json.encode(body), Limits(), Defaults())


def conversation(**fields: Any) -> Conversation:
    (prompt,) = request(**fields).ask.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def returned(*content: Any, id: str = "toolu_1") -> list[Any]:
    """A conversation in which a call has returned this content."""
    call = {"type": "tool_use", "id": id, "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": id, "content": content}
    return [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


async def test_an_answer_comes_whole() -> None:
    async with World(answer("hello there", thought="the user greets", cached=5)) as world:
        message = await ask(world, thinking=THINK)
    thought, text = message.content
    assert (message.type, message.role, message.model, message.id[:4]) == ("message", "assistant", MODEL, "msg_")
    assert (thought.type, thought.thinking) == ("thinking", "the user greets")
    assert thought.signature
    assert (text.type, text.text, message.stop_reason, message.stop_sequence) == (
        "text",
        "hello there",
        "end_turn",
        None,
    )
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(world.engine.jobs[0].tokens)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (5, 0)
    assert usage.output_tokens == len(ids("the user greets</think>hello there<|im_end|>"))
    assert usage.output_tokens_details.thinking_tokens == len(ids("the user greets"))


async def test_an_answer_that_did_not_ask_for_thinking_has_none() -> None:
    async with World(say(ids("plain<|im_end|>"))) as world:
        message = await ask(world)
        prompt = TOKENIZER.decode_bytes(world.engine.jobs[0].tokens).decode()
    assert [block.type for block in message.content] == ["text"]
    assert prompt.endswith("<think></think>")


@pytest.mark.parametrize("per_delta", [1, 3, 100])
async def test_the_stream_joined_by_the_client_is_the_whole_answer(per_delta: int) -> None:
    script = answer("héllo, 世界! 👋" + CALLS, thought="hm — ok", per_delta=per_delta, cached=3)
    async with World(script) as world:
        whole = await ask(world, thinking=THINK, tools=[TOOL])
        async with (
            client_of(world) as client,
            client.messages.stream(
                model=MODEL,
                messages=HELLO,
                max_tokens=2000,
                thinking=THINK,
                tools=[TOOL],  # type: ignore[arg-type]
            ) as stream,
        ):
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        thought, text, *calls = message.content
        assert (thought.thinking, text.text) == ("hm — ok", "héllo, 世界! 👋")
        assert [(call.name, call.input) for call in calls] == [("get", {"city": "Rome"}), ("get", {"city": "Oslo"})]
        assert len({call.id for call in calls}) == 2
        assert all(call.id.startswith("toolu_") for call in calls)
        assert message.stop_reason == "tool_use"
    assert whole.content[0].signature == streamed.content[0].signature
    counts = {"input_tokens", "output_tokens", "output_tokens_details", "cache_read_input_tokens"}
    assert streamed.usage.model_dump(include=counts) == whole.usage.model_dump(include=counts)


async def test_every_event_comes_in_its_order() -> None:
    async with World(answer("ab" + CALLS, thought="t")) as world:
        stream = await events(world, thinking=THINK, tools=[TOOL])
    assert all(name == data["type"] for name, data in stream)
    names: list[str] = []
    for name, data in stream:
        kind = data.get("delta", {}).get("type") or data.get("content_block", {}).get("type") or name
        if not names or names[-1] != kind or name == "content_block_start":
            names.append(kind)
    call = ["tool_use", "input_json_delta", "content_block_stop"]
    assert names == [
        *("message_start", "ping"),
        *("thinking", "thinking_delta", "signature_delta", "content_block_stop"),
        *("text", "text_delta", "content_block_stop"),
        *call, *call,
        *("message_delta", "message_stop"),
    ]  # fmt: skip
    assert [data["index"] for name, data in stream if name == "content_block_start"] == [0, 1, 2, 3]
    start = stream[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] == len(world.engine.jobs[0].tokens)
    assert stream[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_a_tool_round_trip_gives_the_model_its_own_ids() -> None:
    async with World(answer("let me see" + CALLS, thought="which city?")) as world:
        first = await ask(world, thinking=THINK, tools=[TOOL])
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": f"sun {index}"}]}
            for index, call in enumerate(first.content[2:])
        ]
        followed = [
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
        ]
        await ask(world, thinking=THINK, tools=[TOOL], messages=followed)
        prompt = TOKENIZER.decode_bytes(world.engine.jobs[1].tokens).decode()
    assert "toolu_" not in prompt
    assert "<think>which city?</think>let me see" + CALLS.replace('{"city": "', '{"city":"') in prompt.replace(
        '{"city": "', '{"city":"'
    )
    assert "## Return of functions.get:0\nsun 0" in prompt
    assert "## Return of functions.get:1\nsun 1" in prompt
    assert prompt.index("sun 1") < prompt.index("go on")


async def test_omitted_thinking_comes_back_in_its_signature() -> None:
    omitted = {**THINK, "display": "omitted"}
    async with World(answer("so", thought="a thought")) as world:
        whole = await ask(world, thinking=omitted)
        stream = await events(world, thinking=omitted)
    signatures = [
        data["delta"]["signature"] for _, data in stream if data.get("delta", {}).get("type") == "signature_delta"
    ]
    assert whole.content[0].thinking == ""
    assert [whole.content[0].signature] == signatures
    assert not [data for _, data in stream if data.get("delta", {}).get("type") == "thinking_delta"]
    block = {"type": "thinking", "thinking": "", "signature": signatures[0]}
    history = [*HELLO, {"role": "assistant", "content": [block]}, *HELLO]
    assert conversation(messages=history).messages[1].reasoning == "a thought"


@pytest.mark.parametrize(
    ("script", "fields", "reason"),
    [
        (answer("abc"), {}, ("end_turn", None)),
        (say(ids("abcdef")), {"max_tokens": 3}, ("max_tokens", None)),
        (say(ids("abcdef")), {"stop_sequences": ["de", "x"]}, ("stop_sequence", "de")),
        (say(ids(CALLS + "<|im_end|>")), {"tools": [TOOL]}, ("tool_use", None)),
    ],
    ids=["end_turn", "max_tokens", "stop_sequence", "tool_use"],
)
async def test_why_an_answer_ended(script: Any, fields: dict[str, Any], reason: tuple[str, str | None]) -> None:
    async with World(script) as world:
        message = await ask(world, **fields)
        stream = await events(world, **fields)
    assert (message.stop_reason, message.stop_sequence) == reason
    assert stream[-2][1]["delta"] == {"stop_reason": reason[0], "stop_sequence": reason[1]}


async def test_more_max_tokens_than_there_is_room_for_is_cut_and_said() -> None:
    async with World(say(ids("ab") * 500), max_model_len=200) as world:
        message = await ask(world, max_tokens=20_000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 200


async def test_a_call_that_was_cut_off_is_no_call() -> None:
    cut = CALLS[: CALLS.index("Rome")]
    async with World(say(ids(cut))) as world:
        message = await ask(world, tools=[TOOL], max_tokens=len(ids(cut)) - 1)
    assert (message.content, message.stop_reason) == ([], "max_tokens")


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12), thinks=st.booleans())
def test_any_chunking_joins_to_the_same_whole(cuts: list[int], thinks: bool) -> None:
    said = ids(("a thought</think>" if thinks else "") + "wörld 👋" + CALLS + "<|im_end|>")

    def script(job: Any) -> Any:
        start, turn = 0, 0
        while start < len(said):
            end = start + cuts[turn % len(cuts)]
            yield Delta(job=job.id, tokens=tuple(said[start:end]), finish="stop" if end >= len(said) else None)
            start, turn = end, turn + 1

    async def run() -> list[tuple[str, dict[str, Any]]]:
        async with World(script) as world:
            return await events(world, tools=[TOOL], **({"thinking": THINK} if thinks else {}))

    joined: dict[int, str] = {}
    for name, data in asyncio.run(run()):
        if name == "content_block_delta" and data["delta"]["type"] != "signature_delta":
            delta = {key: value for key, value in data["delta"].items() if key != "type"}
            joined[data["index"]] = joined.get(data["index"], "") + "".join(delta.values())
    parts = (["a thought"] if thinks else []) + ["wörld 👋", '{"city": "Rome"}', '{"city": "Oslo"}']
    assert list(joined.values()) == parts


async def test_tokens_are_counted_as_the_prompt_has_them() -> None:
    fields: dict[str, Any] = {"system": "be brief", "tools": [TOOL], "thinking": THINK}
    async with World(answer("a", thought="b")) as world, client_of(world) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, **fields)
        await ask(world, **fields)
        assert counted.input_tokens == len(world.engine.jobs[0].tokens)
        wrong = await world.http.post("/v1/messages/count_tokens", json={"messages": []})
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")


async def test_errors_have_anthropics_shape(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("good\n")
    async with World(answer("a"), keys_file=str(tmp_path / "keys")) as world:
        nobody = await world.http.post(MESSAGES, json={})
        assert nobody.json() == {
            "type": "error",
            "error": {"type": "authentication_error", "message": nobody.json()["error"]["message"]},
            "request_id": nobody.headers["request-id"],
        }
        key = {"x-api-key": "good", "anthropic-version": "2023-06-01"}
        missing = await world.http.post(MESSAGES, json={"messages": HELLO}, headers=key)
        assert (missing.status_code, missing.json()["error"]["type"]) == (400, "invalid_request_error")
        assert missing.json()["error"]["message"] == "Object missing required field `max_tokens`"
        beyond = await world.http.post(MESSAGES, json={"messages": HELLO, "max_tokens": 0}, headers=key)
        assert beyond.json()["error"]["message"] == "max_tokens: Expected `int` >= 1"
        other = await world.http.get(MESSAGES, headers=key)
        assert (other.status_code, other.json()["type"]) == (405, "error")
        unknown = {"messages": HELLO, "max_tokens": 5, "model": "another"}
        unknown = await world.http.post(MESSAGES, json=unknown, headers={"authorization": "Bearer good"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/v1/messages/batches", {}),
        ("GET", "/v1/messages/batches/id", {}),
        ("POST", "/v1/messages/", {}),
        ("GET", "/v1/files", VERSION),
        ("GET", "/v1/models/nothing", VERSION),
        ("POST", "/v1/complete", VERSION),
    ],
)
async def test_what_is_not_there_is_refused_in_anthropics_form(method: str, path: str, headers: dict[str, str]) -> None:
    async with World(answer("a")) as world:
        missing = await world.http.request(method, path, content=b"{}", headers=headers)
        assert missing.status_code == 404
        assert missing.json() == {
            "type": "error",
            "error": {"type": "not_found_error", "message": missing.json()["error"]["message"]},
            "request_id": missing.headers["request-id"],
        }
        for other in ("/v1/messagesx", "/v1/nothing", "/v1/models/nothing"):
            assert "type" not in (await world.http.get(other)).json()


async def test_the_list_of_models_is_anthropics_too() -> None:
    async with World(answer("a")) as world, client_of(world) as client:
        whole = await client.models.list(limit=1000)
        assert [model.id for model in whole.data] == [MODEL, "alias"]
        assert (whole.has_more, whole.first_id, whole.last_id) == (False, MODEL, "alias")
        model = await client.models.retrieve("alias")
        assert (model.id, model.type, model.display_name, model.lifecycle) == ("alias", "model", "alias", "active")
        assert (model.max_input_tokens, model.max_tokens) == (4096, 4096)
        card = (await world.http.get("/v1/models/alias")).json()
        assert model.created_at.timestamp() == card["created"]
        assert [model.id async for model in client.models.list(limit=1)] == [MODEL, "alias"]
        assert [model.id for model in (await client.models.list(after_id=MODEL)).data] == ["alias"]
        before = await client.models.list(before_id="alias", limit=1)
        assert ([model.id for model in before.data], before.has_more) == ([MODEL], False)
        nothing = (await client.models.list(before_id=MODEL)).model_dump()
        assert (nothing["data"], nothing["first_id"], nothing["last_id"]) == ([], None, None)
        listed = await world.client.models.list()
        assert [(model.object, model.created) for model in listed.data] == [("model", card["created"])] * 2
        for query in ("limit=0", "limit=1001", "limit=x", "limit=", "limit=%C2%B2", "after_id=x", "before_id=y"):
            refused = await world.http.get(f"/v1/models?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.partition("=")[0]), query


async def test_an_overloaded_server_says_529_and_a_failed_job_says_so_in_the_stream() -> None:
    def fails(job: Any) -> Any:
        yield Delta(job=job.id, tokens=(ids("a")[0],))
        world.engine.gate.clear()  # so that the first token is sent before the error
        asyncio.get_running_loop().call_later(0.05, world.engine.gate.set)
        yield Delta(job=job.id, finish="error", error="no", fault="failed")

    from anthropic import APIStatusError

    async with World(fails) as world:
        stream = await events(world)
        assert [name for name, _ in stream][-1] == "error"
        assert stream[-1][1]["error"]["type"] == "api_error"
        async with client_of(world) as client:
            with pytest.raises(APIStatusError):
                async with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=9) as streaming:
                    await streaming.get_final_message()
        world.gateway.monitor.mark_down(world.link, "gone")
        with pytest.raises(APIStatusError) as refused:
            await ask(world)
    assert refused.value.status_code == 529
    assert refused.value.response.json()["error"]["type"] == "overloaded_error"


async def test_a_model_of_anthropics_is_the_served_one() -> None:
    async with World(answer("a")) as world:
        assert (await ask(world, model="claude-sonnet-4-5")).model == "claude-sonnet-4-5"
        assert (await ask(world, model="alias")).model == "alias"


def test_blocks_become_messages() -> None:
    read = conversation(
        system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "one"},
                {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "xxx"},
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "toolu_1", "name": "get", "input": {"city": "Rome", "n": [1.50]}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}]},
        ],
        metadata={"user_id": "me"},
        service_tier="auto",
    )  # fmt: skip
    system, user, said, result = read.messages
    assert (system.role, system.content, user.content) == ("system", "one\n\ntwo", "a\nb")
    assert (said.reasoning, said.content, said.tool_calls[0].name) == ("t", "c", "get")
    assert json.loads(said.tool_calls[0].arguments) == {"city": "Rome", "n": [1.5]}
    assert (result.role, result.content, result.tool_call_id) == ("tool", "", "toolu_1")


def test_the_last_message_of_the_assistant_is_gone_on_with() -> None:
    read = conversation(messages=[*HELLO, {"role": "assistant", "content": "{"}])
    assert (read.continues, read.add_generation_prompt, read.thinking) == (True, False, False)


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "get"}, ("required", {"get"}, True)),
    ],
)
def test_which_tools_may_be_called(choice: dict[str, Any], calls: tuple[str, set[str] | None, bool]) -> None:
    read = request(tools=[TOOL], tool_choice=choice).ask
    assert (read.calls.mode, read.calls.names, read.calls.parallel) == calls
    assert conversation(tools=[TOOL], tool_choice={"type": "none"}).tools == ()


async def test_tools_that_anthropic_runs_are_left_out_with_what_they_gave_and_a_header_says_so() -> None:
    foreign: list[dict[str, Any]] = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [
            {"type": "web_search_result", "url": "https://a.example", "title": "A", "encrypted_content": "xx"}]},
        {"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_2", "content": {
            "type": "code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []}},
    ]  # fmt: skip
    said = {"type": "text", "text": "it is so"}
    tools = [SEARCH, {"type": "bash_20250124", "name": "bash"}, {"type": "mcp_toolset", "mcp_server_name": "s"}, TOOL]
    async with World(say(ids("a<|im_end|>"))) as world:
        bodies = [
            {"messages": [*HELLO, {"role": "assistant", "content": [*blocks, said]}, *HELLO], "tools": declared}
            for blocks, declared in ((foreign, tools), ([], [TOOL]))
        ]
        given = [await world.http.post(MESSAGES, json={**body, "max_tokens": 9}) for body in bodies]
        streamed = await world.http.post(MESSAGES, json={**bodies[0], "max_tokens": 9, "stream": True})
        counted = await world.http.post(f"{MESSAGES}/count_tokens", json=bodies[0])
    assert [answer.status_code for answer in given] == [200, 200], given[0].text
    assert world.engine.jobs[0].tokens == world.engine.jobs[1].tokens
    assert counted.json()["input_tokens"] == len(world.engine.jobs[0].tokens)
    for one in (given[0], streamed):
        told = one.headers["x-redline-warning"]
        assert told.endswith(
            ": web_search_20250305, bash_20250124, mcp_toolset, server_tool_use, web_search_tool_result, "
            "code_execution_tool_result"
        )
    assert "x-redline-warning" not in given[1].headers


def test_a_tool_that_is_found_is_declared_where_it_was_found() -> None:
    """The prompt before the search result, which is cached, stays the same when a search finds a tool."""
    found = {**TOOL, "name": "found", "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "found"}
    unknown = {"type": "tool_reference", "tool_name": "gone"}
    before = conversation(tools=[TOOL], messages=HELLO)
    history = returned(reference, unknown, {"type": "text", "text": "two"})
    read = conversation(tools=[TOOL, found], messages=[*history, *returned(reference, id="toolu_2")[1:]])
    first, again = (message for message in read.messages if message.role == "tool")
    assert (first.content, [tool.name for tool in first.declares]) == ("found\ngone\ntwo", ["found"])
    assert (again.content, again.declares) == ("found", ())
    opening, prompt = (TOKENIZER.decode_bytes(encode(one, TOKENIZER)).decode() for one in (before, read))
    assert prompt.startswith(opening.removesuffix("<|im_assistant|>assistant<|im_middle|><think></think>"))
    assert prompt.count("type found = ") == 1
    assert "found\ngone\ntwo\n# Tools\n\n## functions\nnamespace functions {\n// the weather\ntype found = " in prompt
    assert request(tools=[found], messages=history, tool_choice={"type": "tool", "name": "found"}).ask.calls.names


def test_where_anthropic_would_search_all_tools_are_declared_at_once() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    read = conversation(tools=[search, {**TOOL, "defer_loading": True}])
    assert [tool.deferred for tool in read.tools] == [False]


def test_a_form_of_the_answer_is_a_constraint() -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": format, "effort": "high"}}, {"output_format": format}):
        constraint = request(**fields).ask.constraint
        assert constraint is not None
        assert json.loads(constraint.text) == {"type": "object"}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1 << 31}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": ["x" * 1000] * 3}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO * 4097}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 3}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{**TOOL, "type": "costum"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [SEARCH, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tol_result", "content": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": returned({"type": "tool_reference"})}, "messages[2].content[0].content[0].tool_name"),
        ({"messages": returned({"type": "text"}, {"type": "image"})}, "messages[2].content[0].content[0].text"),
        (
            {"messages": returned({"type": "text", "text": "a"}, {"type": "x"})},
            "messages[2].content[0].content[1].type",
        ),
        ({"messages": returned(3)}, "messages[2].content[0].content[0]"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"tools": [{**TOOL, "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"output_format": {"type": "text"}}, "output_format"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"thinking": THINK, "messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "thinking"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        request(**fields)
    assert refused.value.param == param


def test_a_signature_that_is_not_ours_is_nothing() -> None:
    for signature in ("ErUB", "redline1.###", seal("x")[:-3] + "é"):
        block = {"type": "thinking", "thinking": "", "signature": signature}
        assert conversation(messages=[{"role": "assistant", "content": [block]}, *HELLO]).messages[0].reasoning == ""


async def test_a_budget_bounds_the_thinking():
    async with World(answer("a")) as world:
        await ask(world, thinking=THINK)
        grammar = world.engine.jobs[0].sampling.grammar
    assert grammar is not None
    assert grammar.thinking is not None
    assert (grammar.text, grammar.thinking.most) == ("", 1024)
