"""The data that `lab.handoffs` sends, and its reader: each chunk's bytes follow from its number, so a reader can check
them without the checksum.
"""

import ctypes
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from redline.kernels.cpu.checksum import of_memory
from redline.messages.parcel import Ticket
from redline.transport.base import MemoryRange, Peer, RemoteRead, TransferFailed, Transport
from redline.transport.ledger import KvChunk, TransferBufferPool
from redline.transport.memory import host_memory

_TABLE = 8 << 20  # random bytes; each chunk is a slice of them
NUMBER = 8  # bytes of the number in front: two numbers never have the same bytes
LEAST = 2 * NUMBER

HARMS = ("a bit", "a word of zeros", "two words in each other's place", "another parcel's bytes", "a missing end")
LINKS = ("dropped", "failing")


class Content:
    """The bytes of chunk `number`: the number, and a slice of a table selected by its number and seed."""

    def __init__(self, seed: int) -> None:
        table = np.random.default_rng(seed).integers(0, 256, _TABLE, np.uint8)
        self._table = table
        self._address = table.ctypes.data

    def _place(self, number: int, size: int) -> int:
        return self._address + number * 1_000_003 % (_TABLE - size + 1)

    def write(self, address: int, number: int, size: int) -> None:
        """Writes the chunk's bytes to this address."""
        ctypes.memmove(address, self._place(number, size), size)
        ctypes.memmove(address, number.to_bytes(NUMBER, "little"), NUMBER)

    def is_at(self, address: int, number: int, size: int) -> bool:
        """Whether the bytes at this address are the chunk's, byte for byte."""
        if ctypes.string_at(address, NUMBER) != number.to_bytes(NUMBER, "little"):
            return False
        place = self._place(number, size) + NUMBER
        return ctypes.string_at(address + NUMBER, size - NUMBER) == ctypes.string_at(place, size - NUMBER)

    def harm(self, kind: str, address: int, count: int, draw: random.Random) -> bool:
        """Corrupts the bytes in the given way. -> whether that changed them."""
        before = ctypes.string_at(address, count)
        after = bytearray(before)
        words = count // 8
        first, second = 8 * draw.randrange(words), 8 * draw.randrange(words)
        match kind:
            case "a bit":
                after[draw.randrange(count)] ^= 1 << draw.randrange(8)
            case "a word of zeros":
                after[first : first + 8] = bytes(8)
            case "two words in each other's place":
                after[first : first + 8], after[second : second + 8] = (
                    before[second : second + 8],
                    before[first : first + 8],
                )
            case "another parcel's bytes":
                place = draw.randrange(_TABLE - count)
                after[:] = ctypes.string_at(self._address + place, count)
            case _:
                after[first:] = bytes(count - first)
        ctypes.memmove(address, bytes(after), count)
        return bytes(after) != before


@dataclass
class Tally:
    """Counts of the chunks' outcomes."""

    accepted: int = 0
    wrong_bytes_accepted: int = 0
    refused_by_checksum: int = 0
    right_bytes_refused: int = 0
    failed: int = 0  # the read raised TransferFailed
    cancelled: int = 0  # the receiver left
    bytes_accepted: int = 0
    injected: Counter[str] = field(default_factory=Counter[str])
    caught: Counter[str] = field(default_factory=Counter[str])

    def problems(self) -> list[str]:
        """Descriptions of outcomes that must not occur."""
        found: list[str] = []
        if self.wrong_bytes_accepted:
            found.append(f"{self.wrong_bytes_accepted:,} parcels with wrong bytes were accepted")
        if self.right_bytes_refused:
            found.append(f"{self.right_bytes_refused:,} parcels with right bytes were refused")
        missed = self.injected - self.caught
        return found + [f"{count:,} faults of the kind '{kind}' were not caught" for kind, count in missed.items()]


@dataclass(frozen=True)
class Offered:
    """A ticket as sent to a receiver. harm: the corruption of its bytes before that, if any."""

    ticket: Ticket
    number: int
    harm: str | None = None


@dataclass
class Harm:
    """The fault that a link adds to a read: changed once it has changed bytes, or will never deliver any."""

    kind: str
    happened: bool = False


@dataclass
class _Under:
    """A read in flight."""

    offered: Offered
    space: KvChunk
    reading: RemoteRead
    harm: Harm | None


