"""The bystander: a process that reads two streams all the time, and probes the event loop every few milliseconds.

    python -m lab.attack.watch PORT PID TOKEN LENGTH

runs as a separate process, so that its records do not wait for the attacker. Each line on its input is answered with a
line of JSON, the records since the last one. `read`, a pure function, evaluates the records.

How a pause is attributed: the API process never computes, so the time that a probe (a GET on a kept connection) waits
for its answer is the event loop's pause. The time that the two threads waited for a core according to the kernel
(/proc/PID/schedstat) is subtracted: on a machine with other work that is most of it, and not the server's fault. A gap
in one stream while the other one receives tokens is a pause too: the engine ran a step, and left a stream out. A gap in
both while the loop answers is a step of the engine.
"""

import functools
import itertools
import json
import math
import socket
import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.attack.raw_http import HOST, head
from redline import clock

KNOCK_S = 0.005  # between an answer and the next probe
PAUSE_S = 0.02  # a probe that waits longer was delayed
SAME_STEP_S = 0.003  # chunks this close together are of one step: the end of an answer follows its last token
PATIENCE_S = 120.0  # seconds until an answer, and until a chunk
TAIL = b"0\r\n\r\n"  # the end of a chunked answer
OWN = Path("/proc/thread-self/schedstat")


class Knock(NamedTuple):
    """One GET /health of the bystander, in seconds. began: on CLOCK_MONOTONIC. took: until its answer.

    excused: the part of `took` in which the server's event loop or the probing thread waited for a core.
    """

    began: float
    took: float
    excused: float

    @property
    def pause(self) -> float:
        """Seconds that the event loop itself took, without waiting for a core."""
        return max(0.0, self.took - self.excused)


class Chunk(NamedTuple):
    """The time at which a part of a stream was read, in seconds of CLOCK_MONOTONIC.

    waited: total seconds that the reading thread has waited for a core until then.
    """

    at: float
    waited: float = 0.0


Answers = Sequence[Sequence[Chunk]]  # of one stream, in sequence


class Notes(NamedTuple):
    """The bystander's records: every probe, and every chunk of each stream, by stream and answer.

    Times are seconds of CLOCK_MONOTONIC. refused: how many probes and streams the server did not answer.
    """

    knocks: Sequence[Knock]
    streams: Sequence[Answers]
    refused: int = 0


class Gap(NamedTuple):
    """The seconds between two chunks of an answer. excused: the part in which the reading thread waited for a core."""

    begin: float
    end: float
    excused: float


class Spread(NamedTuple):
    """Median, 99th percentile and largest value, in milliseconds."""

    p50: float
    p99: float
    most: float


class Pauses(NamedTuple):
    """The bystander's times in a phase, in milliseconds.

    gap: between two chunks of a stream. knock: until the event loop answered; loop: the same without waiting for a
    core. left_out: the longest time by which one stream got a step's tokens later than the other: the engine left it
    out, or the API did. engine: the longest gap in both streams, without the loop's pauses within it: usually a step.
    beyond: the longest pause that the engine's own steps do not explain: the larger of left_out and loop.most. chunks:
    how many arrived on both streams; with none, no pause could be seen. refused: as in `Notes`.
    """

    gap: Spread
    knock: Spread
    loop: Spread
    left_out: float
    engine: float
    beyond: float
    chunks: int
    refused: int


def read(notes: Notes) -> Pauses:
    """The pauses contained in the records."""
    gaps = [list(_gaps(answers)) for answers in notes.streams]
    times = [[chunk.at for answer in answers for chunk in answer] for answers in notes.streams]
    left_out = max(
        (
            _late(others, gap)
            for own, stream in enumerate(gaps)
            for other, others in enumerate(times)
            if other != own
            for gap in stream
        ),
        default=0.0,
    )
    loop = [knock.pause for knock in notes.knocks]
    return Pauses(
        gap=spread([gap.end - gap.begin for stream in gaps for gap in stream]),
        knock=spread([knock.took for knock in notes.knocks]),
        loop=spread(loop),
        left_out=_ms(left_out),
        engine=_ms(_longest_step(gaps, notes.knocks)),
        beyond=_ms(max([left_out, *loop])),
        chunks=sum(map(len, times)),
        refused=notes.refused,
    )


