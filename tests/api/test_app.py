"""Routes, keys, limits, error shapes, and the endpoints for operators."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from openai import AuthenticationError

from redline.api.app import create_app
from redline.api.ask import Ask
from redline.api.config import ApiConfig, Limits
from redline.api.errors import answer_to, tell
from redline.api.gateway.admission import RequestAdmission
from redline.api.gateway.gateway import Gateway
from redline.api.gateway.generation import Generation, JobFailed
from redline.api.openai.sse import ChatStream
from redline.api.telemetry.metrics import Metrics
from redline.chat.template import K2_6
from redline.errors import ConfigError, Overloaded, RequestError
from redline.messages.channel import MemoryChannel
from redline.messages.delta import Delta, Fault
from redline.messages.job import Job
from redline.messages.news import Heartbeat, Load
from redline.router import worker_registry
from tests.api.fake_engine import FakeEngine, deliver
from tests.api.world import CALLS, MODEL, TOKENIZER, World, answer, ids, openai_client
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def error_of(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_every_listed_route_answers() -> None:
    async with World(answer("a")) as world:
        listed = (await world.http.get("/version")).json()
        assert listed["models"] == [MODEL, "alias"]
        for line in listed["routes"]:
            method, path = line.format(id=MODEL).split()
            path += "?events=1" if path == "/engine" else ""
            response = await world.http.request(method, path, content=b"{}" if method == "POST" else None)
            assert response.status_code == (400 if method == "POST" else 200), line


async def test_unknown_routes_and_methods_are_refused_in_openais_shape() -> None:
    async with World(answer("a")) as world:
        missing = await world.http.get("/v1/nothing")
        wrong = await world.http.get(CHAT)
        assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
        assert "GET /version lists" in error_of(missing)["message"]
        assert "admin routes have an address of their own" in error_of(missing)["message"]
        assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"


async def test_models_are_listed_with_their_context() -> None:
    async with World(answer("a")) as world:
        models = (await world.client.models.list()).data
        assert [model.id for model in models] == [MODEL, "alias"]
        assert models[0].max_model_len == 4096


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ("Expected `float` <= 2.0", "temperature", "temperature: Expected `float` <= 2.0"),
        ("top_k is 3", "top_k", "top_k is 3"),
        ("Object missing required field `prompt`", "prompt", "Object missing required field `prompt`"),
        ("the prompts are long", "prompt", "prompt: the prompts are long"),
        ("not served", "n", "n: not served"),
        ("n_min is 3", "n", "n: n_min is 3"),
        ("missing required field `role`", "messages[2].role", "messages[2].role: missing required field `role`"),
        ("messages[2].role is cook", "messages[2].role", "messages[2].role is cook"),
        ("messages[12] is cook", "messages[1]", "messages[1]: messages[12] is cook"),
        ("the body is more than 3 bytes", None, "the body is more than 3 bytes"),
    ],
)
def test_a_message_names_its_field_once(message: str, param: str | None, told: str) -> None:
    assert tell(RequestError(message, param)).message == told


async def test_a_wrong_field_is_named_in_every_dialect() -> None:
    named = "top_p: Expected `float` <= 1.0"
    async with World(answer("a")) as world:
        for path, body in (
            (CHAT, HELLO),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/messages", {**HELLO, "max_tokens": 9}),
            ("/v1/responses", {"input": "a"}),
        ):
            for stream in (False, True):
                refused = await world.http.post(path, json={**body, "top_p": 9, "stream": stream})
                assert (refused.status_code, refused.json()["error"]["message"]) == (400, named)


async def test_a_wrong_field_is_named_to_the_client() -> None:
    async with World(answer("a")) as world:
        response = await world.http.post(CHAT, json={**HELLO, "temperature": 9})
    assert response.status_code == 400
    assert error_of(response) == {
        "message": "temperature: Expected `float` <= 2.0",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "invalid_value",
    }


async def test_keys_open_every_route_and_only_health_needs_none(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# team a\nsecret-one\n\nsecret-two \n")
    async with World(answer("fine"), keys_file=str(keys)) as world:
        for path in ("/version", "/engine", "/metrics", "/v1/models", "/nothing"):
            refused = await world.http.get(path)
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        assert (await world.http.get("/health")).status_code == 200
        assert (await world.http.get("/live")).status_code == 200
        for header in ("Bearer wrong", "Bearer ", "secret-one", "Basic secret-one", "Bearer # team a"):
            assert (await world.http.get("/v1/models", headers={"authorization": header})).status_code == 401
        for key in ("secret-one", "secret-two"):
            client = openai_client("http://redline", world.http).with_options(api_key=key)
            whole = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
            assert whole.choices[0].message.content == "fine"
        with pytest.raises(AuthenticationError):
            await world.client.models.list()


async def test_a_file_without_keys_is_the_operators_error(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    for path in (empty, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=str(path)):
            async with World(answer("a"), keys_file=str(path)):
                pass


async def test_bodies_and_headers_beyond_their_bounds_are_refused() -> None:
    limits = Limits(body_bytes=1000, header_bytes=2000)
    async with World(answer("a"), limits=limits) as world:
        declared = await world.http.post(CHAT, content=b"x" * 1001)
        assert (declared.status_code, error_of(declared)["code"]) == (413, "body_too_large")

        async def endless() -> Any:
            while True:
                yield b" " * 100

        undeclared = await world.http.post(CHAT, content=endless())
        assert undeclared.status_code == 413
        headers = await world.http.get("/health", headers={"x-long": "x" * 2000})
        assert (headers.status_code, error_of(headers)["code"]) == (431, "headers_too_large")


async def test_a_header_without_an_end_closes_the_connection() -> None:
    async with World(answer("a"), limits=Limits(header_bytes=2000)) as world, world.listening() as address:
        port = int(address.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nx-long: ")
        closed = asyncio.create_task(reader.read())
        for _ in range(64):
            if not closed.done():
                writer.write(b"x" * 1000)
                await turns(3)
        assert (await closed).startswith(b"HTTP/1.1 431")
        writer.close()
        # The limit applies to each request of a connection, not to their sum.
        client = openai_client(address)
        for _ in range(40):
            await client.models.list()
        await client.close()


async def test_a_body_that_never_ends_is_given_up() -> None:
    more = asyncio.Event()

    async def body() -> Any:
        yield b"{"
        more.set()
        await asyncio.Event().wait()

    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        async with World(answer("a"), limits=Limits(body_seconds=5)) as world:
            asked = asyncio.create_task(world.http.post("/v1/completions", content=body()))
            await more.wait()
            clock.advance(4.9)
            await turns(3)
            assert not asked.done()
            clock.advance(1.0)
            given_up = await asked
    assert (given_up.status_code, error_of(given_up)["code"]) == (408, "timeout")


async def test_the_request_id_comes_back_or_is_made() -> None:
    async with World(answer("a")) as world:
        given = await world.http.get("/health", headers={"x-request-id": "abc-1"})
        made = await world.http.get("/health")
        silly = await world.http.get("/health", headers={"x-request-id": "a b" * 100})
        failed = await world.http.post(CHAT, content=b"{", headers={"x-request-id": "abc-2"})
    assert given.headers["x-request-id"] == "abc-1"
    assert len(made.headers["x-request-id"]) == 32
    assert len(silly.headers["x-request-id"]) == 32
    assert failed.headers["x-request-id"] == "abc-2"


async def test_an_exception_ends_its_own_request_and_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with World(answer("a")) as world:
        write = ChatStream.write

        def broken(self: ChatStream, batches: Any) -> bytes:
            raise ValueError("a secret")

        monkeypatch.setattr(ChatStream, "write", broken)
        response = await world.http.post(CHAT, json={**HELLO, "stream": True})
        assert response.status_code == 200  # the stream had begun
        assert json.loads(response.text.removeprefix("data: "))["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert "a secret" in caplog.text
        monkeypatch.setattr(ChatStream, "write", write)
        monkeypatch.setattr("redline.api.openai.dialects.chat_answer", broken)
        response = await world.http.post(CHAT, json=HELLO)
        assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
        assert "secret" not in response.text
        assert (await world.http.post(CHAT, json={**HELLO, "stream": True})).text.endswith("data: [DONE]\n\n")


async def test_a_worker_without_a_heartbeat_is_not_ready_and_one_in_a_long_step_is_not_dead() -> None:
    now = 0.0
    engine, world = FakeEngine(answer("a")), World(answer("a"))
    gateway = Gateway(TOKENIZER, K2_6, Metrics(MODEL), clock=lambda: now)
    world.http._transport.app = create_app(gateway, ApiConfig(served_model_names=(MODEL,)))  # type: ignore[attr-defined]
    link = engine.serve(gateway)

    async def health() -> tuple[int, str | None]:
        response = await world.http.get("/health")
        return response.status_code, response.json().get("reason")

    async with world:
        deliver(gateway, link, Heartbeat())
        for _ in range(24 * 3600):  # a day without a request
            now += 1
            deliver(gateway, link, Heartbeat())
        assert await health() == (200, None)
        now += worker_registry.SILENT_S
        assert await health() == (200, None)
        now += 0.5
        assert await health() == (503, "the worker has not responded for 6 s")
        response = await world.http.post(CHAT, json=HELLO)
        assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "1"
        assert (await world.http.get("/live")).json() == {"status": "live"}
        deliver(gateway, link, Heartbeat(turn_s=worker_registry.STALLED_S))
        assert await health() == (200, None)
        deliver(gateway, link, Heartbeat(turn_s=worker_registry.STALLED_S + 1))
        assert await health() == (503, "a step has been running for 61 s")
        assert (await world.http.post(CHAT, json=HELLO)).status_code == 200, "the step may end at any moment"
        deliver(gateway, link, Heartbeat())
        assert await health() == (200, None)
        now += 100
        gateway.monitor.mark_down(link, "stopped")
        engine.serve(gateway, epoch=2)  # a new start that has not sent a heartbeat yet
        assert await health() == (200, None)
    gateway.close()


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("refused", 400, "invalid_value"),
        ("overloaded", 503, "overloaded"),
        ("lost", 503, "worker_lost"),
        ("failed", 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_cannot_do_is_answered_by_whose_fault_it_is(
    fault: Fault, status: int, code: str | None, stream: bool
) -> None:
    def script(job: Job) -> list[Delta]:
        return [Delta(job=job.id, finish="error", error="so it is", fault=fault)]

    async with World(script) as world:
        response = await world.http.post(CHAT, json={**HELLO, "n": 3, "stream": stream})
        assert (response.status_code, error_of(response)["code"]) == (status, code)
        assert response.headers.get("retry-after") == ("1" if status == 503 else None)
        assert not [*world.gateway.requests]


async def test_a_server_still_loading_says_so() -> None:
    engine, gateway = FakeEngine(answer("a")), Gateway(TOKENIZER, K2_6, Metrics(MODEL))
    world = World(answer("a"))
    app = create_app(gateway, ApiConfig(served_model_names=(MODEL,)))
    world.http._transport.app = app  # type: ignore[attr-defined]
    async with world:
        health = await world.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        response = await world.http.post(CHAT, json=HELLO)
        assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
        assert (await world.http.get("/v1/models")).status_code == 200
        engine.serve(gateway)
        assert (await world.http.post(CHAT, json=HELLO)).status_code == 200
    gateway.close()


async def test_tokenizer_info_is_the_checkpoints_config_with_the_served_length(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = {"content": "[PAD]", "special": True}
    own = {"pad_token": pad, "chat_template": "{{ a }}", "model_max_length": 10**30}
    monkeypatch.setattr(TOKENIZER, "config", TOKENIZER.config | own)
    async with World(answer("a")) as world:
        info = (await world.http.get("/tokenizer_info")).json()
        assert {name: info[name] for name in ("bos_token", "eos_token", "pad_token", "chat_template")} == {
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "chat_template": "{{ a }}",
        }
        assert (info["model_max_length"], info["tokenizer_class"]) == (4096, "TikTokenTokenizer")
        body = {"prompt": info["eos_token"], "add_special_tokens": False}
        assert (await world.http.post("/tokenize", json=body)).json()["tokens"] == ids("[EOS]")


async def test_tokenize_and_detokenize_have_vllms_shapes() -> None:
    async with World(answer("a")) as world:
        text = await world.http.post("/tokenize", json={"prompt": "hello <think>", "add_special_tokens": True})
        assert text.json() == {
            "count": len(ids("hello <think>")),
            "max_model_len": 4096,
            "tokens": ids("hello <think>"),
            "token_strs": None,
        }
        strings = await world.http.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})
        assert strings.json()["token_strs"] == ["hello"]
        assert (await world.http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
        await world.http.post(CHAT, json=HELLO)
        chat = await world.http.post("/tokenize", json={"model": MODEL, **HELLO})
        assert tuple(chat.json()["tokens"]) == world.engine.jobs[0].tokens
        closed = await world.http.post("/tokenize", json={**HELLO, "add_generation_prompt": False})
        assert closed.json()["count"] < chat.json()["count"]
        back = await world.http.post("/detokenize", json={"tokens": ids("héllo 👋")})
        assert back.json() == {"prompt": "héllo 👋"}
        beyond = await world.http.post("/detokenize", json={"tokens": [10**6]})
        assert (beyond.status_code, error_of(beyond)["param"]) == (400, "tokens")
        unknown = await world.http.post("/tokenize", json={"prompt": "a", "model": "gpt-4"})
        assert unknown.status_code == 404


def load(**values: Any) -> Load:
    counts = [field.name for field in msgspec.structs.fields(Load) if field.required]
    return Load(**{**dict.fromkeys(counts, 0), "accepted_per_pos": (), "step_sizes": (), "handoffs": (), **values})


async def test_metrics_carry_vllms_names_and_the_counts() -> None:
    async with World(answer("abcd")) as world:
        await world.http.post(CHAT, json={**HELLO, "n": 2})
        await world.http.post(CHAT, json={**HELLO, "max_tokens": 2})
        deliver(
            world.gateway,
            world.link,
            load(steps=9, led=8, running=3, waiting=2, pages_used=25, pages_total=100, prompt_tokens=640),
        )
        deliver(
            world.gateway,
            world.link,
            load(
                steps=10, led=8, replayed=4, prompt_tokens=700, prompt_tokens_cached=64, preemptions=1, pages_total=100
            ),
        )
        world.gateway.monitor.mark_down(world.link, "gone")
        again = world.engine.serve(world.gateway, epoch=2)
        deliver(world.gateway, again, load(steps=2, running=1, prompt_tokens=50, pages_used=1, pages_total=4))
        text = (await world.http.get("/metrics")).text
    prompt = len(world.engine.jobs[0].tokens)
    said = len(ids("</think>abcd<|im_end|>"))
    for line in (
        f'redline:steps_total{{by="replay",engine="0",model_name="{MODEL}"}} 4.0',
        f'redline:steps_total{{by="host",engine="0",model_name="{MODEL}"}} 8.0',
        f"vllm:prompt_tokens_total{{M}} {3 * prompt}.0",
        f"vllm:generation_tokens_total{{M}} {2 * said + 2}.0",
        "vllm:num_requests_running{M} 1.0",
        "vllm:num_requests_waiting{M} 0.0",
        "vllm:kv_cache_usage_perc{M} 0.25",
        "vllm:prefix_cache_queries_total{M} 750.0",
        "vllm:prefix_cache_hits_total{M} 64.0",
        "vllm:num_preemptions_total{M} 1.0",
        "vllm:time_to_first_token_seconds_count{M} 3.0",
        f"vllm:inter_token_latency_seconds_count{{M}} {2 * (said - 1) + 1}.0",
        "vllm:request_time_per_output_token_seconds_count{M} 3.0",
        "vllm:e2e_request_latency_seconds_count{M} 3.0",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="kimi-nano"} 2.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="kimi-nano"} 1.0',
    ):
        assert line.replace("{M}", '{engine="0",model_name="kimi-nano"}') in text


async def test_metrics_count_drafts_by_position_and_over_workers() -> None:
    async with World(answer("a")) as world:
        assert "vllm:spec_decode_num_drafts_total{M} 0.0".replace("{M}", '{engine="0",model_name="kimi-nano"}') in (
            world.metrics.expose().decode()
        )
        for news in (
            load(steps=5, drafts=10, draft_tokens=30, accepted_tokens=12, accepted_per_pos=(8, 4, 0)),
            load(
                steps=9,
                drafts=14,
                draft_tokens=40,
                accepted_tokens=16,
                accepted_per_pos=(10, 5, 1),
                suffix_draft_tokens=7,
                suffix_accepted_tokens=3,
                grammar_draft_tokens=1,
                grammar_accepted_tokens=1,
            ),
        ):
            deliver(world.gateway, world.link, news)
        world.gateway.monitor.mark_down(world.link, "gone")
        again = load(steps=1, drafts=1, draft_tokens=3, accepted_tokens=1, accepted_per_pos=(1, 0, 0))
        deliver(world.gateway, world.engine.serve(world.gateway, epoch=2), again)
        text = (await world.http.get("/metrics")).text
    for line in (
        "vllm:spec_decode_num_drafts_total{M} 15.0",
        "vllm:spec_decode_num_draft_tokens_total{M} 43.0",
        "vllm:spec_decode_num_accepted_tokens_total{M} 17.0",
        'redline:draft_tokens_total{by="learned",M} 35.0',
        'redline:draft_tokens_total{by="grammar",M} 1.0',
        'redline:draft_tokens_total{by="suffix",M} 7.0',
        'redline:accepted_draft_tokens_total{by="learned",M} 13.0',
        'redline:accepted_draft_tokens_total{by="grammar",M} 1.0',
        'redline:accepted_draft_tokens_total{by="suffix",M} 3.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{M,position="0"} 11.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{M,position="1"} 5.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{M,position="2"} 1.0',
    ):
        assert line.replace("M", 'engine="0",model_name="kimi-nano"', 1) in text


async def test_the_gateway_follows_a_channel_and_its_loss_ends_the_answers() -> None:
    channel = MemoryChannel()
    async with World(answer("abc")) as world:
        follow = asyncio.create_task(world.gateway.monitor.follow(world.link, channel))
        channel.put(load(steps=1, running=7))
        running = b'vllm:num_requests_running{engine="0",model_name="kimi-nano"} 7.0'
        await eventually(lambda: running in world.metrics.expose())
        world.engine.gate.clear()
        request = asyncio.create_task(world.http.post(CHAT, json=HELLO))
        await eventually(lambda: world.engine.jobs)
        follow.cancel()
        response = await request
        assert (response.status_code, error_of(response)["code"]) == (503, "worker_lost")


async def test_a_crowd_that_scrapes_costs_one_scrape_in_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = 0.0, Mock(side_effect=lambda registry: b"%d" % written.call_count)
    monkeypatch.setattr("redline.api.telemetry.metrics.generate_latest", written)
    metrics = Metrics(MODEL, lambda: now)
    assert [metrics.expose() for _ in range(500)] == [b"1"] * 500
    now = 0.25
    assert metrics.expose() == b"2"


def test_a_job_that_the_engine_gave_up_is_a_line_and_what_nobody_foresaw_a_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error, traced in ((JobFailed("no number"), False), (KeyError("x"), True)):
        caplog.clear()
        assert answer_to(error).status == 500
        (record,) = caplog.records
        assert str(error) in record.getMessage()
        assert bool(record.exc_info) == traced


async def test_a_worker_that_falls_silent_as_an_answer_begins_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that has begun is answered: readiness of the worker is not checked again before its answer."""
    begin = Gateway.begin

    def silent(_: RequestAdmission) -> None:
        raise Overloaded("the worker has been silent for 5 s", reason="silent")

    async def begins(gateway: Gateway, ask: Ask) -> Generation:
        generation = await begin(gateway, ask)
        monkeypatch.setattr(RequestAdmission, "engine", silent)
        return generation

    monkeypatch.setattr(Gateway, "begin", begins)
    async with World(answer("a")) as world:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        first = await world.http.post("/v1/chat/completions", json=body)
        assert first.json()["choices"][0]["message"]["content"] == "a"
        assert (await world.http.post("/v1/chat/completions", json=body)).status_code == 503
        assert not [*world.gateway.requests]
        assert (world.gateway.requests.waiting, world.gateway.requests.waiting_tokens) == (0, 0)


