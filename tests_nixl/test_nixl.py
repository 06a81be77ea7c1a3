"""Reads over NIXL and TCP, between threads and between processes. `make test-nixl`: its wheels are 140 MB to download.

A peer that is stopped in the middle of a read is what its release does not survive: bytes come later.
"""

import ctypes
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from redline.errors import ConfigError
from redline.transport.base import MemoryRange, TransferFailed
from redline.transport.memory import host_memory
from redline.transport.nixl import NixlTransport
from tests.transport.promises import Promises, wait

ROOT = Path(__file__).parents[1]
SIZE = 256 << 20
OWNER = """
import ctypes, sys, time
from redline.transport.nixl import NixlTransport
area = NixlTransport("tcp,self").area(int(sys.argv[1]))
ctypes.memset(area.memory.address, 7, area.memory.size)
print("told", area.told.hex(), flush=True)
time.sleep(120)
"""


class TestPromises(Promises):
    LARGE = 3_000_000

    def transport(self) -> NixlTransport:
        return NixlTransport("tcp,self")

    def test_memory_that_nobody_told_of_is_refused(self, theirs: NixlTransport, area, landing: bytearray):
        peer = theirs.connect(area.told)
        with pytest.raises(ValueError, match="not registered with"):
            peer.read(0, bytearray(10), 10, 1.0)
        peer.close()

    def test_a_landing_comes_and_goes(self, theirs: NixlTransport, area, landing: bytearray):
        peer = theirs.connect(area.told)
        into = bytearray(1000)
        later = theirs.landing(MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(into)), 1000, owner=into))
        wait(peer.read(0, into, 1000, 20.0))
        later.close()
        with pytest.raises(ValueError, match="not registered with"):
            peer.read(0, into, 1000, 1.0)
        peer.close()


class Owner:
    """Another process with an area of sevens."""

    def __init__(self, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(size)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.told = bytes.fromhex(next(line for line in lines if line.startswith("told")).split()[1])

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner(SIZE)
    yield made
    made.end()


@pytest.fixture
def ours() -> Iterator[NixlTransport]:
    transport = NixlTransport("tcp,self")
    yield transport
    transport.close()


def landing(transport: NixlTransport, size: int) -> bytearray:
    into = bytearray(size)
    transport.landing(MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(into)), size, owner=into))
    return into


def stop_in_the_middle(owner: Owner, ours: NixlTransport, into: bytearray):
    """A reading whose peer was stopped when some of the bytes had come."""
    peer = ours.connect(owner.told)
    wait(peer.read(0, into, 8, 20.0))
    for _ in range(20):
        into[:] = bytes(len(into))
        reading = peer.read(0, into, len(into), 60.0)
        while not into.count(7, 0, 1 << 20):
            assert not reading.done(), "faster than a look at it"
        owner.process.send_signal(signal.SIGSTOP)
        for _ in range(100):
            if reading.done():
                break
            time.sleep(0.002)
        else:
            assert 0 < into.count(7) < len(into)
            return peer, reading
        owner.process.send_signal(signal.SIGCONT)
    raise AssertionError("the peer was never stopped in the middle of a read")


def test_a_cancelled_read_of_a_stopped_peer_writes_nothing_when_the_peer_goes_on(owner: Owner, ours: NixlTransport):
    into = landing(ours, SIZE)
    peer, reading = stop_in_the_middle(owner, ours, into)
    began = time.monotonic()
    reading.cancel()
    assert time.monotonic() - began < 1.0
    before = into.count(7)
    owner.process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert into.count(7) == before < SIZE
    for failed in (reading, peer.read(0, into, 8, 1.0)):
        with pytest.raises(TransferFailed, match="cancelled"):
            failed.done()


