"""The transport `peer`, between GPUs of one host (CUDA IPC): an area is GPU memory of its owner, which its peers map
and copy from with their own GPUs.

No byte passes through host memory: a read is an asynchronous copy that is queued on the reader's GPU and polled later.
A copy that has begun cannot be cancelled, so `cancel` waits for its end, which takes less than a millisecond; if the
copy does not end, the GPU has failed, and the worker with it.

All driver calls are in the interface `GpuDriver`, so that everything else can be tested without a GPU.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import msgspec

from redline import clock
from redline.errors import ConfigError, WorkerLost
from redline.transport.base import (
    AreaDescriptor,
    MemoryRange,
    Target,
    TransferFailed,
    address_of,
    heard,
    inside,
    landing_at,
)

HANG_S = 10.0  # timeout, in seconds, for a cancelled copy to end
LOOK_S = 0.00005  # polling interval, in seconds, while a cancelled copy ends

_KIND = "redline-peer-1"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # different on each host and after each boot


class Exported(Protocol):
    """Memory of a GPU that other processes of the host can map."""

    address: int
    handle: bytes  # the IPC handle by which they map it

    def free(self) -> None:
        """Frees it: it cannot be mapped again."""
        ...


class GpuDriver(Protocol):
    """The driver calls of one GPU that this transport needs. Driver errors are raised as RuntimeError."""

    @property
    def device(self) -> int | None:
        """CUDA device index; None: host memory takes the place of GPU memory."""
        ...

    def export(self, size: int) -> Exported:
        """Allocates zeroed memory that other processes may map."""
        ...

    def map(self, handle: bytes) -> int:
        """Maps memory that another process has exported. -> its address for this GPU."""
        ...

    def unmap(self, address: int) -> None:
        """Unmaps memory that `map` has mapped."""
        ...

    def copy(self, into: int, source: int, count: int) -> Callable[[], bool]:
        """Queues a copy of `count` bytes on the GPU, after all earlier copies, and returns immediately. -> a function
        that returns whether the copy has completed."""
        ...


class _PeerDescriptor(AreaDescriptor, frozen=True, array_like=True, forbid_unknown_fields=True):
    host: str
    handle: bytes
    size: int


class PeerArea:
    """Memory of this process's GPU that other processes can map."""

    def __init__(self, chip: GpuDriver, size: int) -> None:
        """Raises ConfigError if the GPU has no room for it or cannot export memory."""
        try:
            self._exported = chip.export(size)
        except RuntimeError as error:
            raise ConfigError(f"transport: `peer` cannot allocate {size:,} bytes of GPU memory ({error})") from error
        self._open = True
        self.memory = MemoryRange(self._exported.address, size, chip.device, owner=self._exported)
        self.told = msgspec.msgpack.encode(_PeerDescriptor(_KIND, _host(), self._exported.handle, size))

    def close(self) -> None:
        """As `Area.close`. For peers that have it mapped, the driver keeps the memory as it does when a process
        ends."""
        if self._open:
            self._open = False
            with contextlib.suppress(RuntimeError):  # the GPU has failed, and this process is ending
                self._exported.free()


class PeerLanding:
    """Memory of this process's GPU that is the target of reads."""

    def __init__(self, transport: "PeerTransport", memory: MemoryRange) -> None:
        self.memory = memory
        self._transport = transport

    def close(self) -> None:
        """As `Landing.close`."""
        self._transport.forget(self)


class PeerRead:
    """A copy that is queued on the GPU."""

    def __init__(
        self, peer: "PeerPeer", into: PeerLanding, ended: Callable[[], bool] | None, held: object, seconds: float
    ) -> None:
        """ended: returns whether the copy has completed; None: the GPU has refused the copy, and the caller calls
        `fail` with the reason."""
        self.into = into
        self._peer, self._ended, self._held = peer, ended, held
        self._seconds, self._until = seconds, clock.monotonic() + seconds
        self._failed: str | None = None

    def done(self) -> bool:
        """As `RemoteRead.done`."""
        if self._failed is not None:
            raise TransferFailed(self._failed)
        if self._ended is None:
            return True
        try:
            ended = self._ended()
        except RuntimeError as error:  # the GPU has failed and runs no more copies
            self.fail(f"the GPU could not copy ({error})")
            return self.done()
        if ended:
            self._end()
            return True
        if clock.monotonic() >= self._until:
            self._give_up(f"the read timed out after {self._seconds:g} s")
            return self.done()
        return False

    def cancel(self) -> None:
        """As `RemoteRead.cancel`: waits for the end of the copy. Raises WorkerLost if the GPU does not end it within
        `HANG_S` seconds."""
        if self._ended is not None:
            self._give_up("the read was cancelled")

    def fail(self, reason: str) -> None:
        """Marks the read as failed: nothing is being copied any more."""
        self._failed = reason
        self._end()

    def _give_up(self, reason: str) -> None:
        until = clock.monotonic() + HANG_S
        try:
            while self._ended is not None and not self._ended():
                if clock.monotonic() >= until:
                    raise WorkerLost(f"the GPU has not completed a copy from a peer within {HANG_S:g} s")
                clock.sleep(LOOK_S)
        except RuntimeError as error:
            reason = f"{reason}, and the GPU could not copy ({error})"
        self.fail(reason)

    def _end(self) -> None:
        self._held = self._ended = None
        self._peer.readings.discard(self)


