"""Serving on a CPU compared with transformers' `generate` and llama.cpp, in one run.

    python -m lab.serve_cpu [models/kimi-nano] [--llama-python PYTHON] [--rounds 5]

Ours is the checkpoint as shipped, through the engine (`streams`: over HTTP). transformers has its weights dequantised;
llama.cpp has it as a GGUF of 4 bits (peers/to_gguf.py), and as one with the same 4-bit matrices as ours, if a Python
with llama-cpp-python is given. Each peer is a separate process, in the configuration that a short measurement in the
same run finds fastest. All alternate and the median counts. Decode is timed from the first token of every row to the
last, so prefill is in neither. Prompts are random tokens, new ones for every run, so there are no prefix cache hits
except in the measurement of these; comparisons with and without the drafter use the evaluation sets' questions, and
figures are means over their domains.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import httpx

from lab.peers import peer_llama_cpp, peer_transformers, to_gguf
from lab.peers.peer_transformers import Times
from lab.program import output, program
from lab.trees import START_S
from redline import clock
from redline.bench.machine import measure
from redline.bench.record import provenance
from redline.bench.speculation.rates import (
    Asker,
    Question,
    Rate,
    VariantOutcome,
    bench_parts,
    bench_rates,
    mean_times,
    read_questions,
    variants,
)
from redline.bench.step.checkpoint_steps import step_cost
from redline.chat.page_hashes import make_job
from redline.chat.template import style_of
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.errors import RedlineError
from redline.messages.delta import Delta
from redline.messages.job import JobId, Sampling
from redline.model.k2.cpu import K2
from redline.ops.op import Cost, PeakRates
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine

THREADS = 2
CONTEXT = 8192  # tokens of one request
# The search for a peer's fastest configuration: maximum tokens, and runs that count.
SHORT_PROMPT, SHORT_NEW, SHORT_PREFILL, TRIES = 32, 9, 512, 2
STEPS = 12  # of each kind in a round
DRAFT_BATCH = 16
ANSWER = 64  # maximum tokens of an answer to a question
PEER_ANSWER = 24  # tokens of the peer's answer, enough for its rate
# Matrices other than routed experts: in 4 bits, and in the format in which we compute.
LLAMA_CPP = {"llama.cpp": "q4_0", "llama.cpp, bf16 beside experts": "bf16"}
KV_BYTES = 1 << 30  # of each of the two engines that answer questions

Prompts = list[list[int]]
Field = Literal["first_s", "rest_s"]
Row = dict[str, Any]


class Case(NamedTuple):
    """`batch` prompts of `prompt` tokens at once, continued by `new` tokens each."""

    batch: int
    prompt: int
    new: int


DECODE_1 = Case(1, 200, 96)
DECODE_16 = Case(16, 200, 48)
DECODE_LONG = Case(1, 4000, 96)
PREFILL = Case(1, 2000, 1)
WHOLE, CACHED = 4000, 3900  # tokens of a prompt, and how many of them are cached from an earlier one
STREAMS = Case(64, 100, 64)


class Ours:
    """The engine, in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def run(self, prompts: Prompts, new: int) -> Times:
        """Greedy, `new` tokens for every prompt. Returns seconds until every row has a token, and of the others.

        Rows get their first tokens in different steps here, so `rest_s` is scaled to all `new - 1` tokens of all rows.
        Raises AssertionError if an answer has another number of tokens.
        """
        ids = [JobId(f"run-{next(self._numbers)}") for _ in prompts]
        sampling = Sampling(max_tokens=new, temperature=0)
        fingerprint = self._engine.fingerprint
        jobs = [make_job(id, tuple(prompt), sampling, fingerprint) for id, prompt in zip(ids, prompts, strict=True)]
        waiting, first_s, after, end_s = set(ids), 0.0, 0, 0.0

        def note(delta: Delta) -> None:
            nonlocal first_s, after, end_s
            end_s = clock.perf_counter() - start
            if waiting:
                if delta.tokens:
                    waiting.discard(delta.job)
                first_s = end_s
            else:
                after += len(delta.tokens)

        start = clock.perf_counter()
        deltas = self._engine.generate(jobs, note)
        assert all(sum(len(delta.tokens) for delta in deltas[id]) == new for id in ids)
        rest = len(ids) * (new - 1)
        return Times(first_s, (end_s - first_s) * rest / after if after else 0.0)