Beginning = Callable[[Callable[[], RemoteRead]], tuple[RemoteRead, Harm | None]]


def plainly(begin: Callable[[], RemoteRead]) -> tuple[RemoteRead, Harm | None]:
    """A link without faults."""
    return begin(), None


class Receiver:
    """Reads chunks into its own landing area, several at once, and verifies each.

    through: begins a read, and returns it with the fault of its link. deadline_s: of a read.
    """

    def __init__(
        self, transport: Transport, told: bytes, room: int, content: Content, tally: Tally, deadline_s: float,
        through: Beginning = plainly,
    ) -> None:  # fmt: skip
        self._transport, self._told = transport, told
        self._peer: Peer = transport.connect(told)
        self._memory: MemoryRange = host_memory(room)
        self._landing = transport.landing(self._memory)
        self._spaces = TransferBufferPool(room)
        self._content, self._tally, self._deadline_s, self._through = content, tally, deadline_s, through
        self._waiting: list[Offered] = []
        self._under: list[_Under] = []

    @property
    def busy(self) -> int:
        """How many offered chunks are not finished."""
        return len(self._waiting) + len(self._under)

    def offer(self, offered: Offered) -> None:
        """Accept the offer of a chunk."""
        self._waiting.append(offered)

    def turn(self) -> list[Ticket]:
        """Begins reads for which there is room, and polls those in flight. -> tickets of finished chunks."""
        while self._waiting:
            space = self._spaces.lend(self._waiting[0].ticket.size, "a read", 1e9)
            if space is None:
                break
            self._begin(self._waiting.pop(0), space)
        taken: list[Ticket] = []
        under, self._under = self._under, []
        for one in under:
            try:
                done = one.reading.done()
            except TransferFailed:
                self._failed(one)
                continue
            if not done:
                self._under.append(one)
            elif self._verified(one):
                taken.append(one.offered.ticket)
        return taken

    def leave(self) -> None:
        """Cancels all reads, and drops all offers. Afterwards nothing writes to its landing area."""
        self._waiting.clear()
        for one in self._under:
            one.reading.cancel()
            self._tally.cancelled += 1
            self._spaces.drop(one.space)
        self._under.clear()
        self._reconnect()

    def close(self) -> None:
        """Raises AssertionError if a part of its landing area was not returned."""
        self._spaces.check()
        assert not self._under, self._under
        assert self._spaces.free == self._spaces.size, "landing space is lost"
        self._peer.close()
        self._landing.close()

    def _begin(self, offered: Offered, space: KvChunk) -> None:
        ticket, into = offered.ticket, self._memory.address + space.offset
        peer = self._peer
        reading, harm = self._through(lambda: peer.read(ticket.offset, into, ticket.size, self._deadline_s))
        self._under.append(_Under(offered, space, reading, harm))

    def _failed(self, one: _Under) -> None:
        self._tally.failed += 1
        if one.harm is not None and one.harm.kind in LINKS:
            self._count(one.harm.kind, caught=True)
        self._spaces.drop(one.space)
        self._reconnect()

    def _verified(self, one: _Under) -> bool:
        """Whether the checksum is right; in addition, checks the bytes."""
        ticket, address, tally = one.offered.ticket, self._memory.address + one.space.offset, self._tally
        accepted = of_memory(address, ticket.size, ticket.seed) == ticket.checksum
        right = self._content.is_at(address, one.offered.number, ticket.size)
        for kind in (one.offered.harm, one.harm.kind if one.harm is not None and one.harm.happened else None):
            if kind is not None:
                self._count(kind, caught=not accepted)
        if accepted:
            tally.accepted += 1
            tally.bytes_accepted += ticket.size
            tally.wrong_bytes_accepted += not right
        else:
            tally.refused_by_checksum += 1
            tally.right_bytes_refused += right
        self._spaces.drop(one.space)
        return accepted

    def _count(self, kind: str, *, caught: bool) -> None:
        self._tally.injected[kind] += 1
        self._tally.caught[kind] += caught

    def _reconnect(self) -> None:
        """Open a new connection for later reads. Reads in flight on the old one continue, if possible."""
        self._peer = self._transport.connect(self._told)
