"""Moves bytes from a peer's memory into ours: what every transport promises.

Bytes are only ever read by whoever needs them. Nobody writes into memory of another process, so whoever owns memory
knows who writes to it: itself. What may be read, and for how long, is the ledger's business (`ledger.py`).
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from redline.errors import RedlineError

Target = int | bytearray | memoryview  # where read bytes go: an address, or writable and contiguous bytes


class TransferFailed(RedlineError):
    """Bytes did not come: the peer has gone, the link has, or the time is over. A read of another peer may succeed."""


@dataclass(frozen=True)
class Memory:
    """Bytes of this process that somebody else made, a tensor's for example.

    device: the GPU that has them, by CUDA's number; None: the host. owner: whatever keeps them alive.
    """

    address: int
    size: int
    device: int | None = None
    owner: object = None

    def holds(self, address: int, count: int) -> bool:
        """Whether [address, address + count) lies in it."""
        return self.address <= address and address + count <= self.address + self.size


class Reading(Protocol):
    """One read under way. One thread at a time may use it, the one that uses its peer."""

    def done(self) -> bool:
        """Whether all bytes are there. It also moves the read on, so it has to be asked.

        Raises TransferFailed where they will not come, each time. Once it has said True or raised, nothing writes into
        `into` any more.
        """
        ...

    def cancel(self) -> None:
        """Gives the read up: returns once nothing can write into `into` any more, within the time that the transport
        says. A read that is done already stays done; any other raises TransferFailed from then on."""
        ...


class Peer(Protocol):
    """An area of another process, connected. One thread at a time may use it."""

    @property
    def size(self) -> int:
        """Bytes of the area."""
        ...

    def read(self, source_offset: int, into: Target, count: int, seconds: float) -> Reading:
        """Begins to copy bytes [source_offset, source_offset + count) of the area.

        seconds: after so many the reading cancels itself when it is next asked, and raises TransferFailed.
        Raises ValueError for no bytes, for bytes outside the area or `into`, and for memory that the transport has not
        been told of (`Transport.landing`). That the peer has gone is the reading's to tell.
        """
        ...

    def close(self) -> None:
        """Cancels every reading, and lets the connection go."""
        ...


class Area(Protocol):
    """Memory of this process that peers can read, at any time, until it is closed."""

    @property
    def memory(self) -> Memory:
        """Where it lies."""
        ...

    @property
    def told(self) -> bytes:
        """What a peer has to know to connect. It travels over our own channels and is a secret of the deployment."""
        ...

    def close(self) -> None:
        """Peers can connect no more, and the memory may go. Bytes that peers read from now on are anything."""
        ...


class Landing(Protocol):
    """Memory that reads may go to, as long as this is open."""

    def close(self) -> None:
        """The memory may go. Whoever closes it has ended the reads that go there; a transport that still knows of one
        raises ValueError."""
        ...


class Transport(Protocol):
    """One way for bytes to get from process to process."""

    def area(self, memory: Memory | int) -> Area:
        """Lets peers read this memory, or so many bytes of new host memory, which are zeros.

        Raises ConfigError where it cannot be had or, for memory of the caller's, where this transport only makes its
        own.
        """
        ...

    def landing(self, memory: Memory) -> Landing:
        """Says where reads will go to. Raises ConfigError where this transport cannot write there."""
        ...

    def connect(self, told: bytes) -> Peer:
        """The area of which a peer has told these bytes.

        Raises TransferFailed where it is not there, or what was told is nothing that this transport tells.
        """
        ...

    def close(self) -> None:
        """Closes all that it has made."""
        ...


def address_of(into: Target, count: int) -> tuple[int, object]:
    """The address of `into`, and what keeps it in its place as long as it is held.

    Raises ValueError where there are fewer than `count` bytes or they cannot be written to.
    """
    if isinstance(into, int):
        return into, None
    view = memoryview(into)
    if view.readonly or not view.contiguous or view.nbytes < count:
        raise ValueError(f"a read of {count:,} bytes goes to as many that can be written to, one after the other")
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(held), held


def inside(source_offset: int, count: int, size: int) -> None:
    """Raises ValueError where there are none, or they do not lie in an area of `size`."""
    if count <= 0 or source_offset < 0 or source_offset + count > size:
        raise ValueError(f"bytes [{source_offset:,}, {source_offset + count:,}) are not in an area of {size:,}")


class Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is told of an area. kind: of which transport, and in which form."""

    kind: str


class _Lies(Protocol):
    memory: Memory


AnyTold = TypeVar("AnyTold", bound=Told)
AnyLanding = TypeVar("AnyLanding", bound=_Lies)


def heard(told: bytes, of: type[AnyTold], kind: str, transport: str) -> AnyTold:
    """What a peer has told, of this kind. Raises TransferFailed where it is none."""
    try:
        facts = msgspec.msgpack.decode(told, type=of)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"what the peer told is not of the transport `{transport}` ({error})") from error
    if facts.kind != kind:
        raise TransferFailed(f"what the peer told is not of the transport `{transport}`")
    return facts


def landing_at(landings: Iterable[AnyLanding], address: int, count: int) -> AnyLanding:
    """The one that has these bytes. Raises ValueError where none does."""
    for landing in landings:
        if landing.memory.holds(address, count):
            return landing
    raise ValueError(f"a read of {count:,} bytes to memory that the transport was not told of (`landing`)")