def spread(seconds: Sequence[float]) -> Spread:
    """Percentiles of durations in seconds, as milliseconds; zeros if there are none."""
    if not seconds:
        return Spread(0.0, 0.0, 0.0)
    ordered = sorted(seconds)
    return Spread(*(_ms(ordered[min(len(ordered) - 1, math.floor(part * len(ordered)))]) for part in (0.5, 0.99, 1)))


def joined(parts: Sequence[Notes]) -> Notes:
    """Consecutive records joined; an answer that is cut between two records counts as two, and loses one gap."""
    streams = [[answer for part in parts for answer in part.streams[k]] for k in range(len(parts[0].streams))]
    return Notes([knock for part in parts for knock in part.knocks], streams, sum(part.refused for part in parts))


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def _gaps(answers: Answers) -> Iterator[Gap]:
    for answer in answers:
        for last, chunk in itertools.pairwise(answer):
            yield Gap(last.at, chunk.at, chunk.waited - last.waited)


def _late(times: Sequence[float], gap: Gap) -> float:
    """How many seconds later than another stream this one receives a step's tokens.

    The other stream's first time within the gap may belong to the step before the gap, and its chunk may be in two
    parts; from the next one on, this stream should have received its tokens as well.
    """
    first = bisect_right(times, gap.begin)
    if first == len(times):
        return 0.0
    second = bisect_right(times, times[first] + SAME_STEP_S)
    late = gap.end - times[second] if second < len(times) else 0.0
    return max(0.0, late - gap.excused)


def _longest_step(gaps: Sequence[Sequence[Gap]], knocks: Sequence[Knock]) -> float:
    """Seconds of the longest gap common to all streams.

    The loop's pauses within it are not counted.
    """
    spans = [[(gap.begin, gap.end) for gap in stream] for stream in gaps]
    silent = functools.reduce(lambda one, other: list(_common(one, other)), spans) if spans else []
    longest = 0.0
    for begin, end in sorted(silent, key=lambda span: span[0] - span[1]):
        if end - begin <= longest:
            break
        paused = sum(
            max(0.0, min(end, knock.began + knock.took) - max(begin, knock.began))
            for knock in knocks
            if knock.took > PAUSE_S
        )
        longest = max(longest, end - begin - paused)
    return longest


