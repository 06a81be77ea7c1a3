"""What is lent of an area: parcels, each for one peer to read, for a time, and never mistaken for another.

A parcel's space belongs to whoever fills it, then to the transfer, and never to a request: it is free again only when
its reader has taken it, in the words of its own ticket, when its time is over, or when its reader has gone. A reader
that comes later than that finds other bytes, and its checksum says so.

    lend     -> Parcel    a space that its owner fills; None: no room now
    offer    -> Ticket    it is filled: what the reader is told
    taken                 its reader has verified its own copy
"""

import secrets
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from redline import clock
from redline.wire.parcel import Ticket, seed_of

ALIGNED = 256  # bytes: what a GPU reads at best in one piece, and whole words of a checksum
EPOCH_BITS = 62  # of a first epoch: those that follow it are below 2^63


@dataclass(frozen=True)
class Parcel:
    """A space that is lent. id: among those that are lent at once. epoch: no other parcel has had it, nor will.

    deadline: of its lender's clock, in seconds.
    """

    id: int
    epoch: int
    to: str
    offset: int
    size: int
    deadline: float

    @property
    def seed(self) -> int:
        """Of the checksum of its bytes."""
        return seed_of(self.id, self.epoch)

    @property
    def space(self) -> int:
        """Bytes that it takes of the area."""
        return -(-self.size // ALIGNED) * ALIGNED


@dataclass
class _Lent:
    parcel: Parcel
    filled: bool = False
    lost: bool = False  # its time is over or its reader has gone while it was being filled


class Lender:
    """The book of one area. One thread at a time may use it.

    A space that its owner still fills does not come back before the owner says that it has stopped, by `offer` or
    `drop`, whatever becomes of its reader: two would fill it.

    size: bytes of the area; those behind the last 256 are not used. first_epoch: of the first parcel, the next have one
    more each; None: drawn at random, so that no two lenders have one in common, whatever the system's clock does.
    """

    def __init__(self, size: int, clock: Callable[[], float] = clock.monotonic, first_epoch: int | None = None) -> None:
        self.size = size // ALIGNED * ALIGNED
        self._clock = clock
        self._epoch = secrets.randbits(EPOCH_BITS) if first_epoch is None else first_epoch
        self._first_epoch = self._epoch
        self._lent: dict[int, _Lent] = {}
        self._ids: list[int] = []  # free ones below _next_id
        self._next_id = 0
        self._free: list[tuple[int, int]] = (
            [(0, self.size)] if self.size else []
        )  # [first, end), in order, none adjacent

    @property
    def free(self) -> int:
        """Bytes that are not lent, perhaps in several pieces."""
        return sum(end - first for first, end in self._free)

    @property
    def lent(self) -> tuple[Parcel, ...]:
        """All parcels whose space has not come back."""
        return tuple(lent.parcel for lent in self._lent.values())

    def lend(self, size: int, to: str, seconds: float) -> Parcel | None:
        """The first space that holds so many bytes, for one reader and for so long; None where there is none now.

        Raises ValueError for a size that there will never be room for.
        """
        space = -(-size // ALIGNED) * ALIGNED
        if size <= 0 or space > self.size:
            raise ValueError(f"a parcel of {size:,} bytes in an area of {self.size:,}")
        at = next((at for at, (first, end) in enumerate(self._free) if end - first >= space), None)
        if at is None:
            return None
        first, end = self._free[at]
        self._free[at : at + 1] = [(first + space, end)] if first + space < end else []
        if self._ids:
            name = self._ids.pop()
        else:
            name, self._next_id = self._next_id, self._next_id + 1
        parcel = Parcel(name, self._epoch, to, first, size, self._clock() + seconds)
        self._epoch += 1
        self._lent[name] = _Lent(parcel)
        return parcel

    def offer(self, parcel: Parcel, checksum: int) -> Ticket | None:
        """It is filled, and nobody writes to it any more. None, and the space is back, where its reader has gone or its
        time is over.

        checksum: 64 bits, of its bytes under its seed. Raises KeyError for one that is not being filled.
        """
        lent = self._filling(parcel)
        lent.filled = True
        if lent.lost:
            self._return(parcel)
            return None
        return Ticket(id=parcel.id, epoch=parcel.epoch, offset=parcel.offset, size=parcel.size, checksum=checksum)

    def drop(self, parcel: Parcel) -> None:
        """Nobody writes to it any more, and it is not offered. Raises KeyError for one that is not being filled."""
        self._filling(parcel)
        self._return(parcel)

    def taken(self, id: int, epoch: int) -> bool:
        """Its reader has a verified copy: the space is back.

        False, and nothing changes, for a parcel that is offered no more, or not yet.
        """
        lent = self._lent.get(id)
        if lent is None or lent.parcel.epoch != epoch or not lent.filled:
            return False
        self._return(lent.parcel)
        return True

    def give_up(self, to: str) -> list[Parcel]:
        """This reader has gone. -> its parcels; those that are being filled come back when that has stopped."""
        return self._lose(lent for lent in self._lent.values() if lent.parcel.to == to)

    def expire(self, now: float) -> list[Parcel]:
        """-> the parcels whose time is over; those that are being filled come back when that has stopped."""
        return self._lose(lent for lent in self._lent.values() if lent.parcel.deadline <= now)

    def check(self) -> None:
        """Proves that no two parcels overlap and that every byte is lent or free. Raises AssertionError."""
        lent = [(one.parcel.offset, one.parcel.offset + one.parcel.space) for one in self._lent.values()]
        at = 0
        for first, end in sorted([*lent, *self._free]):
            assert first == at < end, f"bytes from {min(at, first)} to {max(at, first)} are in two places or none"
            at = end
        assert at == self.size, f"the book ends at {at} of {self.size}"
        assert self._free == sorted(self._free), self._free
        gaps = zip(self._free, self._free[1:], strict=False)
        assert all(left[1] < right[0] for left, right in gaps), f"free spaces beside each other: {self._free}"
        assert sorted([*self._lent, *self._ids]) == list(range(self._next_id)), "an id is in two places or none"
        epochs = [one.parcel.epoch for one in self._lent.values()]
        assert len(set(epochs)) == len(epochs), "two parcels have the same epoch"
        assert all(self._first_epoch <= epoch < self._epoch for epoch in epochs), "an epoch that was not given out"
        assert all(one.parcel.id == id for id, one in self._lent.items()), "a parcel under another's id"
        assert not any(one.filled and one.lost for one in self._lent.values()), "a lost parcel is kept"

    def _filling(self, parcel: Parcel) -> _Lent:
        lent = self._lent.get(parcel.id)
        if lent is None or lent.parcel != parcel or lent.filled:
            raise KeyError(f"parcel {parcel.id} of epoch {parcel.epoch} is not being filled")
        return lent

    def _lose(self, found: Iterable[_Lent]) -> list[Parcel]:
        lost = [lent for lent in found if not lent.lost]
        for lent in lost:
            lent.lost = True
            if lent.filled:
                self._return(lent.parcel)
        return [lent.parcel for lent in lost]

    def _return(self, parcel: Parcel) -> None:
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
