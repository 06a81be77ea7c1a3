"""The scripted server by itself: its times, its content and its faults are those of the script."""

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
import termios
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from tests.bench.serving.script import Play, Script, answer_tokens, moments
from tests.bench.serving.scripted import HOST, Line, Scripted
from tests.clocks import FakeClock
from tests.waiting import LIMIT_S, until

EARLY_S = 1e-5  # rounding error of a sum of gaps


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    in_order = (Script(name="first", tokens=1), Script(name="second", tokens=2))
    with Scripted(Play(named={"@slow": Script(name="slow", first_s=0.03, tokens=1)}, in_order=in_order)) as server:
        yield server


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=LIMIT_S)


def send(link: socket.socket, path: str = "/v1/chat/completions", **body: Any) -> None:
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": "two words"}]} | body
    data = json.dumps({"stream": True} | body).encode()
    link.sendall(b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data)


def rest(link: socket.socket) -> bytes:
    """All bytes until the response ends or the server closes."""
    return rest_of(link, b"")


def rest_of(link: socket.socket, data: bytes) -> bytes:
    """The same, after the bytes already received."""
    while not data.endswith(b"0\r\n\r\n") and (part := link.recv(1 << 16)):
        data += part
    return data


def asked(server: Scripted, path: str = "/v1/chat/completions", **body: Any) -> bytes:
    with connect(server.port) as link:
        send(link, path, **body)
        return rest(link)


