"""Whether several ranks serve as one does, over HTTP, and what becomes of a stream whose follower is killed.

    python -m redline.bench.runs.served_by_ranks [--weights models/kimi-nano] [--draft models/kimi-nano-eagle3]
        [--ranks 2] [--prompts 24] [--tokens 160] [--device cuda] [--save FILE]

Serves a checkpoint with its drafter by one rank and then by several, each with a GPU, or a process on a CPU. Both are
asked the same greedy prompts, alone and together. Over ranks sums are added in another order, so an answer may part
where two tokens are near; how many do is counted, beside how many part between two askings of the one rank. Then a
following rank is killed while a stream runs: the stream is to go on once all ranks have been started again.
"""

import argparse
import http.client
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.trees import ROOT, Server, Tree, commit_of
from redline.chat.tokenizer import Tokenizer
from redline.errors import RedlineError

WAIT_S = 120.0  # for one answer
LONG = 3  # times as many tokens in the stream whose rank is killed
KILL_AFTER = 20  # of its chunks
JSON = {"content-type": "application/json"}


class Answer(NamedTuple):
    """What came of one request: tokens, seconds from the first chunk to the last, and the longest pause."""

    tokens: tuple[int, ...]
    seconds: float
    pause_s: float
    error: str | None = None


def ask(port: int, model: str, prompt: Sequence[int], tokens: int, came: threading.Semaphore | None = None) -> Answer:
    """A greedy answer of so many tokens, streamed. came: released at each chunk.

    Raises RedlineError where the server refuses it.
    """
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "stream": True, "ignore_eos": True}
    link.request("POST", "/v1/completions", json.dumps({**body, "temperature": 0, "return_token_ids": True}), JSON)
    answer = link.getresponse()
    if answer.status != 200:
        raise RedlineError(f"a prompt was refused: {answer.read()[:500]!r}")
    found: list[int] = []
    arrivals: list[float] = []
    error: str | None = None
    try:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            told = json.loads(line[6:])
            if "error" in told:
                error = str(told["error"])
                break
            found += told["choices"][0].get("token_ids") or ()
            arrivals.append(clock.perf_counter())
            if came is not None:
                came.release()
    finally:
        link.close()
    pauses = [after - before for before, after in itertools.pairwise(arrivals)]
    whole = arrivals[-1] - arrivals[0] if arrivals else 0.0
    return Answer(tuple(found), whole, max(pauses, default=0.0), error)


class Asked(NamedTuple):
    """All prompts, one after another and then at once."""

    alone: list[Answer]
    together: list[Answer]

    def tokens_per_s(self) -> float:
        """Of one stream, the median."""
        return statistics.median((len(each.tokens) - 1) / each.seconds for each in self.alone if each.seconds)


def ask_all(port: int, model: str, prompts: Sequence[Sequence[int]], tokens: int) -> Asked:
    """Every prompt alone, and all together."""
    alone = [ask(port, model, prompt, tokens) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(ask, port, model, prompt, tokens) for prompt in prompts]
        return Asked(alone, [each.result() for each in running])


def apart(ours: Sequence[Answer], theirs: Sequence[Answer]) -> int:
    """How many answers have other tokens."""
    return sum(a.tokens != b.tokens for a, b in zip(ours, theirs, strict=True))


def errors(asked: Asked) -> list[str]:
    """What went wrong with any of them."""
    return [each.error for each in (*asked.alone, *asked.together) if each.error is not None]


def descendants(process: int) -> list[int]:
    """The children of a process, and theirs."""
    found: list[int] = []
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def followers(server: Server) -> list[int]:
    """The processes of all ranks but the first."""
    return [
        process
        for process in descendants(server.process.pid)
        if b"redline.worker.rank" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]


def killed(server: Server, port: int, model: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A stream whose last rank is killed after some chunks, beside the same undisturbed."""
    whole = ask(port, model, prompt, tokens)
    came = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, port, model, prompt, tokens, came)
        for _ in range(KILL_AFTER):
            if not came.acquire(timeout=WAIT_S):
                raise RedlineError("the stream has not come as far as its rank was to be killed")
        os.kill(followers(server)[-1], signal.SIGKILL)
        answer = running.result()
    lines = [line for line in server.said.splitlines() if "is lost" in line]
    return {
        "tokens": len(answer.tokens),
        "error": answer.error,
        "longest_pause_s": round(answer.pause_s, 2),
        "undisturbed_pause_s": round(whole.pause_s, 3),
        "same_as_undisturbed": answer.tokens == whole.tokens,
        "said": [line[-200:] for line in lines[:2]],
    }


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=ROOT / "models" / "kimi-nano")
    parser.add_argument("--draft", type=Path, default=ROOT / "models" / "kimi-nano-eagle3")
    parser.add_argument("--ranks", type=count, default=2, help="2, 4 or 8")
    parser.add_argument("--prompts", type=count, default=24)
    parser.add_argument("--tokens", type=count, default=160, help="of each answer")
    parser.add_argument("--device", default=None, help="cpu or cuda; absent: the GPU, if there is one")
    parser.add_argument("--save", type=output, default=None)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program with `words` in place of the command line's.

    Raises RedlineError where a server does not start or refuses a prompt.
    """
    given = arguments().parse_args(words)
    draw, size = random.Random(0), Tokenizer.open(given.weights).vocab_size // 2
    prompts = [[draw.randrange(10, size) for _ in range(draw.randrange(20, 600))] for _ in range(given.prompts)]
    tree, model = Tree(".", ROOT, commit_of(ROOT)), given.weights.name
    flags = ["--draft", str(given.draft), *(["--device", given.device] if given.device else [])]
    with tempfile.TemporaryDirectory(prefix="redline-ranks-") as place:
        one = Server(tree, [str(given.weights), *flags], Path(place))
        try:
            port = one.until_ready()
            single = ask_all(port, model, prompts, given.tokens)
            again = ask_all(port, model, prompts, given.tokens)
            one.stop()
        finally:
            one.close()
        several = Server(tree, [str(given.weights), *flags, "--ranks", str(given.ranks)], Path(place))
        try:
            began = clock.monotonic()
            port = several.until_ready()
            start_s = clock.monotonic() - began
            shared = ask_all(port, model, prompts, given.tokens)
            lost = killed(several, port, model, prompts[0], LONG * given.tokens)
            after = ask_all(port, model, prompts, given.tokens)
            end = several.stop()
        finally:
            several.close()
    record = {
        **provenance("torch", "triton"),
        "gpu": torch.cuda.get_device_name() if given.device != "cpu" and torch.cuda.is_available() else None,
        "model": model,
        "drafter": given.draft.name,
        "ranks": given.ranks,
        "prompts": given.prompts,
        "tokens": given.tokens,
        "start_s": round(start_s, 1),
        "errors": errors(single) + errors(shared) + errors(after),
        "part_from_one_rank": {
            "alone": apart(shared.alone, single.alone),
            "together": apart(shared.together, single.together),
        },
        "one_rank_parts_from_itself": {
            "asked_again": apart(again.alone, single.alone),
            "together_from_alone": apart(single.together, single.alone),
        },
        "part_after_the_restart": apart(after.alone, shared.alone),
        "tokens_per_s": {"one_rank": round(single.tokens_per_s(), 1), "ranks": round(shared.tokens_per_s(), 1)},
        "follower_killed": lost,
        "ended": end.code,
        "tracebacks": end.tracebacks,
    }
    print(json.dumps(record, indent=1))
    if given.save:
        given.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    program(main)
