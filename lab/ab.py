"""The relative speed of two trees, measured in interleaved rounds with a control of the same commit.

    python -m lab.ab BEFORE AFTER [--rounds 7] [--device cpu|cuda] [--save FILE]

BEFORE and AFTER are each a commit, a branch, or a folder with a copy of the project. Three trees are measured in
rotation: A is BEFORE, B is AFTER, C is BEFORE once more. A figure is the median over the rounds of B's speed over A's
in the same round, with quartiles; next to it is C's over A's, the variation between two equal trees on this machine.
The order within a round changes from one round to the next.

cpu: three servers stay loaded, and two are idle while the third is measured. Greedy answers of a fixed length are
streamed over HTTP, one and sixteen at once, decoding alone; and a prompt of 2,000 tokens is prefilled. Each is measured
three times in a round, in rotation, and the fastest counts. Prompts are random and always new, so there are no prefix
cache hits; all three servers get the same prompts.

cuda: `redline bench decode` of Kimi K2.6 at its true depth on random weights, 1, 4, 8 and 32 rows, and one layer's
prefill of 8,192 tokens (`redline bench prefill`) if both trees measure it. A round takes minutes.

Goals: on a CPU B is at most 2 % slower; on a GPU at most 1 % at 1, 4 and 8 tokens, 2 % at 32 and for prefill. The exit
status is 1 if a goal is missed or not measured, or if the control deviates by more than the goal, in which case the
figure proves nothing.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from lab.attack.raw_http import READ_BYTES, connection, post
from lab.program import count, output, program
from lab.trees import MODEL, Server, Tree, opened, served
from redline import clock
from redline.bench.record import provenance
from redline.errors import ConfigError, RedlineError
from redline.progress import Working

NAMES = A, B, C = "A", "B", "C"
ROUNDS = {"cpu": 7, "cuda": 3}
# measurements of each figure in a round on a CPU, in rotation; the fastest counts, since disturbance only slows
TRIES = 3
KV_MEMORY = "500MB"
CONTEXT = 4096
VOCABULARY = 3000  # ids below this are ordinary tokens of every model that we serve
ANSWER_S = 600.0
DECODE = "bench decode --shape kimi-k2.6 --layers 61 --alias 12"
PREFILL_VERB = "redline/bench/step/prefill.py"
PREFILL_PROGRAM, PREFILL_TOKENS = "prefill_layer.py", 8192

Rates = dict[str, dict[str, float]]  # {figure: {tree: tokens/s}} of one round


class Figure(NamedTuple):
    """A figure that is compared.

    goal: by how much B may be slower than A, as a share of A's speed, and by how much the control may deviate.
    """

    name: str
    goal: float


class Case(NamedTuple):
    """`batch` prompts of `prompt` tokens at once, continued by `new` tokens each."""

    figure: Figure
    batch: int
    prompt: int
    new: int


CASES = (
    Case(Figure("decode, batch 1", 0.02), 1, 200, 512),
    Case(Figure("decode, batch 16", 0.02), 16, 200, 128),
    Case(Figure("prefill of 2,000 tokens", 0.02), 1, 2000, 1),
)
STEPS = {tokens: Figure(f"step of {tokens} tokens", 0.02 if tokens == 32 else 0.01) for tokens in (1, 4, 8, 32)}
PREFILL = Figure(f"prefill of {PREFILL_TOKENS:,} tokens, a layer", 0.02)


class Way(Protocol):
    """How a round is measured on a device."""

    @property
    def figures(self) -> Sequence[Figure]:
        """The figures of a round, in the order of the table."""
        ...

    def round(self, number: int, order: Sequence[str], did: Callable[[str], None]) -> Rates:
        """Tokens/s of every figure for A, B and C, measured in the given order. did: called with each next step.

        number: the round's number, which determines its prompts. Raises RedlineError if a tree's server or program
        fails.
        """
        ...


# -- On a CPU ------------------------------------------------------------------------------------------------------


class Cpu:
    """Measures three servers with the names A, B and C, which stay loaded."""

    def __init__(self, servers: Mapping[str, Server]) -> None:
        self.figures = [case.figure for case in CASES]
        self._servers = servers

    def round(self, number: int, order: Sequence[str], did: Callable[[str], None]) -> Rates:
        """As `Way.round`: each figure is the fastest of TRIES."""
        rng = random.Random(number)
        found: Rates = {case.figure.name: {} for case in CASES}
        for case in CASES:
            rates = found[case.figure.name]
            for turn in range(TRIES):
                prompts = [[rng.randrange(VOCABULARY) for _ in range(case.prompt)] for _ in range(case.batch)]
                for who in rotated(order, turn):
                    did(f"{case.figure.name}, {who}")
                    rates[who] = max(rates.get(who, 0.0), self._rate(case, prompts, self._servers[who]))
        return found

    def _rate(self, case: Case, prompts: Sequence[Sequence[int]], server: Server) -> float:
        began = clock.perf_counter()
        streams = asyncio.run(_streams(server.port, prompts, case.new))
        server.check()
        return decode_rate(streams, case.new) if case.new > 1 else prefill_rate(streams, case.prompt, began)


Arrivals = list[tuple[float, bytes]]  # (seconds on the clock, bytes) of each part received


async def _streams(port: int, prompts: Sequence[Sequence[int]], new: int) -> list[Arrivals]:
    """Requests all prompts at once; returns the received parts with their times. They are parsed later, since parsing
    takes a core.

    Raises RedlineError if a stream breaks off.
    """

    async def one(prompt: Sequence[int]) -> Arrivals:
        body = {
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        found: Arrivals = []
        async with asyncio.timeout(ANSWER_S), connection(port) as (reader, writer):
            writer.write(post("/v1/completions", json.dumps(body).encode()))
            while part := await reader.read(READ_BYTES):
                found.append((clock.perf_counter(), part))
        return found

    try:
        return await asyncio.gather(*map(one, prompts))
    except (OSError, TimeoutError) as error:
        raise RedlineError(f"a stream broke off: {error or type(error).__name__}") from None


def progress_of(stream: Arrivals, new: int) -> list[tuple[float, int]]:
    """(seconds on the clock, tokens of the answer so far) for each part of the stream that has a count.

    Raises RedlineError if the answer is incomplete, or does not have `new` tokens.
    """
    found: list[tuple[float, int]] = []
    rest = b""
    for at, part in stream:
        *lines, rest = (rest + part).split(b"\n")
        counts = [int(count) for line in lines for count in re.findall(rb'"completion_tokens":\s*(\d+)', line)]
        if counts and counts[-1]:
            found.append((at, counts[-1]))
    whole = b"".join(part for _, part in stream)
    if b"data: [DONE]" not in whole or not found or found[-1][1] != new:
        told = found[-1][1] if found else 0
        raise RedlineError(f"a stream ended with {told} of {new} tokens: {whole[-300:].decode(errors='replace')}")
    return found


def decode_rate(streams: Sequence[Arrivals], new: int) -> float:
    """Tokens/s of all streams together, from the moment at which all have begun to the last token.

    new: tokens of each answer. Raises RedlineError if a stream is incomplete, or if all tokens arrived at one time.
    """
    told = [progress_of(stream, new) for stream in streams]
    start = max(points[0][0] for points in told)
    end = max(next(at for at, count in points if count == new) for points in told)
    before = sum(max(count for at, count in points if at <= start) for points in told)
    if end <= start:
        raise RedlineError("the answers came all at once: nothing can be timed")
    return (new * len(streams) - before) / (end - start)


def prefill_rate(streams: Sequence[Arrivals], prompt: int, began: float) -> float:
    """Prompt tokens/s of all streams, from `began` until each has its first token. prompt: tokens of each prompt.

    Raises RedlineError if a stream does not have exactly one token.
    """
    first = max(progress_of(stream, 1)[0][0] for stream in streams)
    return len(streams) * prompt / (first - began)


# -- On a GPU ------------------------------------------------------------------------------------------------------


class Cuda:
    """Runs the programs of the three trees, one after the other. folder: for the files that they save."""

    def __init__(self, trees: Mapping[str, Tree], folder: Path) -> None:
        self._trees = trees
        self._folder = folder
        self._prefill = {who: prefill_words(tree) for who, tree in trees.items()}
        self.figures = [*STEPS.values(), *([PREFILL] if all(self._prefill.values()) else [])]

    def round(self, number: int, order: Sequence[str], did: Callable[[str], None]) -> Rates:
        """As `Way.round`: each tree's `redline bench decode`, and its prefill of a layer if all three measure it."""
        found: Rates = {figure.name: {} for figure in self.figures}
        for who in order:
            tree = self._trees[who]
            did(f"steps, {who}")
            saved = self._folder / f"{number}-{who}-steps.json"
            rows = [word for tokens in STEPS for word in ("--batch", str(tokens))]
            _run(tree, ["redline", *DECODE.split(), *rows, "--save", str(saved)])
            for tokens, ms in step_ms(saved).items():
                found[STEPS[tokens].name][who] = 1e3 * tokens / ms
            words = self._prefill[who]
            if words and PREFILL in self.figures:
                did(f"prefill, {who}")
                saved = self._folder / f"{number}-{who}-prefill.json"
                _run(tree, [*words, "--tokens", str(PREFILL_TOKENS), "--save", str(saved)])
                found[PREFILL.name][who] = 1e3 * PREFILL_TOKENS / prefill_ms(saved)
        return found


