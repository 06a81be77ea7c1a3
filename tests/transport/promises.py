"""The contract of every transport (`redline.transport.base`), as tests: a subclass provides a pair of ends.

Both ends are in this process; each transport's own tests also run them in two.
"""

import ctypes
from collections.abc import Iterator

import pytest

from redline.transport.base import Area, MemoryRange, Peer, RemoteRead, TransferFailed, Transport
from tests.waiting import LIMIT_S, until

SIZE = 3_000_000


def fill(memory: MemoryRange, data: bytes, offset: int = 0) -> None:
    ctypes.memmove(memory.address + offset, data, len(data))


def pattern(size: int, salt: int = 0) -> bytes:
    return bytes((i * 31 + i // 251 + salt) % 256 for i in range(size))


def wait(reading: RemoteRead) -> None:
    until(reading.done, "the read neither completes nor fails")


class Promises:
    """Tests for a transport. host: memory of the reader, which is registered with the transport."""

    LARGE = SIZE

    def transport(self) -> Transport:
        raise NotImplementedError

    @pytest.fixture
    def ours(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transport]:
        self.folder = tmp_path_factory.mktemp("shared")
        self.folder.chmod(0o700)
        transport = self.transport()
        yield transport
        transport.close()

    @pytest.fixture
    def area(self, ours: Transport) -> Iterator[Area]:
        area = ours.area(self.LARGE)
        yield area
        area.close()

    @pytest.fixture
    def landing(self, theirs: Transport) -> bytearray:
        into = bytearray(self.LARGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(into))
        theirs.landing(MemoryRange(address, len(into), owner=into))
        return into

    @pytest.fixture
    def theirs(self, ours: Transport) -> Iterator[Transport]:
        """The reader's transport, a separate object as in another process."""
        transport = self.transport()
        yield transport
        transport.close()

    @pytest.fixture
    def peer(self, theirs: Transport, area: Area, landing: bytearray) -> Iterator[Peer]:
        peer = theirs.connect(area.told)
        yield peer
        peer.close()

    def test_a_read_brings_the_bytes_and_touches_no_others(self, area: Area, peer: Peer, landing: bytearray):
        data = pattern(self.LARGE)
        fill(area.memory, data)
        assert peer.size == len(data)
        for offset, count in ((0, 1), (7, 4097), (65_536, 300_001), (0, len(data)), (len(data) - 3, 3)):
            landing[:] = bytes([255]) * len(landing)
            at = min(11, len(landing) - count)
            wait(peer.read(offset, memoryview(landing)[at:], count, LIMIT_S))
            assert landing[at : at + count] == data[offset : offset + count]
            assert landing[:at] == bytes([255]) * at
            assert landing[at + count :] == bytes([255]) * (len(landing) - at - count)

    def test_many_reads_are_under_way_at_once(self, area: Area, peer: Peer, landing: bytearray):
        data = pattern(self.LARGE, 3)
        fill(area.memory, data)
        piece = len(data) // 10
        readings = [
            peer.read((9 - i) * piece, memoryview(landing)[i * piece : (i + 1) * piece], piece, LIMIT_S)
            for i in range(10)
        ]
        for reading in readings:
            wait(reading)
            assert reading.done(), "a completed read must stay completed"
        for i in range(10):
            assert landing[i * piece : (i + 1) * piece] == data[(9 - i) * piece : (10 - i) * piece]

    def test_a_read_sees_what_the_owner_writes_later(self, area: Area, peer: Peer, landing: bytearray):
        for salt in range(3):
            data = pattern(5000, salt)
            fill(area.memory, data, 100)
            wait(peer.read(100, landing, 5000, LIMIT_S))
            assert landing[:5000] == data

    def test_a_cancelled_read_writes_nothing_more(self, area: Area, peer: Peer, landing: bytearray):
        half = self.LARGE // 2
        fill(area.memory, bytes([1]) * self.LARGE)
        reading = peer.read(0, landing, half, LIMIT_S)
        reading.cancel()
        before = bytes(landing[:half])
        read_behind(peer, landing, half)
        assert landing[:half] == before
        try:
            assert reading.done()
            assert landing[:half] == bytes([1]) * half, "a read reported as done must have all of its bytes"
        except TransferFailed:
            with pytest.raises(TransferFailed):
                reading.done()
        reading.cancel()

    def test_a_read_whose_time_is_over_fails(self, area: Area, peer: Peer, landing: bytearray):
        half = self.LARGE // 2
        reading = peer.read(0, landing, half, 0.0)
        try:
            wait(reading)
        except TransferFailed:
            before = bytes(landing[:half])
            read_behind(peer, landing, half)
            assert landing[:half] == before

    def test_bytes_outside_are_refused(self, peer: Peer, landing: bytearray):
        for offset, count in ((0, self.LARGE + 1), (self.LARGE, 1), (-1, 1), (0, -1), (0, 0)):
            with pytest.raises(ValueError, match="are outside an area"):
                peer.read(offset, landing, count, 1.0)
        with pytest.raises(ValueError, match="a read of 100 bytes"):
            peer.read(0, bytearray(99), 100, 1.0)
        with pytest.raises((ValueError, TypeError)):
            peer.read(0, memoryview(bytes(100)), 100, 1.0)

    def test_what_nobody_told_is_refused(self, theirs: Transport, area: Area):
        for told in (b"", b"garbage", area.told[:-1], area.told + b"x"):
            with pytest.raises(TransferFailed):
                theirs.connect(told)

    def test_an_area_that_has_closed_takes_no_connections(self, theirs: Transport, area: Area):
        into = bytearray(8)
        theirs.landing(MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(into)), 8, owner=into))

        def read() -> None:
            """If the closed area cannot be detected at connect, the first read fails."""
            wait(theirs.connect(area.told).read(0, into, 8, 2.0))

        area.close()
        with pytest.raises(TransferFailed):
            read()

    def test_closing_a_peer_cancels_its_reads(self, area: Area, theirs: Transport, landing: bytearray):
        fill(area.memory, bytes([1]) * self.LARGE)
        peer, other, half = theirs.connect(area.told), theirs.connect(area.told), self.LARGE // 2
        readings = [peer.read(0, landing, half, LIMIT_S) for _ in range(4)]
        peer.close()
        before = bytes(landing[:half])
        read_behind(other, landing, half)
        assert landing[:half] == before
        other.close()
        for reading in readings:
            try:
                assert reading.done()
            except TransferFailed:
                continue


def read_behind(peer: Peer, landing: bytearray, first: int) -> None:
    """Read the rest of the area, after the first `first` bytes: reads in flight would arrive during this."""
    wait(peer.read(first, memoryview(landing)[first:], len(landing) - first, LIMIT_S))
