"""Kimi-Nano on a GPU compared with Kimi-Nano on a CPU: the same prompts, greedy, on the GPU with and without drafts.

    python -m lab.nano_gpu --limit 1000 --save benchmarks/results/nano-gpu.json

Answers are compared token for token: the GPU's with the CPU's, and the GPU's with drafts (those of its drafter, and
suffix matches alone) with the GPU's without. At the first difference of two answers, the CPU computes the gap between
its two most likely tokens: the difference is due to rounding of kernels only if the gap is small. All are graded as in
`redline eval`.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from lab.program import output, program
from redline import clock
from redline.bench.quality.answering import Greedy
from redline.bench.quality.prompts import EvalPrompt, read_sets
from redline.bench.quality.quality import judge, read_targets, rows
from redline.bench.record import provenance
from redline.chat.conversation import Conversation
from redline.chat.lines import conversation
from redline.chat.page_hashes import make_job
from redline.chat.template import encode
from redline.kernels.kernel import fallbacks
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId, Sampling
from redline.worker.config import DraftConfig, EngineConfig, Learned, Suffix
from redline.worker.engine import Engine

CONTEXT = 8192
MAX_TOKENS = 1024
TOLERANCE = 0.25  # of logits: bf16 through eight layers; larger gaps are listed


class Difference(msgspec.Struct, frozen=True):
    """Two answers differ first at token `place`; gap: between the CPU's two most likely tokens there, in logits."""

    prompt: str
    place: int
    gap: float


class Run(msgspec.Struct, frozen=True):
    """One device's answers to all prompts. seconds, tokens: of generating them.

    fallbacks: calls of the reference by op. replays: steps replayed as CUDA graphs. led: eager steps, by reason.
    """

    device: str
    drafts: str  # the kind of drafts: none, learned, suffix
    seconds: float
    tokens: int
    fallbacks: dict[str, int]
    replays: int
    led: dict[str, int]
    right: dict[str, float]  # kind of prompt, including "all" -> percent


def jobs_of(engine: Engine, prompts: Sequence[EvalPrompt]) -> list[Job]:
    """A greedy job for each prompt, in their order."""

    def job(number: int, asked: Conversation) -> Job:
        tokens = tuple(encode(asked, engine.tokenizer, engine.style))
        sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0, stop_ids=engine.tokenizer.stop_ids)
        return make_job(JobId(f"prompt-{number}"), tokens, sampling, engine.fingerprint)

    return [job(number, conversation(prompt)) for number, prompt in enumerate(prompts)]


class Kept:
    """An engine that stores the tokens of its answers, in the order of their jobs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokenizer, self.style, self.fingerprint = engine.tokenizer, engine.style, engine.fingerprint
        self.tokens: list[tuple[int, ...]] = []

    def generate(
        self, jobs: Sequence[Job], on_delta: Callable[[Delta], object] | None = None
    ) -> dict[JobId, list[Delta]]:
        """The engine's answers. Raises AssertionError if an answer ends in an error."""
        deltas = self._engine.generate(jobs, on_delta)
        for job in jobs:
            error = next((delta.error for delta in deltas[job.id] if delta.error), None)
            assert error is None, f"{job.id}: {error}"
        self.tokens = [tuple(token for delta in deltas[job.id] for token in delta.tokens) for job in jobs]
        return deltas

    def run(self, jobs: Iterable[Job], on_delta: Callable[[Delta], object]) -> None:
        """As the engine's own method, without storing tokens."""
        self._engine.run(jobs, on_delta)


