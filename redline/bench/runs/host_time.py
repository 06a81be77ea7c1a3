"""How long the host works for a round on a GPU: planning, launching, reading and settling, without its waits.

    python -m redline.bench.runs.host_time [--weights models/kimi-nano] [--draft models/kimi-nano-eagle3]

Answers run through planner, runner and loop, and the processor time of both threads is taken around each part. Waiting
for the device is taken off, since a thread that waits there is awake. The rounds' wall time stands beside it: what the
host does for the next round is hidden behind the device's work on this one, while it is the shorter of the two. The
goal is 0.3 ms with one row and 1 ms with 64.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any

import msgspec
import torch

from redline import clock
from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.chat.hashing import make_job
from redline.wire.job import JobId, Sampling
from redline.worker.config import EngineConfig, drafts_of
from redline.worker.engine import EngineCore
from redline.worker.loop import StepInFlight, turn

GOAL = {1: 0.3, 64: 1.0}  # ms of a round, by rows
PROMPT = 256  # tokens
WARM = 60  # rounds before any that counts


class Spent:
    """Processor seconds of named parts, each in whatever thread calls it; what waits for the device is taken off."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, float] = defaultdict(float)
        self._waited: defaultdict[int, float] = defaultdict(float)  # by thread

    def of(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted under `name`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            began, waited = clock.thread_time(), self._waited[get_ident()]
            try:
                return work(*args, **kwargs)
            finally:
                spent = clock.thread_time() - began - (self._waited[get_ident()] - waited)
                self.parts[name] += spent

        return counted

    def waits(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time taken off whatever part calls it."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            began = clock.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self._waited[get_ident()] += clock.thread_time() - began

        return counted


def measured(engine: EngineCore, rows: int, rounds: int, spent: Spent) -> dict[str, Any]:
    """Milliseconds of a round with so many rows: of the wall, and of the host by part.

    Raises AssertionError where a job fails, or a counted round was led by the host.
    """
    draw = random.Random(rows)
    vocabulary = engine.model.config.vocab_size
    for number in range(rows):
        prompt = tuple(draw.randrange(vocabulary) for _ in range(PROMPT))
        tokens = 8 * (rounds + WARM)
        job = make_job(
            JobId(f"{rows}.{number}"), prompt, Sampling(max_tokens=tokens, temperature=0.0), engine.fingerprint
        )
        assert not engine.planner.submit(job), "the job is refused"
    flight: StepInFlight | None = None
    led: dict[str, int] = {}
    walls: list[float] = []
    new = 0
    for number in range(WARM + rounds):
        if number == WARM:
            spent.parts.clear()
            led = dict(engine.runner.led)
        began = clock.perf_counter()
        flight, deltas = turn(engine.planner, engine.runner, flight)
        walls.append(clock.perf_counter() - began)
        for delta in deltas:
            assert delta.error is None, delta.error
        new += sum(len(delta.tokens) for delta in deltas) if number >= WARM else 0
    parts = {name: round(seconds / rounds * 1000, 4) for name, seconds in spent.parts.items()}
    assert dict(engine.runner.led) == led, "a round was led by the host"
    engine.planner.abort_all()
    while flight is not None:
        flight, _ = turn(engine.planner, engine.runner, flight)
    return {
        "rows": rows,
        "ms_round": round(statistics.median(walls[WARM:]) * 1000, 4),
        "ms_host": round(sum(parts.values()), 4),
        "ms_parts": parts,
        "goal_ms": GOAL.get(rows),
        "tokens_of_a_row": round(new / rounds / rows, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures as the command line says, and writes JSON. Raises SystemExit where torch sees no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--draft", type=Path, help="the folder of a drafter for the weights, or suffix")
    parser.add_argument("--rows", type=int, action="append", help="answers that run (repeatable); absent: 1, 16, 64")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--save", type=output, default="runs/host-time.json")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch sees none")
    draft: Path | None = asked.draft
    speculation = None if draft is None else msgspec.structs.replace(drafts_of(str(draft)), adaptive=False)
    config = EngineConfig(max_model_len=16_384, kv_memory=4 << 30, device="cuda", speculation=speculation)
    engine = EngineCore.load(asked.weights, config)
    spent = Spent()
    runner, planner = engine.runner, engine.planner
    torch.cuda.Event.synchronize = spent.waits(torch.cuda.Event.synchronize)
    runner._start = spent.of("launch", runner._start)  # pyright: ignore[reportPrivateUsage]
    planner.next_step = spent.of("plan", planner.next_step)
    planner.settle = spent.of("settle", planner.settle)
    launch = runner.launch

    def launched(step: Any) -> Any:
        pending = launch(step)
        pending.wait = spent.of("read", pending.wait)
        return pending

    runner.launch = launched
    cases: list[dict[str, Any]] = []
    try:
        while runner.record_more():
            pass
        with torch.inference_mode():
            for rows in asked.rows or (1, 16, 64):
                cases.append(measured(engine, rows, asked.rounds, spent))
                print(json.dumps(cases[-1]), flush=True)
    finally:
        runner.close()
    record = {
        **provenance("torch", "triton"),
        "device": torch.cuda.get_device_name(),
        "model": asked.weights.name,
        "draft": None if draft is None else draft.name,
        "cases": cases,
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    program(main)