def prefill_words(tree: Tree) -> list[str] | None:
    """The arguments after `python -m` that start the tree's measurement of a layer's prefill: `redline bench prefill`,
    or a program in older trees, in any folder. None: the tree has neither.
    """
    if (tree.folder / PREFILL_VERB).exists():
        return ["redline", "bench", "prefill"]
    for folder in ("benchmarks", "redline"):
        for path in sorted((tree.folder / folder).rglob(PREFILL_PROGRAM)):
            return [".".join(path.relative_to(tree.folder).with_suffix("").parts)]
    return None


def _run(tree: Tree, words: Sequence[str]) -> None:
    """Runs a module of the tree as a program. Raises RedlineError with its last output if it fails."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=tree.folder, env=tree.environment(), capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
        raise RedlineError(f"{tree.name}: {' '.join(words[:3])} ended with status {done.returncode}: {said[-1]}")


def step_ms(saved: Path) -> dict[int, float]:
    """{tokens of a step: ms} from a file written by `redline bench decode --shape --save`.

    Raises ConfigError if the file cannot be read, or lacks one of the steps.
    """
    try:
        ms = {case["rows"] * case["tokens_per_row"]: float(case["ms"]) for case in json.loads(saved.read_bytes())}
        return {tokens: ms[tokens] for tokens in STEPS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{saved}: expected measured steps of {[*STEPS]} tokens ({error!r})") from None


def prefill_ms(saved: Path) -> float:
    """ms of one layer for a prompt of PREFILL_TOKENS, from a file written by `redline bench prefill --save`.

    Raises ConfigError if the file cannot be read, or lacks this case.
    """
    try:
        cases = json.loads(saved.read_bytes())["cases"]
        return next(float(case["ms"]) for case in cases if (case["tokens"], case["start"]) == (PREFILL_TOKENS, 0))
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(f"{saved}: expected a measured prefill of {PREFILL_TOKENS:,} tokens ({error!r})") from None


# -- Results -----------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Quartiles and median of the ratios of all rounds."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def spread(ratios: Sequence[float]) -> Spread:
    """Median and quartiles of the ratios; a single ratio is all three.

    Raises StatisticsError if there is none.
    """
    if len(ratios) == 1:
        return Spread(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Spread(low, median, high)


class Result(NamedTuple):
    """rate: A's tokens/s, the median of the rounds. after: B's speed over A's. control: C's over A's."""

    figure: Figure
    rate: float
    after: Spread
    control: Spread

    @property
    def proved(self) -> bool:
        """Whether B is as fast as A, or faster, and the control is accurate enough to show it."""
        return abs(self.control.median - 1) <= self.figure.goal and self.after.median >= 1 - self.figure.goal

    @property
    def verdict(self) -> str:
        """A description: within the goal, faster or slower by how much, or unclear because the control deviates too
        much.
        """
        off, goal = self.after.median - 1, f"{self.figure.goal:.0%}"
        if abs(self.control.median - 1) > self.figure.goal:
            return (
                f"unclear: the control is {abs(self.control.median - 1):.1%} off; take more rounds, or a quiet machine"
            )
        if abs(off) <= self.figure.goal:
            return f"within {goal}"
        return f"{'FASTER' if off > 0 else 'SLOWER'} by {abs(off):.1%}; the goal is {goal}"


