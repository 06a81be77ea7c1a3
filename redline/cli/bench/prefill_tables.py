"""`redline bench prefill`: the tables of `bench.step.prefill`."""

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from redline.bench.machine import device_name, measure
from redline.bench.record import provenance
from redline.bench.step.prefill import LAYERS, MODEL, PEER_MS, PrefillCase, check, prefill_cases
from redline.bench.step.ranks import own_rank, ranks_of_gpus
from redline.cli.bench.steps import PrefillFlags
from redline.cli.console import save_result, say, until_interrupted
from redline.disk import check_output
from redline.errors import ConfigError
from redline.kernels.cuda.kernel import has_kernels, why_not
from redline.kernels.group import Group
from redline.progress import Working
from redline.worker.engine import pick_device

READ_BYTES = 4 << 30  # bytes read to measure bandwidth: far more than any cache holds


def run(config: PrefillFlags, console: Console) -> int:
    """Measures a layer over prefill chunks, prints and saves. Returns the exit code: 0, or 130 after Ctrl-C.

    Raises ConfigError before anything is measured, and RedlineError after the result is saved if ranks disagree.
    """
    if config.save is not None:
        check_output(config.save)
    device = pick_device(None)
    if device.type == "cpu" or not has_kernels(device):
        raise ConfigError(f"prefill is measured on an NVIDIA GPU of compute capability 9.0 (H100, H200): {why_not()}")
    with ranks_of_gpus(MODEL, config.ranks) as group:
        return until_interrupted(lambda: _run(config, group, console), console)


def _run(config: PrefillFlags, group: Group, console: Console) -> int:
    device, cases = torch.device("cuda"), list[PrefillCase]()
    with torch.inference_mode(), Working("measuring the machine") as working:
        machine = measure(device, working_set_bytes=READ_BYTES)
        total = len(config.tokens) * len(config.start)
        working.show(0, total, what="cases")
        measured = prefill_cases(group, device, config.tokens, config.start, config.repeats, machine.flops_per_s)
        for case in measured:
            cases.append(case)
            working.show(len(cases), total)
    if own_rank():
        return 0  # rank 0 prints, saves and checks the cases of all ranks
    show(cases, device_name(device), config.ranks, machine.flops_per_s, console)
    if config.save is not None:
        record = {
            **provenance("torch", "triton"),
            "gpu": device_name(device),
            "ranks": config.ranks,
            "flops_per_s": machine.flops_per_s,
            "peer_ms": {str(tokens): ms for tokens, ms in PEER_MS.items()} if config.ranks == 1 else {},
            "cases": cases,
        }
        save_result(config.save, record, console)
    for case in cases:
        check(case)
    return 0


def show(cases: Sequence[PrefillCase], gpu: str, ranks: int, flops_per_s: float, console: Console) -> None:
    """Prints a table per case: the layer, then its parts."""
    for case in cases:
        over = "" if ranks == 1 else f", {ranks} ranks"
        table = Table(
            title=f"prefill, one layer of kimi-k2.6 on {gpu}{over}: {case.tokens:,} tokens from {case.start:,}",
            caption=f"floor: operations over {flops_per_s / 1e12:.0f} TFLOP/s (measured in this run); layer: mean of "
            f"{LAYERS} run in sequence; parts: each timed alone",
        )
        for name in ("part", "ms", "floor ms", "floor/time", "TFLOP/s"):
            table.add_column(name, justify="left" if name == "part" else "right")
        table.add_row(
            "layer", f"{case.ms:.2f}", f"{case.floor_ms:.2f}", f"{case.floor_ms / case.ms:.0%}", f"{case.tflops:.0f}"
        )
        table.add_section()
        floors = case.part_floors(ranks, flops_per_s)
        for name, ms in case.parts.items():
            of_floor = ("", "", "")
            if name in floors:
                of_floor = f"{floors[name]:.2f}", f"{floors[name] / ms:.0%}", f"{case.part_tflops[name]:.0f}"
            table.add_row(name, f"{ms:.2f}", *of_floor)
        console.print(table)
        for line in _of_ranks(case):
            say(console, line)
        if ranks == 1 and case.start == 0 and (peer := PEER_MS.get(case.tokens)) is not None:
            say(console, f"peer             vLLM 0.33 on an NVIDIA H200 (2026-11-28): {peer:g} ms")


def _of_ranks(case: PrefillCase) -> list[str]:
    if case.ms_by_parts is None or case.apart is None:
        return []
    by_parts = ", ".join(f"{ms:.2f} ms in {count}" for count, ms in case.ms_by_parts.items())
    half, most, all_rows = (f"{each:.1e}" for each in case.apart)
    bits = "the same" if case.same_bits else "different"
    return [
        f"rows divided     by parts: {by_parts}; rows whole: {case.ms_whole:.2f} ms",
        f"rows apart       relative error: half at most {half}, 99 % {most}, all {all_rows}; {bits} bits on all ranks",
    ]
