"""An OpenAI server with scripted behaviour and a log of the actual send times, for measuring a client.

    python -m tests.bench.serving.scripted [--port 0] [--play FILE.json]

It serves /v1/chat/completions, /v1/completions and /v1/models; GET /log returns its log, DELETE /log empties it.
The content, times and faults of answers are defined in `script.py`; FILE.json holds a `Play`. Events are timed by a
timerfd with nanosecond resolution (the event loop's own timers have milliseconds), and are written to the socket
from its callback, so that the logged time is the one at which the kernel accepted them.
"""

import argparse
import asyncio
import ctypes
import gc
import heapq
import http.client
import math
import multiprocessing
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, cast

import httptools
import msgspec
import uvloop

from redline import clock
from tests.bench.serving import script as say
from tests.bench.serving.script import AT_THE_START, MODEL, Form, Log, Logged, Part, Play, Script

HOST = "127.0.0.1"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"cache-control: no-cache\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
ERROR = {"message": "as the script wants it", "type": "server_error", "code": None, "param": None}
CALLS_AT_ONCE = 64  # due calls per iteration, so that sockets are also read if the server is late
CLOCK_MONOTONIC, TFD_NONBLOCK, TFD_TIMER_ABSTIME = 1, os.O_NONBLOCK, 1  # constants of Linux's timerfd_create(2)


