"""Keys with names and limits, reloading, deadlines, queue limits, draining, the admin routes, and usage counters."""

import asyncio
import logging
import os
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from redline.api.admin import create_admin_app
from redline.api.app import create_app
from redline.api.auth import auth_state as edges
from redline.api.auth.auth_state import LAG_S, LOOK_S, AuthState, measure_lag
from redline.api.auth.keys import Keyring, read_keys
from redline.api.auth.quota import KeyAccount, LimitReached, ServedRate
from redline.api.config import ApiConfig, KeyLimits, Limits
from redline.errors import ConfigError
from tests.api.world import MODEL, SOON_S, World, answer
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def keys_file(folder: Path, text: str) -> Path:
    path = folder / "keys.txt"
    path.write_text(text)
    return path


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def clock() -> AsyncIterator[FakeClock]:
    """The clock of the package, and of this event loop's timers."""
    clock = FakeClock()
    with clock.installed(), clock.drives(asyncio.get_running_loop()):
        yield clock


async def chat(world: World, key: str = "", headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
    sent = {"authorization": f"Bearer {key}"} if key else {}
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    return await world.http.post(CHAT, json=body, headers=sent | (headers or {}))


# -- the file


def test_a_line_is_a_name_and_a_key_or_a_key_alone(tmp_path: Path) -> None:
    path = keys_file(
        tmp_path, "# \x1ball\r\n\r\nalice k1 requests_per_s=2 concurrency=3  # hers\nalice k2\nbob k3\n  k4\nk5 # old\n"
    )
    entries = list(read_keys(path, KeyLimits(concurrency=7, tokens_per_day=9)).values())
    assert [entry.name for entry in entries[:3]] == ["alice", "alice", "bob"]
    hers = KeyLimits(requests_per_s=2, concurrency=3, tokens_per_day=9)
    assert [entry.limits for entry in entries[:3]] == [hers, hers, KeyLimits(concurrency=7, tokens_per_day=9)]
    alone = [entry.name for entry in entries[3:]]
    assert len(set(alone)) == 2
    assert all(re.fullmatch("key-[0-9a-f]{8}", name) for name in alone)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no API key in the file"),
        ("alice secret what", "line 1: unknown word after the key of alice; expected requests_per_s=NUMBER"),
        ("alice secret sla=quick", "line 1: alice: unknown class in sla=; the deployment has none"),
        (
            "a secret sla=default\na other concurrency=2 sla=default",
            "line 2: a has other limits or another sla in .*line 1",
        ),
        ("alice secret concurrency=0", "line 1: alice: Expected `int` >= 1"),
        ("alice secret tokens_per_day=many", "line 1: alice: Expected `int"),
        ("alice secret\nbob secret", "line 2: this key already has another name: alice"),
        ("a secret concurrency=1\na other concurrency=2", "line 2: a has other limits or another sla in .*line 1"),
        (f"{'a' * 65} secret", "line 1: the name is not printable text of at most 64"),
        ("alice k1\n\0\0\0\0", "line 2: a character that is not printable"),
        ("\x0bsecret", "line 1: a character that is not printable"),
        ("alice secret\x1b[0m", "line 1: a character that is not printable"),
        ("# all\nsecret\u2028secret", "line 2: a character that is not printable"),
        ("alice\u00a0secret", "line 1: a character that is not printable"),
    ],
)
def test_a_wrong_line_is_named_and_its_key_is_not(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as told:
        read_keys(keys_file(tmp_path, text))
    assert "secret" not in str(told.value)


async def test_keys_are_read_again_and_a_wrong_file_changes_nothing(tmp_path: Path, clock: FakeClock) -> None:
    path = keys_file(tmp_path, "alice k1 concurrency=2")
    async with World(answer("a")) as world:
        edge = AuthState(ApiConfig(served_model_names=(MODEL,), keys_file=str(path)))
        app = create_app(world.gateway, ApiConfig(served_model_names=(MODEL,)), edge)
        world.http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://redline")
        following = asyncio.create_task(edge.follow_keys())
        assert (await chat(world, "k1")).status_code == 200
        assert (await chat(world, "k2")).status_code == 401
        assert edge.keyring is not None
        used = edge.keyring.accounts["alice"].tokens
        assert used > 0
        path.write_text("alice k2 concurrency=5\n")
        clock.advance(LOOK_S)
        await eventually(lambda: edge.keyring and edge.keyring.accounts["alice"].limits.concurrency == 5)
        assert (await chat(world, "k1")).status_code == 401
        assert (await chat(world, "k2")).status_code == 200
        assert edge.keyring.accounts["alice"].tokens > used
        path.write_text("alice k3 concurrency=none\n")
        assert "the previous keys stay in effect" in await edge.reload()
        assert (await chat(world, "k2")).status_code == 200
        following.cancel()


def test_a_name_that_is_gone_keeps_no_account_once_its_requests_have_ended(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "alice k1\nbob k2")
    keys = Keyring(path, KeyLimits())
    with keys.accounts["bob"].request():
        path.write_text("alice k1")
        reading = keys.read(changed=True)
        assert reading is not None
        assert keys.take(reading) == 1
        assert set(keys.accounts) == {"alice", "bob"}
    assert keys.read(changed=True) is None
    keys.take(reading)
    assert set(keys.accounts) == {"alice"}


async def test_a_file_that_does_not_answer_holds_nothing_up_and_is_read_by_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path, "alice k1")
    caplog.set_level("INFO", "redline.api")
    answers, reads = threading.Event(), list[str]()

    def look(self: Keyring) -> tuple[int, int, int]:
        reads.append(threading.current_thread().name)
        assert answers.wait(120), "like a network share while its server is down"
        return 0, 0, 0

    async with World(answer("a")) as world:
        edge = AuthState(ApiConfig(served_model_names=(MODEL,), keys_file=str(path)))
        app = create_app(world.gateway, ApiConfig(served_model_names=(MODEL,)), edge)
        world.http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://redline")
        monkeypatch.setattr(Keyring, "_look", look)
        for name in ("LOOK_S", "READ_S"):
            monkeypatch.setattr(edges, name, 0.01)
        following = asyncio.create_task(edge.follow_keys())
        try:
            path.write_text("alice k2")
            said = [await edge.reload() for _ in range(3)]
            assert all("keys.txt: not read within" in each for each in said)
            assert (await chat(world, "k1")).status_code == 200, "the previous keys stay in effect"
            edge.reload_soon()
            assert reads == ["file"], "one read at a time, in a separate thread"
            assert caplog.text.count("the previous keys stay in effect until then") == 1
        finally:
            answers.set()
        await eventually(lambda: "keys.txt: 1 keys are in effect now" in caplog.text)
        assert (await chat(world, "k2")).status_code == 200
        assert (await chat(world, "k1")).status_code == 401
        following.cancel()


