"""Parcels that leave a worker: filled from the pages of prompts, and offered once their checksum is known.

What is filled here others read, in an area of its own and under leases (`transport/ledger.py`). On a GPU filling is
launched, and takes less than a millisecond beside the step that runs: the loop's thread waits for it, since its next
turn may be a prompt's chunk later.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from redline import clock
from redline.run.handoff import Parcels
from redline.transport.base import Transport
from redline.transport.ledger import Lender, Parcel
from redline.wire.handoff import Piece
from redline.wire.parcel import Ticket
from redline.worker.parcel_memory import ParcelMemory, Summed

LEASE_S = 10.0  # for a parcel to be read
LOOK_S = 0.00002  # between two looks at what is being filled

Of = TypeVar("Of")  # whatever a parcel is for


class _Filling(NamedTuple, Generic[Of]):
    of: Of
    piece: Piece
    parcel: Parcel
    summed: Summed


class Departures(Generic[Of]):
    """The area of a worker whose parcels others read. The loop's thread uses it."""

    def __init__(
        self, parcels: Parcels, transport: Transport, memory: ParcelMemory, size: int, clock: Callable[[], float]
    ) -> None:
        """size: bytes of the area. Raises ConfigError where there is no room for it."""
        self.area = transport.area(size)
        self.lender = Lender(size, clock)
        self.space_B = memory.tensor(self.area.memory)
        self._parcels, self._memory = parcels, memory
        self._filling: deque[_Filling[Of]] = deque()

    def fill(self, of: Of, piece: Piece, pages: Sequence[int], to: str) -> bool:
        """Begins to fill a parcel for a reader; False where there is no room for it now."""
        size = self._parcels.size(piece)
        parcel = self.lender.lend(size, to, LEASE_S)
        if parcel is None:
            return False
        into_B = self.space_B[parcel.offset : parcel.offset + size]
        summed = self._memory.gather(self._parcels, piece, pages, into_B, parcel.seed)
        self._filling.append(_Filling(of, piece, parcel, summed))
        return True

    def filled(self) -> Iterator[tuple[Of, Piece, Ticket | None]]:
        """Those that have been filled since, in the order of `fill`. None: its reader has gone meanwhile, or its time
        is over, and nobody can read it."""
        until = clock.perf_counter() + self._memory.fill_s
        while self._filling:
            one = self._filling[0]
            while not one.summed.ended():
                if clock.perf_counter() >= until:
                    return
                clock.sleep(LOOK_S)
            self._filling.popleft()
            yield one.of, one.piece, self.lender.offer(one.parcel, one.summed.number())
