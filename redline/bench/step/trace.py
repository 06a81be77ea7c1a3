# pyright: basic
"""What a device did and when, from torch.profiler's trace: the time in which nothing ran, and a picture.

It is too much time rather than too little, since the profiler slows the host.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ON_DEVICE = "kernel", "gpu_memcpy", "gpu_memset"
BY_HOST = "cudaGraphLaunch", "cudaEventSynchronize", "cudaMemcpyAsync", "cudaLaunchKernel"
SHOWN = 4  # steps of a picture


def traced(work: Callable[[], object]) -> dict[str, Any]:
    """The chrome trace of the work on a GPU, as parsed JSON; its times are microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())


class Busy(NamedTuple):
    """An interval in microseconds in which something ran on the device."""

    start: float
    end: float


def joined(intervals: Sequence[Busy]) -> list[Busy]:
    """The union of the intervals, in order: kernels overlap where one begins before the one in front has ended."""
    found: list[Busy] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1].end:
            found[-1] = Busy(found[-1].start, max(found[-1].end, end))
        else:
            found.append(Busy(start, end))
    return found


def idle_share(busy: Sequence[Busy]) -> float:
    """The share of the time from the first to the last of joined intervals in which nothing ran.

    Raises IndexError where there is no interval.
    """
    return 1 - sum(end - start for start, end in busy) / (busy[-1].end - busy[0].start)


def intervals(trace: dict[str, Any], names: Sequence[str], of: str) -> list[Busy]:
    """The complete events of a chrome trace whose field `of` ("cat" or "name") is one of `names`, in microseconds."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get(of) in names)
    return [Busy(event["ts"], event["ts"] + event["dur"]) for event in events]


def draw(trace: dict[str, Any], ms: float, title: str, path: Path) -> None:
    """A picture at `path` of SHOWN steps out of the middle: what the host asks for, and what the device does.

    ms: milliseconds of one step, which decide how much is shown.
    """
    import matplotlib.pyplot as plt

    busy = joined(intervals(trace, ON_DEVICE, "cat"))
    middle = busy[len(busy) // 2].start
    end = middle + SHOWN * ms * 1000
    lanes = [("device", busy), *((name, intervals(trace, [name], "name")) for name in BY_HOST)]
    figure, axes = plt.subplots(figsize=(12, 3))
    for lane, (_, found) in enumerate(lanes):
        shown = [(start - middle, stop - start) for start, stop in found if stop > middle and start < end]
        axes.broken_barh(shown, (-lane - 0.4, 0.8), color="C0" if lane == 0 else "C1")
    axes.set_yticks([-lane for lane in range(len(lanes))], [name for name, _ in lanes])
    axes.set_xlim(0, end - middle)
    axes.set_xlabel("microseconds")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
