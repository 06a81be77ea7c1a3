"""What prompts do to an answer that is being written beside them: prefill and decode apart, and in one worker.

    python -m redline.bench.runs.pools [--weights models/kimi-nano] [--draft models/kimi-nano-eagle3]
        [--prompt 4000] [--prompts 6] [--tokens 1500] [--turns 4] [--rounds 2] [--save FILE]

Serves three deployments in turn, over HTTP on loopback: `pools`, a worker that computes prompts on one core and one
that answers on another; `mixed`, one worker with both cores; and `alone`, one worker on one core. With each, a client
reads streams of the same length, in turns with nothing beside them and while prompts come, one after another. A
stream's intervals are those between the arrivals of its tokens. The longer an answer is, the longer its steps take, so
intervals are compared at the same places of the answer: those alone count only as far as the ones beside prompts have
come. The first token of each prompt is timed from its request. Rounds go through the deployments in turn. Wants two
cores, and says what else they were doing.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.trees import ROOT, Server, Tree, commit_of
from redline.chat.tokenizer import Tokenizer
from redline.errors import ConfigError, RedlineError

STREAM_S = 20.0  # of one stream, at most: beside prompts in one worker it would take minutes
WAIT_S = 120.0  # for one answer
JSON = {"content-type": "application/json"}
DEPLOYMENTS = {
    "pools": '[[workers]]\nrole = "prefill"\ncores = [{first}]\n[[workers]]\nrole = "decode"\ncores = [{second}]\n',
    "mixed": "[[workers]]\ncores = [{first}, {second}]\n",
    "alone": "[[workers]]\ncores = [{second}]\n",
}


class Stream:
    """An answer of so many tokens, read in a thread. `arrivals` has (seconds, tokens) of each chunk."""

    def __init__(self, port: int, model: str, tokens: int) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._link = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        body = {"model": model, "prompt": "Once", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        self._link.request(
            "POST", "/v1/completions", json.dumps({**body, "temperature": 0, "return_token_ids": True}), JSON
        )
        self._answer = self._link.getresponse()
        if self._answer.status != 200:
            raise RedlineError(f"a stream was refused: {self._answer.read()[:500]!r}")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._answer:
                if line.startswith(b"data: {"):
                    told = json.loads(line[6:])["choices"][0].get("token_ids") or ()
                    self.arrivals.append((clock.perf_counter(), len(told)))
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            return  # closed

    def intervals(self) -> list[tuple[int, float]]:
        """(tokens before it, milliseconds) between each two chunks."""
        found: list[tuple[int, float]] = []
        position = 0
        for (before, tokens), (at, _) in itertools.pairwise(self.arrivals):
            position += tokens
            found.append((position, (at - before) * 1000))
        return found

    def read(self, seconds: float) -> None:
        """Waits for its end, for so long at most; then the client leaves."""
        self._thread.join(seconds)
        self.close()

    def close(self) -> None:
        """The client leaves."""
        if self._link.sock is not None:
            self._link.sock.close()
        self._answer.close()
        self._thread.join(5.0)


def first_token_ms(port: int, model: str, prompt: Sequence[int]) -> float:
    """Milliseconds from the request to the first token of an answer of two."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    body = {"model": model, "prompt": list(prompt), "max_tokens": 2, "stream": True, "ignore_eos": True}
    began = clock.perf_counter()
    link.request("POST", "/v1/completions", json.dumps({**body, "temperature": 0}), JSON)
    answer = link.getresponse()
    try:
        for line in answer:
            if line.startswith(b"data: {"):
                return (clock.perf_counter() - began) * 1000
    finally:
        link.close()
    raise RedlineError(f"a prompt had no answer: status {answer.status}")


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the mean, the 99th percentile, the largest, and how many there are."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "mean": round(statistics.fmean(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "most": round(ordered[-1], 3),
        "count": len(ordered),
    }


class Prompts:
    """Prompts that come one after another, each once the one before has its first token. Use as a context manager."""

    def __init__(self, ask: Callable[[], float], ttft_ms: list[float]) -> None:
        """ask: sends one and tells milliseconds to its first token, which are put into ttft_ms."""
        self._stopping = threading.Event()
        self._failed: Exception | None = None

        def send() -> None:
            try:
                while not self._stopping.is_set():
                    ttft_ms.append(ask())
            except (OSError, RedlineError) as error:
                self._failed = error

        self._thread = threading.Thread(target=send, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)
        if self._failed is not None:
            raise self._failed


