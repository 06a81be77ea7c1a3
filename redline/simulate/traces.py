"""Traces of requests: Mooncake's, and synthetic ones with phases of different kinds, generated from a seed.

A trace is JSONL, one request per line, in the format that Mooncake published:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353, ...]}

`timestamp` is milliseconds since the trace began; `hash_ids` are the ids of the prompt's blocks of 512 tokens, the last
of which may be partial: equal ids mean equal tokens from the prompt's beginning to the block's end. The optional field
`class` is our extension: the class of SLO targets of the request.
"""

import heapq
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from redline.errors import ConfigError
from redline.messages.base import Record

BLOCK_TOKENS = 512


class TracedRequest(NamedTuple):
    """at_s: arrival time. prompt, output: tokens. blocks: ids of the prompt's blocks. of: its class.

    cached: tokens of the prompt that are cached at every worker; None: as many as the worker's cached blocks give.
    """

    at_s: float
    prompt: int
    output: int
    blocks: Sequence[int]
    of: str = ""
    cached: int | None = None


class _Line(Record, frozen=True, forbid_unknown_fields=False, rename={"of": "class"}):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    of: str = ""


def read(path: Path) -> list[TracedRequest]:
    """The requests of a trace, sorted by time. Raises ConfigError with the file, the line and the problem."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror or error}); "
            "expected a trace file, or KIND:SECONDS@RATE such as chat:600@20"
        ) from None
    found: list[TracedRequest] = []
    decoder = msgspec.json.Decoder(_Line)
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: not a request of a trace: {error}") from None
        if problem := _problem(line):
            raise ConfigError(f"{path}, line {number}: {problem}")
        found.append(
            TracedRequest(line.timestamp / 1e3, line.input_length, max(1, line.output_length), line.hash_ids, line.of)
        )
    if not found:
        raise ConfigError(f"{path}: contains no requests")
    found.sort(key=lambda request: request.at_s)
    return found


def _problem(line: _Line) -> str:
    if not 0 <= line.timestamp < 1e15:
        return f"`timestamp` is {line.timestamp:g}; give milliseconds since the trace began"
    if not 1 <= line.input_length <= 1 << 24:
        return f"`input_length` is {line.input_length}; give 1 to {1 << 24} tokens"
    if not 0 <= line.output_length <= 1 << 24:
        return f"`output_length` is {line.output_length}; give 0 to {1 << 24} tokens"
    if len(line.hash_ids) > -(-line.input_length // BLOCK_TOKENS):
        return (
            f"`hash_ids` has {len(line.hash_ids)} blocks of {BLOCK_TOKENS} tokens; "
            f"a prompt of {line.input_length} has {-(-line.input_length // BLOCK_TOKENS)}"
        )
    return ""


def write(path: Path, requests: Iterator[TracedRequest]) -> int:
    """Write a trace. Returns the number of requests. Raises OSError if the file cannot be written."""
    count = 0
    with path.open("w") as file:
        for count, request in enumerate(requests, 1):  # noqa: B007
            line: dict[str, Any] = {
                "timestamp": round(1e3 * request.at_s), "input_length": request.prompt,
                "output_length": request.output, "hash_ids": list(request.blocks),
            }  # fmt: skip
            if request.of:
                line["class"] = request.of
            file.write(json.dumps(line) + "\n")
    return count


# ---------------------------------------------------------------------------------------------------- synthetic traces


class Kind(Record, frozen=True):
    """The requests of one kind of user: sessions of several turns. A turn's prompt is the conversation so far plus new
    tokens.

    shared: tokens that all sessions begin with. first, more: median of the new tokens of the first turn and of each
    later turn; answer: median of the answer's tokens. spread: standard deviation of the logarithms of all three. turns:
    mean of a geometric distribution. pause_s: mean time between an answer, assumed to be instant, and the next turn.
    """

    name: str
    shared: int
    first: int
    more: int
    answer: int
    turns: float
    pause_s: float
    spread: float = 0.7


CHAT = Kind(name="chat", shared=1024, first=400, more=250, answer=350, turns=4.0, pause_s=30.0)
DOCUMENTS = Kind(name="documents", shared=512, first=24_000, more=300, answer=250, turns=1.6, pause_s=40.0)
AGENTS = Kind(name="agents", shared=8192, first=6_000, more=1_500, answer=300, turns=14.0, pause_s=8.0, spread=0.8)
KINDS = {kind.name: kind for kind in (CHAT, DOCUMENTS, AGENTS)}
MOST_PROMPT = 120_000
LEAD = 2  # times the mean length of a session: start before the trace; earlier sessions have almost all ended by then


class Phase(NamedTuple):
    """For `seconds` seconds, requests of one kind arrive at a mean rate of `rate` per second."""

    kind: Kind
    seconds: float
    rate: float


def made(phases: Sequence[Phase], seed: int = 0) -> Iterator[TracedRequest]:
    """Requests of consecutive phases, sorted by time, generated lazily. The same seed gives the same requests.

    Sessions begin as a Poisson process with the rate that gives the phase's request rate; sessions of the first phase
    also begin before the trace. Sessions continue into the next phase, so that one kind fades out while the next
    begins. All end with the trace.
    """
    draw, names, order = random.Random(seed), itertools.count(1), itertools.count()
    kinds = {phase.kind.name: phase.kind for phase in phases}
    shared = {name: tuple(itertools.islice(names, kind.shared // BLOCK_TOKENS)) for name, kind in kinds.items()}
    end = sum(phase.seconds for phase in phases)
    coming: list[tuple[float, int, TracedRequest]] = []
    start, at = 0.0, -LEAD * phases[0].kind.turns * phases[0].kind.pause_s
    for kind, seconds, rate in phases:
        while (at := at + draw.expovariate(rate / kind.turns)) < start + seconds:
            for request in _session(kind, at, draw, names, shared[kind.name]):
                if 0 <= request.at_s < end:
                    heapq.heappush(coming, (request.at_s, next(order), request))
            while coming and coming[0][0] <= at:
                yield heapq.heappop(coming)[2]
        start = at = start + seconds
    while coming:
        yield heapq.heappop(coming)[2]


def _session(
    kind: Kind, at: float, draw: random.Random, names: Iterator[int], shared: tuple[int, ...]
) -> Iterator[TracedRequest]:
    """The turns of a session that begins at a time."""

    def length(median: int) -> int:
        return max(8, round(median * draw.lognormvariate(0.0, kind.spread)))

    prompt, blocks = kind.shared, list(shared)
    new = length(kind.first)
    while True:
        prompt += new
        if prompt > MOST_PROMPT:
            return
        whole = prompt // BLOCK_TOKENS  # a partial last block gets no id, as no other prompt can share it
        blocks += itertools.islice(names, whole - len(blocks))
        answer = length(kind.answer)
        # Rounded to milliseconds as in a trace file, so that a replay of the file gives the same decisions.
        yield TracedRequest(round(at, 3), prompt, answer, tuple(blocks), kind.name)
        if draw.random() < 1 / kind.turns:
            return
        prompt += answer
        new = length(kind.more)
        at += draw.expovariate(1 / kind.pause_s)
