"""Serving on a CPU against transformers' `generate`, in one run: decode, prefill, long context, cached prefix, streams.

    python -m benchmarks.serve_cpu [models/kimi-nano] [--rounds 5]

Ours is the checkpoint as shipped, through the engine (`streams`: over HTTP). The peer has its weights dequantised, in a
process of its own, in the way that a short measurement in the same run finds fastest. The two alternate and the median
counts. Decode is timed from the first token of every row to the last, so prefill is in neither. Prompts are random
tokens, new ones for every run, so nothing is found in the prefix cache but where that is what is measured.
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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from benchmarks.peer_transformers import Times, Way, ways
from redline.bench.local.decode import step_cost
from redline.bench.local.machine import measure
from redline.bench.local.record import provenance
from redline.chat.hashing import make_job
from redline.chat.tokenizer import RESERVED
from redline.ops.op import Cost, Machine
from redline.wire.delta import Delta
from redline.wire.job import JobId, Sampling
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine, LocalEngine

RESULT = Path(__file__).parent / "results" / "serve-cpu.json"
THREADS = 2
CONTEXT = 8192  # tokens of one request
SHORT_NEW = 9  # new tokens where the fastest way is looked for

Prompts = list[list[int]]


class Case(NamedTuple):
    """`batch` prompts of `prompt` tokens, continued by `new`."""

    batch: int
    prompt: int
    new: int


DECODE_1 = Case(1, 200, 96)
DECODE_16 = Case(16, 200, 48)
DECODE_LONG = Case(1, 4000, 96)
PREFILL = Case(1, 2000, 1)
WHOLE, CACHED = 4000, 3900  # tokens of a prompt, and how many of them an earlier one began with
STREAMS = Case(64, 100, 64)


class Ours:
    """The engine, in this process."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def run(self, prompts: Prompts, new: int) -> Times:
        """Greedy, `new` tokens for every prompt. The other tokens are those that came after every row's first.

        Rows get their first tokens in different steps here, so `rest_s` is scaled to all `new - 1` tokens of all rows.
        """
        ids = [JobId(f"run-{next(self._numbers)}") for _ in prompts]
        sampling = Sampling(max_tokens=new, temperature=0)
        fingerprint = self._engine.fingerprint
        jobs = [make_job(id, tuple(prompt), sampling, fingerprint) for id, prompt in zip(ids, prompts, strict=True)]
        waiting, first_s, after, end_s = set(ids), 0.0, 0, 0.0

        def note(delta: Delta) -> None:
            nonlocal first_s, after, end_s
            end_s = time.perf_counter() - start
            if waiting:
                if delta.tokens:
                    waiting.discard(delta.job)
                first_s = end_s
            else:
                after += len(delta.tokens)

        start = time.perf_counter()
        deltas = self._engine.generate(jobs, note)
        assert all(sum(len(delta.tokens) for delta in deltas[id]) == new for id in ids)
        rest = len(ids) * (new - 1)
        return Times(first_s, (end_s - first_s) * rest / after if after else 0.0)


class Peer:
    """benchmarks.peer_transformers in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.peer_transformers", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, way: Way, prompts: Prompts, new: int) -> Times:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"way": way._asdict(), "prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return Times(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Bench:
    """Runs the cases, each a row of the result."""

    def __init__(self, engine: LocalEngine, peer: Peer, machine: Machine, rounds: int) -> None:
        self._ours = Ours(engine)
        self._peer = peer
        self._engine = engine.engine
        self._tokenizer = engine.tokenizer
        self._machine = machine
        self._rounds = rounds
        self._rng = random.Random(0)

    def draw(self, case: Case) -> Prompts:
        """New prompts of ordinary tokens: the last ids of a vocabulary are control tokens."""
        ordinary = self._tokenizer.vocab_size - RESERVED
        return [[self._rng.randrange(ordinary) for _ in range(case.prompt)] for _ in range(case.batch)]

    def decode(self, name: str, case: Case, target: float) -> dict[str, Any]:
        """Tokens per second of all rows together."""
        tokens = case.batch * (case.new - 1)
        way, ours, peer = self._against(case, "rest_s")
        floor_s = (case.new - 1) * self._step_floor_s(case.batch, case.prompt + case.new // 2)
        return rates(name, tokens, ours, peer, way, target) | {"floor_tokens_per_s": round(tokens / floor_s, 1)}

    def prefill(self, name: str, case: Case, target: float) -> dict[str, Any]:
        """Prompt tokens per second until the first new token."""
        way, ours, peer = self._against(case, "first_s")
        floor_s = self._prefill_cost(case).seconds(self._machine)
        row = rates(name, case.batch * case.prompt, ours, peer, way, target)
        return row | {"floor_tokens_per_s": round(case.batch * case.prompt / floor_s, 1)}

    def long_context(self) -> dict[str, Any]:
        """What a token costs behind 4,000 others, over what it costs behind 200."""
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
            "target": "<= 2",
            "met": ratio <= 2,
        }

    def cached_prefix(self) -> dict[str, Any]:
        """Time to the first token with most of the prompt in the cache, over the time with nothing there."""
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

    def _against(self, case: Case, field: str) -> tuple[Way, list[float], list[float]]:
        """The peer's fastest way, and alternating runs: seconds of `field`."""

        def short(way: Way) -> float:
            new = min(case.new, SHORT_NEW)
            self._peer.run(way, self.draw(case._replace(prompt=min(case.prompt, 200))), new)  # warm
            return getattr(self._peer.run(way, self.draw(case), new), field)

        best = min(ways(THREADS), key=short)
        ours: list[float] = []
        peer: list[float] = []
        self._ours.run(self.draw(case), case.new)
        for _ in range(self._rounds):
            ours.append(getattr(self._ours.run(self.draw(case), case.new), field))
            peer.append(getattr(self._peer.run(best, self.draw(case), case.new), field))
        return best, ours, peer

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