async def test_tokens_are_counted_with_the_arguments_that_the_model_wrote() -> None:
    """The client's spelling of the arguments has fewer tokens than the one that is used in the next prompt."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get", "parameters": schema}
    user, id = {"role": "user", "content": "hello"}, "functions.get:0"
    call = {"id": id, "type": "function", "function": {"name": "get", "arguments": '{"city":"Rome"}'}}
    chat = {
        "messages": [
            user,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": "a"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    use = {"type": "tool_use", "id": id, "name": "get", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": id, "content": "a"}
    messages = {
        "messages": [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
        "tools": [{"name": "get", "input_schema": schema}],
        "max_tokens": 9,
    }
    responses = {
        "input": [
            user,
            {"type": "function_call", "call_id": id, "name": "get", "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": id, "output": "a"},
        ],
        "tools": [{"type": "function", **function}],
    }
    async with World(answer(CALLS.replace('{"city": ', '{"city":     '))) as world:
        await world.http.post("/v1/chat/completions", json={"messages": [user], "tools": chat["tools"]})
        for answers, counts, body, member in (
            ("/v1/chat/completions", "/tokenize", chat, "count"),
            ("/v1/messages", "/v1/messages/count_tokens", messages, "input_tokens"),
            ("/v1/responses", "/v1/responses/input_tokens", responses, "input_tokens"),
        ):
            counted = await world.http.post(counts, json=body)
            await world.http.post(answers, json=body)
            prompt = world.engine.jobs[-1].tokens
            assert b'{"city":     "Rome"}' in TOKENIZER.decode_bytes(prompt)
            assert counted.json()[member] == len(prompt), counts
