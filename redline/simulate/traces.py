"""Requests by time: Mooncake's traces, and made ones of phases that differ, by a seed.

A trace is JSONL, a request on each line, as Mooncake published its own:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353, ...]}

`timestamp` is milliseconds since the trace began; `hash_ids` name the prompt's blocks of 512 tokens, the last perhaps
not full: equal names mean equal tokens from the prompt's beginning to the block's end. Our own field `class`, which may
be left out, names the targets that the request is held to.
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
from redline.wire.base import Record

BLOCK_TOKENS = 512


class Request(NamedTuple):
    """at_s: when it comes. prompt, output: tokens. blocks: names of the prompt's blocks. of: its class.

    cached: tokens of the prompt that whoever computes it has; None: by its blocks, those that this worker has.
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


def read(path: Path) -> list[Request]:
    """The requests of a trace, by time. Raises ConfigError with the file, the line and what is wrong there."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    found: list[Request] = []
    decoder = msgspec.json.Decoder(_Line)
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: is no request of a trace: {error}") from None
        if problem := _problem(line):
            raise ConfigError(f"{path}, line {number}: {problem}")
        found.append(
            Request(line.timestamp / 1e3, line.input_length, max(1, line.output_length), line.hash_ids, line.of)
        )
    if not found:
        raise ConfigError(f"{path}: has no request")
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


def write(path: Path, requests: Iterator[Request]) -> int:
    """Writes a trace; how many requests it has. Raises OSError where the file cannot be written."""
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


# --------------------------------------------------------------------------------------------------------- made traces


class Kind(Record, frozen=True):
    """What users of one kind ask: sessions of some turns, each turn's prompt all that was said and something new.

    shared: tokens that all its sessions begin with. first, more: new tokens of the first turn and of each later one, at
    the median; answer: of its answer. spread: of all three, the deviation of their logarithms. turns: the mean, of a
    geometric distribution. pause_s: between an answer, taken to have come at once, and the next turn: the mean.
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
LEAD = 2  # times the mean length of a session: who began longer ago is hardly there any more


class Phase(NamedTuple):
    """For so many seconds requests of one kind come, so many a second on the mean."""

    kind: Kind
    seconds: float
    rate: float


def made(phases: Sequence[Phase], seed: int = 0) -> Iterator[Request]:
    """Requests of phases one after another, by time, made as they are asked for. The same seed gives the same ones.

    Sessions begin at random (Poisson), as many as give the phase's rate; those of the first phase began before the
    trace, too. They go on into the next phase: one kind fades out while the other begins. The trace's end ends all.
    """
    draw, names, order = random.Random(seed), itertools.count(1), itertools.count()
    kinds = {phase.kind.name: phase.kind for phase in phases}
    shared = {name: tuple(itertools.islice(names, kind.shared // BLOCK_TOKENS)) for name, kind in kinds.items()}
    end = sum(phase.seconds for phase in phases)
    coming: list[tuple[float, int, Request]] = []
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
) -> Iterator[Request]:
    """The turns of a session that begins at a time."""

    def length(median: int) -> int:
        return max(8, round(median * draw.lognormvariate(0.0, kind.spread)))

    prompt, blocks = kind.shared, list(shared)
    new = length(kind.first)
    while True:
        prompt += new
        if prompt > MOST_PROMPT:
            return
        whole = prompt // BLOCK_TOKENS  # the last block, where it is not full, is named by no other prompt
        blocks += itertools.islice(names, whole - len(blocks))
        answer = length(kind.answer)
        # To the millisecond, as a trace is kept: whatever plays it again decides alike.
        yield Request(round(at, 3), prompt, answer, tuple(blocks), kind.name)
        if draw.random() < 1 / kind.turns:
            return
        prompt += answer
        new = length(kind.more)
        at += draw.expovariate(1 / kind.pause_s)
