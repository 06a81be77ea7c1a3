"""Reads within one process, and links that are slow, drop, tear and corrupt data."""

import ctypes
from collections.abc import Callable

import pytest

from redline.errors import ConfigError
from redline.transport.base import MemoryRange, TransferFailed
from redline.transport.memory import Disturbance, MemoryTransport
from tests.transport.promises import Promises, fill


class TestPromises(Promises):
    def transport(self) -> MemoryTransport:
        return MemoryTransport()


def read_through(disturbance: Disturbance, clock: Callable[[], float] = lambda: 0.0):
    transport = MemoryTransport(lambda offset, count: disturbance, clock)
    area, into = transport.area(1000), bytearray(1000)
    fill(area.memory, bytes([1]) * 1000)
    return area, into, transport.connect(area.told).read(0, into, 1000, 5.0)


def test_a_slow_read_brings_nothing_before_its_time():
    _, into, reading = read_through(Disturbance(polls=2))
    assert not reading.done()
    assert not reading.done()
    assert into == bytes(1000)
    assert reading.done()
    assert into == bytes([1]) * 1000


def test_a_torn_read_has_bytes_of_two_times():
    area, into, reading = read_through(Disturbance(polls=1, torn=True))
    assert not reading.done()
    fill(area.memory, bytes([2]) * 1000)
    assert reading.done()
    assert into == bytes([1]) * 500 + bytes([2]) * 500


def test_a_dropped_read_ends_with_its_time():
    now = [0.0]
    _, into, reading = read_through(Disturbance(dropped=True), lambda: now[0])
    for now[0] in (0.0, 4.9):
        assert not reading.done()
    now[0] = 5.0
    with pytest.raises(TransferFailed, match="the read timed out"):
        reading.done()
    assert into == bytes(1000)


def test_a_failing_read_fails_and_a_corrupted_one_does_not():
    _, _, reading = read_through(Disturbance(failing=True))
    with pytest.raises(TransferFailed, match="the link failed"):
        reading.done()
    _, into, reading = read_through(Disturbance(change=lambda address, count: ctypes.memset(address + count - 1, 9, 1)))
    assert reading.done()
    assert into == bytes([1]) * 999 + bytes([9])


def test_a_read_under_way_fails_where_the_area_goes():
    area, into, reading = read_through(Disturbance(polls=5))
    assert not reading.done()
    area.close()
    with pytest.raises(TransferFailed, match="has closed its memory area"):
        reading.done()
    assert into == bytes(1000)


def test_memory_of_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="this is GPU memory"):
        MemoryTransport().area(MemoryRange(4096, 10, device=0))
    with pytest.raises(ConfigError, match="this is GPU memory"):
        MemoryTransport().landing(MemoryRange(4096, 10, device=0))
