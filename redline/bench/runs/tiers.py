"""What a conversation that returns gains from memory below the prefix cache: host memory, disk, disk after a restart.

    python -m redline.bench.runs.tiers [models/kimi-nano] [--tokens 8192] [--conversations 4] [--device cpu]
        [--save FILE]

Conversations of so many random tokens take turns in an engine whose pages hold one of them, so each has been forgotten
when it returns with 64 tokens more. Timed is the first token of such a return: computed anew (no tiers), from host
memory, with a disk alone (what waits to be written is in memory), and from disk by an engine that was opened again.
The answers of all ways are compared. Beside the times stands by how much predictions of a reading were off.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.trees import MODEL, ROOT
from redline.chat.hashing import make_job
from redline.chat.tokenizer import RESERVED
from redline.errors import RedlineError
from redline.wire.delta import Delta
from redline.wire.job import PAGE_TOKENS, JobId, Sampling
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine, kv_dtype_of

MORE, ANSWER = 64, 4  # tokens that a return adds, and those of its answer
RETURNS = 2  # of each conversation


class Times:
    """First tokens of conversations in one engine, and the answers."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
        self._engine, self._prompts = engine, prompts
        self.answers: dict[tuple[int, int], tuple[int, ...]] = {}  # by conversation and return
        self.ms: list[float] = []

    def play(self, returns: range) -> None:
        """Each conversation in turn, with MORE tokens for each return so far. Return 0 is the first time, not timed."""
        for number in returns:
            for conversation, prompt in enumerate(self._prompts):
                took_ms, answer = self._first_token(conversation, number, prompt)
                self.answers[conversation, number] = answer
                if number:
                    self.ms.append(took_ms)

    def _first_token(self, conversation: int, number: int, prompt: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        tokens = tuple(prompt[: len(prompt) - (RETURNS - number) * MORE])
        sampling = Sampling(max_tokens=ANSWER, min_tokens=ANSWER, temperature=0.0)
        job = make_job(JobId(f"{conversation}-{number}"), tokens, sampling, self._engine.fingerprint)
        came: list[float] = []

        def seen(delta: Delta) -> None:
            if delta.tokens:
                came.append(time.perf_counter())

        began = time.perf_counter()
        deltas = self._engine.generate([job], seen)[job.id]
        if not came:
            raise RedlineError(f"an answer has no token: {deltas[-1].error}")
        return 1e3 * (came[0] - began), tuple(token for delta in deltas for token in delta.tokens)


def predicted(engine: Engine) -> dict[str, dict[str, float]]:
    """By tier: tokens that came from there, seconds of readings, those predicted, and by how much they were off."""
    tiers = engine.engine.tiers
    assert tiers is not None, "an engine with tiers"
    told = {one.name: one for one in tiers.load()}
    return {
        name: {
            "hit_tokens": one.hit_tokens,
            "read_s": round(one.read_s, 4),
            "predicted_s": round(one.predicted_s, 4),
            "error": round(one.error_s / one.read_s, 3) if one.read_s else 0.0,
        }
        for name, one in told.items()
    }


def measured(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All ways. Raises RedlineError where an engine does not answer, or ways have other answers."""
    draw, whole = random.Random(given.seed), given.tokens + RETURNS * MORE
    longest = whole + 2 * PAGE_TOKENS
    with Engine.open(folder, EngineConfig(max_model_len=longest, device=given.device)) as probe:
        size = probe.tokenizer.vocab_size - RESERVED
        of_token = probe.engine.model.config.kv_bytes_per_token(kv_dtype_of("bf16"))
    prompts = [[draw.randrange(size) for _ in range(whole)] for _ in range(given.conversations)]
    one = (longest + 2 * PAGE_TOKENS) * of_token  # bytes of the pages of a conversation
    plain: dict[str, Any] = {"kv_memory": one, "max_model_len": longest, "device": given.device}
    found: dict[str, Any] = {"conversation_bytes": one}
    answers: dict[str, dict[tuple[int, int], tuple[int, ...]]] = {}

    def run(name: str, returns: range, **more: Any) -> None:
        with Engine.open(folder, EngineConfig(**plain, **more)) as engine:
            times = Times(engine, prompts)
            times.play(returns)
            answers[name] = times.answers
            found[name] = {"ttft_ms": [round(ms, 2) for ms in times.ms]}
            found[name]["median_ms"] = round(statistics.median(times.ms), 2)
            if more:
                found[name]["tiers"] = predicted(engine)

    all_returns, room = range(RETURNS + 1), 2 * given.conversations * one
    with tempfile.TemporaryDirectory(prefix="redline-tiers-", dir=given.disk) as place:
        run("computed", all_returns)
        run("host", all_returns, host_memory=room)
        disk = {"disk": place, "disk_size": 2 * room}
        run("disk", all_returns, **disk)
        run("restarted", range(1, RETURNS + 1), **disk)
    for name in ("host", "disk", "restarted"):
        if any(answers["computed"][key] != answer for key, answer in answers[name].items()):
            raise RedlineError(f"{name}: an answer is another than where its prompt was computed")
        found[name]["of_computed"] = round(found[name]["median_ms"] / found["computed"]["median_ms"], 4)
    return found


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / MODEL)
    parser.add_argument("--tokens", type=count, default=8192, help="of a conversation, when it begins")
    parser.add_argument("--conversations", type=count, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--disk", default=None, help="where the folder of pages is made; absent: where TMPDIR says")
    parser.add_argument("--save", type=output, default=None)
    return parser


def main(said: Sequence[str] | None = None) -> None:
    """Runs the program with `said` in place of the command line's words. Raises RedlineError."""
    given = arguments().parse_args(said)
    origin = provenance("torch")
    what = {"model": given.folder.name, "tokens": given.tokens, "conversations": given.conversations}
    record = {**origin, **what, "device": given.device, **measured(given.folder, given)}
    print(json.dumps(record, indent=1))
    if given.save:
        given.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    program(main)
