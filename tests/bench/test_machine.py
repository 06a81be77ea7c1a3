"""The limits that floors are computed from."""

import math

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