def measured(asked: argparse.Namespace, port: int, prompts: Iterator[Sequence[int]]) -> dict[str, Any]:
    """One deployment, which serves: streams alone and beside prompts, and the prompts' first tokens."""
    model = asked.weights.name
    without = [first_token_ms(port, model, next(prompts)) for _ in range(asked.prompts)]
    alone: list[tuple[int, float]] = []
    beside: list[tuple[int, float]] = []
    ttft_ms: list[float] = []
    for _ in range(asked.turns):
        for intervals, company in (
            (alone, contextlib.nullcontext()),
            (beside, Prompts(lambda: first_token_ms(port, model, next(prompts)), ttft_ms)),
        ):
            with company:
                stream = Stream(port, model, asked.tokens)
                stream.read(STREAM_S)
            intervals += stream.intervals()
    end = max(position for position, _ in beside)
    idle, busy = (spread([ms for at, ms in intervals if at <= end]) for intervals in (alone, beside))
    return {
        "tokens_compared": end,
        "itl_alone_ms": idle,
        "itl_beside_prompts_ms": busy,
        "p99_ratio": round(busy["p99"] / idle["p99"], 2),
        "p50_ratio": round(busy["p50"] / idle["p50"], 2),
        "ttft_without_stream_ms": spread(without),
        "ttft_beside_stream_ms": spread(ttft_ms),
    }


def deployment(asked: argparse.Namespace, name: str, cores: Sequence[int]) -> str:
    """A deployment file's text."""
    drafter = f'[engine.speculation]\ntype = "learned"\ndrafter = "{asked.draft.resolve()}"\n' if asked.draft else ""
    workers = DEPLOYMENTS[name].format(first=cores[0], second=cores[1])
    return (
        f'weights = "{asked.weights.resolve()}"\nlog_level = "warning"\n[engine]\nkv_memory = "{asked.kv_memory}"\n'
        f"{drafter}{workers}"
    )


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=ROOT / "models" / "kimi-nano")
    parser.add_argument("--draft", type=Path, default=None, help="a drafter's folder; absent: nothing drafts")
    parser.add_argument("--kv-memory", default="300MB")
    parser.add_argument("--prompt", type=count, default=4000, help="tokens")
    parser.add_argument("--prompts", type=count, default=6, help="whose first tokens are timed with no stream beside")
    parser.add_argument("--tokens", type=count, default=1500, help="of each stream")
    parser.add_argument("--turns", type=count, default=4, help="of a stream alone and one beside prompts, in a round")
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--save", type=output, default="runs/pools-cpu.json")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program with `words` in place of the command line's, and writes JSON.

    Raises ConfigError with fewer than two cores, RedlineError where a server does not start or a request has no answer.
    """
    asked = arguments().parse_args(words)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("a core for each of two workers is wanted; there is one")
    tree = Tree(".", ROOT, commit_of(ROOT))
    vocabulary = Tokenizer.open(asked.weights).vocab_size // 2
    load = os.getloadavg()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="redline-pools-") as place:
        for number in range(asked.rounds):
            results: dict[str, Any] = {}
            for at, name in enumerate(DEPLOYMENTS):
                draw = random.Random(f"{number} {name}")
                prompts = ([draw.randrange(10, vocabulary) for _ in range(asked.prompt)] for _ in itertools.count())
                file = Path(place) / f"{number}-{at}.toml"
                file.write_text(deployment(asked, name, cores))
                server = Server(tree, [str(file)], Path(place))
                try:
                    results[name] = measured(asked, server.until_ready(), prompts)
                    results[name]["ended"] = server.stop().code
                finally:
                    server.close()
                print(f"round {number + 1}, {name}: {json.dumps(results[name])}", flush=True)
            rounds.append(results)
    record = {
        **provenance("torch", "uvicorn", "uvloop"),
        "load_average": [round(each, 1) for each in load],
        "model": asked.weights.name,
        "drafter": None if asked.draft is None else asked.draft.name,
        "prompt_tokens": asked.prompt,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,  # of each deployment's workers
        "rounds": rounds,
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    program(main)