def events(answer: bytes) -> list[Any]:
    lines = answer.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def test_events_leave_when_they_were_planned_and_the_log_says_so(server: Scripted):
    gaps = (0.01, 0.002, 0.005)
    asked(server, script={"name": "plan", "tokens": 31, "first_s": 0.02, "gaps_s": gaps})
    row = server.named()["plan"]
    assert row.tokens == (1,) * 31
    plan = [row.received + 0.02 + sum(gaps) * (i // 3) + sum(gaps[: i % 3]) for i in range(31)]
    assert all(at - due > -EARLY_S for at, due in zip(row.events, plan, strict=True)), "no event is early"


def test_the_time_of_an_event_is_read_before_it_is_handed_over(monkeypatch: pytest.MonkeyPatch):
    """So no client can read an event before its logged time."""
    here, there = socket.socketpair()
    transport = mock.Mock(asyncio.Transport)
    transport.get_extra_info.return_value = here
    transport.is_closing.return_value, transport.get_write_buffer_size.return_value = False, 0
    line = Line(mock.Mock())
    line.connection_made(transport)
    write = os.write

    with here, there, FakeClock(5.0).installed() as clock:

        def slow(file: int, data: bytes) -> int:
            clock.advance(1)
            return write(file, data)

        monkeypatch.setattr("tests.bench.serving.scripted.os", SimpleNamespace(write=slow))
        assert line.write(b"event") == 5.0
        assert clock() == 6.0
        assert there.recv(100) == b"event"


def test_thinking_comes_before_the_answer_and_bursts_share_an_event(server: Scripted):
    answer = asked(
        server,
        stream_options={"include_usage": True},
        script={"name": "burst", "tokens": 4, "thinking": 3, "burst": [2, 3], "token_ids": True},
    )
    deltas = [event["choices"][0] for event in events(answer) if event["choices"]]
    assert [choice["delta"] for choice in deltas] == [
        {"role": "assistant", "content": ""},
        {"reasoning": " the the", "reasoning_content": " the the"},
        {"reasoning": " the", "reasoning_content": " the"},
        {"content": " the the"},
        {"content": " the the"},
        {},
    ]
    assert [len(choice.get("token_ids", ())) for choice in deltas] == [0, 2, 1, 2, 2, 0]
    assert deltas[-1]["finish_reason"] == "stop"
    assert events(answer)[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert server.named()["burst"].tokens == (2, 1, 2, 2)


def test_a_completion_has_text_and_its_prompt_may_be_ids(server: Scripted):
    usage = {"include_usage": True}
    answer = asked(server, "/v1/completions", prompt=[5, 6, 7], max_tokens=2, stream_options=usage, script={})
    said = events(answer)
    assert [event["choices"][0]["text"] for event in said[:-1]] == [" the", " the"]
    assert [event["choices"][0]["finish_reason"] for event in said[:-1]] == [None, "length"]
    assert said[-1]["usage"]["prompt_tokens"] == 3


def test_usage_lies_or_is_absent_as_the_script_wants(server: Scripted):
    usage = {"include_usage": True}
    lie = asked(server, stream_options=usage, script={"tokens": 3, "usage_off": 5})
    assert events(lie)[-1]["usage"]["completion_tokens"] == 8
    assert b"usage" not in asked(server, stream_options=usage, script={"tokens": 3, "usage": False})
    assert b"usage" not in asked(server, script={"tokens": 3})


@pytest.mark.parametrize(
    ("fault", "ends", "tokens"),
    [
        ("drop", b'"finish_reason":null}]}\n\n\r\n', 2),
        ("cut", b"", 2),
        ("error", b"data: [DONE]\n\n\r\n0\r\n\r\n", 2),
        ("short", b'"finish_reason":null}]}\n\n\r\n0\r\n\r\n', 2),
        ("no_done", b'"finish_reason":"stop"}]}\n\n\r\n0\r\n\r\n', 4),
        ("not_http", b"ESMTP\r\n", 0),
    ],
)
def test_a_fault_comes_after_so_many_events(server: Scripted, fault: str, ends: bytes, tokens: int):
    with connect(server.port) as link:
        send(link, script={"name": fault, "tokens": 4, "fault": fault, "after": 2})
        answer = link.recv(1 << 16) if fault == "not_http" else rest(link)
    assert answer.endswith(ends)
    assert answer.count(b'"content":" the"') == tokens
    assert b"[DONE]" not in answer or fault == "error"
    if fault == "cut":
        assert answer.count(b"data: {") == 1 + 2 + 1, "role, two tokens, half an event"
        assert not answer.endswith(b"\n\r\n")
    assert len(server.named()[fault].events) == tokens


def test_a_reset_is_an_error_and_a_drop_before_the_head_says_nothing(server: Scripted):
    with connect(server.port) as link:
        send(link, script={"tokens": 4, "fault": "reset", "after": 1, "gaps_s": [0.01]})
        with pytest.raises(ConnectionResetError):
            rest(link)
    assert asked(server, script={"tokens": 4, "fault": "drop", "after": -1}) == b""


def test_a_stalled_answer_keeps_its_connection_until_the_client_leaves(server: Scripted):
    with connect(server.port) as link:
        send(link, script={"name": "stall", "tokens": 4, "fault": "stall", "after": 2})
        answer = b""
        while answer.count(b'"content":" the"') < 2:
            answer += link.recv(1 << 16)
        link.setblocking(False)
        with pytest.raises(BlockingIOError):
            link.recv(1)
        assert not server.named()["stall"].left
    until(lambda: server.named()["stall"].left)
    assert len(server.named()["stall"].events) == 2


def test_a_status_is_an_error_with_json(server: Scripted):
    with connect(server.port) as link:
        send(link, script={"fault": "status", "status": 429})
        head, body = link.recv(1 << 16).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert json.loads(body)["error"]["code"] == 429


def test_an_event_that_is_no_json_stands_between_others(server: Scripted):
    answer = asked(server, script={"tokens": 3, "fault": "not_json", "after": 1})
    data = [line for line in answer.splitlines() if line.startswith(b"data: ")]
    assert [b"[DONE]" in line or line.endswith(b"}") for line in data] == [True, True, False, True, True, True, True]


def test_a_script_is_chosen_by_field_then_prompt_then_order(server: Scripted):
    server.forget()
    asked(server, messages=[{"role": "user", "content": [{"type": "text", "text": "be @slow"}]}])
    asked(server)
    asked(server)
    asked(server, script="@slow")
    names = [row.name for row in server.log().requests]
    assert names[0] == names[3] == "slow"
    assert {names[1], names[2]} == {"first", "second"}


def test_a_wrong_script_is_refused_by_name(server: Scripted):
    for script, word in (({"tokns": 1}, "tokns"), ("absent", "absent"), ({"burst": [0]}, "burst")):
        with connect(server.port) as link:
            send(link, script=script)
            answer = link.recv(1 << 16)
        assert b"400 Bad Request" in answer
        assert word.encode() in answer


def test_places_let_further_requests_wait():
    with Scripted(Play(places=1)) as server, connect(server.port) as one, connect(server.port) as two:
        send(one, script={"name": "one", "tokens": 5, "gaps_s": [0.05]})
        first = one.recv(1 << 16)  # it has the place
        send(two, script={"name": "two", "tokens": 5})
        rest_of(one, first)
        rest(two)
        rows = server.named()
        assert rows["one"].events[-1] < rows["two"].events[0]


def test_answers_in_step_move_together(server: Scripted):
    """The first event is sent at the next multiple of the gap, and each further one a gap later."""
    with connect(server.port) as one, connect(server.port) as two:
        for name, link in (("one", one), ("two", two)):
            send(link, script={"name": name, "tokens": 5, "gaps_s": [0.1], "in_step": True})
        rest(one)
        rest(two)
    rows = server.named()
    for name in ("one", "two"):
        first, last = rows[name].events[0], rows[name].events[-1]
        assert (last // 0.1) - (first // 0.1) >= 4, "each event has a step of its own"


def test_who_reads_slowly_gets_everything(server: Scripted):
    with connect(server.port) as link:
        send(link, script={"tokens": 50_000, "events_at_once": 64, "logged": False})
        first = link.recv(1)
        until(lambda: unread(link) > 1 << 16)  # more was sent while the client did not read
        assert rest_of(link, first).count(b'"content":" the"') == 50_000


def unread(link: socket.socket) -> int:
    """The number of received bytes that have not been read."""
    found = array("i", [0])
    fcntl.ioctl(link, termios.FIONREAD, found)
    return found[0]


def test_random_gaps_are_those_of_their_seed():
    gaps = [[gap for *_, gap in moments(Script(gaps_s=(0.01,), spread_s=0.005, seed=seed), 20)] for seed in (1, 1, 2)]
    assert gaps[0] == gaps[1] != gaps[2]
    assert all(0.01 <= gap <= 0.015 for gap in gaps[0])
    assert answer_tokens(Script(thinking=4), 10) == 6


def test_it_runs_from_the_command_line_with_a_play_of_a_file(tmp_path: Path):
    play = tmp_path / "play.json"
    play.write_bytes(msgspec.json.encode(Play(in_order=(Script(tokens=3),))))
    command = [sys.executable, "-m", "tests.bench.serving.scripted", "--port", "0", "--play", str(play)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            with connect(port) as link:
                send(link)
                assert rest(link).count(b'"content":" the"') == 3
        finally:
            process.terminate()
    play.write_text('{"in_order": [{"burst": []}]}')
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --play {play}: burst needs")
