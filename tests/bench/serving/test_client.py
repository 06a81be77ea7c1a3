"""The client against servers that answer well, oddly, wrongly or not at all."""

import asyncio
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from redline.bench.serving.client import BODY_BYTES, LoadClient
from redline.bench.serving.connection import EVENT_BYTES, HEAD_BYTES
from redline.bench.serving.dialects import error_line
from redline.bench.serving.records import LoadRequest, TimedAnswer, Usage
from redline.bench.serving.target import Patience, ServerTarget
from redline.errors import ConfigError
from tests.bench.serving.odd_servers import (
    CHUNKED,
    DONE,
    HEAD,
    HI,
    answer_to,
    chunk,
    event,
    said,
    serving,
    target,
    whole,
)
from tests.waiting import LIMIT_S, eventually, turns


def _asked(*parts: bytes, **fields: Any) -> TimedAnswer:
    return asyncio.run(answer_to(*parts, **fields))


def _right(answer: TimedAnswer, text: str) -> None:
    assert (answer.failure, answer.error) == (None, None)
    assert (answer.text, answer.finish, answer.status) == (text, "stop", 200)
    assert answer.usage == Usage(prompt_tokens=3, completion_tokens=len(answer.chunks))
    assert answer.taken is not None
    assert answer.connected is not None
    assert answer.sent is not None
    assert answer.head is not None
    times = [answer.taken, answer.connected, answer.sent, answer.head, *(one.at for one in answer.chunks), answer.end]
    assert times == sorted(times)


@pytest.mark.parametrize("how", ["chunked", "length", "close", "crlf"])
def test_a_stream_is_read_whatever_marks_the_end_of_its_body(how: str):
    stream = said("Hel", "lo")
    parts = {
        "chunked": (CHUNKED, chunk(stream), b"0\r\n\r\n"),
        "length": (whole(stream, kind="text/event-stream"),),
        "close": (HEAD + b"\r\n", stream),
        "crlf": (whole(stream.replace(b"\n", b"\r\n"), kind="text/event-stream; charset=utf-8"),),
    }[how]
    answer = _asked(*parts, close=how == "close")
    _right(answer, "Hello")
    assert [one.characters for one in answer.chunks] == [3, 2]


def test_a_stream_may_be_cut_anywhere():
    data = CHUNKED + chunk(b": ping\n\n") + chunk(said("Käse", "ツ")) + b"0\r\n\r\n"
    _right(_asked(*(data[place : place + 7] for place in range(0, len(data), 7))), "Käseツ")


def test_chunks_have_the_time_of_their_read():
    answer = _asked(
        CHUNKED + chunk(event({"content": "a"}) * 2),
        chunk(event({"content": "b"}, "stop") + DONE) + b"0\r\n\r\n",
        pause=0.1,
    )
    first, second, third = (one.at for one in answer.chunks)
    assert first == second
    assert 0.08 < third - second < 1


def test_a_stream_without_usage_or_without_done_is_whole_where_it_names_its_finish():
    answer = _asked(whole(event({"content": "a"}) + event(finish="length"), kind="text/event-stream"))
    assert (answer.failure, answer.text, answer.finish, answer.usage) == (None, "a", "length", None)


def test_a_stream_is_known_without_its_content_type():
    _right(_asked(whole(said("a"), kind="text/plain")), "a")


def test_an_answer_that_is_no_stream_is_one_chunk():
    choice = b'{"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}'
    body = b'{"choices":[%b],"usage":{"prompt_tokens":3,"completion_tokens":1}}' % choice
    answer = _asked(whole(body))
    _right(answer, "hello")
    assert len(answer.chunks) == 1


def test_thinking_and_tool_calls_are_put_together():
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"at"'}}
    more = {"index": 0, "function": {"arguments": ":1}"}}
    parts = event({"reasoning": "h"}) + event({"reasoning": "m"}) + event({"tool_calls": [call]})
    answer = _asked(whole(parts + event({"tool_calls": [more]}, "tool_calls") + DONE, kind="text/event-stream"))
    assert (answer.thinking, answer.text, answer.finish) == ("hm", "", "tool_calls")
    assert answer.calls == ({"id": "c1", "name": "look", "arguments": '{"at":1}'},)
    assert [one.kind for one in answer.chunks] == ["thinking", "thinking", "tool", "tool"]