class Peer:
    """A program of `lab.peers` in a separate process. Use as a context manager: on exit, the process ends.

    ways: those that `fastest` tries.
    """

    def __init__(self, name: str, command: Sequence[str | Path], ways: Sequence[Any]) -> None:
        self.name = name
        self._ways = ways
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @classmethod
    def transformers(cls, folder: Path) -> Self:
        """The peer that generates by transformers, on the checkpoint in `folder`."""
        command = [sys.executable, "-m", "lab.peers.peer_transformers", folder]
        return cls("transformers", command, peer_transformers.ways(THREADS))

    @classmethod
    def llama_cpp(cls, name: str, model: Path, dense: str, python: Path, folder: Path) -> Self:
        """The peer on a GGUF of the model, which is written to `folder`. python: one that has llama-cpp-python.

        Raises CheckpointError if the model cannot be converted.
        """
        to_gguf.convert(model, folder / f"{dense}.gguf", dense)
        return cls(name, [python, peer_llama_cpp.__file__, folder], peer_llama_cpp.ways(THREADS, dense))

    def run(self, way: Any, prompts: Prompts, new: int) -> Times:
        """Greedy, `new` tokens for every prompt (all of one length), in one way. Returns seconds, as `Ours.run` does.

        Raises BrokenPipeError or JSONDecodeError if the peer's process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"way": way._asdict(), "prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return Times(**json.loads(self._process.stdout.readline()))

    def fastest(self, draw: Callable[[Case], Prompts], case: Case, field: Field) -> Any:
        """The way that takes the fewest seconds: of decoding a few tokens after a short prompt, or for a prefill.

        draw: creates new prompts for a case. field: which of the two times counts.
        """
        short = case._replace(prompt=min(case.prompt, SHORT_PROMPT), new=min(case.new, SHORT_NEW))
        measured = short if field == "rest_s" else short._replace(prompt=min(case.prompt, SHORT_PREFILL))

        def seconds(way: Any) -> float:
            self.run(way, draw(short), short.new)  # warm
            return min(getattr(self.run(way, draw(measured), measured.new), field) for _ in range(TRIES))

        return min(self._ways, key=seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the process ends when its input does


class PeerAsker(Asker):
    """A peer that answers questions, one at a time, in one way."""

    def __init__(self, peer: Peer, way: Any) -> None:
        self._peer = peer
        self._way = way

    def ask(self, questions: Sequence[Question]) -> VariantOutcome:
        """Answers one question with PEER_ANSWER tokens. Raises ValueError for more than one question."""
        [question] = questions
        times = self._peer.run(self._way, [[*question.tokens]], PEER_ANSWER)
        return VariantOutcome(times.rest_s, PEER_ANSWER - 1, [])


class Bench:
    """Runs the cases, each a row of the result. Rates are medians of `rounds` runs, peers alternating with ours.

    machine: the measured limits, for floors. ways: each peer's fastest way in each case, filled as cases run. `targets`
    of a case: the intended speed relative to each peer, by its name.
    """

    def __init__(self, engine: Engine, peers: Sequence[Peer], machine: PeakRates, rounds: int) -> None:
        self._ours = Ours(engine)
        self._peers = peers
        self._engine = engine.engine
        self._tokenizer = engine.tokenizer
        self._machine = machine
        self._rounds = rounds
        self._rng = random.Random(0)
        self.ways: dict[tuple[str, Case], Any] = {}  # the fastest way of each peer in each case

    def draw(self, case: Case) -> Prompts:
        """New prompts of ordinary tokens: the last ids of a vocabulary are control tokens."""
        ordinary = self._tokenizer.vocab_size - RESERVED
        return [[self._rng.randrange(ordinary) for _ in range(case.prompt)] for _ in range(case.batch)]

    def decode(self, name: str, case: Case, targets: Mapping[str, float]) -> Row:
        """Tokens/s of all rows together, from every row's first token to the last."""
        tokens = case.batch * (case.new - 1)
        floor_s = (case.new - 1) * self._step_floor_s(case.batch, case.prompt + case.new // 2)
        return self._against(name, case, "rest_s", tokens, targets, floor_s)

    def prefill(self, name: str, case: Case, targets: Mapping[str, float]) -> Row:
        """Prompt tokens/s of all rows together, until each has its first new token."""
        floor_s = self._prefill_cost(case).seconds(self._machine)
        return self._against(name, case, "first_s", case.batch * case.prompt, targets, floor_s)

    def long_context(self) -> dict[str, Any]:
        """The time of a token after 4,000 others, relative to one after 200; in ms, with the ratio."""
        short: list[float] = []
        long: list[float] = []
        for _ in range(self._rounds):
            short.append(self._ours.run(self.draw(DECODE_1), DECODE_1.new).rest_s / (DECODE_1.new - 1))
            long.append(self._ours.run(self.draw(DECODE_LONG), DECODE_LONG.new).rest_s / (DECODE_LONG.new - 1))
        ratio = statistics.median(long) / statistics.median(short)
        return {
            "name": f"a token at context {DECODE_LONG.prompt:,} over one at {DECODE_1.prompt}",
            "ms": [round(1000 * statistics.median(times), 3) for times in (short, long)],
            "floor_ms": [
                round(1000 * self._step_floor_s(1, case.prompt + case.new // 2), 3) for case in (DECODE_1, DECODE_LONG)
            ],
            "ratio": round(ratio, 3),
            "target": "<= 1.5",
            "met": ratio <= 1.5,
        }

    def cached_prefix(self) -> dict[str, Any]:
        """Time to the first token with most of the prompt cached, relative to that with none of it; in ms, with the
        ratio.
        """
        cold: list[float] = []
        warm: list[float] = []
        for _ in range(self._rounds):
            [prompt] = self.draw(Case(1, WHOLE, 1))
            [other] = self.draw(Case(1, WHOLE - CACHED, 1))
            cold.append(self._ours.run([prompt], 1).first_s)
            warm.append(self._ours.run([prompt[:CACHED] + other], 1).first_s)
        ratio = statistics.median(warm) / statistics.median(cold)
        return {
            "name": f"first token of a {WHOLE:,}-token prompt, {CACHED:,} of them cached, over none cached",
            "ms": [round(1000 * statistics.median(times), 1) for times in (warm, cold)],
            "ratio": round(ratio, 4),
            "target": "<= 0.1",
            "met": ratio <= 0.1,
        }

    def _against(
        self, name: str, case: Case, field: Field, tokens: int, targets: Mapping[str, float], floor_s: float
    ) -> Row:
        """Alternating runs of all: medians as tokens/s, and our rate over each peer's in its fastest way."""
        for peer in self._peers:
            self.ways[peer.name, case] = peer.fastest(self.draw, case, field)
        runs: dict[str, Callable[[], Times]] = {"ours": lambda: self._ours.run(self.draw(case), case.new)}
        for peer in self._peers:
            way = self.ways[peer.name, case]
            runs[peer.name] = lambda peer=peer, way=way: peer.run(way, self.draw(case), case.new)
        took: dict[str, list[float]] = {who: [] for who in runs}
        for number in range(1 + self._rounds):
            for who, run in runs.items():
                seconds = getattr(run(), field)
                if number:  # the first one is a warm-up
                    took[who].append(seconds)
        rate = {who: tokens / statistics.median(seconds) for who, seconds in took.items()}
        peers = {
            peer.name: {
                "tokens_per_s": round(rate[peer.name], 1),
                "way": " ".join(map(str, self.ways[peer.name, case])) + " threads",
                "times": round(rate["ours"] / rate[peer.name], 2),
            }
            for peer in self._peers
        }
        return {
            "name": name,
            "tokens_per_s": round(rate["ours"], 1),
            "peers": peers,
            "target": ", ".join(f">= {times:g} x {who}" for who, times in targets.items()),
            "met": all(rate["ours"] >= times * rate[who] for who, times in targets.items() if who in rate),
            "floor_tokens_per_s": round(tokens / floor_s, 1),
        }

    def _step_floor_s(self, batch: int, context: int) -> float:
        return step_cost(self._engine.runner, batch, context).seconds(self._machine)

    def _prefill_cost(self, case: Case) -> Cost:
        """Every weight once; two operations per active weight and token, the output head for the last token only."""
        config = self._engine.model.config
        matrices = config.active_parameters - config.embedding_parameters
        head = config.vocab_size * config.hidden_size
        pairs = case.prompt * (case.prompt + 1) // 2
        per_pair = 2 * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
        attention = config.num_hidden_layers * pairs * per_pair
        return Cost(config.weight_bytes, case.batch * (2 * (matrices * case.prompt + head) + attention))


def steps(model: K2, rounds: int) -> Iterator[Row]:
    """Yields the time of a step of 4 or 16 tokens relative to a step of one: rows that verify drafts, and rows of one
    token.
    """
    ratios: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        ms = {(part.name, part.batch): part.ms for part in bench_parts(model, None, (1, 4, 16), DECODE_1.prompt, STEPS)}
        for kind, value in ms.items():
            ratios.setdefault(kind, []).append(value / ms["verify 1", 1])
    for tokens, most, kinds in (
        (4, 1.5, {"one row of 4": ("verify 4", 1), "4 rows of 1": ("verify 1", 4)}),
        (16, 4.0, {"4 rows of 4": ("verify 4", 4), "16 rows of 1": ("verify 1", 16)}),
    ):
        found = {name: statistics.median(ratios[kind]) for name, kind in kinds.items()}
        yield {
            "name": f"a step of {tokens} tokens over one of 1, context {DECODE_1.prompt}",
            "ratios": {name: round(ratio, 3) for name, ratio in found.items()},
            "target": f"<= {most:g}",
            "met": max(found.values()) <= most,
        }


def drafts(folder: Path, draft: Path, peer: Peer, way: Any, rounds: int) -> Iterator[Row]:
    """Yields the speedup by the drafter for one stream, the same compared with the peer, and the speedup for a batch.

    way: the peer's. Raises ConfigError if the engine or the evaluation sets cannot be opened.
    """
    paths = sorted((folder / "eval").glob("*.jsonl"))
    questions = read_questions(paths, Tokenizer.open(folder), style_of(folder), DRAFT_BATCH)
    longest = max(len(question.tokens) for question in questions) + ANSWER
    configs = variants(str(draft), (), DRAFT_BATCH, longest, KV_BYTES, None)
    with Engine.open(folder, configs["off"]) as off, Engine.open(folder, configs["auto"]) as auto:
        ours = {"off": Asker(off, ANSWER), "auto": Asker(auto, ANSWER)}
        Asker.measure_floors(list(ours.values()))
        every = ours | {peer.name: PeerAsker(peer, way)}
        for asker in every.values():
            asker.ask(questions[:1])  # warm
        single = list(bench_rates(every, questions, 1, rounds))
        batch = list(bench_rates(ours, questions, DRAFT_BATCH, rounds))
    speeds, speeds_batch = by_domain(single), by_domain(batch)
    times = mean_times(single)["auto", 1]
    over_peer = statistics.fmean(speed["auto"] / speed[peer.name] for speed in speeds.values())
    yield {
        "name": f"one stream with the drafter, mean of {len(speeds)} domains",
        "times": {"without": round(times, 3), peer.name: round(over_peer, 2)},
        "target": f">= 1.4 x without, >= 7 x {peer.name}",
        "met": times >= 1.4 and over_peer >= 7,
        "tokens_per_s": speeds,
    }
    times = mean_times(batch)["auto", DRAFT_BATCH]
    yield {
        "name": f"batch {DRAFT_BATCH} with the drafter over without, mean of {len(speeds)} domains",
        "times": {"without": round(times, 3)},
        "target": ">= 0.98 x without",
        "met": times >= 0.98,
        "tokens_per_s": speeds_batch,
    }


def by_domain(rates: Sequence[Rate]) -> dict[str, dict[str, float]]:
    """{domain: {variant: tokens/s}}, rounded to a tenth. Raises RedlineError if one is above its limit."""
    found: dict[str, dict[str, float]] = {}
    for rate in rates:
        if rate.tokens_per_s is None:
            raise RedlineError(f"{rate.domain}, {rate.variant}, batch {rate.batch}: {rate.above}")
        found.setdefault(rate.domain, {})[rate.variant] = round(rate.tokens_per_s, 1)
    return found


async def streams(url: str, case: Case, prompts: Prompts) -> dict[str, Any]:
    """Requests all prompts at once over HTTP.

    A stream's tokens/s count from its request to its end, so waiting counts too. An exception of a stream is counted
    under `errors`, and ends no other stream.
    """

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> float:
        body = {
            "model": "nano",
            "prompt": prompt,
            "max_tokens": case.new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, tokens, done = clock.perf_counter(), 0, False
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise RuntimeError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    usage: dict[str, int] = json.loads(line[6:]).get("usage") or {}
                    tokens = usage.get("completion_tokens", tokens)
        if not done or tokens != case.new:
            raise RuntimeError(f"a stream ended with {tokens} of {case.new} tokens")
        return tokens / (clock.perf_counter() - start)

    limits = httpx.Limits(max_connections=case.batch)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        start = clock.perf_counter()
        found = await asyncio.gather(*(one(client, prompt) for prompt in prompts), return_exceptions=True)
        seconds = clock.perf_counter() - start
    rate = sorted(value for value in found if isinstance(value, float))
    errors = Counter(repr(value) for value in found if isinstance(value, BaseException))
    fair = bool(rate) and rate[0] >= statistics.median(rate) / 2
    return {
        "name": f"{case.batch} streams at once over HTTP, {case.prompt} + {case.new} tokens each",
        "tokens_per_s": round(len(rate) * case.new / seconds, 1),
        "stream_tokens_per_s": {
            "slowest": round(rate[0], 2) if rate else 0.0,
            "median": round(statistics.median(rate), 2) if rate else 0.0,
        },
        "errors": dict(errors),
        "target": "no error, slowest >= half the median",
        "met": not errors and fair,
    }


@contextmanager
def served(folder: Path) -> Generator[str]:
    """Runs `redline serve` on a free port until the end; yields its address once it is ready.

    Raises RedlineError if the server ends before that, or is not ready after START_S.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    redline = Path(sys.executable).with_name("redline")
    command = [redline, "serve", folder, "--port", str(port), "--served-model-name", "nano"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = clock.monotonic() + START_S
        while not _is_ready(url):
            if server.poll() is not None:
                raise RedlineError(f"redline serve {folder} ended with status {server.returncode}")
            if clock.monotonic() > deadline:
                raise RedlineError(f"redline serve {folder} is not ready after {START_S:g} s")
            clock.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


def main() -> None:
    """Runs every case of the command line, prints each as it ends, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/kimi-nano"))
    parser.add_argument("--draft", type=Path, help="the drafter's folder (default: the model's, with -eagle3)")
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama-cpp-python: the second peer")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, alternating; the median counts")
    parser.add_argument("--out", type=output, default="runs/serve-cpu.json")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    draft: Path = arguments.draft or folder.with_name(f"{folder.name}-eagle3")
    if not (draft / "config.json").exists():
        parser.error(f"{draft}: no drafter here; name its folder with --draft")
    llama_python: Path | None = arguments.llama_python
    rounds: int = arguments.rounds
    # the affinity of this process, inherited by every child
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    machine = measure(working_set_bytes=weights)
    load = os.getloadavg()[0]
    cases: list[Row] = []

    def record(case: Row) -> None:
        cases.append(case)
        print(json.dumps(case), flush=True)

    with ExitStack() as stack:
        transformers = stack.enter_context(Peer.transformers(folder))
        peers = [transformers]
        if llama_python is not None:
            files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name, dense in LLAMA_CPP.items():
                peers.append(stack.enter_context(Peer.llama_cpp(name, folder, dense, llama_python, files)))
        with Engine.open(folder, EngineConfig(max_model_len=CONTEXT)) as engine:
            bench = Bench(engine, peers, machine, rounds)
            record(bench.decode("decode, batch 1", DECODE_1, {"transformers": 5, "llama.cpp": 1}))
            record(bench.decode("decode, batch 16", DECODE_16, {"transformers": 4}))
            record(bench.prefill("prefill of 2,000 tokens", PREFILL, {"transformers": 2}))
            for case in steps(engine.engine.model, rounds):
                record(case)
            record(bench.long_context())
            record(bench.cached_prefix())
            prompts = bench.draw(STREAMS)
        for case in drafts(folder, draft, transformers, bench.ways["transformers", DECODE_1], rounds):
            record(case)
    with served(folder) as url:
        asyncio.run(streams(url, STREAMS._replace(new=4), prompts))  # warm
        record(asyncio.run(streams(url, STREAMS, prompts)))
    where = provenance("torch", "transformers")
    result = {
        "command": "python -m lab.serve_cpu" + (" --llama-python PYTHON" if llama_python else ""),
        "model": str(folder),
        "drafter": str(draft),
        "peers": {
            "transformers": "DeepseekV3ForCausalLM.generate, weights dequantised",
            "llama.cpp": "llama_decode on a deepseek2 GGUF: all matrices in Q4_0, the head in Q8_0",
            "llama.cpp, bf16 beside experts": "the same with all but routed experts in bf16, as ours",
        },
        **where,
        "load_average": round(load, 1),
        "rounds": rounds,
        "limits": {
            "bytes_per_s": round(machine.bytes_per_s / 1e9, 1) * 1e9,
            "flops_per_s": round(machine.flops_per_s / 1e9) * 1e9,
            "over_bytes": weights,
        },
        "cases": cases,
    }
    if llama_python is not None:
        where["versions"]["llama-cpp-python"] = llama_version(llama_python)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def llama_version(python: Path) -> str:
    """The version of llama-cpp-python that a Python has. Raises CalledProcessError if it has none."""
    program = "from importlib.metadata import version; print(version('llama-cpp-python'))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    program(main)
