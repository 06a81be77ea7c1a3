"""The interface of a transport, which copies bytes from a peer's memory into memory of this process (one-sided reads).

Transfers are reads only: the receiver pulls. No process writes into another process's memory, so the owner of a memory
area is its only writer. `ledger.py` decides which bytes may be read, and for how long.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from redline.errors import RedlineError

Target = int | bytearray | memoryview  # the destination of a read: an address, or writable and contiguous bytes


class TransferFailed(RedlineError):
    """A read failed: the peer or the link is down, or the read timed out. A read from another peer may succeed."""


@dataclass(frozen=True)
class MemoryRange:
    """A range of this process's memory that was allocated elsewhere, a tensor's storage for example.

    device: CUDA device index of the GPU memory; None: host memory. owner: the object that keeps the memory allocated.
    """

    address: int
    size: int
    device: int | None = None
    owner: object = None

    def holds(self, address: int, count: int) -> bool:
        """Whether it contains [address, address + count)."""
        return self.address <= address and address + count <= self.address + self.size


class RemoteRead(Protocol):
    """One read in progress. One thread at a time may use it: the thread that uses its peer."""

    def done(self) -> bool:
        """Whether all bytes have arrived. It also makes the read progress, so the caller has to poll it.

        Raises TransferFailed, on every call, if the read has failed. After it has returned True or raised, nothing
        writes into `into` any more.
        """
        ...

    def cancel(self) -> None:
        """Cancels the read: returns once nothing can write into `into` any more, within a time that each transport
        documents. A read that is already done stays done; any other raises TransferFailed from then on."""
        ...


class Peer(Protocol):
    """A connection to an area of another process. One thread at a time may use it."""

    @property
    def size(self) -> int:
        """Bytes of the area."""
        ...

    def read(self, source_offset: int, into: Target, count: int, seconds: float) -> RemoteRead:
        """Starts to copy bytes [source_offset, source_offset + count) of the area to `into`.

        seconds: timeout. The first poll after it cancels the reading and raises TransferFailed.
        Raises ValueError if `count` is not positive, if the bytes are outside the area or `into`, and if the target
        memory is not registered (`Transport.landing`). If the peer is down, `RemoteRead.done` raises, not this method.
        """
        ...

    def close(self) -> None:
        """Cancels every reading and closes the connection."""
        ...


class Area(Protocol):
    """Memory of this process that peers can read, at any time, until it is closed."""

    @property
    def memory(self) -> MemoryRange:
        """Its address, size and device."""
        ...

    @property
    def told(self) -> bytes:
        """The descriptor with which a peer connects. It is sent over our own channels and is a secret of the
        deployment."""
        ...

    def close(self) -> None:
        """Ends access: peers can no longer connect, and the memory may be freed. The content of reads from now on is
        undefined."""
        ...


class Landing(Protocol):
    """Memory registered as the target of reads, until this is closed."""

    def close(self) -> None:
        """Deregisters the memory, which may be freed then. The caller has to end all reads into it first; a transport
        that still knows of one raises ValueError."""
        ...


class Transport(Protocol):
    """A method of copying bytes between processes."""

    def area(self, memory: MemoryRange | int) -> Area:
        """Lets peers read `memory`, or, if it is an int, that many bytes of new, zeroed memory.

        Raises ConfigError if the memory cannot be allocated or registered, and for memory of the caller's if this
        transport can only use memory that it allocates itself.
        """
        ...

    def landing(self, memory: MemoryRange) -> Landing:
        """Registers memory as a target of reads. Raises ConfigError if this transport cannot write there."""
        ...

    def connect(self, told: bytes) -> Peer:
        """Connects to a peer's area, given its descriptor (`Area.told`).

        Raises TransferFailed if the area does not exist, or if the descriptor was not produced by this transport.
        """
        ...

    def close(self) -> None:
        """Closes all peers and areas that it has created."""
        ...


def address_of(into: Target, count: int) -> tuple[int, object]:
    """The address of `into`, and an object that pins the memory while it is referenced.

    Raises ValueError if there are fewer than `count` bytes, or if they are not writable and contiguous.
    """
    if isinstance(into, int):
        return into, None
    view = memoryview(into)
    if view.readonly or not view.contiguous or view.nbytes < count:
        raise ValueError(f"the target of a read of {count:,} bytes must be writable, contiguous and at least that long")
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(held), held


def inside(source_offset: int, count: int, size: int) -> None:
    """Raises ValueError if `count` is not positive, or if the bytes are outside an area of `size` bytes."""
    if count <= 0 or source_offset < 0 or source_offset + count > size:
        raise ValueError(f"bytes [{source_offset:,}, {source_offset + count:,}) are outside an area of {size:,} bytes")


class AreaDescriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The descriptor of an area. kind: name and format version of its transport."""

    kind: str


class _Lies(Protocol):
    memory: MemoryRange


AnyTold = TypeVar("AnyTold", bound=AreaDescriptor)
AnyLanding = TypeVar("AnyLanding", bound=_Lies)


def heard(told: bytes, of: type[AnyTold], kind: str, transport: str) -> AnyTold:
    """Decodes the descriptor of a peer's area. Raises TransferFailed if it is not of this kind."""
    try:
        facts = msgspec.msgpack.decode(told, type=of)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"the peer's descriptor is not of the transport `{transport}` ({error})") from error
    if facts.kind != kind:
        raise TransferFailed(f"the peer's descriptor is not of the transport `{transport}`")
    return facts


def landing_at(landings: Iterable[AnyLanding], address: int, count: int) -> AnyLanding:
    """The landing that contains these bytes. Raises ValueError if none does."""
    for landing in landings:
        if landing.memory.holds(address, count):
            return landing
    raise ValueError(f"a read of {count:,} bytes to memory that is not registered with the transport (`landing`)")