class PeerPeer:
    """A connection to an area of another process's GPU, which is mapped here."""

    def __init__(self, transport: "PeerTransport", chip: GpuDriver, facts: _PeerDescriptor) -> None:
        """Raises TransferFailed, with the driver's reason, if the area cannot be mapped."""
        self.size = facts.size
        self.readings: set[PeerRead] = set()
        self._transport, self._chip = transport, chip
        try:
            self._address: int | None = chip.map(facts.handle)
        except RuntimeError as error:
            raise TransferFailed(f"this GPU cannot map the peer's memory ({error})") from error

    def read(self, source_offset: int, into: Target, count: int, seconds: float) -> PeerRead:
        """As `Peer.read`: takes microseconds of host time, independent of `count`."""
        inside(source_offset, count, self.size)
        assert self._address is not None, "the peer is closed"
        address, held = address_of(into, count)
        landing = landing_at(self._transport.landings, address, count)
        try:
            ended = self._chip.copy(address, self._address + source_offset, count)
        except RuntimeError as error:
            reading = PeerRead(self, landing, None, None, seconds)
            reading.fail(f"the GPU could not copy ({error})")
            return reading
        reading = PeerRead(self, landing, ended, held, seconds)
        self.readings.add(reading)
        return reading

    def close(self) -> None:
        """As `Peer.close`: unmaps the memory once no copy is in progress."""
        for reading in tuple(self.readings):
            reading.cancel()
        if self._address is not None:
            address, self._address = self._address, None
            with contextlib.suppress(RuntimeError):  # it stays mapped; the next step reports a GPU that has failed
                self._chip.unmap(address)


class PeerTransport:
    """Areas and peers among the GPUs of one host.

    chip: the GPU of this process.
    """

    def __init__(self, chip: GpuDriver) -> None:
        self._chip = chip
        self.landings: list[PeerLanding] = []
        self._areas: list[PeerArea] = []
        self._peers: WeakSet[PeerPeer] = WeakSet()

    def area(self, memory: MemoryRange | int) -> PeerArea:
        """As `Transport.area`: only of new memory, which is allocated on the GPU."""
        if not isinstance(memory, int):
            raise ConfigError("transport: `peer` allocates the memory of an area itself: pass its size")
        area = PeerArea(self._chip, memory)
        self._areas.append(area)
        return area

    def landing(self, memory: MemoryRange) -> PeerLanding:
        """As `Transport.landing`: only memory of this GPU."""
        if memory.device != self._chip.device:
            raise ConfigError("transport: `peer` copies only into memory of its own GPU, and this is other memory")
        landing = PeerLanding(self, memory)
        self.landings.append(landing)
        return landing

    def forget(self, landing: PeerLanding) -> None:
        """Deregisters a landing. Raises ValueError while a reading into it is in progress."""
        if any(reading.into is landing for peer in self._peers for reading in peer.readings):
            raise ValueError("a landing is closed while a reading into it is in progress")
        self.landings.remove(landing)

    def connect(self, told: bytes) -> PeerPeer:
        """As `Transport.connect`: maps the area, once for all its reads."""
        facts = heard(told, _PeerDescriptor, _KIND, "peer")
        if facts.host != _host():
            raise TransferFailed("the peer's GPU is in another host")
        peer = PeerPeer(self, self._chip, facts)
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        """As `Transport.close`."""
        for made in (*self._peers, *self._areas):
            made.close()


def _host() -> str:
    """An id of this boot of this host."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""
