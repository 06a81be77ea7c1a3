"""A GPU's kernels out of what torch.profiler writes: which events, in which lanes, on which clock. Without a GPU."""

from collections.abc import Sequence

import msgspec
import pytest

from redline import clock
from redline.worker.kernel_trace import MOST_S, KernelTrace
from tests.clocks import FakeClock
from tests.waiting import until


class Recorded(KernelTrace):
    """As one that has watched a GPU."""

    events: Sequence[dict[str, object]] = ()
    base_ns = 0

    def _record(self) -> bytes:
        return msgspec.json.encode({"traceEvents": self.events, "baseTimeNanoseconds": self.base_ns})


def traced(events: list[dict[str, object]], base_ns: int, seconds: float) -> KernelTrace:
    made = type("One", (Recorded,), {"events": events, "base_ns": base_ns})(seconds)
    until(lambda: made.done)
    return made


def test_what_ran_on_the_device_is_a_lane_for_each_stream_on_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch):
    where = {"stream": 7, "grid": [1, 2, 3]}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 20.5, "dur": 3.0, "args": where}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 10.0, "dur": 1.0, "args": {"stream": 13}}
    host = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 1.0, "args": {}}
    wall_ns, monotonic = 1_700_000_000_000_000_000, FakeClock()
    monkeypatch.setattr(clock, "now_ns", lambda: wall_ns)
    monkeypatch.setattr(clock, "monotonic_ns", monotonic.ns)
    base_ns = wall_ns - 5_000_000_000
    trace = traced([kernel, host, copy, {"ph": "M", "name": "process_name"}], base_ns, 1.0)
    assert [(span.lane, span.name) for span in trace.spans] == [("stream 13", "Memcpy HtoD"), ("stream 7", "gemm")]
    first, second = trace.spans
    assert (first.ended_ns - first.began_ns, second.ended_ns - second.began_ns) == (1_000, 3_000)
    assert second.began_ns - first.began_ns == 10_500
    assert first.began_ns == monotonic.ns() - 5_000_000_000 + 10_000, "the wall clock has become the monotonic one"
    assert trace.notes == []


def test_what_is_not_seen_is_said():
    (longer,) = traced([], 0, MOST_S + 1).notes
    assert longer == "kernels were traced only in the first 2 s"
    (broken,) = traced([{"ph": 3}], 0, 1.0).notes
    assert broken.startswith("kernels could not be traced: ValidationError")
