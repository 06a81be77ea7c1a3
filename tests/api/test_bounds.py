"""The cost of one request for others: each product of its fields is bounded, and expensive work is in threads."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from redline.api.ask import WHAT_IS_LEFT, Ask
from redline.api.config import Defaults, Limits
from redline.api.openai import requests as openai
from redline.api.openai.answers import json_list
from redline.api.openai.requests import read_chat, read_completion, read_detokenize
from redline.chat.conversation import Conversation, Tool
from redline.chat.conversation import Message as Turn
from redline.chat.tokenizer import Tokenizer
from redline.errors import ContextTooLong, Overloaded, RequestError, WorkerLost
from redline.messages.job import Sampling
from tests.api.world import SOON_S, World, answer
from tests.waiting import eventually, turns
from tests.work import Memory

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = b'{"messages":[{"role":"user","content":"x"}],'
MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def text_ask(*prompts: str, n: int = 1, **sampling: Any) -> Ask:
    return Ask(prompts=prompts, n=n, sampling=Sampling(max_tokens=WHAT_IS_LEFT, **sampling), param="prompt")


def repeated(unit: bytes, head: bytes, tail: bytes, size: int = 4 * MIB) -> bytes:
    return head + unit * (size // len(unit)) + tail


def chat(body: bytes) -> object:
    return read_chat(body, Limits(), Defaults())


def completion(body: bytes) -> object:
    return read_completion(body, Limits(), Defaults())


# Each took seconds while no other Python code ran: floats that parse slowly, and containers tracked by the collector.
@pytest.mark.parametrize(
    ("read", "body"),
    [
        (chat, repeated(b"1e300,", USER + b'"suffix":[', b"1]}")),
        (chat, repeated(b"1e300,", USER + b'"tool_choice":[', b"1]}")),
        (
            chat,
            repeated(
                b"1e300,",
                USER + b'"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[',
                b"1]}}}]}",
            ),
        ),
        (
            chat,
            repeated(
                b"1e300,",
                b'{"messages":[{"role":"assistant","tool_calls":[{"id":"","function":{"name":"f","arguments":{"a":[',
                b"1]}}}]}]}",
            ),
        ),
        (completion, repeated(b"[],", b'{"prompt":[', b"[]]}")),
    ],
)
def test_a_field_that_is_refused_is_not_read_whole(read: Callable[[bytes], object], body: bytes) -> None:
    with Memory() as memory, pytest.raises(RequestError):
        read(body)
    assert memory.peak_bytes < 2 * len(body), "all its objects were created"  # 27 MB of floats, 90 MB of lists


@pytest.mark.parametrize("text", ["a", "", '"', "\\", '\\"', '\\\\"', '","', "\\\\", "[", "é\n"])
def test_too_many_prompts_are_refused_unread_and_as_many_as_allowed_are_read(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(prompts=3)
    whole = read_completion(msgspec.json.encode({"prompt": [text] * 3}), limits, Defaults())
    assert whole.ask.prompts == (text,) * 3
    monkeypatch.setattr("redline.api.openai.requests._TEXTS", None)
    with pytest.raises(RequestError, match="at most 3 prompts"):
        read_completion(msgspec.json.encode({"prompt": [text] * 4}), limits, Defaults())


def test_slow_floats_within_the_bound_are_read_by_pythons_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = repeated(b"1e300,", b'{"enum":[', b"1]}", 400_000)
    body = USER + b'"tools":[{"type":"function","function":{"name":"f","parameters":' + parameters + b"}}]}"
    assert openai._OBJECT.float_hook is float, "msgspec's own float parser takes twenty times as long for these"
    read: list[str] = []
    hooked = msgspec.json.Decoder(dict[str, Any], float_hook=lambda text: (read.append(text), float(text))[1])
    monkeypatch.setattr(openai, "_OBJECT", hooked)
    request = read_chat(body, Limits(), Defaults())
    assert len(read) == parameters.count(b"1e300")
    (prompt,) = request.ask.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.tools[0].parameters["enum"][:2] == [1e300, 1e300]


@pytest.mark.parametrize("word", ["x" * MIB, " - at `$.n" * 100_000])
def test_a_complaint_does_not_repeat_what_is_long(word: str) -> None:
    body = b'{"messages":[{"role":"' + word.encode() + b'"}]}'
    with pytest.raises(RequestError) as refused:
        chat(body)
    assert len(str(refused.value)) < 500
    assert refused.value.param == "messages[0].role"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (USER + b'"logit_bias":{"1":1,"x":2}}', "logit_bias"),
        (USER + b'"stop":[7]}', "stop[0]"),
        (USER + b'"stop":["\xff"]}', "stop"),
        (USER + b'"suffix":' + b"[" * 400 + b"]" * 400 + b"}", "suffix"),
        (
            b'{"messages":[{"role":"assistant","tool_calls":[{"id":"","function":{"name":"f","arguments":7}}]}]}',
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            b'{"messages":[{"role":"assistant","tool_calls":[{"id":"","function":{"name":"f","arguments":{"a":'
            + b"[" * 64
            + b"]" * 64
            + b"}}}]}]}",
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            USER + b'"tools":[{"type":"function","function":{"name":"f","parameters":{"a":"\xff"}}}]}',
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_field_that_is_read_on_its_own_is_named_in_full(body: bytes, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(body)
    assert refused.value.param == param


def test_objects_of_a_request_are_bounded_together() -> None:
    tool = b'{"type":"function","function":{"name":"f","parameters":{"a":"%b"}}}' % (b"x" * 1000)
    limits = Limits(json_bytes=3000)

    def read(count: int) -> object:
        return read_chat(USER + b'"tools":[' + b",".join([tool] * count) + b"]}", limits, Defaults())

    size = len(b'{"a":"%b"}' % (b"x" * 1000))
    assert read_chat(USER + b'"tools":[%b,%b]}' % (tool, tool), Limits(json_bytes=2 * size), Defaults())
    read(2)
    with pytest.raises(RequestError, match="3000") as refused:
        read(3)
    assert refused.value.param == "tools[2].function.parameters"


def test_as_many_prompts_and_ids_as_the_bounds_allow_are_read() -> None:
    limits = Limits(prompts=3, tokens=5)

    def prompts(prompt: bytes) -> int:
        return len(read_completion(b'{"prompt":' + prompt + b"}", limits, Defaults()).ask.prompts)

    assert prompts(b"[[1],[2],[3]]") == prompts(b'["a","b","c"]') == 3
    assert prompts(b"[1,2,3,4,5]") == 1
    for beyond in (b"[[1],[2],[3],[4]]", b'["a","b","c","d"]', b"[1,2,3,4,5,6]"):
        with pytest.raises(RequestError) as refused:
            prompts(beyond)
        assert refused.value.param == "prompt"


# -- products


async def test_prompts_and_their_copies_are_bounded_together() -> None:
    async with World(answer("a"), limits=Limits(tokens=40, queue_tokens=40)) as world:
        long = "x" * 30
        for ask in (text_ask(long, n=2), text_ask(long, long)):
            with pytest.raises(RequestError, match="40 in one request"):
                await world.gateway.begin(ask)
        with await world.gateway.begin(text_ask("x" * 20, n=2)):
            pass
        with await world.gateway.begin(text_ask("x" * 50)):  # a single prompt is bounded by the context length
            pass
    assert len(world.engine.jobs) == 3


async def test_log_probabilities_of_prompts_are_bounded_as_a_product() -> None:
    async with World(answer("a"), limits=Limits(prompt_logprobs=60)) as world:
        for prompts, n, top, served in ((1, 1, 5, True), (1, 1, 6, False), (2, 3, 0, True), (2, 3, 1, False)):
            ask = text_ask(*["x" * 10] * prompts, n=n, prompt_logprobs=top)
            if served:
                with await world.gateway.begin(ask):
                    pass
            else:
                with pytest.raises(RequestError, match="at most 60") as refused:
                    await world.gateway.begin(ask)
                assert refused.value.param == "prompt_logprobs"


async def test_tokens_that_wait_are_bounded_and_come_free_again() -> None:
    async with World(answer("a"), limits=Limits(tokens=50, queue_tokens=50)) as world:
        world.engine.gate.clear()
        for _ in range(3):  # abandoned
            with (
                await world.gateway.begin(text_ask("x" * 20, n=2)),
                pytest.raises(Overloaded, match="40 prompt tokens"),
            ):
                await world.gateway.begin(text_ask("x" * 6, n=2))
        for ask in (text_ask("x" * 20, "x" * 40), text_ask("x" * 20, ""), text_ask("x" * 20, "x" * 5000)):  # refused
            with pytest.raises(RequestError):
                await world.gateway.begin(ask)
        with await world.gateway.begin(text_ask("x" * 50)):  # the worker goes down
            world.gateway.monitor.mark_down(world.link, "gone")
        world.engine.serve(world.gateway)
        with await world.gateway.begin(text_ask("x" * 50)) as heard:
            world.engine.gate.set()
            async for _ in heard:
                pass
            with await world.gateway.begin(text_ask("x" * 50)):
                pass


async def test_a_worker_that_is_lost_between_the_jobs_of_a_request_is_sent_no_more() -> None:
    async with World(answer("a"), max_model_len=1 << 20) as world:
        put = world.engine.put

        def put_and_lose(message: Any) -> None:
            put(message)
            world.gateway.monitor.mark_down(world.link, "gone")

        world.engine.put = put_and_lose  # type: ignore[method-assign]
        with await world.gateway.begin(text_ask("x" * 5000, n=3)) as generation, pytest.raises(WorkerLost):
            await anext(generation)
    assert len(world.engine.jobs) == 1


async def test_large_bodies_are_bounded_together_and_small_ones_are_served_meanwhile() -> None:
    limits = Limits(bodies_bytes=300_000)
    body = b'{"prompt":"' + b"x" * 200_000 + b'"}'
    async with World(answer("a"), limits=limits, max_model_len=1 << 20) as world:
        for _ in range(3):
            feed, fed = asyncio.Event(), list[int]()

            async def slow(feed: asyncio.Event = feed, fed: list[int] = fed) -> Any:
                yield body[:-1]
                fed.append(1)  # the first part has been read
                await feed.wait()
                yield body[-1:]

            first = [asyncio.create_task(world.http.post(COMPLETIONS, content=slow())) for _ in range(2)]
            await eventually(lambda fed=fed: len(fed) == 2)
            refused = await world.http.post(COMPLETIONS, content=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"]
            assert (await world.http.post(COMPLETIONS, json={"prompt": "x" * 1000})).status_code == 200
            feed.set()
            assert [(await one).status_code for one in first] == [200, 200]


async def test_a_body_counts_no_more_once_its_job_is_sent() -> None:
    body = b'{"prompt":"' + b"x" * 200_000 + b'"}'
    async with World(answer("a"), limits=Limits(bodies_bytes=300_000), max_model_len=1 << 20) as world:
        world.engine.gate.clear()
        running = [Visitor(world, body) for _ in range(2)]
        await eventually(lambda: len(world.engine.jobs) == 2)
        running.append(Visitor(world, body))
        await eventually(lambda: len(world.engine.jobs) == 3)
        world.engine.gate.set()
        for one in running:
            await one.task


async def test_what_is_exactly_as_large_as_its_bound_is_served() -> None:
    body = b'{"prompt":"' + b"x" * 39 + b'"}'
    limits = Limits(tokens=40, queue_tokens=40, body_bytes=len(body))
    async with World(answer("a"), limits=limits, max_model_len=12) as world:

        async def chunked(more: bytes) -> Any:
            yield body[:20]
            yield body[20:] + more

        async def status(path: str, content: Any) -> int:
            return (await world.http.post(path, content=content)).status_code

        assert await status("/tokenize", chunked(b"")) == 200
        assert await status("/tokenize", chunked(b" ")) == 413
        assert await status("/detokenize", b'{"tokens":[1,1,1,1,1,1,1,1,1,1,1,1]}') == 200
        assert await status("/detokenize", b'{"tokens":[1,1,1,1,1,1,1,1,1,1,1,1,1]}') == 400
    async with World(answer("a"), limits=Limits(tokens=40, queue_tokens=40)) as world:
        assert await status("/tokenize", b'{"prompt":"%b"}' % (b"x" * 40)) == 200
        assert await status("/tokenize", b'{"prompt":"%b"}' % (b"x" * 41)) == 400


# -- clients that leave


class Visitor:
    """An ASGI client that disconnects when `leave` is called."""

    def __init__(self, world: World, body: bytes, path: str = COMPLETIONS) -> None:
        self.sent: list[Message] = []
        self._left = asyncio.Event()
        self._body: bytes | None = body
        scope = {"type": "http", "method": "POST", "path": path, "root_path": ""}
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        self.task = asyncio.ensure_future(world.app({**scope, "headers": headers}, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


async def test_who_has_left_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    encoded: list[int] = []
    gate = threading.Event()
    encode = Tokenizer.encode_with_specials

    def slowly(self: Tokenizer, text: str, *rest: Any) -> list[int]:
        begun.append(len(text))
        gate.wait(SOON_S)
        encoded.append(len(text))
        return encode(self, text, *rest)

    script = answer("a")
    monkeypatch.setattr(Tokenizer, "encode_with_specials", slowly)
    async with World(script, max_model_len=1 << 20) as world:
        visitors = [Visitor(world, b'{"prompt":"%b"}' % (b"x" * size)) for size in (5001, 5002, 5003, 5004)]
        queue = world.gateway.encoder.threads._work_queue
        await eventually(lambda: len(begun) == 2 and queue.qsize() == 2)  # two threads are busy, the other two wait
        visitors[2].leave()
        async with asyncio.timeout(SOON_S):
            await visitors[2].task
        gate.set()
        for visitor in visitors:
            await visitor.task
    assert sorted(encoded) == [5001, 5002, 5004]
    assert sorted(len(job.tokens) for job in world.engine.jobs) == [5001, 5002, 5004]
    assert visitors[2].sent == []


async def test_who_leaves_while_encoded_is_encoded_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    gate = threading.Event()
    check = "redline.chat.tokenizer._check_length"

    def slowly(tokens: list[int], most: int) -> None:
        pieces.append(len(tokens))
        gate.wait(SOON_S)

    script = answer("a")
    monkeypatch.setattr(check, slowly)
    async with World(script, max_model_len=1 << 20) as world:
        visitor = Visitor(world, b'{"prompt":"%b"}' % (b"x" * 200_000))  # eight slices
        await eventually(lambda: len(pieces) == 1)
        visitor.leave()
        async with asyncio.timeout(SOON_S):
            await visitor.task
        gate.set()
        await world.gateway.encoder.in_thread(MIB, lambda: None)
        assert (await world.http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
    assert len(pieces) == 2  # the second belongs to the other request
    assert len(world.engine.jobs) == 1


async def test_a_server_that_stops_ends_the_requests_of_those_who_leave_too() -> None:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        visitor = Visitor(world, b'{"prompt":"a"}')
        await eventually(lambda: world.engine.jobs)
        visitor.leave()
        await turns()  # the disconnect has not been processed yet
        visitor.task.cancel()
        async with asyncio.timeout(SOON_S):
            await visitor.task  # the middleware ends it without an answer: the server has closed the connection
        await eventually(lambda: world.engine.aborted)
        assert visitor.sent == []


# -- off the event loop


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, {"prompt": "x" * 5000, "echo": True}, "completion_answer"),
        (COMPLETIONS, {"prompt": "x" * 500, "logprobs": 3, "echo": True}, "completion_answer"),
        (COMPLETIONS, {"prompt": "x" * 500, "prompt_logprobs": 3, "stream": True}, "CompletionStream.write"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 500}], "prompt_logprobs": 3}, "chat_answer"),
        ("/tokenize", {"prompt": "x" * 5000, "return_token_strs": True}, "tokenize_answer"),
        ("/detokenize", {"tokens": [65] * 5000}, "detokenize_answer"),
    ],
)
async def test_a_large_answer_is_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], name: str
) -> None:
    import redline.api.handlers as handlers
    import redline.api.openai.dialects as dialects

    owner: Any = handlers if path in ("/tokenize", "/detokenize") else dialects
    *owners, last = name.split(".")
    for one in owners:
        owner = getattr(owner, one)
    write = getattr(owner, last)
    threads: list[str] = []

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return write(*arguments)

    monkeypatch.setattr(owner, last, watched)
    async with World(answer("a"), max_model_len=1 << 20) as world:
        small = {key: (value[:5] if key in ("prompt", "tokens") else value) for key, value in body.items()}
        if path != CHAT:
            assert (await world.http.post(path, json=small)).status_code == 200
            assert not any(name.startswith("encode") for name in threads)
        threads.clear()
        assert (await world.http.post(path, json=body)).status_code == 200
    assert threads[0].startswith("encode")


async def test_a_large_answer_leaves_in_parts() -> None:
    async with World(answer("a"), max_model_len=1 << 22) as world:
        visitor = Visitor(world, b'{"echo":true,"prompt":"%b"}' % (b"x" * (MIB * 5 // 2)))
        await visitor.task
    start, *parts = visitor.sent
    assert [part["more_body"] for part in parts] == [True, True, False]
    assert sum(len(part["body"]) for part in parts) == int(dict(start["headers"])[b"content-length"])


async def test_an_answer_of_whole_parts_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"tokens":[65,66]}'
    async with World(answer("a")) as world:
        monkeypatch.setattr("redline.api.handlers.SEND_BYTES", len(b'{"prompt":"AB"}') // 3)
        visitor = Visitor(world, body, "/detokenize")
        await visitor.task
    assert [part["more_body"] for part in visitor.sent[1:]] == [True, True, False]


async def test_a_prompt_far_beyond_the_context_is_not_encoded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def counted(tokens: list[int], most: int) -> None:
        lengths.append(len(tokens))
        if len(tokens) > most:
            raise ContextTooLong(f"more than {len(tokens)} tokens")

    script = answer("a")
    monkeypatch.setattr("redline.chat.tokenizer._check_length", counted)
    async with World(script, max_model_len=20_000) as world:
        response = await world.http.post(COMPLETIONS, json={"prompt": "x" * 120_000})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "20000" in response.json()["error"]["message"]
    assert lengths == [0, 25_000]


def test_a_list_in_pieces_is_the_list() -> None:
    for count in (0, 1, 256, 257, 1000):
        assert msgspec.json.decode(msgspec.json.encode({"a": json_list(range(count))})) == {"a": list(range(count))}


@pytest.mark.parametrize("place", ["content", "reasoning", "arguments", "description", "parameters"])
async def test_all_that_is_rendered_counts_towards_the_bound(place: str) -> None:
    long = "x" * 50_000
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": long if place == "arguments" else "{}"}}
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": long}}}
    tool = {
        "name": "f",
        "description": long if place == "description" else "",
        "parameters": parameters if place == "parameters" else {},
    }
    message = {"role": "assistant", "content": long if place == "content" else "a", "tool_calls": [call]}
    message["reasoning"] = long if place == "reasoning" else ""
    async with World(answer("a"), max_model_len=1000) as world:
        body = {"messages": [message], "tools": [{"type": "function", "function": tool}]}
        response = await world.http.post(CHAT, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert "maximum context length is 1000 tokens" in error["message"]
        assert world.engine.jobs == []


async def test_a_schema_of_many_lines_deep_within_others_costs_no_more_than_it_may_be_long() -> None:
    schema: dict[str, Any] = {"type": "string", "description": "a\n" * 200_000}
    for _ in range(60):
        schema = {"type": "array", "description": "a", "items": schema}
    tool = Tool(name="f", parameters={"type": "object", "properties": {"x": schema}})
    prompt = Conversation(messages=(Turn(role="user", content="x"),), tools=(tool,))
    ask = Ask(prompts=(prompt,), sampling=Sampling(max_tokens=1))
    async with World(answer("a"), max_model_len=10_000) as world:
        with Memory() as memory, pytest.raises(ContextTooLong):
            await world.gateway.begin(ask)
    assert memory.peak_bytes < 8 << 20, "the whole schema was rendered"  # its indentation alone is 24 MB


def test_as_many_ids_to_detokenize_as_the_bound_allows_are_read() -> None:
    assert read_detokenize(b'{"tokens":[1,2,3]}', 3).tokens == (1, 2, 3)
    for wrong in (b"[1,2,3,4]", b"[1,-1]", b"7"):
        with pytest.raises(RequestError) as refused:
            read_detokenize(b'{"tokens":%b}' % wrong, 3)
        assert refused.value.param in ("tokens", "tokens[1]")


@pytest.mark.parametrize(
    ("read", "begin", "item", "param"),
    [
        (read_chat, b'{"messages":[', b'{"role":"user","content":"x"}', "messages"),
        (read_chat, USER + b'"tools":[', b'{"type":"function","function":{"name":"f"}}', "tools"),
        (read_completion, b'{"prompt":[', b'"x"', "prompt"),
        (read_completion, b'{"prompt":[', b"[7]", "prompt"),
    ],
)
def test_messages_tools_and_prompts_are_served_up_to_their_bounds(
    read: Callable[[bytes, Limits, Defaults], object], begin: bytes, item: bytes, param: str
) -> None:
    limits = Limits(messages=3, tools=3, prompts=3)
    read(begin + b",".join([item] * 3) + b"]}", limits, Defaults())
    with pytest.raises(RequestError, match="at most 3 ") as refused:
        read(begin + b",".join([item] * 4) + b"]}", limits, Defaults())
    assert refused.value.param == param


def test_the_tool_calls_of_a_conversation_are_bounded_together() -> None:
    call = b'{"id":"a","function":{"name":"f"}}'

    def read(*calls: int) -> object:
        messages = b",".join(b'{"role":"assistant","tool_calls":[%b]}' % b",".join([call] * count) for count in calls)
        return read_chat(b'{"messages":[%b]}' % messages, Limits(calls=5), Defaults())

    read(2, 3)
    with pytest.raises(RequestError, match="5 tool calls") as refused:
        read(3, 3)
    assert refused.value.param == "messages"
