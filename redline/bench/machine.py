"""What this machine can do at best, measured: the denominators of every floor that Redline prints.

A limit is the best of several ways to reach it, each tried several times: disturbance only ever slows.
"""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from redline.bench.record import cpu_name
from redline.ops.op import Machine

WORKING_SET_BYTES = 256 << 20  # larger than the last-level cache, on most machines


def measure(device: torch.device | None = None, working_set_bytes: int = WORKING_SET_BYTES, rounds: int = 5) -> Machine:
    """Bytes/s read over `working_set_bytes`, and operations/s of matrix products: the higher of bf16 and float32.

    device: the CPU where none is given, with torch's current number of threads. working_set_bytes: give the bytes that
    one step reads, since a small model may live in the last-level cache, where its floor is lower than memory's.
    rounds: of about ten milliseconds, for each way to reach a limit. Takes about a second.
    """
    device = device or torch.device("cpu")
    return Machine(device_name(device), _read_rate(device, working_set_bytes, rounds), _product_rate(device, rounds))


def device_name(device: torch.device) -> str:
    """The chip, as it calls itself; for a CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _read_rate(device: torch.device, size: int, rounds: int) -> float:
    """Bytes per second. A matrix-vector product streams best on some machines, a plain sum on others."""
    rows = max(size // (4 * 1024), 1)
    matrix, vector = torch.ones(rows, 1024, device=device), torch.ones(1024, device=device)
    ways: list[Callable[[], Tensor]] = [matrix.sum, lambda: matrix @ vector, matrix.view(-1).max]
    best = math.inf
    for way in ways:
        best = min(best, _seconds(way, device, rounds, best))
    return matrix.nbytes / best


def _product_rate(device: torch.device, rounds: int) -> float:
    """Operations per second, a multiplication and an addition counted as two."""
    size = 8192 if device.type == "cuda" else 1024
    best = math.inf
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(size, size, device=device, dtype=dtype)
        best = min(best, _seconds(lambda a=a: a @ a, device, rounds, best))
    return 2 * size**3 / best


def _seconds(work: Callable[[], Tensor], device: torch.device, rounds: int, best: float = math.inf) -> float:
    """The fastest of `rounds` rounds of some ten milliseconds each, after one run to warm up.

    best: another way's. Work that takes ten times as long is run no further: bf16 products take seconds on a CPU that
    has no instructions for them.

    A GPU is timed by the round, since it runs behind. On a CPU the fastest single run counts: where others work beside,
    threads that wait for one another stop for a scheduler's slice in nearly every round, but not in every run.
    """

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / times

    run(1)
    once = run(1)
    if once > 10 * best:
        return once
    runs = max(1, round(0.01 / min(once, run(1))))
    if device.type == "cuda":
        return min(run(runs) for _ in range(rounds))
    return min(run(1) for _ in range(rounds * runs))
