"""Between GPUs of one host: an area is memory of its owner's GPU, which its peers map and copy from with their own.

No byte passes through the host: a read is a copy that the reader's GPU is told of, and is asked about later. A copy
that has begun cannot be called back, so whoever cancels it waits for its end, which takes less than a millisecond;
where it does not end, the GPU has failed, and so has the worker.

What a driver does here is behind `Chip`, so that all else can be tried where there is no GPU.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import msgspec

from redline import clock
from redline.errors import ConfigError, WorkerLost
from redline.transport.base import Memory, Target, Told, TransferFailed, address_of, heard, inside, landing_at

HANG_S = 10.0  # for a copy that was given up to end
LOOK_S = 0.00005  # between two looks at one that is waited for

_KIND = "redline-peer-1"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # another on each host, and after each start of it


class Exported(Protocol):
    """Memory of a GPU that other processes of the host can map."""

    address: int
    handle: bytes  # what they map it by

    def free(self) -> None:
        """Gives it back: it is mapped anew no more."""
        ...


class Chip(Protocol):
    """One GPU, as far as this transport needs it. What its driver refuses is a RuntimeError."""

    @property
    def device(self) -> int | None:
        """By CUDA's number; None: the host's memory stands in its place."""
        ...

    def export(self, size: int) -> Exported:
        """New memory, zeros, that others may map."""
        ...

    def map(self, handle: bytes) -> int:
        """The address at which this GPU reads what another process has exported."""
        ...

    def unmap(self, address: int) -> None:
        """Ends what `map` began."""
        ...

    def copy(self, into: int, source: int, count: int) -> Callable[[], bool]:
        """Has the GPU copy so many bytes, behind those that it was told of before, and returns at once. What comes back
        tells whether they are there."""
        ...


class _Told(Told, frozen=True, array_like=True, forbid_unknown_fields=True):
    host: str
    handle: bytes
    size: int


class PeerArea:
    """Memory of this process's GPU that others can map."""

    def __init__(self, chip: Chip, size: int) -> None:
        """Raises ConfigError where the GPU has no room for it, or exports nothing."""
        try:
            self._exported = chip.export(size)
        except RuntimeError as error:
            raise ConfigError(f"transport: `peer` has no area of {size:,} bytes of the GPU's ({error})") from error
        self._open = True
        self.memory = Memory(self._exported.address, size, chip.device, owner=self._exported)
        self.told = msgspec.msgpack.encode(_Told(_KIND, _host(), self._exported.handle, size))

    def close(self) -> None:
        """As `Area.close`. Who has it mapped keeps its memory as a driver keeps it when a process ends."""
        if self._open:
            self._open = False
            with contextlib.suppress(RuntimeError):  # of a GPU that has failed, whose process ends
                self._exported.free()


class PeerLanding:
    """Memory of this process's GPU."""

    def __init__(self, transport: "PeerTransport", memory: Memory) -> None:
        self.memory = memory
        self._transport = transport

    def close(self) -> None:
        """As `Landing.close`."""
        self._transport.forget(self)


class PeerReading:
    """A copy that the GPU was told of."""

    def __init__(
        self, peer: "PeerPeer", into: PeerLanding, ended: Callable[[], bool] | None, held: object, seconds: float
    ) -> None:
        """ended: whether the bytes are there; None: the GPU has refused the copy, as `fail` will say."""
        self.into = into
        self._peer, self._ended, self._held = peer, ended, held
        self._seconds, self._until = seconds, clock.monotonic() + seconds
        self._failed: str | None = None

    def done(self) -> bool:
        """As `Reading.done`."""
        if self._failed is not None:
            raise TransferFailed(self._failed)
        if self._ended is None:
            return True
        try:
            ended = self._ended()
        except RuntimeError as error:  # a GPU that has failed copies nothing more
            self.fail(f"the GPU could not copy ({error})")
            return self.done()
        if ended:
            self._end()
            return True
        if clock.monotonic() >= self._until:
            self._give_up(f"the read took longer than its {self._seconds:g} s")
            return self.done()
        return False

    def cancel(self) -> None:
        """As `Reading.cancel`: it waits for the copy. Raises WorkerLost where the GPU does not end it in `HANG_S`."""
        if self._ended is not None:
            self._give_up("the read was cancelled")

    def fail(self, reason: str) -> None:
        """Nothing was copied, or will be."""
        self._failed = reason
        self._end()

    def _give_up(self, reason: str) -> None:
        until = clock.monotonic() + HANG_S
        try:
            while self._ended is not None and not self._ended():
                if clock.monotonic() >= until:
                    raise WorkerLost(f"the GPU has not ended a copy from a peer in {HANG_S:g} s")
                clock.sleep(LOOK_S)
        except RuntimeError as error:
            reason = f"{reason}, and the GPU could not copy ({error})"
        self.fail(reason)

    def _end(self) -> None:
        self._held = self._ended = None
        self._peer.readings.discard(self)