def _common(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            yield begin, end
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1


# -- The process ---------------------------------------------------------------------------------------------------


class Watcher:
    """Three threads that read two streams and probe the event loop, and their records since the last `take`.

    port: of the server. pid: of its API process; its main thread runs the event loop. token, length: every answer is
    `length` times this token.
    """

    def __init__(self, port: int, pid: int, token: int, length: int) -> None:
        self._port = port
        self._server = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self._lock = threading.Lock()
        self._refused = 0
        self._knocks = array("d")
        bodies = ("/v1/chat/completions", chat(token, length)), ("/v1/completions", completion(token, length))
        self._streams: list[list[array[float]]] = [[array("d")] for _ in bodies]
        for number, (path, body) in enumerate(bodies):
            request = head("POST", path, len(body), {"Connection": "keep-alive"}.items()) + body
            threading.Thread(target=self._again, args=(self._stream, number, request), daemon=True).start()
        threading.Thread(target=self._again, args=(self._knock,), daemon=True).start()

    def take(self) -> dict[str, Any]:
        """The records since the last call, as flat lists that `notes_of` reads; they are cleared here.

        An unfinished answer is continued in the next records.
        """
        with self._lock:
            knocks, self._knocks = self._knocks, array("d")
            streams, self._streams = self._streams, [[array("d", answers[-1][-2:])] for answers in self._streams]
            refused, self._refused = self._refused, 0
        told = [[answer.tolist() for answer in answers if answer] for answers in streams]
        return {"knocks": knocks.tolist(), "streams": told, "refused": refused}

    def _again(self, work: Any, *arguments: Any) -> None:
        while True:
            try:
                work(*arguments)
            except (OSError, ValueError):
                with self._lock:
                    self._refused += 1
                clock.sleep(0.1)

    def _knock(self) -> None:
        request = head("GET", "/health", None, {"Connection": "keep-alive"}.items())
        with socket.create_connection((HOST, self._port), PATIENCE_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                waited, began = self._waited(), clock.monotonic()
                link.sendall(request)
                _read_answer(link)
                took = clock.monotonic() - began
                with self._lock:
                    self._knocks.extend((began, took, self._waited() - waited))
                clock.sleep(KNOCK_S)

    def _waited(self) -> float:
        """Total seconds that the server's event loop and this thread have waited for a core."""
        return waited(self._server) + waited(OWN)

    def _stream(self, number: int, request: bytes) -> None:
        with self._lock:
            self._streams[number].append(array("d"))
        with socket.create_connection((HOST, self._port), PATIENCE_S) as link:
            link.sendall(request)
            if not link.recv(1 << 16).startswith(b"HTTP/1.1 200"):
                raise ValueError("refused")
            while True:
                part = link.recv(1 << 16)
                at, own = clock.monotonic(), waited(OWN)
                if not part:
                    raise ValueError("closed")
                if part.endswith(TAIL):
                    return
                with self._lock:
                    self._streams[number][-1].extend((at, own))


def chat(token: int, length: int) -> bytes:
    """The body of a streamed chat request with an answer of `length` times `token`."""
    asked = {"messages": [{"role": "user", "content": "Tell me a long story."}]}
    return json.dumps({**asked, **_at_length(token, length)}).encode()


def completion(token: int, length: int) -> bytes:
    """The body of a streamed completions request with an answer of `length` times `token`."""
    return json.dumps({"prompt": "Once upon a time", **_at_length(token, length)}).encode()


def _at_length(token: int, length: int) -> dict[str, Any]:
    """One chunk for every step: each token is complete text, so nothing is held back."""
    return {"max_tokens": length, "ignore_eos": True, "temperature": 0, "logit_bias": {str(token): 100}, "stream": True}


def waited(schedstat: Path) -> float:
    """Seconds that a thread was ready to run without a core. Raises OSError if the thread has ended."""
    return int(schedstat.read_text().split()[1]) / 1e9


def notes_of(told: dict[str, Any]) -> Notes:
    """The output of `Watcher.take` as records."""
    flat = told["knocks"]
    knocks = [Knock(*triple) for triple in zip(flat[::3], flat[1::3], flat[2::3], strict=True)]
    streams = [
        [[Chunk(*pair) for pair in zip(answer[::2], answer[1::2], strict=True)] for answer in answers]
        for answers in told["streams"]
    ]
    return Notes(knocks, streams, told["refused"])


def _read_answer(link: socket.socket) -> None:
    """Reads one answer of a kept connection to its end. Raises ValueError if the server closes before that."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        if not (part := link.recv(1 << 16)):
            raise ValueError("closed")
        answer += part
    top, _, body = answer.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in top.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        if not (part := link.recv(1 << 16)):
            raise ValueError("closed")
        body += part


def main() -> None:
    """Answers every line on stdin with the records since the last one, as a line of JSON, until stdin ends."""
    port, pid, token, length = map(int, sys.argv[1:])
    watcher = Watcher(port, pid, token, length)
    for _ in sys.stdin:
        print(json.dumps(watcher.take()), flush=True)


if __name__ == "__main__":
    main()
