"""Op times of a decode step on this GPU, each relative to its floor, compared with the stored ones: losses over 3 % are
listed.

    python -m lab.op_times [--rows 1 4 8 32 64 256] [--layers 5] [--stored FILE] [--save FILE]

Times Kimi K2.6's step with a few layers in memory, with forced uniform routing and a context of 1,024 tokens, and its
ops one by one. The ratio of time to floor is compared: floors are computed from the bandwidth and the matrix rate
measured in this run, so cards of one kind are comparable. A slower op is timed again, and counts only if it was slower
both times. `make test-gpu` compares with the card's stored file.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from lab.program import count, output, program
from redline.bench.step.depth_record import DepthRecord, append, read
from redline.bench.step.op_times import LAYERS, StepTimer
from redline.errors import ConfigError

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LOSS = 0.03
SHORT_US = 3.0  # of one launch: below this, launch gaps decide, and no loss is named


def stored_file(gpu: str) -> Path:
    """The stored op times of a kind of card, by its reported name."""
    kind = next((kind for kind in ("H200", "H100") if kind in gpu), None)
    return RESULTS / f"op-times-{(kind or gpu.replace(' ', '-')).lower()}.json"


def ratios(record: DepthRecord) -> dict[str, float]:
    """Time over floor, by op; "step" is the whole step. Ops of launches below SHORT_US are left out."""
    ops = {op.name: op.us / op.floor_us for op in record.ops if op.us / op.launches >= SHORT_US}
    return {"step": record.ms / record.floor_ms, **ops}


def lost(now: DepthRecord, before: DepthRecord) -> dict[str, float]:
    """Ops with a time over floor that has grown by more than LOSS, and the growth of each."""
    was = ratios(before)
    grown = {name: ratio / was[name] - 1 for name, ratio in ratios(now).items() if name in was}
    return {name: share for name, share in grown.items() if share > LOSS}


def table(now: DepthRecord, before: DepthRecord | None) -> list[str]:
    """A line for each op: its time, its floor, their ratio, and the stored ratio."""
    was = {} if before is None else ratios(before)
    kept = ratios(now)
    rows = [("step", 1e3 * now.ms, 1e3 * now.floor_ms), *((op.name, op.us, op.floor_us) for op in now.ops)]
    lines = [f"{now.tokens} rows: {'op':14} {'us':>10} {'floor us':>10} {'time/floor':>11} {'stored':>7} {'change':>7}"]
    for name, us, floor_us in rows:
        line = f"{'':9}{name:14} {us:10.2f} {floor_us:10.2f} {us / floor_us:11.3f}"
        if name in was and name in kept:
            line += f" {was[name]:7.3f} {kept[name] / was[name] - 1:+7.1%}"
        lines.append(line)
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program; 1 if an op is slower. Raises ConfigError without a GPU, or for a file of another kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 4, 8, 32, 64, 256], help="of each step")
    parser.add_argument("--layers", type=count, default=LAYERS, help="in memory, the dense one among them (default: 5)")
    parser.add_argument("--stored", type=Path, help="file to compare with (default: the one of this kind of card)")
    parser.add_argument("--save", type=output, help="a file to which the cases are added")
    asked = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise ConfigError("op_times needs an NVIDIA GPU of compute capability 9.0; torch finds none")
    device = torch.device("cuda")
    stored = asked.stored or stored_file(torch.cuda.get_device_name(device))
    if asked.stored is not None and not stored.exists():
        raise ConfigError(f"--stored is {stored}, which does not exist; omit it to compare with the card's own file")
    before: dict[Any, DepthRecord] = {}
    if stored.exists():
        before = {(one.tokens, one.layers): one for one in read(stored, DepthRecord)}
    steps = StepTimer(asked.layers, device)
    print(
        f"{steps.machine.name}: {steps.machine.bytes_per_s / 1e12:.2f} TB/s, {steps.machine.flops_per_s / 1e12:.0f} "
        f"TFLOP/s measured now; " + (f"compared with {stored.name}" if before else "nothing stored for this card")
    )
    losses: list[str] = []
    for rows in asked.rows:
        now, then = steps.time(rows), before.get((rows, asked.layers))
        worse = lost(now, then) if then is not None else {}
        if then is not None and worse:
            again = steps.time(rows)
            both = lost(again, then)
            losses += [
                f"{name} at {rows} rows: time over floor {min(worse[name], both[name]):+.1%}, was "
                f"{ratios(then)[name]:.3f}"
                for name in worse
                if name in both
            ]
            now = min(now, again, key=lambda one: one.ms)
        print("\n".join(table(now, then)), flush=True)
        if asked.save is not None:
            append(asked.save, msgspec.structs.replace(now))
    print("lost: " + ("; ".join(losses) or ("nothing" if before else "nothing to compare with")))
    return 1 if losses else 0


if __name__ == "__main__":
    program(main)