class PeerPeer:
    """An area of another process's GPU, mapped."""

    def __init__(self, transport: "PeerTransport", chip: Chip, facts: _Told) -> None:
        """Raises TransferFailed, with the driver's reason, where it cannot be mapped."""
        self.size = facts.size
        self.readings: set[PeerReading] = set()
        self._transport, self._chip = transport, chip
        try:
            self._address: int | None = chip.map(facts.handle)
        except RuntimeError as error:
            raise TransferFailed(f"this GPU cannot map the peer's memory ({error})") from error

    def read(self, source_offset: int, into: Target, count: int, seconds: float) -> PeerReading:
        """As `Peer.read`: microseconds of the host's, whatever the count."""
        inside(source_offset, count, self.size)
        assert self._address is not None, "a peer that has been closed"
        address, held = address_of(into, count)
        landing = landing_at(self._transport.landings, address, count)
        try:
            ended = self._chip.copy(address, self._address + source_offset, count)
        except RuntimeError as error:
            reading = PeerReading(self, landing, None, None, seconds)
            reading.fail(f"the GPU could not copy ({error})")
            return reading
        reading = PeerReading(self, landing, ended, held, seconds)
        self.readings.add(reading)
        return reading

    def close(self) -> None:
        """As `Peer.close`: once no copy is under way, the memory is unmapped."""
        for reading in tuple(self.readings):
            reading.cancel()
        if self._address is not None:
            address, self._address = self._address, None
            with contextlib.suppress(RuntimeError):  # it stays mapped; a GPU that has failed says so in the next step
                self._chip.unmap(address)


class PeerTransport:
    """Areas and peers among the GPUs of one host.

    chip: the GPU of this process.
    """

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self.landings: list[PeerLanding] = []
        self._areas: list[PeerArea] = []
        self._peers: WeakSet[PeerPeer] = WeakSet()

    def area(self, memory: Memory | int) -> PeerArea:
        """As `Transport.area`: of new memory alone, which is the GPU's."""
        if not isinstance(memory, int):
            raise ConfigError("transport: `peer` makes the memory of an area itself: say its size")
        area = PeerArea(self._chip, memory)
        self._areas.append(area)
        return area

    def landing(self, memory: Memory) -> PeerLanding:
        """As `Transport.landing`: memory of the GPU alone."""
        if memory.device != self._chip.device:
            raise ConfigError("transport: `peer` copies into memory of its own GPU, and this is none of it")
        landing = PeerLanding(self, memory)
        self.landings.append(landing)
        return landing

    def forget(self, landing: PeerLanding) -> None:
        """Its memory may go. Raises ValueError while a reading goes there."""
        if any(reading.into is landing for peer in self._peers for reading in peer.readings):
            raise ValueError("a landing that a reading still goes to")
        self.landings.remove(landing)

    def connect(self, told: bytes) -> PeerPeer:
        """As `Transport.connect`: the memory is mapped once, here."""
        facts = heard(told, _Told, _KIND, "peer")
        if facts.host != _host():
            raise TransferFailed("the peer's GPU is of another host")
        peer = PeerPeer(self, self._chip, facts)
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        """As `Transport.close`."""
        for made in (*self._peers, *self._areas):
            made.close()


def _host() -> str:
    """Names this host since it was started."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""