def results(figures: Sequence[Figure], rounds: Sequence[Rates]) -> list[Result]:
    """A result for each figure, in their order. Ratios are taken within a round."""
    found: list[Result] = []
    for figure in figures:
        told = [rates[figure.name] for rates in rounds]
        after, control = (spread([rates[who] / rates[A] for rates in told]) for who in (B, C))
        found.append(Result(figure, statistics.median(rates[A] for rates in told), after, control))
    return found


def table(found: Sequence[Result]) -> str:
    """The results as lines for a terminal."""
    lines = [f"{'':32}{'A, tokens/s':>12}  {'B / A [quartiles]':23}{'C / A, the control':23}"]
    for one in found:
        lines.append(f"{one.figure.name:32}{one.rate:12,.1f}  {one.after!s:23}{one.control!s:23}{one.verdict}")
    return "\n".join(lines)


# -- The program ---------------------------------------------------------------------------------------------------


@contextmanager
def way_of(device: str, trees: Mapping[str, Tree], model: str) -> Generator[Way]:
    """A way to measure on a device, with its servers running until the end. trees: by the names A, B and C.

    model: the folder that is served on a CPU, within each tree. Raises ConfigError if it is missing, and RedlineError
    if a server does not start.
    """
    if device == "cuda":
        with tempfile.TemporaryDirectory(prefix="redline-ab-") as folder:
            yield Cuda(trees, Path(folder))
        return
    words = ("--device", "cpu", "--kv-memory", KV_MEMORY, "--max-model-len", str(CONTEXT), "--log-level", "warning")
    with served([*trees.values()], [[str(tree.model(model)), *words] for tree in trees.values()]) as servers:
        yield Cpu(dict(zip(trees, servers, strict=True)))


