"""How fast a device reads its memory and multiplies matrices, measured: what every floor divides by.

A rate is the best of several ways to reach it, each tried several times: disturbance only ever slows.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from redline import clock

WORKING_SET_BYTES = 256 << 20  # larger than the last-level cache, on most machines
GPU_SIDE, CPU_SIDE = 8192, 1024  # of the square matrices that are multiplied


def read_rate(device: torch.device, size: int, rounds: int, ways: int = 3) -> float:
    """Bytes per second, read over `size` bytes in `rounds` rounds of some ten milliseconds.

    ways: how many of these are tried: a matrix-vector product, which streams best on some machines, a plain sum, which
    does on others, a maximum.
    """
    rows = max(size // (4 * 1024), 1)
    matrix, vector = torch.ones(rows, 1024, device=device), torch.ones(1024, device=device)
    tried: list[Callable[[], Tensor]] = [lambda: matrix @ vector, matrix.sum, matrix.view(-1).max]
    best = math.inf
    for way in tried[:ways]:
        best = min(best, _seconds(way, device, rounds, best))
    return matrix.nbytes / best


def product_rate(device: torch.device, rounds: int, side: int | None = None) -> float:
    """Operations per second of matrix products, a multiplication and an addition counted as two.

    The higher of bf16 and float32; on a GPU of bf16, which is always faster there. side: of the matrices; None: what
    reaches the rate.
    """
    if device.type == "cuda":
        side, dtypes = side or GPU_SIDE, [torch.bfloat16]
    else:
        side = side or CPU_SIDE
        dtypes = [torch.float32, torch.bfloat16] if _multiplies_bf16(side // 4) else [torch.float32]
    best = math.inf
    for dtype in dtypes:
        a = torch.ones(side, side, device=device, dtype=dtype)
        best = min(best, _seconds(lambda a=a: a @ a, device, rounds, best))
    return 2 * side**3 / best


def _multiplies_bf16(side: int) -> bool:
    """Whether this CPU has instructions for it: without them small products take ten times as long as float32's, and
    larger ones seconds. One thread multiplies, since others would be waited for longer than that on a busy machine."""
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.ones(side, side)
        b = a.bfloat16()
        float32 = _seconds(lambda: a @ a, cpu, 1)
        return _seconds(lambda: b @ b, cpu, 1) <= 10 * float32
    finally:
        torch.set_num_threads(threads)


def _seconds(work: Callable[[], Tensor], device: torch.device, rounds: int, best: float = math.inf) -> float:
    """The fastest of `rounds` rounds of some ten milliseconds each, after one run to warm up.

    best: another way's. Work that takes ten times as long is run no further: bf16 products take seconds on a CPU that
    has no instructions for them.

    A GPU is timed by the round, since it runs behind. On a CPU the fastest single run counts: where others work beside,
    threads that wait for one another stop for a scheduler's slice in nearly every round, but not in every run.
    """

    def run(times: int) -> float:
        start = clock.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (clock.perf_counter() - start) / times

    run(1)
    once = run(1)
    if once > 10 * best:
        return once
    runs = max(1, round(0.01 / min(once, run(1))))
    if device.type == "cuda":
        return min(run(runs) for _ in range(rounds))
    return min(run(1) for _ in range(rounds * runs))