A = CHUNKED + chunk(event({"content": "a"}))
LAST = b"0\r\n\r\n"
FAILURES = {
    "dropped before the head": ((b"",), "dropped", "", "before it answered"),
    "dropped within an event": ((A + b"40\r\ndata: {",), "dropped", "a", "within"),
    "an open end that says nothing": ((HEAD + b"\r\n" + event({"content": "a"}),), "dropped", "a", r"without \[DONE\]"),
    "an end that says nothing": ((A + LAST,), "malformed", "a", r"without \[DONE\]"),
    "an empty stream": ((CHUNKED + LAST,), "malformed", "", r"without \[DONE\]"),
    "nothing but done": ((CHUNKED + chunk(DONE) + LAST,), "malformed", "", "nothing else"),
    "no JSON": ((A + chunk(b"data: {oops\n\n"),), "malformed", "a", "oops"),
    "no UTF-8": (
        (CHUNKED + chunk(b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'),),
        "malformed",
        "",
        "cannot be decoded",
    ),
    "no HTTP": ((b"SSH-2.0-OpenSSH_9.6\r\n\r\n",), "malformed", "", "invalid HTTP"),
    "a wrong chunk": ((A + b"zz\r\n",), "malformed", "a", "invalid HTTP"),
    "an endless head": ((HEAD + b"X-A: " + b"a" * HEAD_BYTES + b"\r\n",), "malformed", "", "head has more than 64 KiB"),
    "an error within": ((A + chunk(b'data: {"error":{"message":"lost"}}\n\n'),), "server", "a", "^lost$"),
    "a server error": (
        (whole(b'{"error":{"message":"no pages","type":"x"}}', "500 Internal Server Error"),),
        "http",
        "",
        "^HTTP 500: no pages$",
    ),
    "a redirect": (
        (b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /else\r\nContent-Length: 0\r\n\r\n",),
        "http",
        "",
        "redirect to /else",
    ),
    "a long body": ((whole(b"x" * (BODY_BYTES + 1)),), "malformed", "", "not a stream"),
    "a long event": ((A + chunk(b"data: " + b"x" * EVENT_BYTES),), "malformed", "a", "16 MiB"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_goes_wrong_is_named_and_what_had_come_is_kept(name: str):
    parts, failure, text, error = FAILURES[name]
    answer = _asked(*parts, close=failure == "dropped")
    assert (answer.failure, answer.text) == (failure, text)
    assert answer.error is not None
    assert "\n" not in answer.error
    assert re.search(error, answer.error)
    assert answer.end > 0


@pytest.mark.parametrize(
    ("parts", "patience", "error"),
    [
        ((), Patience(first=0.1), "no token within"),
        ((CHUNKED + chunk(event({"content": "a"})),), Patience(silence=0.1), "no data on the stream"),
        ((CHUNKED + chunk(event({"content": "a"})),), Patience(whole=0.1), "did not end"),
    ],
)
def test_a_server_that_stalls_holds_up_nobody_for_long(parts: tuple[bytes, ...], patience: Patience, error: str):
    answer = _asked(*parts, patience=patience)
    assert answer.failure == "stalled"
    assert error in (answer.error or "")
    assert answer.text == "a" * len(parts)


def test_a_body_that_never_ends_after_done_is_whole():
    answer = _asked(CHUNKED + chunk(said("a")))
    _right(answer, "a")
    assert answer.end < 1, "the fake clock would otherwise jump to the timeout"


def test_nobody_listens():
    async def ask() -> TimedAnswer:
        async with serving(_never) as (port, _):
            pass
        async with LoadClient(target(port)) as client:
            return await client.ask(HI)

    answer = asyncio.run(ask())
    assert answer.failure == "refused"
    assert answer.sent is None
    assert "no connection" in (answer.error or "")


async def _never(_: bytes, writer: asyncio.StreamWriter) -> None:
    raise AssertionError("no request is sent")


def test_a_connection_is_kept_for_the_next_request():
    connections: set[int] = set()

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        connections.add(id(writer))
        writer.write(CHUNKED + chunk(said("a")))
        await turns(3)
        writer.write(b"0\r\n\r\n")

    async def ask() -> None:
        async with (
            serving(reply) as (port, requests),
            LoadClient(target(port, key="secret", headers={"X-A": "b"})) as client,
        ):
            for index in range(3):
                _right(await client.ask(HI, index=index, planned=1.5), "a")
        assert len(connections) == 1
        assert len(requests) == 3
        assert requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert b"\r\nAuthorization: Bearer secret\r\n" in requests[0]
        assert b"\r\nX-A: b\r\n" in requests[0]

    asyncio.run(ask())


def test_a_kept_connection_that_the_server_closed_is_replaced_once():
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        if b"second" in request and not seen:
            seen.append(request)  # closed without a byte, as by a server with an idle timeout that has just expired
            writer.close()
            return
        writer.write(whole(said("a"), kind="text/event-stream"))

    async def ask() -> None:
        async with serving(reply) as (port, requests), LoadClient(target(port)) as client:
            _right(await client.ask(HI), "a")
            _right(await client.ask(LoadRequest(max_tokens=1, text="second")), "a")
            assert len(requests) == 3

    seen: list[bytes] = []
    asyncio.run(ask())
    assert len(seen) == 1


def test_connections_are_opened_ahead_and_idle_ones_that_end_are_forgotten():
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(said("a"), kind="text/event-stream"))
        await turns(3)
        writer.close()

    async def ask() -> None:
        async with serving(reply) as (port, _), LoadClient(target(port)) as client:
            await client.ready(2)
            for left in (1, 0, 0, 0):
                answer = await client.ask(HI)
                _right(answer, "a")
                await eventually(lambda left=left: len(client._idle) == left)

    asyncio.run(ask())


def test_sixty_four_streams_at_once():
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for place in range(20):
            writer.write(chunk(event({"content": f"{place} "})))
            await turns()
        writer.write(chunk(event(finish="stop") + DONE) + b"0\r\n\r\n")

    async def ask() -> list[TimedAnswer]:
        async with serving(reply) as (port, _), LoadClient(target(port)) as client:
            return await asyncio.gather(*(client.ask(HI, index=index) for index in range(64)))

    answers = asyncio.run(ask())
    assert [answer.index for answer in answers] == list(range(64))
    assert {answer.text for answer in answers} == {"".join(f"{place} " for place in range(20))}
    assert {len(answer.chunks) for answer in answers} == {20}


def test_what_is_cut_off_keeps_what_had_come():
    async def ask() -> list[TimedAnswer]:
        async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED + chunk(event({"content": "a"})))
            await asyncio.Event().wait()

        async with serving(reply) as (port, _), LoadClient(target(port)) as client:
            asking = [asyncio.create_task(client.ask(HI)) for _ in range(2)]
            await eventually(lambda: client.chunks == 2)
            client.cut("time is up")
            return await asyncio.gather(*asking)

    for answer in asyncio.run(ask()):
        assert (answer.failure, answer.error, answer.text) == ("deadline", "time is up", "a")


def test_tls(tmp_path: Path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *subject]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=LIMIT_S)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(said("a"), kind="text/event-stream"))

    async def ask() -> list[TimedAnswer]:
        async with serving(reply, context) as (port, _):
            answers: list[TimedAnswer] = []
            for verify in (False, True):
                fields = {"base_url": f"https://127.0.0.1:{port}", "verify_tls": verify}
                async with LoadClient(target(port, **fields)) as client:
                    answers.append(await client.ask(HI))
            return answers

    unverified, verified = asyncio.run(ask())
    _right(unverified, "a")
    assert verified.failure == "refused"
    assert "certificate" in (verified.error or "").lower()


def test_the_model_is_asked_for_where_none_is_named():
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        models = b'{"object":"list","data":[{"id":"first","object":"model"},{"id":"second"}]}'
        writer.write(whole(models) if request.startswith(b"GET /at/v1/models ") else whole(b"{}", "404 Not Found"))

    async def ask() -> tuple[str, list[str]]:
        async with serving(reply) as (port, _):
            fields = {"base_url": f"http://127.0.0.1:{port}/at/v1/", "model": ""}
            async with LoadClient(target(port, **fields)) as client:
                return client.target.model, await client.models()

    assert asyncio.run(ask()) == ("first", ["first", "second"])


@pytest.mark.parametrize("body", [b'{"data":[]}', b'{"data":"no"}', b"no"])
def test_a_server_without_models_is_an_error_that_names_it(body: bytes):
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(body))

    async def ask() -> None:
        async with serving(reply) as (port, _), LoadClient(target(port, model="")):
            raise AssertionError("there is no model")

    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"base_url": "127.0.0.1:8000"}, "127.0.0.1:8000.*server address"),
        ({"base_url": "http://127.0.0.1:99999"}, "99999.*server address"),
        ({"base_url": "http://127.0.0.1:1/a path"}, "--base-url"),
        ({"backend": "tgi"}, "--backend"),
        ({"headers": {"X-A": "b\r\nX-B: c"}}, "header"),
    ],
)
def test_a_target_that_cannot_be_is_an_error_that_names_the_flag(fields: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        LoadClient(target(1, **fields)).request(HI)


def test_a_text_that_json_cannot_carry_is_an_error():
    with pytest.raises(ConfigError, match="JSON"):
        LoadClient(target(1)).request(LoadRequest(max_tokens=1, text="\ud800"))


def test_a_header_that_is_given_takes_the_place_of_ours_however_it_is_written():
    headers = {"authorization": "Basic b", "content-type": "application/json; charset=utf-8"}
    head = LoadClient(target(1, key="k", headers=headers)).request(HI).partition(b"\r\n\r\n")[0].lower()
    assert head.count(b"authorization:") == 1
    assert b"basic b" in head
    assert head.count(b"content-type:") == 1


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_several_answers_to_one_request_are_refused(field: str):
    with pytest.raises(ConfigError, match=field):
        LoadClient(target(1, body={field: 2})).request(HI)
    assert LoadClient(target(1, body={field: 1})).request(HI)


def test_what_lies_too_deep_to_be_read_ends_its_request_at_once():
    deep = b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    found = _asked(HEAD, b"data: " + deep + b"\n\n")
    assert found.failure == "malformed"
    assert error_line(deep).startswith('{"x":[[')


@pytest.mark.parametrize("address", ["http://[", "http://a:99999", "ftp://a", "a:1", ""])
def test_an_address_that_is_none_is_said(address: str):
    with pytest.raises(ConfigError, match=f"{re.escape(repr(address))} is not a server address"):
        LoadClient(ServerTarget(base_url=address))
