"""OpenAI's Responses through the official client, whole and streamed, over a scripted engine; and stored responses."""

import asyncio
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import BadRequestError, NotFoundError

from redline.api.config import Defaults, Limits
from redline.api.errors import Refusal
from redline.api.responses.requests import ResponsesRequest, read_responses
from redline.api.responses.store import ResponseStore, StoreLimits
from redline.chat.conversation import Conversation, Message
from redline.errors import ConfigError, RequestError
from redline.messages.delta import Delta
from tests.api.fake_engine import say
from tests.api.world import CALLS, MODEL, PATIENT, TOKENIZER, World, answer, ids, named_events
from tests.clocks import FakeClock
from tests.waiting import LIMIT_S, eventually

pytestmark = pytest.mark.anyio
RESPONSES = "/v1/responses"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get",
    "description": "the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}

CLOCK: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__clock",
    "description": "About time.",
    "tools": [
        {"type": "function", "name": "now", "description": "The time.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "raw"},
        {"type": "function", "name": "get"},
    ],
}
CALLED = (  # a call of the namespace's function as the model writes it
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.mcp__clock__now:0<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|>"
)


def allowed(names: list[str], mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def ask(world: World, **fields: Any) -> Any:
    return await world.client.responses.create(**{"model": MODEL, "input": "hello", **fields})


async def events(world: World, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The raw events of a stream: name and data."""
    response = await world.http.post(RESPONSES, json={"input": "hello", "stream": True, **fields})
    assert response.status_code == 200, response.text
    return named_events(response.text)


def request(**fields: Any) -> ResponsesRequest:
    return read_responses(msgspec.json.encode({"input": "hello", **fields}), Limits(), Defaults())


def conversation(**fields: Any) -> Conversation:
    (prompt,) = request(**fields).ask.prompts
    assert isinstance(prompt, Conversation)
    return prompt


async def test_an_answer_comes_whole() -> None:
    async with World(answer("hello there", thought="the user greets", cached=5)) as world:
        response = await ask(world, instructions="be kind", metadata={"a": "b"})
        prompt = TOKENIZER.decode_bytes(world.engine.jobs[0].tokens).decode()
    reasoning, message = response.output
    assert (response.status, response.output_text, response.model) == ("completed", "hello there", MODEL)
    assert (reasoning.type, reasoning.content[0].text, reasoning.encrypted_content) == (
        "reasoning", "the user greets", None,
    )  # fmt: skip
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.store, response.metadata, response.instructions) == (False, {"a": "b"}, "be kind")
    usage = response.usage
    assert usage.input_tokens == len(world.engine.jobs[0].tokens)
    assert usage.input_tokens_details.cached_tokens == 5
    assert usage.output_tokens == len(ids("the user greets</think>hello there<|im_end|>"))
    assert usage.output_tokens_details.reasoning_tokens == len(ids("the user greets"))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert "be kind" in prompt


@pytest.mark.parametrize("per_delta", [1, 3, 100])
async def test_the_stream_joined_by_the_client_is_the_whole_answer(per_delta: int) -> None:
    async with World(answer("héllo, 世界! 👋" + CALLS, thought="hm — ok", per_delta=per_delta)) as world:
        whole = await ask(world, tools=[TOOL])
        async with world.client.responses.stream(model=MODEL, input="hello", tools=[TOOL]) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        reasoning, message, *calls = response.output
        assert (reasoning.content[0].text, message.content[0].text) == ("hm — ok", "héllo, 世界! 👋")
        assert [(call.call_id, call.name, call.arguments) for call in calls] == [
            ("functions.get:0", "get", '{"city": "Rome"}'),
            ("functions.get:1", "get", '{"city": "Oslo"}'),
        ]
    assert whole.usage == streamed.usage


async def test_every_event_comes_in_its_order_and_is_numbered() -> None:
    async with World(answer("ab" + CALLS, thought="t")) as world:
        stream = await events(world, tools=[TOOL])
    assert all(name == data["type"] for name, data in stream)
    assert [data["sequence_number"] for _, data in stream] == list(range(len(stream)))
    names: list[str] = []
    for name, _ in stream:
        short = name.removeprefix("response.")
        if not names or names[-1] != short:
            names.append(short)
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert names == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call, *call,
        "completed",
    ]  # fmt: skip
    done = [data["item"] for name, data in stream if name == "response.output_item.done"]
    assert stream[-1][1]["response"]["output"] == done
    added = [data for name, data in stream if name == "response.output_item.added"]
    assert [data["output_index"] for data in added] == [0, 1, 2, 3]
    assert [data["item"]["id"] for data in added] == [item["id"] for item in done]


@pytest.mark.parametrize("newline", ["\n", "\r", "\r\n"], ids=repr)
async def test_what_a_client_has_laid_out_in_lines_is_repeated_within_one(newline: str) -> None:
    """All fields of the request that the answer repeats, with text that would parse as fields of an event stream."""
    framing = "event: response.completed\ndata: {}\n\n"
    asked: dict[str, Any] = {
        "input": [{"role": "user", "content": framing}],
        "instructions": framing,
        "metadata": {framing: framing},
        "tools": [{**TOOL, "description": framing, "more": [1.50, {framing: framing}]}],
        "tool_choice": {"type": "function", "name": "get"},
        "text": {"format": {"type": "json_schema", "name": framing, "schema": {"type": "object"}}},
        "stream": True,
    }
    body = json.dumps(asked, indent=2).replace("\n", newline).encode()
    async with World(answer("ab" + CALLS)) as world:
        response = await world.http.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert b"\r" not in response.content
    stream = named_events(response.text)
    assert all(name == data["type"] for name, data in stream)
    for told in (data["response"] for _, data in stream if "response" in data):
        assert {name: told[name] for name in asked if name not in ("input", "stream")} == {
            name: value for name, value in asked.items() if name not in ("input", "stream")
        }


async def test_a_tool_round_trip_gives_the_model_its_own_words() -> None:
    async with World(answer("let me see" + CALLS, thought="which city?")) as world:
        first = await ask(world, tools=[TOOL], include=["reasoning.encrypted_content"], store=False)
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"sun {index}"}
            for index, call in enumerate(first.output[2:])
        ]
        items = [item.model_dump(exclude_none=True) for item in first.output]
        items[0].pop("content")  # a client that only sends encrypted_content back
        await ask(world, tools=[TOOL], input=[{"role": "user", "content": "hello"}, *items, *outputs])
        prompt = TOKENIZER.decode_bytes(world.engine.jobs[1].tokens).decode()
    assert "<think>which city?</think>let me see" + CALLS in prompt
    assert "## Return of functions.get:0\nsun 0" in prompt
    assert "## Return of functions.get:1\nsun 1" in prompt


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with World(say(ids("ab</think>cdef"))) as world:
        whole = await ask(world, max_output_tokens=5)
        stream = await events(world, max_output_tokens=5)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.output[-1].status, whole.output_text) == ("incomplete", "cd")
    assert stream[-1][0] == "response.incomplete"
    assert stream[-1][1]["response"]["output"][-1]["status"] == "incomplete"


async def test_a_job_that_fails_says_so_in_the_stream() -> None:
    def fails(job: Any) -> Any:
        yield Delta(job=job.id, tokens=tuple(ids("</think>a")))
        world.engine.gate.clear()  # so that the first token is sent before the error
        asyncio.get_running_loop().call_later(0.05, world.engine.gate.set)
        yield Delta(job=job.id, finish="error", error="no", fault="failed")

    async with World(fails) as world:
        stream = await events(world)
    assert stream[-1][0] == "response.failed"
    assert stream[-1][1]["response"]["error"]["code"] == "server_error"


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_chunking_joins_to_the_same_whole(cuts: list[int]) -> None:
    said = ids("a thought</think>wörld 👋" + CALLS + "<|im_end|>")

    def script(job: Any) -> Any:
        start, turn = 0, 0
        while start < len(said):
            end = start + cuts[turn % len(cuts)]
            yield Delta(job=job.id, tokens=tuple(said[start:end]), finish="stop" if end >= len(said) else None)
            start, turn = end, turn + 1

    async def run() -> list[tuple[str, dict[str, Any]]]:
        async with World(script) as world:
            return await events(world, tools=[TOOL])

    joined: dict[int, str] = {}
    for name, data in asyncio.run(run()):
        if name.endswith(".delta"):
            joined[data["output_index"]] = joined.get(data["output_index"], "") + data["delta"]
    assert list(joined.values()) == ["a thought", "wörld 👋", '{"city": "Rome"}', '{"city": "Oslo"}']


async def test_a_response_that_is_kept_is_read_gone_on_with_and_forgotten(tmp_path: Path) -> None:
    async with World(answer("so" + CALLS, thought="why"), responses_file=str(tmp_path / "kept")) as world:
        first = await ask(world, instructions="be kind", tools=[TOOL])
        assert first.store
        assert await world.client.responses.retrieve(first.id) == first
        output = {"type": "function_call_output", "call_id": "functions.get:0", "output": "sun"}
        stream = await events(world, previous_response_id=first.id, input=[output])
        prompt = TOKENIZER.decode_bytes(world.engine.jobs[1].tokens).decode()
        second = stream[-1][1]["response"]
        assert (second["previous_response_id"], second["store"]) == (first.id, True)
        await ask(world, previous_response_id=second["id"], input="and then?", store=False)
        third = TOKENIZER.decode_bytes(world.engine.jobs[2].tokens).decode()
        await world.client.responses.delete(first.id)
        with pytest.raises(NotFoundError):
            await world.client.responses.retrieve(first.id)
        with pytest.raises(NotFoundError):
            await ask(world, previous_response_id=first.id)
    assert "<think>why</think>so" + CALLS in prompt
    assert "## Return of functions.get:0\nsun" in prompt
    assert "be kind" not in prompt
    assert third.count("hello") == 1
    assert third.index("sun") < third.index("and then?")


async def test_a_response_is_its_keys_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    files = {"keys_file": str(tmp_path / "keys"), "responses_file": str(tmp_path / "kept")}
    async with World(answer("a"), **files) as world:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        id = (await world.http.post(RESPONSES, json={"input": "hello"}, headers=mine)).json()["id"]
        assert (await world.http.get(f"{RESPONSES}/{id}", headers=other)).status_code == 404
        assert (await world.http.delete(f"{RESPONSES}/{id}", headers=other)).status_code == 404
        body = {"input": "hello", "previous_response_id": id}
        assert (await world.http.post(RESPONSES, json=body, headers=other)).status_code == 404
        assert (await world.http.get(f"{RESPONSES}/{id}", headers=mine)).status_code == 200


async def test_without_a_store_nothing_is_kept() -> None:
    async with World(answer("a")) as world:
        assert (await ask(world, store=True)).store is False
        with pytest.raises(BadRequestError, match="stores no responses"):
            await ask(world, previous_response_id="resp_1")
        with pytest.raises(NotFoundError):
            await world.client.responses.retrieve("resp_1")


def held(store: ResponseStore, count: int) -> list[int]:
    async def look() -> list[int]:
        found: list[int] = []
        for number in range(count):
            try:
                await store.body(str(number), "")
                found.append(number)
            except RequestError:
                pass
        return found

    return asyncio.run(look())


def test_what_is_kept_is_bounded_in_number_bytes_and_age(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limits = StoreLimits(rows=4, bytes=950, row_bytes=500, age_s=10)
    store = ResponseStore(tmp_path / "kept", limits, clock=lambda: now)
    for number in range(6):
        store.put(str(number), "", b"{}", (Message(role="user", content="a"),))
    assert held(store, 6) == [2, 3, 4, 5]
    store.put("6", "", b"x" * 400, ())
    store.put("7", "", b"x" * 480, ())
    store.put("8", "", b"x" * 501, ())
    assert held(store, 9) == [6, 7]
    assert "not stored" in caplog.text
    now = 11.0
    assert held(store, 9) == []
    store.close()
    again = ResponseStore(tmp_path / "kept", limits, clock=lambda: 5.0)
    assert held(again, 9) == [6, 7]
    again.close()


async def test_what_one_process_has_kept_another_finds(tmp_path: Path) -> None:
    one, other = (ResponseStore(tmp_path / "kept") for _ in range(2))
    for number in range(10):
        assert await other.keep(str(number), "alice", b"{}", ())
        assert await one.body(str(number), "alice") == b"{}"
    one.close()
    other.close()


async def test_every_answer_that_says_it_is_kept_is_found_at_once(tmp_path: Path) -> None:
    """More concurrent responses than the queue of writes holds, whole and streamed."""
    async with World(answer("a"), responses_file=str(tmp_path / "kept")) as world:
        whole = await asyncio.gather(*(ask(world) for _ in range(150)))
        streams = await asyncio.gather(*(events(world) for _ in range(150)))
        told = [(one.id, one.store) for one in whole]
        told += [(stream[-1][1]["response"]["id"], stream[-1][1]["response"]["store"]) for stream in streams]
        assert all(store for _, store in told)
        for id, _ in told:
            assert (await world.client.responses.retrieve(id)).id == id


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_kept_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async with World(answer("a"), responses_file=str(tmp_path / "kept")) as world:

        def fails(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(ResponseStore, "_make_room", fails)
        told = (await events(world))[-1][1]["response"] if stream else (await ask(world)).model_dump()
        assert (told["status"], told["store"]) == ("completed", False)
        with pytest.raises(NotFoundError):
            await world.client.responses.retrieve(told["id"])
    assert "a response was not stored: database or disk is full" in caplog.text


async def test_a_disk_that_takes_no_writes_holds_up_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStore(tmp_path / "kept")
    stuck, goes_on = threading.Event(), threading.Event()

    def waits(*_: object) -> None:
        stuck.set()
        assert goes_on.wait(LIMIT_S)

    with monkeypatch.context() as patched, FakeClock().drives(asyncio.get_running_loop()) as clock:
        patched.setattr(store, "_make_room", waits)
        keeping = [asyncio.create_task(store.keep(id, "", b"{}", ())) for id in ("1", "2")]
        await eventually(stuck.is_set)
        clock.advance(StoreLimits().wait_s)
        await eventually(lambda: all(task.done() for task in keeping))
        assert [task.result() for task in keeping] == [False, False]
        goes_on.set()
    assert await store.keep("3", "", b"{}", ())
    with pytest.raises(Refusal):
        await store.body("2", "")
    store.close()
    assert "took more than 10 s" in caplog.text


@pytest.fixture
def open_umask() -> Generator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_the_file_and_those_beside_it_are_their_owners_alone_from_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, connect = dict.fromkeys(("kept", "kept-wal", "kept-shm"), 0o600), sqlite3.connect

    def modes() -> dict[str, int]:
        return {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}

    def connects(path: Path) -> sqlite3.Connection:
        assert modes() == {"kept": 0o600}, "before SQLite opens it"
        return connect(path)

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", connects)
        store = ResponseStore(tmp_path / "kept")
    assert store.put("1", "alice", b"{}", (Message(role="user", content="secret"),)).result()
    assert modes() == private
    for path in tmp_path.iterdir():
        path.chmod(0o644)  # as an earlier version left them
    again = ResponseStore(tmp_path / "kept")
    assert modes() == private
    store.close()
    again.close()


def test_what_is_kept_is_counted_and_not_read_at_each_write(tmp_path: Path) -> None:
    """A write takes the same number of SQLite VM steps with 300 responses as with 3: it does not scan rows."""

    def steps(rows: int) -> int:
        store = ResponseStore(tmp_path / f"{rows}", StoreLimits(rows=rows))
        for number in range(rows + 1):
            store.put(str(number), "", b"{}", ())
        taken = 0

        def count() -> int:
            nonlocal taken
            taken += 1
            return 0

        store._thread.submit(lambda: store._file.set_progress_handler(count, 1)).result()
        assert store.put("last", "", b"{}", ()).result()
        store.close()
        return taken

    few, many = steps(3), steps(300)
    assert 0 < many <= few + 10


def test_a_file_of_an_earlier_version_is_counted_once(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "kept")) as file, file:
        file.execute(
            "CREATE TABLE responses (number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, created REAL, "
            "size INTEGER, body BLOB, messages BLOB)"
        )
        rows = [(str(number), "", 1.0, 100, b"{}", b"[]") for number in range(7)]
        file.executemany(
            "INSERT INTO responses (id, owner, created, size, body, messages) VALUES (?, ?, ?, ?, ?, ?)", rows
        )
    for _ in range(2):
        ResponseStore(tmp_path / "kept").close()
    store = ResponseStore(tmp_path / "kept", StoreLimits(rows=5), clock=lambda: 1.0)
    assert store._thread.submit(lambda: store._file.execute("SELECT * FROM totals").fetchall()).result() == [(7, 700)]
    assert store.put("7", "", b"{}", ()).result()
    assert held(store, 8) == [3, 4, 5, 6, 7]
    store.close()


async def test_a_file_that_is_removed_is_reported_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deep" / "kept"
    path.parent.mkdir()
    store = ResponseStore(path)
    assert await store.keep("1", "", b"{}", ())
    path.unlink()
    with pytest.raises(Refusal, match="no response"):
        await store.body("1", "")
    assert await store.keep("2", "", b"{}", ())
    assert path.stat().st_mode & 0o777 == 0o600
    assert await store.body("2", "") == b"{}"
    assert caplog.text.count("was removed or replaced while in use") == 1
    shutil.rmtree(path.parent)
    for id in ("3", "4"):
        assert not await store.keep(id, "", b"{}", ())
    with pytest.raises(Refusal) as told:
        await store.body("2", "")
    assert told.value.status == 503
    assert caplog.text.count("was removed or replaced while in use") == 2
    path.parent.mkdir()
    assert await store.keep("5", "", b"{}", ())
    assert await store.body("5", "") == b"{}"
    store.close()


@pytest.mark.parametrize(
    "table",
    ["users (name TEXT)", "responses (id TEXT, body BLOB)", "responses_2 (id TEXT)"],
    ids=lambda table: table[:11],
)
def test_a_database_of_another_program_is_refused_and_stays_as_it_is(tmp_path: Path, table: str) -> None:
    path = tmp_path / "theirs"
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(f"CREATE TABLE {table}")
    before = path.read_bytes(), path.stat().st_mode
    with pytest.raises(ConfigError) as told:
        ResponseStore(path)
    assert str(told.value) == (
        f"responses_file: {path} is a SQLite database of another program (its tables: {table.split()[0]}): "
        "name another file"
    )
    assert (path.read_bytes(), path.stat().st_mode) == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_no_store_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("this is no database" * 100)
    with pytest.raises(ConfigError, match="kept"):
        ResponseStore(tmp_path / "kept")


def test_items_of_one_turn_become_one_message() -> None:
    read = conversation(
        input=[
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
            {"role": "assistant", "content": "b"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "s"}]},
        ],
        reasoning={"effort": "none"},
    )
    assert [message.role for message in read.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "assistant",
    ]
    assert (read.messages[2].reasoning, read.messages[2].content) == ("r", "a")
    assert [call.name for call in read.messages[2].tool_calls] == ["f", "g"]
    assert (read.messages[3].content, read.messages[4].content, read.messages[5].reasoning) == ("o", "b", "s")
    assert read.thinking is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x"}] * 1025}, "input[1024]"),
        ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "functoin_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{}]}]}, "input[0].output[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"tools": [{**TOOL, "type": "funktion"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{**CLOCK, "tools": [{**TOOL, "type": "funktion"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**CLOCK, "tools": [TOOL] * 1025}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": 3}, "tools"),
        ({"tools": [{**TOOL, "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "x"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": allowed(["x"]), "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": allowed([]), "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}, TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "name": "c"}, "tools": [{"type": "custom", "name": "c"}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "c"}, "tools": [{"type": "custom", "name": "c"}]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "namespace"}, "tools": [CLOCK]}, "tool_choice.name"),
        ({"tool_choice": {"type": "namespace", "name": "x"}, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "now", "namespace": "x"}, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"background": True}, "background"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"reasoning": {"effort": "bogus"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        request(**fields)
    assert refused.value.param == param


def test_which_tools_may_be_called_and_what_the_answer_has_to_be() -> None:
    named = request(tools=[TOOL], tool_choice={"type": "function", "name": "get"}, parallel_tool_calls=False).ask
    assert (named.calls.mode, named.calls.names, named.calls.parallel) == ("required", {"get"}, False)
    assert conversation(tools=[TOOL], tool_choice="none").tools == ()
    schema = {"type": "object", "properties": {}}
    format = {"type": "json_schema", "name": "x", "schema": schema}
    constraint = request(text={"format": format}).ask.constraint
    assert constraint is not None
    assert json.loads(constraint.text) == schema


def test_functions_of_a_namespace_are_declared_under_names_of_their_own() -> None:
    declared = [
        TOOL,
        CLOCK,
        {**CLOCK, "name": "mcp__clock__", "description": None},
        {"type": "function", "name": "mcp__clock__get"},
    ]
    read = request(tools=declared)
    assert [(tool.name, tool.description) for tool in conversation(tools=declared).tools] == [
        ("get", "the weather"),
        ("mcp__clock__now", "About time.\nThe time."),
        ("mcp__clock__get_2", ""),
        ("mcp__clock__now_2", "The time."),
        ("mcp__clock__get_3", ""),
        ("mcp__clock__get", ""),
    ]
    assert read.namespaces["mcp__clock__get_3"] == ("mcp__clock__", "get")
    assert [tool.param for tool in conversation(tools=[CLOCK]).tools] == [
        "tools[0].tools[0].parameters",
        "tools[0].tools[2].parameters",
    ]
    assert read.left_out == ("custom",)


async def test_a_call_of_a_namespaces_function_comes_and_goes_under_both_names() -> None:
    async with World(answer(CALLED)) as world:
        whole = await ask(world, tools=[CLOCK])
        stream = await events(world, tools=[CLOCK])
        async with world.client.responses.stream(model=MODEL, input="hello", tools=[CLOCK]) as typed:  # type: ignore[arg-type]
            async for _ in typed:
                pass
            streamed = await typed.get_final_response()
        items = [item.model_dump(exclude_none=True) for item in whole.output]
        output = {"type": "function_call_output", "call_id": "functions.mcp__clock__now:0", "output": "noon"}
        for tools in ([CLOCK], []):
            await ask(world, tools=tools, input=[{"role": "user", "content": "hello"}, *items, output])
        await ask(world, input=[{**items[-1], "call_id": "call_1"}, {**output, "call_id": "call_1"}], tools=[CLOCK])
        prompts = [TOKENIZER.decode_bytes(job.tokens).decode() for job in world.engine.jobs[-3:]]
    for response in (whole, streamed):
        [call] = (item for item in response.output if item.type == "function_call")
        assert (call.name, call.namespace, call.call_id) == ("now", "mcp__clock", "functions.mcp__clock__now:0")
    told = [data["item"] for name, data in stream if name.startswith("response.output_item.")]
    assert {(item["name"], item["namespace"]) for item in told if "name" in item} == {("now", "mcp__clock")}
    assert [data["name"] for name, data in stream if name == "response.function_call_arguments.done"] == ["now"]
    assert all(CALLED in prompt and "## Return of functions.mcp__clock__now:0\nnoon" in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (allowed(["get"]), {"get"}),
        (allowed(["get", "now"], "required"), {"get", "mcp__clock__now"}),
        ({**allowed([]), "tools": [{"type": "namespace", "name": "mcp__clock"}, {"type": "mcp", "server_label": "x"}]},
         {"mcp__clock__now", "mcp__clock__get"}),
        ({"type": "namespace", "name": "mcp__clock"}, {"mcp__clock__now", "mcp__clock__get"}),
        ({"type": "function", "name": "now"}, {"mcp__clock__now"}),
        ({"type": "function", "name": "mcp__clock__now"}, {"mcp__clock__now"}),
        ({"type": "function", "name": "get", "namespace": "mcp__clock"}, {"mcp__clock__get"}),
        ({"type": "function", "name": "get"}, {"get"}),
    ],
)  # fmt: skip
def test_a_choice_bounds_what_is_called_and_not_what_is_declared(choice: dict[str, Any], names: set[str]) -> None:
    declared = [TOOL, CLOCK, {"type": "mcp", "server_label": "x"}]
    read = request(tools=declared, tool_choice=choice).ask
    assert (read.calls.mode, read.calls.names) == (choice.get("mode", "required"), names)
    assert read.prompts == request(tools=declared).ask.prompts


async def test_what_only_openai_runs_is_left_out_and_a_header_says_so() -> None:
    hosted = [
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client", "description": "finds", "parameters": {"type": "object"}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "a\r\nset-cookie: é" + "x" * 200},
    ]
    items: list[dict[str, Any]] = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "tool_search_call", "arguments": {"query": "x"}, "call_id": "t"},
        {"type": "computer_call_output", "call_id": "d", "output": {"type": "computer_screenshot"}},
        {"type": "mcp_call", "id": "m", "name": "f", "server_label": "s", "arguments": "{}", "output": "x"},
        {"type": "of_tomorrow", "id": "x", "action": {"content": [1, 2]}},
        {"type": "program_output", "content": "x", "summary": "y"},
        {"type": "shell_call_output", "content": {"stdout": "x"}},
        {"type": "tool_search_output", "content": ["x", 1], "summary": {"x": []}},
    ]
    said = {"role": "user", "content": "hello"}
    async with World(answer("a")) as world:
        bodies = [{"input": [said, *items, said], "tools": [*hosted, TOOL]}, {"input": [said, said], "tools": [TOOL]}]
        given = [await world.http.post(RESPONSES, json=body) for body in bodies]
        streamed = await world.http.post(RESPONSES, json={**bodies[0], "stream": True})
        counted = await world.http.post(f"{RESPONSES}/input_tokens", json=bodies[0])
        await world.client.responses.create(model=MODEL, **bodies[0])
    assert [one.status_code for one in given] == [200, 200], given[0].text
    assert world.engine.jobs[0].tokens == world.engine.jobs[1].tokens
    for one in (given[0], streamed, counted):
        assert one.headers["x-redline-warning"] == (
            "ignored, since only function tools are supported: web_search, tool_search, custom, "
            f"a??set-cookie???{'x' * 48}, "
            "web_search_call, custom_tool_call, custom_tool_call_output, tool_search_call, computer_call_output, "
            "mcp_call, of_tomorrow, program_output, shell_call_output, tool_search_output"
        )
        assert "set-cookie" not in one.headers
    assert "x-redline-warning" not in given[1].headers


async def test_reasoning_comes_as_its_summary_where_that_is_asked_for() -> None:
    async with World(answer("so", thought="why — so")) as world:
        for summary in ("auto", "concise", "detailed"):
            how: dict[str, Any] = {"reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
            whole = await ask(world, **how)
            stream = await events(world, **how)
            async with world.client.responses.stream(model=MODEL, input="hello", **how) as typed:
                types = [event.type async for event in typed]
                streamed = await typed.get_final_response()
        plain = [await ask(world, **how) for how in ({}, {"reasoning": {"summary": None}})]
        back = [streamed.output[0].model_dump(exclude_none=True), {"role": "assistant", "content": ""}]
        del back[0]["encrypted_content"]
    for response in (whole, streamed):
        assert [(part.type, part.text) for part in response.output[0].summary] == [("summary_text", "why — so")]
        assert (response.output[0].content, response.output_text) == ([], "so")
    names = [name.removeprefix("response.") for name, _ in stream]
    assert [name for place, name in enumerate(names) if name not in names[:place]][2:7] == [
        "output_item.added",
        *("reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done"),
    ]
    assert types.count("response.reasoning_summary_part.added") == 1
    deltas = [data["delta"] for name, data in stream if name == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "why — so"
    assert "reasoning_text.delta" not in names
    for response in plain:
        assert (response.output[0].summary, response.output[0].content[0].text) == ([], "why — so")
    assert conversation(input=back).messages[0].reasoning == "why — so"


async def test_references_to_items_that_are_kept_are_read_as_the_items(tmp_path: Path) -> None:
    said = {"role": "user", "content": "hello"}
    async with World(answer("so" + CALLED, thought="why"), responses_file=str(tmp_path / "kept")) as world:
        first = await ask(world, tools=[CLOCK])
        output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "noon"}
        items = [item.model_dump(exclude_none=True) for item in first.output]
        references = [{"type": "item_reference", "id": item["id"]} for item in items]
        untyped = [{"id": item["id"]} for item in items]
        for asked in (items, references, [references[0], *items[1:]], untyped):
            await ask(world, tools=[CLOCK], input=[said, *asked, output])
        counted = await world.client.responses.input_tokens.count(
            model=MODEL,
            tools=[CLOCK],  # type: ignore[arg-type]
            input=[said, *references, output],  # type: ignore[list-item]
        )
        jobs = world.engine.jobs[1:]
        unknown = {"type": "item_reference", "id": "rs_1"}
        await ask(world, input=[said, unknown])
        assert b"rs_1" not in TOKENIZER.decode_bytes(world.engine.jobs[-1].tokens)
        with pytest.raises(BadRequestError, match="no item 'msg_1' is stored for this key") as refused:
            await ask(world, input=[said, {**unknown, "id": "msg_1"}])
        assert refused.value.param == "input[1].id"
        await world.client.responses.delete(first.id)
        with pytest.raises(BadRequestError, match="is stored for this key"):
            await ask(world, input=[said, *references])
    assert len({job.tokens for job in jobs}) == 1
    assert counted.input_tokens == len(jobs[0].tokens)
    assert "<think>why</think>so" + CALLED in TOKENIZER.decode_bytes(jobs[0].tokens).decode()


async def test_items_are_referred_to_as_long_as_they_are_no_more_than_a_body_holds(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(PATIENT, body_bytes=20_000)
    async with World(answer("a" * 500), limits, responses_file=str(tmp_path / "kept")) as world:
        reference = {"type": "item_reference", "id": (await ask(world)).output[-1].id}
        await ask(world, input=[reference] * 3)
        with pytest.raises(BadRequestError, match="more than 20000 bytes in total") as refused:
            await ask(world, input=[reference] * 100)
    assert refused.value.param == "input"


async def test_a_reference_to_reasoning_is_left_out_where_nothing_is_kept() -> None:
    said = {"role": "user", "content": "hello"}
    async with World(answer("a")) as world:
        for asked in ([said], [said, {"type": "item_reference", "id": "rs_1"}]):
            await ask(world, input=asked)
        with pytest.raises(BadRequestError, match="send the item itself"):
            await ask(world, input=[said, {"type": "item_reference", "id": "fc_1"}])
    assert len({job.tokens for job in world.engine.jobs}) == 1


async def test_an_item_is_its_keys_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    files = {"keys_file": str(tmp_path / "keys"), "responses_file": str(tmp_path / "kept")}
    async with World(answer("a"), **files) as world:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        first = (await world.http.post(RESPONSES, json={"input": "hello"}, headers=mine)).json()
        body = {"input": [{"type": "item_reference", "id": first["output"][-1]["id"]}]}
        statuses = [(await world.http.post(RESPONSES, json=body, headers=who)).status_code for who in (mine, other)]
        path = f"{RESPONSES}/{first['id']}/input_items"
        statuses += [(await world.http.get(path, headers=who)).status_code for who in (mine, other)]
    assert statuses == [200, 400, 200, 404]


async def test_input_tokens_are_those_of_the_prompt(tmp_path: Path) -> None:
    async with World(answer("a"), responses_file=str(tmp_path / "kept")) as world:
        first = await ask(world)
        for fields in (
            {"input": "hello", "instructions": "be kind", "tools": [TOOL], "reasoning": {"effort": "none"}},
            {"input": "and then?", "previous_response_id": first.id},
            {"input": "hello", "tools": [TOOL], "tool_choice": "none"},
        ):
            counted = await world.client.responses.input_tokens.count(model=MODEL, **fields)
            assert counted.object == "response.input_tokens"
            assert counted.input_tokens == (await ask(world, **fields)).usage.input_tokens
        assert (await world.client.responses.input_tokens.count(instructions="be kind")).input_tokens > 0
        with pytest.raises(BadRequestError, match="nothing to count"):
            await world.client.responses.input_tokens.count(tools=[TOOL])  # type: ignore[list-item]
        with pytest.raises(BadRequestError, match="verbosity"):
            await world.client.responses.input_tokens.count(input="x", text={"verbosity": "low"})


async def test_the_input_of_a_response_is_read_page_by_page(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "c1", "namespace": "mcp__clock", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]
    async with World(answer("so"), responses_file=str(tmp_path / "kept")) as world:
        first = await ask(world, input=given, tools=[CLOCK], instructions="be kind")
        items = world.client.responses.input_items
        listed = [item async for item in await items.list(first.id, order="asc", limit=2)]
        newest = await items.list(first.id)
        second = await ask(world, previous_response_id=first.id, input="and then?")
        words = [item.type async for item in await items.list(second.id, order="asc")]
        for wrong in ({"limit": 0}, {"order": "up"}, {"after": "x"}):
            with pytest.raises(BadRequestError) as refused:
                await items.list(first.id, extra_query=wrong)
            assert refused.value.param in wrong
        with pytest.raises(NotFoundError):
            await items.list("resp_1")
    told: list[Any] = [item.model_dump(exclude_none=True) for item in listed]
    assert [item["type"] for item in told] == ["message", *(item.get("type", "message") for item in given[1:])]
    assert [told[0]["content"][0]["text"], told[1]["content"][0]["text"], told[2]["content"][0]["text"]] == [
        "one", "why", "two",
    ]  # fmt: skip
    assert (told[3]["namespace"], told[3]["name"], told[4]["output"]) == ("mcp__clock", "now", "noon")
    assert [item.id for item in newest.data] == [item.id for item in reversed(listed)]
    assert (newest.first_id, newest.last_id, newest.has_more) == (listed[-1].id, listed[0].id, False)
    assert words == [*(item["type"] for item in told), "message", "message"]


def test_what_is_kept_of_items_goes_with_their_response(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "kept", StoreLimits(rows=2))
    for number in range(3):
        store.put(f"resp_{number}", "me", b"{}", (), {f"msg_{number}": b"[%d]" % number})

    def items(owner: str) -> dict[str, bytes]:
        return asyncio.run(store.items([f"msg_{number}" for number in range(4)], owner, 1 << 20))

    assert (items("me"), items("you")) == ({"msg_1": b"[1]", "msg_2": b"[2]"}, {})
    asyncio.run(store.delete("resp_1", "me"))
    assert items("me") == {"msg_2": b"[2]"}
    assert store._thread.submit(lambda: store._file.execute("SELECT COUNT(*) FROM items").fetchone()).result() == (1,)
    store.close()