async def test_a_pipe_in_the_place_of_the_file_is_refused_and_the_keys_hold_on(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "alice k1")
    edge = AuthState(ApiConfig(served_model_names=(MODEL,), keys_file=str(path)))
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file; the previous keys stay in effect" in await edge.reload()
    assert edge.keyring is not None
    assert edge.keyring.account([(b"authorization", b"Bearer k1")]).name == "alice"
    for other in (path, tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_keys(other)


# -- limits


def test_requests_in_a_second_come_free_with_time() -> None:
    clock = Clock()
    account = KeyAccount("alice", KeyLimits(requests_per_s=2), clock)
    for _ in range(2):
        with account.request():
            pass
    with (
        pytest.raises(LimitReached, match="the key alice has reached its rate limit: requests_per_s is 2") as told,
        account.request(),
    ):
        pass
    assert told.value.retry_s == pytest.approx(0.5)
    clock.now += 0.5
    with account.request():
        pass


def test_tokens_are_paid_for_afterwards_and_the_debt_is_waited_for() -> None:
    clock = Clock()
    account = KeyAccount("alice", KeyLimits(tokens_per_minute=600), clock)
    account.check_tokens(600)
    account.charge(1200)
    with pytest.raises(LimitReached, match="tokens_per_minute is 600") as told:
        account.check_tokens(0)
    assert told.value.retry_s == pytest.approx(60.1)
    with pytest.raises(LimitReached) as told:
        account.check_tokens(10_000)  # more than one minute's limit: it may start once the bucket is full
    assert told.value.retry_s == pytest.approx(120)
    clock.now += 60.1
    account.check_tokens(0)
    account.limit(KeyLimits(tokens_per_minute=600, concurrency=1))
    with pytest.raises(LimitReached):
        account.check_tokens(100)  # another limit has changed; the debt is kept
    account.limit(KeyLimits(tokens_per_minute=700))
    account.check_tokens(700)


def test_a_new_rate_holds_from_the_next_request_on() -> None:
    clock = Clock()
    account = KeyAccount("alice", KeyLimits(requests_per_s=0.5), clock)
    for rate, waits in ((0.5, 2.0), (0.25, 4.0)):
        account.limit(KeyLimits(requests_per_s=rate))
        with account.request():
            pass
        with pytest.raises(LimitReached) as told, account.request():
            pass
        assert told.value.retry_s == pytest.approx(waits)


async def test_a_key_that_has_reached_a_limit_gets_429_with_its_name_and_others_are_served(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "alice k1 concurrency=1\nbob k2 tokens_per_day=40\ncarol k3")
    async with World(answer("a"), keys_file=str(path)) as world:
        world.engine.gate.clear()
        first = asyncio.create_task(chat(world, "k1"))
        await eventually(lambda: world.engine.jobs)
        refused = await chat(world, "k1")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "alice has reached its rate limit: concurrency is 1" in error["message"]
        world.engine.gate.set()
        assert (await first).status_code == 200
        assert (await chat(world, "k1")).status_code == 200
        statuses = [(await chat(world, "k2")).status_code for _ in range(4)]
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert int((await chat(world, "k2")).headers["retry-after"]) > 60
        assert (await chat(world, "k3")).status_code == 200
        metrics = (await world.http.get("/metrics", headers={"authorization": "Bearer k3"})).text
        assert f'redline:rejections_total{{engine="0",model_name="{MODEL}",reason="concurrency"}} 1.0' in metrics
        assert f'redline:requests_total{{engine="0",model_name="{MODEL}",route="{CHAT}",status="200"}} ' in metrics


async def test_pages_of_one_name_are_never_anothers(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "alice k1\nalice k2\nbob k3")
    async with World(answer("a"), keys_file=str(path)) as world:
        long = [{"role": "user", "content": "x" * 200}]
        for key, salt in (("k1", None), ("k2", None), ("k3", None), ("k1", "s"), ("k3", "s")):
            assert (await chat(world, key, messages=long, cache_salt=salt)).status_code == 200
        pages = [job.pages for job in world.engine.jobs]
        assert all(pages)
        assert pages[0] == pages[1]
        assert len({hash for of_job in pages[1:] for hash in of_job[:1]}) == 4
        assert [job.tenant for job in world.engine.jobs] == ["alice", "alice", "bob", "alice", "bob"]


# -- admission and deadlines


def test_what_waits_is_told_by_what_was_served_lately() -> None:
    clock = Clock()
    rate = ServedRate(clock)
    assert rate.retry_s(1_000_000) == 1.0, "nothing has been measured"
    rate.begins()
    for _ in range(10):
        clock.now += 1
        rate.served(100)
    assert rate.per_s == pytest.approx(100)
    assert rate.retry_s(2500) == pytest.approx(25)
    assert rate.retry_s(10**9) == 600
    clock.now += 1000  # idle
    rate.begins()
    clock.now += 1
    rate.served(100)
    assert rate.per_s == pytest.approx(100), "idle time does not lower the rate"


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with World(answer("a"), limits=Limits(queue_tokens=30)) as world:
        world.engine.gate.clear()
        waits = asyncio.create_task(chat(world))
        await eventually(lambda: world.engine.jobs)
        refused = await chat(world)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert world.gateway.requests.waiting == 1
        world.engine.gate.set()
        assert (await waits).status_code == 200
        assert (world.gateway.requests.waiting, world.gateway.requests.waiting_tokens) == (0, 0)
        assert world.gateway.admission.served_per_s > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["field", "header", "deployment"])
