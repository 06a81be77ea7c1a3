"""Leases on an area: parcels (KV chunks in the transfer buffer), each lent to one peer to read until a deadline.

A parcel's space belongs first to the code that fills it, then to the transfer, and never to a request. It is free again
only when its reader acknowledges it with the id and epoch of its own ticket, when its lease expires, or when its reader
is down. A reader that reads after that finds other bytes, which fail its checksum.

    lend     -> Parcel    a space for its owner to fill; None: no room now
    offer    -> Ticket    the space is filled; the ticket is sent to the reader
    taken                 the reader has verified its own copy
"""

import secrets
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from redline import clock
from redline.messages.parcel import Ticket, seed_of

ALIGNED = 256  # bytes: the largest efficient single read of a GPU, and a whole number of checksum words
EPOCH_BITS = 62  # size of a random first epoch, so that the epochs that follow it are below 2^63


@dataclass(frozen=True)
class KvChunk:
    """A space that is lent. id: unique among the parcels lent at one time. epoch: never used for another parcel.

    deadline: end of the lease by the lender's clock, in seconds.
    """

    id: int
    epoch: int
    to: str
    offset: int
    size: int
    deadline: float

    @property
    def seed(self) -> int:
        """The seed of the checksum of its bytes."""
        return seed_of(self.id, self.epoch)

    @property
    def space(self) -> int:
        """Bytes of the area that it occupies: its size, aligned."""
        return -(-self.size // ALIGNED) * ALIGNED


@dataclass
class _Lent:
    parcel: KvChunk
    filled: bool = False
    lost: bool = False  # its lease expired, or its reader went down, while it was being filled


class TransferBufferPool:
    """Allocator of the leases on one area. One thread at a time may use it.

    A space that its owner is still filling is not freed before the owner calls `offer` or `drop`, even if its reader is
    down: otherwise two owners would fill it at once.

    size: bytes of the area; a rest of less than 256 bytes at its end is not used. first_epoch: epoch of the first
    parcel, incremented for each following one; None: drawn at random, so that no two lenders have an epoch in common,
    whatever the system's clock does.
    """

    def __init__(self, size: int, clock: Callable[[], float] = clock.monotonic, first_epoch: int | None = None) -> None:
        self.size = size // ALIGNED * ALIGNED
        self._clock = clock
        self._epoch = secrets.randbits(EPOCH_BITS) if first_epoch is None else first_epoch
        self._first_epoch = self._epoch
        self._lent: dict[int, _Lent] = {}
        self._ids: list[int] = []  # free ids below _next_id
        self._next_id = 0
        self._free: list[tuple[int, int]] = (
            [(0, self.size)] if self.size else []
        )  # [first, end), in order, none adjacent

    @property
    def free(self) -> int:
        """Bytes that are not lent, possibly in several separate spaces."""
        return sum(end - first for first, end in self._free)

    @property
    def lent(self) -> tuple[KvChunk, ...]:
        """All parcels that still occupy space."""
        return tuple(lent.parcel for lent in self._lent.values())

    def lend(self, size: int, to: str, seconds: float) -> KvChunk | None:
        """Lends the first free space of at least `size` bytes to the reader `to` for `seconds`; None: no room now.

        Raises ValueError for a size that never fits into the area.
        """
        space = -(-size // ALIGNED) * ALIGNED
        if size <= 0 or space > self.size:
            raise ValueError(f"a parcel of {size:,} bytes does not fit into an area of {self.size:,} bytes")
        at = next((at for at, (first, end) in enumerate(self._free) if end - first >= space), None)
        if at is None:
            return None
        first, end = self._free[at]
        self._free[at : at + 1] = [(first + space, end)] if first + space < end else []
        if self._ids:
            name = self._ids.pop()
        else:
            name, self._next_id = self._next_id, self._next_id + 1
        parcel = KvChunk(name, self._epoch, to, first, size, self._clock() + seconds)
        self._epoch += 1
        self._lent[name] = _Lent(parcel)
        return parcel

    def offer(self, parcel: KvChunk, checksum: int) -> Ticket | None:
        """Marks a parcel as filled: its owner has stopped writing. If its reader is down or its lease has expired,
        frees the space and returns None.

        checksum: 64 bits, over its bytes with its seed. Raises KeyError for a parcel that is not being filled.
        """
        lent = self._filling(parcel)
        lent.filled = True
        if lent.lost:
            self._return(parcel)
            return None
        return Ticket(id=parcel.id, epoch=parcel.epoch, offset=parcel.offset, size=parcel.size, checksum=checksum)

    def drop(self, parcel: KvChunk) -> None:
        """Frees a parcel that will not be offered; its owner has stopped writing. Raises KeyError for a parcel that is
        not being filled."""
        self._filling(parcel)
        self._return(parcel)

    def taken(self, id: int, epoch: int) -> bool:
        """Frees a parcel that its reader has acknowledged: the reader has a verified copy.

        False, and nothing changes, for a parcel that is no longer offered or not offered yet.
        """
        lent = self._lent.get(id)
        if lent is None or lent.parcel.epoch != epoch or not lent.filled:
            return False
        self._return(lent.parcel)
        return True

    def give_up(self, to: str) -> list[KvChunk]:
        """Ends the leases of a reader that is down. -> its parcels; a parcel that is being filled is freed when its
        owner stops filling it."""
        return self._lose(lent for lent in self._lent.values() if lent.parcel.to == to)

    def expire(self, now: float) -> list[KvChunk]:
        """Ends the leases that have expired. -> their parcels; a parcel that is being filled is freed when its
        owner stops filling it."""
        return self._lose(lent for lent in self._lent.values() if lent.parcel.deadline <= now)

    def check(self) -> None:
        """Checks that no two parcels overlap and that every byte is either lent or free. Raises AssertionError."""
        lent = [(one.parcel.offset, one.parcel.offset + one.parcel.space) for one in self._lent.values()]
        at = 0
        for first, end in sorted([*lent, *self._free]):
            assert first == at < end, f"bytes from {min(at, first)} to {max(at, first)} have two owners or none"
            at = end
        assert at == self.size, f"the spaces end at {at} of {self.size}"
        assert self._free == sorted(self._free), self._free
        gaps = zip(self._free, self._free[1:], strict=False)
        assert all(left[1] < right[0] for left, right in gaps), f"adjacent free spaces: {self._free}"
        assert sorted([*self._lent, *self._ids]) == list(range(self._next_id)), "an id has two owners or none"
        epochs = [one.parcel.epoch for one in self._lent.values()]
        assert len(set(epochs)) == len(epochs), "two parcels have the same epoch"
        assert all(self._first_epoch <= epoch < self._epoch for epoch in epochs), "an epoch that was not assigned"
        assert all(one.parcel.id == id for id, one in self._lent.items()), "a parcel is stored under a wrong id"
        assert not any(one.filled and one.lost for one in self._lent.values()), "a lost parcel is kept"

    def _filling(self, parcel: KvChunk) -> _Lent:
        lent = self._lent.get(parcel.id)
        if lent is None or lent.parcel != parcel or lent.filled:
            raise KeyError(f"parcel {parcel.id} of epoch {parcel.epoch} is not being filled")
        return lent

    def _lose(self, found: Iterable[_Lent]) -> list[KvChunk]:
        lost = [lent for lent in found if not lent.lost]
        for lent in lost:
            lent.lost = True
            if lent.filled:
                self._return(lent.parcel)
        return [lent.parcel for lent in lost]

    def _return(self, parcel: KvChunk) -> None:
        del self._lent[parcel.id]
        self._ids.append(parcel.id)
        first, end = parcel.offset, parcel.offset + parcel.space
        at = bisect_left(self._free, (first, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == first:
            at -= 1
            first = self._free.pop(at)[0]
        insort(self._free, (first, end))
