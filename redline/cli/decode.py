"""`redline bench decode`: the table of `bench.local.decode`."""

from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from redline.bench.local.decode import DecodeCase
from redline.bench.local.decode import bench_decode as measure_decode
from redline.bench.local.machine import measure
from redline.bench.local.record import provenance
from redline.model.checkpoint import Checkpoint
from redline.ops import native
from redline.wire.job import PAGE_TOKENS
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine


def bench_decode(
    folder: Path, batches: list[int], contexts: list[int], repeats: int, save: Path | None, console: Console
) -> int:
    longest = max(contexts) + repeats + 128
    tokens = max(batches) * -(-longest // PAGE_TOKENS) * PAGE_TOKENS
    config = EngineConfig(
        kv_memory=tokens * Checkpoint.open(folder).config.kv_bytes_per_token(torch.bfloat16),
        max_model_len=longest,
        max_running=max(batches),
        step_tokens=max(512, *batches),
    )
    runner = Engine.load(folder, config).runner
    torch.set_num_threads(native.threads())
    machine = measure(runner.model.device, working_set_bytes=runner.model.config.weight_bytes)
    if runner.model.device.type == "cpu" and native.library() is not None:
        torch.set_num_threads(1)
    table = Table(
        title=f"decode, {folder.name} on {machine.name}", caption=_caption(machine.bytes_per_s, machine.flops_per_s)
    )
    for name in ("batch", "context", "ms/step", "p10", "p90", "floor ms", "floor/time", "tokens/s"):
        table.add_column(name, justify="right")
    cases: list[DecodeCase] = []
    for case in measure_decode(runner, machine, batches, contexts, repeats):
        cases.append(case)
        figures = f"{case.ms:.2f} {case.p10_ms:.2f} {case.p90_ms:.2f} {case.floor_ms:.2f} {case.ratio:.0%}".split()
        table.add_row(str(case.batch), str(case.context), *figures, f"{1000 * case.batch / case.ms:,.0f}")
    runner.close()
    console.print(table)
    if save is not None:
        record = {
            **provenance("torch"),
            "folder": folder.name,
            "bytes_per_s": machine.bytes_per_s,
            "flops_per_s": machine.flops_per_s,
            "cases": cases,
        }
        save.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        console.print(f"written to {save}", style="dim")
    return 0


def _caption(bytes_per_s: float, flops_per_s: float) -> str:
    return (
        f"floor: bytes over {bytes_per_s / 1e9:.1f} GB/s or operations over {flops_per_s / 1e12:.2f} TFLOP/s, "
        "the larger (both measured here, now)"
    )
