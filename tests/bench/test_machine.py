"""The limits that floors are computed from."""

import math
import time

import pytest
import torch

from redline.bench import machine as limits
from redline.bench.machine import measure
from redline.bench.record import cpu_name
from redline.ops.op import Cost


def test_a_machine_has_a_name_and_finite_limits() -> None:
    machine = measure(working_set_bytes=1 << 20, rounds=1)
    assert cpu_name() in machine.name
    assert 1e8 < machine.bytes_per_s < math.inf
    assert 1e8 < machine.flops_per_s < math.inf


def test_a_floor_is_the_slower_of_moving_and_computing() -> None:
    machine = measure(working_set_bytes=1 << 20, rounds=1)
    moving = Cost(bytes=1 << 30).seconds(machine)
    computing = Cost(bytes=0, flops=10**15).seconds(machine)
    assert Cost(bytes=1 << 30, flops=10**15).seconds(machine) == max(moving, computing)


@pytest.mark.parametrize(("seconds", "times"), [(0.02, 2), (0.005, 13)])
def test_a_way_that_takes_ten_times_as_long_is_run_twice(seconds: float, times: int) -> None:
    calls: list[float] = []

    def work() -> torch.Tensor:
        calls.append(seconds)
        time.sleep(seconds)
        return torch.empty(0)

    assert limits._seconds(work, torch.device("cpu"), 5, best=0.001 if times == 2 else 0.1) >= seconds
    assert len(calls) in range(times - 5 * (times > 2), times + 1)


def test_one_slow_run_does_not_make_rounds_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = 0.0, iter([1.0, 0.03])  # warming up, and a run that others were in the way of
    calls: list[float] = []

    def work() -> torch.Tensor:
        nonlocal now
        calls.append(next(took, 0.001))
        now += calls[-1]
        return torch.empty(0)

    monkeypatch.setattr(limits.time, "perf_counter", lambda: now)
    assert limits._seconds(work, torch.device("cpu"), 5) == pytest.approx(0.001)
    assert len(calls) == 3 + 5 * 10, "ten milliseconds a round"
