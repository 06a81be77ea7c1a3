"""Measures a device's memory bandwidth and matmul throughput, the denominators of all time floors.

A rate is the best of several methods, each run several times: interference can only slow a run down.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from redline import clock

WORKING_SET_BYTES = 256 << 20  # larger than the last-level cache of most machines
GPU_SIDE, CPU_SIDE = 8192, 1024  # side of the square matrices


def read_rate(device: torch.device, size: int, rounds: int, ways: int = 3) -> float:
    """Bytes per second of reads over `size` bytes, in `rounds` rounds of about ten milliseconds.

    ways: number of methods to try: a matrix-vector product, which is fastest on some machines, a plain sum, which is
    fastest on others, a maximum.
    """
    rows = max(size // (4 * 1024), 1)
    matrix, vector = torch.ones(rows, 1024, device=device), torch.ones(1024, device=device)
    tried: list[Callable[[], Tensor]] = [lambda: matrix @ vector, matrix.sum, matrix.view(-1).max]
    best = math.inf
    for way in tried[:ways]:
        best = min(best, _seconds(way, device, rounds, best))
    return matrix.nbytes / best


def product_rate(device: torch.device, rounds: int, side: int | None = None) -> float:
    """Operations per second of matmuls; a multiplication and an addition count as two.

    The higher of bf16 and float32; on a GPU only bf16, which is always faster there. side: of the matrices; None: a
    size that reaches the rate.
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
    """Whether this CPU has bf16 instructions: without them small products take ten times as long as float32's, and
    larger ones seconds. Uses one thread, since on a busy machine waiting for others would take longer than that."""
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
    """The fastest of `rounds` rounds of about ten milliseconds each, after one warm-up run.

    best: the result of another method. A method that is ten times slower is stopped: bf16 products take seconds on a
    CPU without instructions for them.

    A GPU is timed per round, since it runs asynchronously. On a CPU the fastest single run counts: on a busy machine,
    threads that wait for one another lose a scheduler time slice in nearly every round, but not in every run.
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
