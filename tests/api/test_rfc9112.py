"""RFC 9110 and 9112 on the head of a request, over a socket; and one shape for all errors."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from redline.api.admin import create_admin_app
from redline.api.auth.auth_state import AuthState
from redline.api.config import ApiConfig, Limits
from redline.api.http.head import check_head, is_without_version
from tests.api.sockets import ASYNCIO, GET, Client, Hello, error_of, serving
from tests.api.world import World, answer
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ASYNCIO


@pytest.fixture
async def clock() -> AsyncIterator[FakeClock]:
    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        yield clock


CHUNKED = b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
REFUSED = [
    (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_host"),
    (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400, "invalid_host"),
    (b"GET / HTTP/1.1\r\nhost: a, b\r\n\r\n", 400, "invalid_host"),
    (b"GET / HTTP/1.1\r\nhost: http://a/\r\n\r\n", 400, "invalid_host"),
    (b"GET / HTTP/1.1\r\nhost: a:port\r\n\r\n", 400, "invalid_host"),
    (b"GET /\r\n", 400, "http_version"),
    (b"GET /\r\n\r\n", 400, "http_version"),
    (b"\r\nGET /\r\n", 400, "http_version"),
    (b"GET / HTTP/0.9\r\nhost: a\r\n\r\n", 505, "http_version"),
    (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505, "http_version"),
    (b"GET / HTTP/1.2\r\nhost: a\r\n\r\n", 400, "invalid_request"),
    (b"GET / HTTP/3\r\nhost: a\r\n\r\n", 400, "invalid_request"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501, "transfer_coding"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "transfer_coding"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n" + CHUNKED, 501, "transfer_coding"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n", 501, "transfer_coding"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n", 400, "invalid_request"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n" + CHUNKED, 400, "invalid_request"),
    (b"POST / HTTP/1.0\r\nhost: a\r\n" + CHUNKED, 400, "transfer_coding"),
    (b"GET http://b/ HTTP/1.1\r\nhost: a\r\n\r\n", 400, "invalid_host"),
    (b"GET http://a:81/ HTTP/1.1\r\nhost: a\r\n\r\n", 400, "invalid_host"),
    (b"GET https://a:80/ HTTP/1.1\r\nhost: a:443\r\n\r\n", 400, "invalid_host"),
    (b"GET http://a@b/ HTTP/1.1\r\nhost: b\r\n\r\n", 400, "invalid_target"),
    (b"GET http:///live HTTP/1.1\r\nhost:\r\n\r\n", 400, "invalid_target"),
    (b"GET ftp://a/ HTTP/1.1\r\nhost: a\r\n\r\n", 400, "invalid_target"),
    (b"GET * HTTP/1.1\r\nhost: a\r\n\r\n", 400, "invalid_target"),
]


@pytest.mark.parametrize(("said", "status", "code"), REFUSED)
async def test_a_malformed_head_is_refused_before_the_app(
    said: bytes, status: int, code: str, clock: FakeClock
) -> None:
    app = Hello()
    async with serving(app, Limits(), clock) as (port, _):
        with Client(port) as client:
            got = await client.say(said).rest()
    assert error_of(got) == (status, code)
    assert got.startswith(b"HTTP/1.1 ")
    assert not app.begun


SERVED = [
    b"GET / HTTP/1.0\r\n\r\n",
    b"\r\nGET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: [::1]:8000\r\nconnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: my_host.internal:8000\r\nconnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
]


@pytest.mark.parametrize("said", SERVED)
async def test_an_unusual_head_is_served(said: bytes, clock: FakeClock) -> None:
    async with serving(Hello(), Limits(), clock) as (port, _):
        with Client(port) as client:
            got = await client.say(said).rest()
    assert got.startswith(b"HTTP/1.1 200")
    assert got.endswith(b"hello")


STREAMED = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, b"data: "),
    ("/v1/completions", {"prompt": "hi"}, b"data: "),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}, b"event: message_start\n"),
    ("/v1/responses", {"input": "hi"}, b"event: response.created\n"),
]


def posted(path: str, body: dict[str, object], version: bytes, headers: bytes = b"") -> bytes:
    data = json.dumps(body | {"stream": True}).encode()
    head = b"POST %b HTTP/%b\r\nhost: a\r\ncontent-type: application/json\r\n" % (path.encode(), version)
    return head + headers + b"content-length: %d\r\n\r\n" % len(data) + data


@pytest.mark.parametrize(("path", "body", "opening"), STREAMED)
@pytest.mark.parametrize("poured", [True, False])
async def test_a_stream_asked_for_with_http_1_0_ends_with_the_connection(
    path: str, body: dict[str, object], opening: bytes, poured: bool, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not poured:
        monkeypatch.setattr("redline.api.http.server.HttpConnection.write_part", lambda *_: False)
    text = "hello the <|tool_calls_section_begin|> and é"
    async with World(answer(text)) as world, serving(world.app, Limits(), clock) as (port, _):
        with Client(port) as old, Client(port) as new:
            # A client of HTTP/1.0 does not understand 100 Continue either.
            asked = posted(path, body, b"1.0", b"connection: keep-alive\r\nexpect: 100-continue\r\n")
            head, _, streamed = (await old.say(asked).rest()).partition(b"\r\n\r\n")
            chunked = await new.say(posted(path, body, b"1.1", b"connection: close\r\n")).rest()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert streamed.startswith(opening)
    assert b"transfer-encoding: chunked" in chunked.partition(b"\r\n\r\n")[0]
    assert events(streamed) == events(unchunked(chunked.partition(b"\r\n\r\n")[2]))


def events(stream: bytes) -> list[bytes]:
    """The blocks of a whole stream, without the parts that differ between answers."""
    assert stream.endswith(b"\n\n")
    return re.sub(rb"[0-9a-f]{32}|\"created(_at)?\":\d+", b"", stream).split(b"\n\n")


def unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole, body = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole


async def test_any_body_of_unknown_length_ends_an_http_1_0_connection(clock: FakeClock) -> None:
    class Parts:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": int(scope["path"][1:]), "headers": []})
            for part in (b"hel", b"", b"lo") if scope["path"] == "/200" else ():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})

    async with serving(Parts(), Limits(), clock) as (port, _):
        for method, path, body in ((b"GET", b"/200", b"hello"), (b"HEAD", b"/200", b""), (b"GET", b"/204", b"")):
            with Client(port) as client:
                # The second request is not read: nothing can follow a body that ends with the connection.
                got = await client.say((b"%b %b HTTP/1.0\r\n\r\n" % (method, path)) * 2).rest()
            head, _, came = got.partition(b"\r\n\r\n")
            assert came == body
            assert b"transfer-encoding" not in head


async def test_a_head_may_come_byte_by_byte(clock: FakeClock) -> None:
    app = Hello()
    async with serving(app, Limits(), clock) as (port, _):
        with Client(port) as client:
            for count in (1, 2):
                for byte in GET:
                    client.say(bytes([byte]))
                    await asyncio.sleep(0)
                await eventually(lambda count=count: client.look().count(b"hello") == count)
    assert app.begun == 2


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        (b"http://A/live?x=1", b"a", b"/live?x=1"),
        (b"HTTP://a:80", b"a:", b"/"),
        (b"http://a?x", b"a:80", b"/?x"),
        (b"https://a:443/live", b"a", b"/live"),
        (b"http://[::1]:8000/live", b"[::1]:8000", b"/live"),
        (b"//a/live", b"b", b"//a/live"),
    ],
)
def test_an_absolute_uri_of_the_host_is_its_path(target: bytes, host: bytes, path: bytes) -> None:
    headers = [(b"host", host)]
    assert check_head("1.1", b"GET", target, headers) == path
    assert headers == [(b"host", host)]


def test_an_absolute_uri_names_the_host_where_nothing_else_does() -> None:
    headers: list[tuple[bytes, bytes]] = []
    assert check_head("1.0", b"GET", b"http://evil:8000/live", headers) == b"/live"
    assert headers == [(b"host", b"evil:8000")]  # so that it is checked like any other host


def test_a_line_is_without_a_version_only_once_it_is_whole() -> None:
    assert is_without_version(b"GET /\n")
    assert not is_without_version(b"GET /")
    assert not is_without_version(b"\r\n")
    assert not is_without_version(b"GET / HTTP/1.1\r\nfoo\r\n")


async def test_two_keys_in_one_request_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    for config in ({}, {"keys_file": str(keys)}):
        async with World(answer("a"), **config) as world:
            for path, kind in (("/v1/models", "invalid_request_error"), ("/v1/messages", "invalid_request_error")):
                headers = [("authorization", "Bearer one"), ("authorization", "Bearer two")]
                refused = await world.http.request("GET", path, headers=headers)
                assert refused.status_code == 400
                assert refused.json()["error"]["type"] == kind
                assert "more than one header Authorization" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/admin/none", b"", 404, "not_found"),
        ("GET", "/", b"", 404, "not_found"),
        ("GET", "/admin/drain", b"", 405, "method_not_allowed"),
        ("GET", "/admin/requests/none", b"", 404, "not_found"),
        ("POST", "/admin/workers/cook/replace", b"", 404, "not_found"),
        ("POST", "/admin/workers/cook/role", b'{"role": "decode"}', 404, "not_found"),
        ("POST", "/admin/workers/worker/role", b'{"role": "cook"}', 400, "invalid_body"),
        ("POST", "/admin/workers/worker/role", b"x" * 2000, 413, "body_too_large"),
        ("POST", "/admin/workers/worker/role", b'{"role": "decode"}', 409, "conflict"),
    ],
)
async def test_errors_of_admin_routes_have_the_shape_of_the_apis(
    method: str, path: str, body: bytes, status: int, code: str
) -> None:
    async with World(answer("a")) as world:

        def turn(name: str, role: str) -> str | None:
            if name == "cook":
                raise KeyError(name)
            return "it is the last worker that answers"

        admin = create_admin_app(
            world.gateway, AuthState(world.config), ApiConfig(served_model_names=("m",)), lambda: None, turn=turn
        )
        headers = {"content-type": "application/json"}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(admin), base_url="http://localhost") as http:
            answered = await http.request(method, path, content=body, headers=headers)
    assert answered.status_code == status
    assert answered.headers["content-type"] == "application/json"
    error = answered.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


async def test_trailers_are_no_headers_of_the_request(clock: FakeClock) -> None:
    heads: list[list[tuple[bytes, bytes]]] = []

    class App(Hello):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            heads.append(list(scope["headers"]))
            await super().__call__(scope, receive, send)

    asked = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(App(), Limits(), clock) as (port, _):
        with Client(port) as client:
            got = await client.say(asked + b"1\r\na\r\n0\r\nauthorization: Bearer x\r\n\r\n").rest()
    assert got.startswith(b"HTTP/1.1 200")
    assert [name for name, _ in heads[0]] == [b"host", b"connection", b"transfer-encoding"]


async def test_what_follows_a_request_does_not_end_its_answer(clock: FakeClock) -> None:
    """The Content-Length is too short by some bytes, which arrive later and are not a request with a version."""
    app = Hello()
    async with serving(app, Limits(), clock) as (port, _):
        with Client(port) as client:
            client.say(b"POST /held HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n{")
            await eventually(lambda: app.begun)
            client.say(b"}\n")
            await turns(20)
            app.gate.set()
            got = await client.rest()
    assert got.startswith(b"HTTP/1.1 200")
    assert got.endswith(b"hello")


async def test_an_empty_line_between_requests_is_none(clock: FakeClock) -> None:
    limits = Limits()
    async with serving(Hello(), limits, clock) as (port, _):
        with Client(port) as client:
            client.say(GET)
            await eventually(lambda: client.look().endswith(b"hello"))
            client.say(b"\r\n")
            await turns(20)
            clock.advance(limits.header_seconds + 1)
            await turns(20)
            assert not client.ended, "the client still has its time between requests"
            client.say(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            got = await client.rest()
    assert got.count(b"HTTP/1.1 200") == 2
    assert b" 408 " not in got


async def test_an_answer_before_the_body_leaves_the_time_between_requests(clock: FakeClock) -> None:
    class Refuses:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 429, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    limits = Limits()
    async with serving(Refuses(), limits, clock) as (port, _):
        with Client(port) as client:
            client.say(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n")
            await eventually(lambda: b" 429 " in client.look())
            client.say(b"{}")
            await turns(20)
            clock.advance(limits.header_seconds + 1)
            await turns(20)
            assert not client.ended
            client.say(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            got = await client.rest()
    assert got.count(b" 429 ") == 2