async def test_a_deadline_ends_an_answer_and_its_jobs(stream: bool, by: str, clock: FakeClock) -> None:
    limits = Limits(timeout_s=7.5) if by == "deployment" else Limits()
    async with World(answer("a"), limits=limits) as world:
        world.engine.gate.clear()
        headers = {"x-request-timeout": "7.5"} if by == "header" else {}
        fields = {"timeout": 7.5} if by == "field" else {}
        asked = asyncio.create_task(chat(world, headers=headers, stream=stream, **fields))
        await eventually(lambda: world.engine.jobs)
        clock.advance(7.4)
        await turns(3)
        assert world.gateway.requests.waiting == 1
        clock.advance(0.2)
        ended = await asked
        assert ended.status_code == (200 if stream else 504)
        assert "the deadline has passed: the answer was not complete 7.5 s after the request arrived" in ended.text
        assert "deadline_exceeded" in ended.text
        assert "[DONE]" not in ended.text
        assert {job.id for job in world.engine.jobs} == world.engine.aborted
        assert (world.gateway.requests.waiting, world.gateway.requests.waiting_tokens) == (0, 0)


async def test_a_deadline_that_is_no_number_is_refused() -> None:
    async with World(answer("a")) as world:
        for wrong in ("soon", "0", "-1", "nan", "inf", "1e9"):
            refused = await chat(world, headers={"x-request-timeout": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Timeout")
        assert (await chat(world, timeout=0)).json()["error"]["param"] == "timeout"
        assert (await chat(world, timeout=5, headers={"x-request-timeout": "5"})).status_code == 200


async def test_max_tokens_has_a_default_and_a_maximum() -> None:
    async with World(answer("a"), limits=Limits(default_max_tokens=5, most_max_tokens=8)) as world:
        for fields in ({}, {"max_tokens": 7}):
            assert (await chat(world, **fields)).status_code == 200
        assert [job.sampling.max_tokens for job in world.engine.jobs] == [5, 7]
        await chat(world, max_tokens=9)
        assert world.engine.jobs[-1].sampling.max_tokens == 8
        assert (await chat(world, min_tokens=6)).json()["error"]["param"] == "min_tokens"
    async with World(answer("a"), limits=Limits(most_max_tokens=8)) as world:
        await chat(world)
        assert world.engine.jobs[0].sampling.max_tokens == 8


async def test_a_streams_headers_leave_before_its_first_token() -> None:
    async with World(answer("a")) as world, world.listening() as url, httpx2.AsyncClient(timeout=SOON_S) as http:
        world.engine.gate.clear()
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with asyncio.timeout(SOON_S), http.stream("POST", url + CHAT, json=body) as response:
            assert response.status_code == 200
            assert world.engine.sent == 0
            world.engine.gate.set()
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")


# -- draining, the admin routes, the access log


async def test_while_it_drains_new_work_is_refused_and_running_answers_end() -> None:
    async with World(answer("a")) as world:
        edge = AuthState(world.config)
        app = create_app(world.gateway, world.config, edge)
        world.http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://redline")
        world.engine.gate.clear()
        running = asyncio.create_task(chat(world))
        await eventually(lambda: world.engine.jobs)
        edge.draining = "the server is stopping"
        health = await world.http.get("/health")
        assert (health.status_code, health.json()) == (
            503,
            {"status": "draining", "reason": "the server is stopping"},
        )
        assert (await world.http.get("/live")).status_code == 200
        refused = await chat(world)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "3")
        world.engine.gate.set()
        assert (await running).status_code == 200


async def test_the_admin_routes_ask_for_keys_of_their_own(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "alice k1 tokens_per_minute=500")
    own = tmp_path / "admin.txt"
    own.write_text("root r1")
    drained: list[bool] = []
    async with World(answer("a"), keys_file=str(path)) as world:
        edge = AuthState(world.config)
        app = create_app(world.gateway, world.config, edge)
        world.http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://redline")
        assert (await chat(world, "k1")).status_code == 200
        config = ApiConfig(served_model_names=(MODEL,), keys_file=str(own))
        routes = create_admin_app(world.gateway, edge, config, lambda: drained.append(True))
        admin = httpx2.AsyncClient(transport=httpx2.ASGITransport(routes), base_url="http://admin")
        for key in ("k1", ""):
            sent = {"authorization": f"Bearer {key}"} if key else {}
            assert (await admin.get("/admin/status", headers=sent)).status_code == 401
        assert (await world.http.get("/admin/status", headers={"authorization": "Bearer k1"})).status_code == 404
        ours = {"authorization": "Bearer r1"}
        status = (await admin.get("/admin/status", headers=ours)).json()
        assert status["ready"] is True
        assert status["queue"]["jobs"] == status["queue"]["tokens"] == 0
        alice = status["keys"]["alice"]
        assert (alice["requests"], alice["running"]) == (1, 0)
        assert alice["tokens"] > 1
        assert 0 < alice["left"]["tokens_per_minute"] < 500
        path.write_text("bob k2")
        assert "1 keys are in effect now" in (await admin.post("/admin/reload", headers=ours)).json()["message"]
        assert (await chat(world, "k1")).status_code == 401
        assert not drained
        assert (await admin.post("/admin/drain", headers=ours)).json()["status"] == "draining"
        assert drained == [True]
        await admin.aclose()


async def test_a_worker_is_replaced_or_the_answer_says_why_not(tmp_path: Path) -> None:
    own = tmp_path / "admin.txt"
    own.write_text("root r1")

    def replace(name: str) -> tuple[str | None, str]:
        return {"a": ("draining", ""), "b": ("starting", ""), "c": (None, "c is being started already")}[name]

    async with World(answer("a")) as world:
        config = ApiConfig(served_model_names=(MODEL,), keys_file=str(own))
        routes = create_admin_app(world.gateway, AuthState(world.config), config, lambda: None, replace)
        transport, ours = httpx2.ASGITransport(routes), {"authorization": "Bearer r1"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://admin", headers=ours) as admin:
            answers = {name: await admin.post(f"/admin/workers/{name}/replace") for name in "abcd"}
    assert [answer.status_code for answer in answers.values()] == [200, 200, 409, 404]
    assert [answers[name].json()["status"] for name in "ab"] == ["draining", "starting"]
    assert answers["c"].json()["error"]["message"] == "c is being started already"
    assert answers["d"].json()["error"]["message"] == "there is no worker d; the workers are worker"


async def test_an_access_line_has_fields_and_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = keys_file(tmp_path, "alice k1")
    caplog.set_level(logging.INFO, "redline.access")
    async with World(answer("a secret answer"), keys_file=str(path), json_lines=True) as world:
        secret = [{"role": "user", "content": "a secret question"}]
        await chat(world, "k1", headers={"x-request-id": "abc-1"}, messages=secret)
        fields: dict[str, Any] = caplog.records[-1].__dict__["fields"]
        assert fields.pop("ms") >= 0
        assert fields.pop("prompt_tokens") > 5
        assert fields.pop("completion_tokens") > 5
        assert fields == {
            "method": "POST", "path": CHAT, "status": 200, "key": "alice", "id": "abc-1", "complete": True,
            "workers": [],
        }  # fmt: skip
        assert "secret" not in caplog.text
        assert world.engine.jobs[0].id.startswith("abc-1."), "job IDs, which the worker logs, begin with the request ID"


async def test_the_loops_lag_is_observed(clock: FakeClock) -> None:
    async with World(answer("a")) as world:
        measuring = asyncio.create_task(measure_lag(world.metrics))
        await turns()
        clock.advance(LAG_S + 2.0)
        await turns(3)
        labels = {"engine": "0", "model_name": MODEL}
        value = world.metrics.registry.get_sample_value
        assert value("redline:event_loop_lag_seconds_count", labels) == 1
        assert value("redline:event_loop_lag_seconds_sum", labels) == pytest.approx(2.0)
        measuring.cancel()
