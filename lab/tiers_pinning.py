"""The time to pin host memory, and its effect on a thread that launches work at the same time.

Memory for pages is pinned a slab at a time while a worker serves. For each way to get a slab: how long it takes, how
much of that is in calls of the driver, how long it takes while the device still has work to do (a way that waits for
all of that takes at least as much time), and the launch times of another thread that launches small kernels: the
longest, and the median.

`asked`: torch's allocator, with memory allocated by the driver (cudaHostAlloc). `touched`: pages are first written,
without the driver, and then pinned in place (cudaHostRegister). `huge`: the same, in pages of 2 MiB if the system has
them. On a CPU nothing is pinned.
"""

import contextlib
import mmap
import threading
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline import clock

SLABS = 6  # slabs of each way
BEHIND_S = 0.05  # of work queued on the device before a slab is requested
_SIDE = 4096  # of a square matrix; its product is one piece of work


class Slab(NamedTuple):
    """Memory, a function that releases it, and the seconds of its allocation in calls of the driver."""

    memory: Tensor
    close: Callable[[], object]
    driver_s: float


def asked(size: int, gpu: bool) -> Slab:
    """Memory allocated by torch."""
    began = clock.perf_counter()
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=gpu)
    return Slab(memory, lambda: None, clock.perf_counter() - began if gpu else 0.0)


def touched(size: int, gpu: bool, huge: bool = False) -> Slab:
    """Writes to system memory, then pins it. Raises RuntimeError if the driver refuses."""
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    memory.zero_()
    if not gpu:
        return Slab(memory, lambda: None, 0.0)
    runtime: Any = torch.cuda.cudart()
    began = clock.perf_counter()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
    driver_s = clock.perf_counter() - began

    def close() -> None:
        runtime.cudaHostUnregister(memory.data_ptr())

    return Slab(memory, close, driver_s)


Way = Callable[[int, bool], Slab]
WAYS: dict[str, Way] = {"asked": asked, "touched": touched, "huge": partial(touched, huge=True)}


def pinned(device: torch.device, size: int, slabs: int = SLABS) -> dict[str, Any]:
    """Milliseconds, for each way. size: bytes of a slab."""
    gpu, found = device.type == "cuda", dict[str, Any]()
    work = _Work(device)
    for name, way in WAYS.items():
        alone, driver, behind, longest, usual = [list[float]() for _ in range(5)]
        held = list[Slab]()
        for _ in range(slabs):
            began = clock.perf_counter()
            held.append(way(size, gpu))
            alone.append(clock.perf_counter() - began)
            driver.append(held[-1].driver_s)
        for _ in range(slabs):
            work.launch(BEHIND_S)
            began = clock.perf_counter()
            held.append(way(size, gpu))
            behind.append(clock.perf_counter() - began)
            work.wait()
        for _ in range(slabs):
            launches = work.launched_beside(way, size, held)
            longest.append(max(launches))
            usual.append(median(launches))
        found[name] = {
            "alone_ms": _ms(alone),
            "of_driver_ms": _ms(driver),
            "behind_work_ms": _ms(behind),
            "longest_launch_beside_ms": _ms(longest),
            "usual_launch_beside_ms": _ms(usual),
        }
        for slab in held:
            slab.close()
    found["work_ms"] = round(1e3 * BEHIND_S, 1)
    return found


class _Work:
    """Work of the device: long pieces, and many small ones."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, device.type == "cuda"
        side = _SIDE if self._gpu else 64
        dtype = torch.bfloat16 if self._gpu else torch.float32
        self._square = torch.ones(side, side, dtype=dtype, device=device)
        self._into = torch.empty_like(self._square)
        self._small = torch.zeros(32, device=device)
        self._piece_s = 1.0
        for _ in range(3):
            began = clock.perf_counter()
            torch.matmul(self._square, self._square, out=self._into)
            self.wait()
            self._piece_s = clock.perf_counter() - began

    def launch(self, seconds: float) -> None:
        """Launch about `seconds` of work. On a CPU it is done at once."""
        for _ in range(max(1, min(1000, round(seconds / self._piece_s)))):
            torch.matmul(self._square, self._square, out=self._into)

    def launched_beside(self, way: Way, size: int, held: list[Slab]) -> list[float]:
        """Seconds of each small launch while another thread allocates a slab, which is added to `held`."""
        thread, took = threading.Thread(target=lambda: held.append(way(size, self._gpu)), daemon=True), list[float]()
        thread.start()
        while not took or thread.is_alive():
            began = clock.perf_counter()
            self._small.add_(1)
            took.append(clock.perf_counter() - began)
            if len(took) % 256 == 0:
                self.wait()
        thread.join()
        return took

    def wait(self) -> None:
        """Wait until all of it is done."""
        if self._gpu:
            torch.cuda.synchronize(self._device)


def _ms(seconds: list[float]) -> float:
    return round(1e3 * median(seconds), 3)
