"""The transport `memory`, within one process: a read is a copy, made while its reading is polled.

`Disturbance` simulates a link that is slow, drops, tears or corrupts reads, so that the layers above a transport can be
tested with a seed instead of a clock.
"""

import ctypes
import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from redline import clock
from redline.errors import ConfigError
from redline.transport.base import MemoryRange, Target, TransferFailed, address_of, inside


@dataclass(frozen=True)
class Disturbance:
    """The faults that are injected into one read.

    polls: the first `polls` calls of `done` return False. torn: the first half of the bytes is copied when the read
    begins, the rest when it ends; otherwise all of them when it ends. dropped: the read never completes. failing: the
    read fails instead of completing. change: called with address and count of the received bytes, which it may change.
    """

    polls: int = 0
    torn: bool = False
    dropped: bool = False
    failing: bool = False
    change: Callable[[int, int], None] | None = None


Disturb = Callable[[int, int], Disturbance | None]  # source offset and count of a read -> its faults; None: no fault

_areas: dict[bytes, "MemoryArea"] = {}  # descriptor -> area, of the whole process
_numbers = itertools.count()


class MemoryArea:
    """An area of this process for peers in this process."""

    def __init__(self, memory: MemoryRange) -> None:
        """Raises ConfigError if the memory is a GPU's."""
        if memory.device is not None:
            raise ConfigError("transport: `memory` copies host memory only, and this is GPU memory")
        self.memory = memory
        self.told = b"memory %d." % next(_numbers)  # cut short, it is no other area's
        _areas[self.told] = self

    @property
    def open(self) -> bool:
        """Whether peers can read it."""
        return self.told in _areas

    def close(self) -> None:
        """As `Area.close`: reads in progress fail at their next poll."""
        _areas.pop(self.told, None)


class MemoryLanding:
    """The target of reads; host memory needs no registration here."""

    def close(self) -> None:
        """Does nothing."""


class MemoryRead:
    """A read that progresses when it is polled."""

    def __init__(self, peer: "MemoryPeer", offset: int, into: Target, count: int, until: float) -> None:
        self._peer, self._offset, self._count, self._until = peer, offset, count, until
        self._into, self._held = address_of(into, count)
        self._disturbance = peer.disturbed(offset, count)
        self._polls = self._disturbance.polls if self._disturbance is not None else 0
        self._copied = 0
        self._done = False
        self._failed: str | None = None
        if self._disturbance is not None and self._disturbance.torn and peer.area.open:
            self._copy(count // 2)

    def done(self) -> bool:
        """As `RemoteRead.done`."""
        if self._done:
            return True
        if self._failed is not None:
            raise TransferFailed(self._failed)
        if not self._peer.area.open:
            self._fail("the peer has closed its memory area")
        if self._polls > 0:
            self._polls -= 1
            return self._wait()
        disturbance = self._disturbance
        if disturbance is not None:
            if disturbance.failing:
                self._fail("the link failed")
            if disturbance.dropped:
                return self._wait()
        self._copy(self._count)
        if disturbance is not None and disturbance.change is not None:
            disturbance.change(self._into, self._count)
        self._done = True
        self._end()
        return True

    def cancel(self) -> None:
        """As `RemoteRead.cancel`, immediately: bytes are copied only while the read is polled."""
        if not self._done and self._failed is None:
            self._failed = "the read was cancelled"
            self._end()

    def _wait(self) -> bool:
        if self._peer.clock() >= self._until:
            self._fail("the read timed out")
        return False

    def _copy(self, end: int) -> None:
        source = self._peer.area.memory.address + self._offset + self._copied
        ctypes.memmove(self._into + self._copied, source, end - self._copied)
        self._copied = end

    def _fail(self, reason: str) -> None:
        self._failed = reason
        self._end()
        raise TransferFailed(reason)

    def _end(self) -> None:
        self._held = None
        self._peer.readings.discard(self)


class MemoryPeer:
    """A connection to an area of this process."""

    def __init__(self, area: MemoryArea, disturb: Disturb | None, clock: Callable[[], float]) -> None:
        self.area, self.clock = area, clock
        self.size = area.memory.size
        self.readings: set[MemoryRead] = set()
        self._disturb = disturb
        self._open = True

    def read(self, source_offset: int, into: Target, count: int, seconds: float) -> MemoryRead:
        """As `Peer.read`."""
        inside(source_offset, count, self.size)
        assert self._open, "the peer is closed"
        reading = MemoryRead(self, source_offset, into, count, self.clock() + seconds)
        self.readings.add(reading)
        return reading

    def disturbed(self, offset: int, count: int) -> Disturbance | None:
        """The faults to inject into this read; None: no fault."""
        return self._disturb(offset, count) if self._disturb is not None else None

    def close(self) -> None:
        """As `Peer.close`."""
        self._open = False
        for reading in tuple(self.readings):
            reading.cancel()


class MemoryTransport:
    """Areas and peers of one process.

    disturb: chooses the faults of each read (tests). clock: the clock of the readings' deadlines, in seconds.
    """

    def __init__(self, disturb: Disturb | None = None, clock: Callable[[], float] = clock.monotonic) -> None:
        self._disturb, self._clock = disturb, clock
        self._areas: list[MemoryArea] = []
        self._peers: WeakSet[MemoryPeer] = WeakSet()

    def area(self, memory: MemoryRange | int) -> MemoryArea:
        """As `Transport.area`."""
        area = MemoryArea(host_memory(memory) if isinstance(memory, int) else memory)
        self._areas.append(area)
        return area

    def landing(self, memory: MemoryRange) -> MemoryLanding:
        """As `Transport.landing`: any host memory."""
        if memory.device is not None:
            raise ConfigError("transport: `memory` copies host memory only, and this is GPU memory")
        return MemoryLanding()

    def connect(self, told: bytes) -> MemoryPeer:
        """As `Transport.connect`."""
        area = _areas.get(told)
        if area is None:
            raise TransferFailed(f"this process has no area with the descriptor {told!r}")
        peer = MemoryPeer(area, self._disturb, self._clock)
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        """As `Transport.close`."""
        for made in (*self._peers, *self._areas):
            made.close()


def host_memory(size: int) -> MemoryRange:
    """New zeroed memory of this process, as whole pages. Raises ConfigError if it cannot be allocated."""
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"transport: cannot allocate an area of {size:,} bytes ({error})") from error
    held = (ctypes.c_char * size).from_buffer(mapped)
    return MemoryRange(ctypes.addressof(held), size, owner=held)