def test_a_peer_that_is_given_up_takes_no_other_with_it(owner: Owner, ours: NixlTransport):
    into, other = landing(ours, SIZE), Owner(1000)
    try:
        another = ours.connect(other.told)
        _, reading = stop_in_the_middle(owner, ours, into)
        reading.cancel()
        into[:1000] = bytes(1000)
        wait(another.read(0, into, 1000, 20.0))
        assert into.count(7, 0, 1000) == 1000
    finally:
        other.end()


def test_a_read_of_a_stopped_peer_ends_with_its_time(owner: Owner, ours: NixlTransport):
    into = landing(ours, SIZE)
    peer, _ = stop_in_the_middle(owner, ours, into)
    late = peer.read(0, into, 8, 0.2)
    with pytest.raises(TransferFailed, match=r"timed out after 0.2 s"):
        wait(late)


def test_a_peer_that_is_killed_in_the_middle_fails_its_reads(owner: Owner, ours: NixlTransport):
    into = landing(ours, SIZE)
    peer, reading = stop_in_the_middle(owner, ours, into)
    owner.process.kill()
    owner.process.wait(10)
    began = time.monotonic()
    with pytest.raises(TransferFailed, match=r"unreachable|failed"):
        wait(reading)
    assert time.monotonic() - began < 5.0
    with pytest.raises(TransferFailed):
        wait(peer.read(0, into, 8, 1.0))


def test_an_idle_area_takes_little_of_a_core(owner: Owner):
    def seconds() -> float:
        fields = Path(f"/proc/{owner.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    before = seconds()
    time.sleep(2.0)
    assert seconds() - before < 0.4


def test_a_peer_that_has_gone_before_is_found_out_by_the_first_read(owner: Owner, ours: NixlTransport):
    into = landing(ours, 100)
    owner.process.kill()
    owner.process.wait(10)

    def read() -> None:
        wait(ours.connect(owner.told).read(0, into, 100, 3.0))

    with pytest.raises(TransferFailed):
        read()


def test_what_another_transport_told_is_refused(ours: NixlTransport):
    with pytest.raises(TransferFailed, match="not of the transport `nixl`"):
        ours.connect(msgspec.msgpack.encode(["other", "a", b"", 0, 1, None]))


def test_an_area_lies_in_memory_that_its_worker_makes(ours: NixlTransport):
    made: list[MemoryRange] = []

    def make(size: int) -> MemoryRange:
        made.append(host_memory(size))
        return made[-1]

    theirs = NixlTransport("tcp,self", make=make)
    area = theirs.area(5000)
    (memory,) = made
    assert area.memory is memory
    ctypes.memset(memory.address, 7, 5000)
    into = landing(ours, 5000)
    wait(ours.connect(area.told).read(0, into, 5000, 20.0))
    assert into.count(7) == 5000
    theirs.close()


def test_memory_that_ucx_does_not_find_in_a_gpu_is_refused(ours: NixlTransport):
    """So it is where UCX lacks CUDA: NIXL then takes every address for the host's."""
    memory = dataclasses.replace(host_memory(5000), device=0)
    for tell in (ours.area, ours.landing):
        with pytest.raises(ConfigError, match=r"cannot register 5,000 bytes of GPU 0 \(.*UCX may lack CUDA here"):
            tell(memory)
    assert not ours.landings


@pytest.mark.parametrize(("device", "waits"), [(0, 1), (None, 0)], ids=["a GPU's memory", "the host's"])
def test_a_lost_peers_reads_into_a_gpu_are_waited_for(owner: Owner, device: int | None, waits: int):
    """A GPU's copies outlive the agent that began them. The host's memory stands for a GPU's."""
    settled: list[int] = []
    ours = NixlTransport("tcp,self", settle=lambda: settled.append(1))
    peer, reading = stop_in_the_middle(owner, ours, landing(ours, SIZE))
    reading.into.memory = dataclasses.replace(reading.into.memory, device=device)
    reading.cancel()
    assert len(settled) == waits
    peer.close()
    assert len(settled) == waits, "nothing was under way any more"
    ours.close()
