"""Traces the kernels that a GPU runs in a few seconds with torch.profiler (CUPTI), in a thread of its own.

The profiler slows each launch and writes a large file, so it records only the first MOST_S seconds of a profile.
"""

import tempfile
import threading
from pathlib import Path

import msgspec

from redline import clock
from redline.messages.profile import Span

MOST_S = 2.0  # seconds of kernels that are recorded: a small model runs a hundred thousand kernels per second
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class _KernelEvent(msgspec.Struct):
    ph: str
    cat: str = ""
    name: str = ""
    ts: float = 0.0  # microseconds since the trace's base
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Where(msgspec.Struct):
    stream: int | str = 0
    grid: list[int] = []


class _KernelTraceFile(msgspec.Struct):
    traceEvents: list[_KernelEvent] = []
    baseTimeNanoseconds: int = 0


class KernelTrace:
    """A kernel trace; it starts immediately. `spans`, with a lane for each stream, and `notes` are set once it is
    `done`."""

    def __init__(self, seconds: float) -> None:
        """seconds: duration of the profile; kernels are recorded in the first MOST_S of them."""
        self.spans: list[Span] = []
        self.notes: list[str] = []
        self._seconds = min(seconds, MOST_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kernel trace", daemon=True)
        self._thread.start()
        if seconds > MOST_S:
            self.notes.append(f"kernels were traced only in the first {MOST_S:g} s")

    @property
    def done(self) -> bool:
        """Whether the trace is complete."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop recording; the recorded kernels are still processed, in the background."""
        self._over.set()

    def _watch(self) -> None:
        try:
            self._read(self._record())
        except Exception as error:  # a profile without kernels is better than none
            self.notes.append(
                f"kernels could not be traced: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            )

    def _record(self) -> bytes:
        from torch.profiler import ProfilerActivity, profile

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler = profile(activities=[ProfilerActivity.CUDA])
            profiler.start()
            self._over.wait(self._seconds)
            profiler.stop()
            profiler.export_chrome_trace(str(path))
            return path.read_bytes()

    def _read(self, data: bytes) -> None:
        trace = msgspec.json.decode(data, type=_KernelTraceFile)
        wall_to_monotonic = clock.monotonic_ns() - clock.now_ns()
        base = trace.baseTimeNanoseconds + wall_to_monotonic
        for event in trace.traceEvents:
            if event.ph == "X" and event.cat in ON_DEVICE:
                where = msgspec.json.decode(event.args, type=_Where)
                began = base + round(event.ts * 1000)
                self.spans.append(
                    Span(f"stream {where.stream}", event.name[:120], began, began + round(event.dur * 1000))
                )
        self.spans.sort(key=lambda span: span.began_ns)