class Body(msgspec.Struct, frozen=True):
    """The fields of a request's body that the server uses."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int | str] | None = None
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: dict[str, Any] | None = None
    script: Any = None


class Timer:
    """Calls functions at times of `time.perf_counter`, in order, on the running event loop, by a Linux timerfd."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        asyncio.get_running_loop().add_reader(self._file, self._fire)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls `call` at `when`, or as soon as possible after it."""
        entry = (when, next(self._order), call)
        heapq.heappush(self._due, entry)
        if self._due[0] is entry:
            self._arm(when)

    def _arm(self, when: float) -> None:
        whole = max(1, int(when * 1e9))  # 0 would disarm it
        setting = struct.pack("qqqq", 0, 0, whole // 10**9, whole % 10**9)
        if self._libc.timerfd_settime(self._file, TFD_TIMER_ABSTIME, setting, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return  # it was armed again after it had expired
        for _ in range(CALLS_AT_ONCE):
            if not self._due or self._due[0][0] > clock.perf_counter():
                break
            heapq.heappop(self._due)[2]()
        if self._due:
            self._arm(self._due[0][0])


class Stage:
    """State shared by the connections of a server: the play, its log, the timer, and the queue of waiting answers."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.timer = Timer()
        self.acts: list[Act] = []
        self.events = 0
        self._arrived = count()
        self._running = 0
        self._waiting: deque[Act] = deque()

    def arrive(self) -> int:
        """The number of a request that arrives, from 0 on."""
        return next(self._arrived)

    def enter(self, act: "Act") -> None:
        """Begins an answer, or queues it until a place is free."""
        self.acts.append(act)
        if self.play.places is not None and self._running >= self.play.places:
            self._waiting.append(act)
        else:
            self._running += 1
            act.begin(act.received)

    def leave(self, act: "Act") -> None:
        """An answer has ended, or its client has disconnected: the next queued one begins."""
        if act in self._waiting:
            self._waiting.remove(act)
            return
        self._running -= 1
        if self._waiting:
            self._running += 1
            self._waiting.popleft().begin(clock.perf_counter())

    def log(self) -> bytes:
        """The requests since the log was emptied, as JSON of a `Log`."""
        requests = tuple(act.logged() for act in self.acts)
        return msgspec.json.encode(Log(cpu_s=clock.process_time(), events=self.events, requests=requests))


class Act:
    """One answer, from its request to its end or its fault."""

    def __init__(self, line: "Line", script: Script, form: Form, body: Body, prompt_tokens: int) -> None:
        self._line, self._script, self._form, self._body = line, script, form, body
        self._prompt_tokens = prompt_tokens
        self._max_tokens: int | None = body.max_tokens or body.max_completion_tokens
        self._moments = say.moments(script, self._max_tokens)
        self._next = next(self._moments, None)
        self._path = line.path
        self.received = line.read_at
        self._head: float | None = None
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._end: float | None = None
        self._sent = 0  # events sent
        self._left = False
        self._faulted = False
        self._due = 0.0

    def begin(self, now: float) -> None:
        """Schedules the head and the first event. now: the time from which both are counted."""
        script = self._script
        if script.fault in AT_THE_START or not self._body.stream:
            self._at(now + max(script.head_s, script.first_s), self._whole)
            return
        self._due = now + max(script.head_s, script.first_s)
        if script.in_step and (gap := script.gaps_s[0]):
            self._due = math.ceil(self._due / gap) * gap
        self._at(now + script.head_s, self._open)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._end is None

    def gone(self) -> None:
        """The connection has closed: if the answer has not ended, the client has disconnected."""
        if self._end is None:
            self._left = True
            self._finish(clock.perf_counter())

    def logged(self) -> Logged:
        """The log's row of this answer."""
        return Logged(
            name=self._script.name,
            path=self._path,
            received=self.received,
            head=self._head,
            events=tuple(self._times),
            tokens=tuple(self._tokens),
            end=None if self._left else self._end,
            left=self._left,
        )

    def _at(self, when: float, call: Callable[[], None]) -> None:
        self._line.stage.timer.at(when, lambda: None if self._end is not None else call())

    def _finish(self, at: float) -> None:
        self._end = at
        self._line.act = None
        self._line.stage.leave(self)

    def _open(self) -> None:
        if self._fault_is_due(-1):
            self._fault()
            return
        self._head = self._line.write(STREAM_HEAD)
        self._at(self._due, self._more)

    def _more(self) -> None:
        """The next write of events, or the fault in its place."""
        if self._end is not None:
            return
        if self._line.full:
            self._line.when_free = self._more
            return
        if self._fault_is_due(self._sent):
            self._fault()
            return
        pieces: list[bytes] = []
        tokens: list[int] = []
        gap = 0.0
        if not self._sent and self._form.chat:
            pieces.append(say.event(self._form, "role", 0))
        while self._next and len(tokens) < self._script.events_at_once and not self._fault_is_due(self._sent):
            part, number, gap = self._next
            self._next = next(self._moments, None)
            self._sent += 1
            # In completions every event with a choice counts as a token, so the last token's one has the
            # finish_reason.
            last = self._next is None and not self._form.chat and not self._fault_is_due(self._sent)
            pieces.append(say.event(self._form, part, number, say.finish_of(self._script) if last else None))
            tokens.append(number)
        data = b"".join(pieces)
        if self._script.halves_s and data:
            half = len(data) // 2
            at = self._line.write(data[:half]) + self._script.halves_s
            self._at(at, lambda: self._wrote(data[half:], tokens, gap))
        else:
            self._wrote(data, tokens, gap)

    def _wrote(self, data: bytes, tokens: list[int], gap: float) -> None:
        """Writes events, and schedules the next ones."""
        at = self._line.write(data)
        self._line.stage.events += len(tokens)
        if self._script.logged:
            self._times += [at] * len(tokens)
            self._tokens += tokens
        if not self._next and not self._fault_is_due(self._sent):
            self._close()
            return
        self._due += gap
        if gap:
            self._at(self._due, self._more)
        else:
            asyncio.get_running_loop().call_soon(self._more)  # lets the other streams write first

    def _fault_is_due(self, sent: int) -> bool:
        """Whether the fault comes now, `sent` events into the answer (-1: before its head), or at its end."""
        script = self._script
        if script.fault in (None, "no_done") or self._faulted:
            return False
        return sent >= script.after or (sent >= 0 and self._next is None)

    def _fault(self) -> None:
        self._faulted = True
        match self._script.fault:
            case "stall":
                return  # until the client disconnects
            case "not_json":
                self._wrote(say.framed(b'data: {"choices": [{"index": 0, "del\n\n'), [], self._script.gaps_s[0])
                return
            case "cut":
                part: Part = self._next[0] if self._next else "answer"
                data = say.event(self._form, part, 1)
                self._line.write(data[: len(data) // 2])
            case "error":
                said = b'data: {"error":%b}\n\ndata: [DONE]\n\n' % msgspec.json.encode(ERROR | {"code": 500})
                self._line.write(say.framed(said) + LAST_CHUNK)
            case "short":
                self._line.write(LAST_CHUNK)
            case _:
                pass  # drop and reset send nothing
        fault = self._script.fault
        self._finish(clock.perf_counter())
        if fault not in ("error", "short"):
            self._line.close(reset=fault == "reset")

    def _close(self) -> None:
        """The ending of a stream that has sent all its tokens."""
        asked = (self._body.stream_options or {}).get("include_usage")
        usage = self._usage() if asked and self._script.usage else None
        finished = bool(self._sent) and not self._form.chat
        ending = say.ending(self._form, self._script, usage, finished=finished)
        self._finish(self._line.write(ending + LAST_CHUNK))

    def _whole(self) -> None:
        """A response in one piece."""
        script = self._script
        match script.fault:
            case "status":
                head = self._line.reply(script.status, msgspec.json.encode({"error": ERROR | {"code": script.status}}))
            case "not_http":
                head = self._line.write(b"220 mail.example.org ESMTP\r\n")
            case "stall" | "drop" | "reset" | "cut":
                self._fault()
                return
            case _:
                answer = say.WORD * say.answer_tokens(script, self._max_tokens)
                thinking = say.WORD * script.thinking
                head = self._line.reply(200, say.whole(self._form, script, answer, thinking, self._usage()))
        self._head = head
        self._finish(head)

    def _usage(self) -> dict[str, Any]:
        said = say.answer_tokens(self._script, self._max_tokens) + self._script.thinking + self._script.usage_off
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": said,
            "total_tokens": self._prompt_tokens + said,
        }
        if self._script.thinking:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._script.thinking}
        return usage


class Line(asyncio.Protocol):
    """One connection.

    act: the answer in progress. read_at: time of the last read. full: the client does not read, so writing waits.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.act: Act | None = None
        self.path = ""
        self.read_at = 0.0
        self.full = False
        self.when_free: Callable[[], None] | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport, and its socket's file descriptor, to which most writes go directly."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._socket = transport.get_extra_info("socket")
        self._file: int = self._socket.fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer in progress has lost its client."""
        if self.act is not None:
            self.act.gone()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.full = True

    def resume_writing(self) -> None:
        """The client has read the buffered data."""
        self.full = False
        if call := self.when_free:
            self.when_free = None
            call()

    def data_received(self, data: bytes) -> None:
        """Reads requests. Data that is not HTTP ends the connection."""
        self.read_at = clock.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_url(self, url: bytes) -> None:
        """A request begins; this is its path."""
        self.path = url.decode()
        self._body.clear()

    def on_body(self, body: bytes) -> None:
        """A part of the request's body."""
        self._body += body

    def on_message_complete(self) -> None:
        """The request has been read whole."""
        match self._parser.get_method(), self.path:
            case b"POST", "/v1/chat/completions" | "/v1/completions":
                self._perform()
            case b"GET", "/v1/models":
                model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "redline", "max_model_len": 1 << 20}
                self.reply(200, msgspec.json.encode({"object": "list", "data": [model]}))
            case b"POST", "/tokenize" if self.stage.play.tokenizes:
                prompt = msgspec.json.decode(self._body, type=Body).prompt
                self.reply(200, msgspec.json.encode({"tokens": list(range(say.tokens_of(str(prompt))))}))
            case b"GET", "/log":
                self.reply(200, self.stage.log())
            case b"DELETE", "/log":
                self.stage.acts = [act for act in self.stage.acts if act.running]
                self.reply(200, b"{}")
            case _, path:
                self.reply(404, msgspec.json.encode({"error": ERROR | {"message": f"no {path} here", "code": 404}}))

    def _perform(self) -> None:
        chat = self.path.startswith("/v1/chat")
        try:
            body = msgspec.json.decode(self._body, type=Body)
            prompt = body.messages if chat else body.prompt
            if prompt is None:
                raise ValueError("a chat has messages, a completion has a prompt")
            text = " ".join(_texts(prompt))
            script = self.stage.play.choose(body.script, text, self.stage.arrive())
        except ValueError as error:  # includes msgspec's errors
            said = ERROR | {"message": str(error), "type": "invalid_request_error", "code": 400}
            self.reply(400, msgspec.json.encode({"error": said}))
            return
        form = Form(chat=chat, newline=script.newline, comments=script.comments, token_ids=script.token_ids)
        tokens = say.tokens_of(text) if self.stage.play.tokenizes else len(text.split())
        tokens += sum(isinstance(item, int) for item in prompt)
        self.act = Act(self, script, form, body, tokens)
        self.stage.enter(self.act)

    def write(self, data: bytes) -> float:
        """Writes data to the socket, and returns the time. The transport buffers what the kernel does not accept."""
        at = clock.perf_counter()
        if self._transport.is_closing():
            return at
        taken = 0
        if not self._transport.get_write_buffer_size():
            try:
                taken = os.write(self._file, data)
            except BlockingIOError:
                pass
            except OSError:
                self._transport.abort()
                return at
        if taken < len(data):
            self._transport.write(data[taken:])
        return at

    def reply(self, status: int, body: bytes) -> float:
        """Sends a whole JSON response; returns the time at which it was passed to the socket."""
        reason = http.client.responses.get(status, "Unknown")
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return self.write(head.encode() + body)

    def close(self, reset: bool = False) -> None:
        """Closes the connection. reset: by RST, so the client's system reports an error."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()


def _texts(prompt: Any) -> Iterator[str]:
    """Every text of a prompt: a string, or the strings in lists and in messages under content and text."""
    match prompt:
        case str():
            yield prompt
        case list():
            for item in cast(list[Any], prompt):
                yield from _texts(item)
        case {"content": inner} | {"text": inner}:
            yield from _texts(inner)
        case _:
            return


async def serve(listener: socket.socket, play: Play) -> NoReturn:
    """Serves on the listening socket until the task is cancelled."""
    stage = Stage(play)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Line(stage), sock=listener, backlog=1024)
    gc.freeze()  # exclude long-lived objects from garbage collection during answers
    async with server:
        await loop.create_future()
    raise AssertionError("only a cancellation ends it")


def _process(listener: socket.socket, play: Play) -> None:
    uvloop.run(serve(listener, play))


class Scripted:
    """A scripted server in a process and on a port of its own, from `with` until its end."""

    def __init__(self, play: Play | None = None) -> None:
        listener = _listener(0)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_process, args=(listener, play or Play()), daemon=True)
        self._process.start()
        listener.close()

    def __enter__(self) -> "Scripted":
        """Waits until the server answers. Raises OSError if it does not."""
        self.log()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.join()

    def log(self) -> Log:
        """The server's log, requests in the order of their arrival."""
        return msgspec.json.decode(self._ask("GET"), type=Log)

    def named(self) -> dict[str, Logged]:
        """The log's rows by the name of their script; the last one if several have the same."""
        return {row.name: row for row in self.log().requests}

    def forget(self) -> None:
        """Removes ended answers from the log."""
        self._ask("DELETE")

    def _ask(self, method: str) -> bytes:
        link = http.client.HTTPConnection(HOST, self.port, timeout=20)
        try:
            link.request(method, "/log")
            return link.getresponse().read()
        finally:
            link.close()


def _listener(port: int) -> socket.socket:
    return socket.create_server((HOST, port), backlog=1024)


def main() -> None:
    """Serves until SIGINT or SIGTERM; the first line that it prints is its address."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: one that is free")
    parser.add_argument("--play", type=Path, help="JSON of a Play: scripts by name and in order")
    given = parser.parse_args()
    play = Play()
    if given.play:
        try:
            play = msgspec.json.decode(given.play.read_bytes(), type=Play)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise SystemExit(f"error: --play {given.play}: {error}") from None
    listener = _listener(given.port)
    print(f"http://{HOST}:{listener.getsockname()[1]}", flush=True)
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(listener, play))


if __name__ == "__main__":
    main()