def rates(
    name: str, tokens: int, ours: Sequence[float], peer: Sequence[float], way: Way, target: float
) -> dict[str, Any]:
    """Medians of alternating runs as tokens per second, and how many times the peer's."""
    mine, theirs = (tokens / statistics.median(times) for times in (ours, peer))
    return {
        "name": name,
        "tokens_per_s": round(mine, 1),
        "peer_tokens_per_s": round(theirs, 1),
        "peer_way": " ".join(map(str, way)) + " threads",
        "times": round(mine / theirs, 2),
        "target": f">= {target:g} x",
        "met": mine >= target * theirs,
    }


async def streams(url: str, case: Case, prompts: Prompts) -> dict[str, Any]:
    """All at once over HTTP. A stream's rate counts from its request to its end, so waiting counts too."""

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
        start, tokens, done = time.perf_counter(), 0, False
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise RuntimeError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    usage = json.loads(line[6:]).get("usage") or {}
                    tokens = usage.get("completion_tokens", tokens)
        if not done or tokens != case.new:
            raise RuntimeError(f"a stream ended with {tokens} of {case.new} tokens")
        return tokens / (time.perf_counter() - start)

    limits = httpx.Limits(max_connections=case.batch)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        start = time.perf_counter()
        found = await asyncio.gather(*(one(client, prompt) for prompt in prompts), return_exceptions=True)
        seconds = time.perf_counter() - start
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
def served(folder: Path) -> Iterator[str]:
    """`redline serve` on a free port; gives the address once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    redline = Path(sys.executable).with_name("redline")
    command = [redline, "serve", folder, "--port", str(port), "--served-model-name", "nano"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health", trust_env=False).is_success:
                    break
            except httpx.TransportError:
                pass
            assert server.poll() is None, f"redline serve ended with status {server.returncode}"
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/kimi-nano"))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, alternating; the median counts")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # and with it every child's
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    machine = measure(working_set_bytes=weights)
    cases: list[dict[str, Any]] = []

    def record(case: dict[str, Any]) -> None:
        cases.append(case)
        print(json.dumps(case), flush=True)

    with Engine.open(folder, EngineConfig(max_model_len=CONTEXT)) as engine, Peer(folder) as peer:
        bench = Bench(engine, peer, machine, arguments.rounds)
        record(bench.decode("decode, batch 1", DECODE_1, 2))
        record(bench.decode("decode, batch 16", DECODE_16, 3))
        record(bench.prefill("prefill of 2,000 tokens", PREFILL, 1.5))
        record(bench.long_context())
        record(bench.cached_prefix())
        prompts = bench.draw(STREAMS)
    with served(folder) as url:
        asyncio.run(streams(url, STREAMS._replace(new=4), prompts))  # warm
        record(asyncio.run(streams(url, STREAMS, prompts)))
    result = {
        "command": "python -m benchmarks.serve_cpu",
        "model": str(folder),
        "peer": "transformers DeepseekV3ForCausalLM.generate, weights dequantised",
        **provenance("torch", "transformers"),
        "load_average": round(os.getloadavg()[0], 1),
        "rounds": arguments.rounds,
        "limits": {
            "bytes_per_s": round(machine.bytes_per_s / 1e9, 1) * 1e9,
            "flops_per_s": round(machine.flops_per_s / 1e9) * 1e9,
            "over_bytes": weights,
        },
        "cases": cases,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
