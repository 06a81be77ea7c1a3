# pyright: basic
"""Activity of a device over time, from a torch.profiler trace: its idle time, and a picture.

The idle time is an upper bound, since the profiler slows the host.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ON_DEVICE = "kernel", "gpu_memcpy", "gpu_memset"
BY_HOST = "cudaGraphLaunch", "cudaEventSynchronize", "cudaMemcpyAsync", "cudaLaunchKernel"
SHOWN = 4  # steps shown in a picture


def traced(work: Callable[[], object]) -> dict[str, Any]:
    """Runs `work` on a GPU and returns its chrome trace, as parsed JSON; times are in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())


class BusyInterval(NamedTuple):
    """An interval in microseconds in which the device was busy."""

    start: float
    end: float


def joined(intervals: Sequence[BusyInterval]) -> list[BusyInterval]:
    """The union of the intervals, in order: a kernel may start before the previous one has ended."""
    found: list[BusyInterval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1].end:
            found[-1] = BusyInterval(found[-1].start, max(found[-1].end, end))
        else:
            found.append(BusyInterval(start, end))
    return found


def idle_share(busy: Sequence[BusyInterval]) -> float:
    """The idle share of the time between the first and the last of the joined intervals.

    Raises IndexError if there is no interval.
    """
    return 1 - sum(end - start for start, end in busy) / (busy[-1].end - busy[0].start)


def intervals(trace: dict[str, Any], names: Sequence[str], of: str) -> list[BusyInterval]:
    """The complete events of a chrome trace with field `of` ("cat" or "name") in `names`, in microseconds."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get(of) in names)
    return [BusyInterval(event["ts"], event["ts"] + event["dur"]) for event in events]


def draw(trace: dict[str, Any], ms: float, title: str, path: Path) -> None:
    """Draws SHOWN steps from the middle of the trace to `path`: the host's CUDA calls, and the device's activity.

    ms: milliseconds of one step, which set the length of the picture.
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