def rotated(order: Sequence[str], turn: int) -> list[str]:
    """The names in their order, rotated to begin with the one at `turn`."""
    first = turn % len(order)
    return [*order[first:], *order[:first]]


def measured(way: Way, device: str, rounds: int, working: Working) -> list[Rates]:
    """The rates of each round. On a CPU an additional first round warms up and does not count."""
    found: list[Rates] = []
    warm = [NAMES] if device == "cpu" else []
    for number, order in enumerate([*warm, *(rotated(NAMES, turn) for turn in range(rounds))]):
        where = f"round {number + 1 - len(warm)} of {rounds}" if number >= len(warm) else "warming"

        def did(what: str, where: str = where) -> None:
            working.show(note=f"{where}: {what}")

        rates = way.round(number, order, did)
        if number >= len(warm):
            found.append(rates)
            working.show(len(found), rounds)
    return found


def run(asked: argparse.Namespace) -> int:
    """Measures, prints and saves; 0 if every figure was measured and reached its goal, else 1.

    asked: the flags. Raises RedlineError if a tree cannot be opened, served or measured.
    """
    rounds: int = asked.rounds or ROUNDS[asked.device]
    with Working("rounds", bar=False) as working, opened([asked.before, asked.after]) as (before, after):
        trees = {A: before, B: after, C: before}
        working.show(0, rounds, note="starting")
        with way_of(asked.device, trees, asked.model) as way:
            told = measured(way, asked.device, rounds, working)
            found = results(way.figures, told)
    left_out = asked.device == "cuda" and PREFILL not in way.figures
    print(
        f"A and C: {before.name} ({before.commit}); B: {after.name} ({after.commit}); {rounds} rounds on {asked.device}"
    )
    print(table(found))
    if left_out:
        print(f"{PREFILL.name}: NOT MEASURED, since a tree has no {PREFILL_PROGRAM}")
    print(f"load {os.getloadavg()[0]:.1f}; above 1 B is faster")
    if asked.save:
        record = {
            **provenance("torch"),
            "before": before.commit,
            "after": after.commit,
            "device": asked.device,
            "load_average": [round(load, 1) for load in os.getloadavg()],
            "rounds": rounds,
            "figures": [
                {
                    "name": one.figure.name,
                    "goal": one.figure.goal,
                    "tokens_per_s": round(one.rate, 1),
                    "after": {name: round(value, 4) for name, value in one.after._asdict().items()},
                    "control": {name: round(value, 4) for name, value in one.control._asdict().items()},
                    "verdict": one.verdict,
                }
                for one in found
            ],
            "tokens_per_s": [
                {name: {who: round(rate, 2) for who, rate in of.items()} for name, of in rates.items()}
                for rates in told
            ],
        }
        asked.save.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(one.proved for one in found) and not left_out else 1


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", help="a commit, a branch, or a folder with a copy of the project")
    parser.add_argument("after", metavar="AFTER", help="the same; it must be as fast as BEFORE")
    parser.add_argument("--device", choices=[*ROUNDS], default="cpu")
    told = ", ".join(f"{rounds} on {device}" for device, rounds in ROUNDS.items())
    parser.add_argument("--rounds", type=count, help=f"absent: {told}")
    parser.add_argument("--model", default=MODEL, help=f"served on a CPU, a folder within each tree (default: {MODEL})")
    parser.add_argument("--save", type=output, help="write figures and every round as JSON")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program with `words` instead of the command line's, and returns its exit status as `run` does."""
    return run(arguments().parse_args(words))


if __name__ == "__main__":
    program(main, heard=False)