def run(
    folder: Path, device: str, speculation: DraftConfig | None, prompts: Sequence[EvalPrompt]
) -> tuple[Run, list[tuple[int, ...]]]:
    """Answers every prompt on a device, timed and graded; returns the figures and the tokens of each answer.

    speculation: the drafter; None: no drafts. Raises ConfigError or CheckpointError if the engine cannot be opened.
    """
    config = EngineConfig(
        max_model_len=CONTEXT,
        device=device,
        kv_memory=1 << 30,
        speculation=speculation,
    )
    drafts = "none" if speculation is None else "learned" if isinstance(speculation, Learned) else "suffix"
    with Engine.open(folder, config) as engine:
        print(engine.engine.ready.summary, flush=True)
        engine.record_all()
        fallbacks.clear()
        kept = Kept(engine)
        start = clock.monotonic()
        given = Greedy(kept, MAX_TOKENS).answer(prompts, lambda: None)
        seconds = clock.monotonic() - start
        called = dict(fallbacks)
        grades = judge({"asked": prompts}, given, False)
        right = {row.kind: round(row.percent, 2) for row in rows(grades, read_targets(folder / "eval"))}
        runner = engine.engine.runner
        count = sum(map(len, kept.tokens))
        print(f"{device}, drafts: {drafts}: {count / seconds:,.0f} tokens/s", flush=True)
        return (
            Run(
                device=device,
                drafts=drafts,
                seconds=round(seconds, 2),
                tokens=count,
                fallbacks=called,
                replays=runner.replays,
                led=dict(runner.led),
                right=right,
            ),
            kept.tokens,
        )


def gaps(
    folder: Path, prompts: Sequence[EvalPrompt], ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]]
):
    """Yields the positions at which answers diverge, and the gap between the CPU's two most likely tokens there."""
    with Engine.open(folder, EngineConfig(max_model_len=CONTEXT, device="cpu")) as engine:
        found: list[tuple[str, int, Job]] = []
        sampling = Sampling(max_tokens=1, temperature=0, logprobs=2)
        for number, (job, a, b) in enumerate(zip(jobs_of(engine, prompts), ours, theirs, strict=True)):
            if a != b:
                place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                tokens = (*job.tokens, *b[:place])
                found.append(
                    (f"{number}", place, make_job(JobId(f"gap-{number}"), tokens, sampling, engine.fingerprint))
                )
        deltas = engine.generate([job for *_, job in found])
        for number, place, job in found:
            (one,) = [x for delta in deltas[job.id] for x in delta.logprobs]
            (_, first), (_, second) = one.top
            yield Difference(prompt=number, place=place, gap=round(first - second, 4))


def main() -> None:
    """Compares as given on the command line, and prints and saves the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--draft", type=Path, default=Path("models/kimi-nano-eagle3"))
    parser.add_argument("--limit", type=int, default=0, help="prompts; 0: all")
    parser.add_argument(
        "--gpu-alone", action="store_true", help="without the CPU's answers; gaps are computed nevertheless"
    )
    parser.add_argument("--save", type=output)
    given = parser.parse_args()
    asked = [prompt for members in read_sets(given.folder / "eval").values() for prompt in members]
    prompts = asked[:: max(1, len(asked) // given.limit)] if given.limit else asked
    results: list[Run] = []
    wanted: list[tuple[int, ...]] = []
    if not given.gpu_alone:
        cpu, wanted = run(given.folder, "cpu", None, prompts)
        results.append(cpu)
    without: list[tuple[int, ...]] = []
    differences: dict[str, list[Difference]] = {}

    def compare(name: str, ours: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> None:
        parted = differences[name] = list(gaps(given.folder, prompts, ours, theirs))
        wide = sum(one.gap > TOLERANCE for one in parted)
        equal = len(prompts) - len(parted)
        print(f"{name}: {equal} of {len(prompts)} answers equal; {wide} part at a gap > {TOLERANCE}", flush=True)
        print(f"gaps: {sorted(one.gap for one in parted)}", flush=True)
        if given.save:  # save the results so far, since the rest takes minutes
            given.save.write_bytes(msgspec.json.format(msgspec.json.encode(record()), indent=1))

    def record() -> dict[str, Any]:
        return {
            **provenance("torch", "triton"),
            "gpu": torch.cuda.get_device_name(),
            "prompts": len(prompts),
            "tolerance": TOLERANCE,
            "runs": results,
            "differences": differences,
        }

    for speculation in (None, Learned(drafter=str(given.draft)), Suffix()):
        result, got = run(given.folder, "cuda", speculation, prompts)
        results.append(result)
        if wanted:
            compare(f"{result.drafts}, GPU and CPU", got, wanted)
        without = without or got
        if speculation is not None:
            compare(f"{result.drafts} and none, GPU", got, without)


if __name__ == "__main__":
    program(main)
