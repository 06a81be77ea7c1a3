"""Parcels on their way to the worker that answers: several are read at once, and put into pages as time allows.

The loop's thread has decode steps to launch. What it spends on parcels (a read may be done by whoever begins it, a
parcel is verified and scattered) is therefore a share of the steps' own time: what the next parcel will take is
predicted from what its bytes have taken so far. While nothing runs, nobody is held up, and nothing is held back.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from redline import clock
from redline.run.handoff import Parcels
from redline.transport.base import Peer, Reading, TransferFailed, Transport
from redline.transport.ledger import Lender, Parcel
from redline.wire.handoff import Offer
from redline.worker.parcel_memory import Ended, ParcelMemory, Summed

LOOK_S = 0.00002  # between two looks at what is under way to a GPU
READ_S = 5.0  # for one parcel to come
WEIGHT = 0.25  # of the newest measurement in what is predicted
HICCUP = 4.0  # times what was predicted: what takes longer has waited for something else

Of = TypeVar("Of")  # whatever a parcel is for
Work = Literal["read", "place"]


class Budget:
    """Seconds of a thread that may go to parcels. `share`: of the time between two turns, while steps run."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._share, self._clock = share, clock
        self._busy = False
        self._left = 0.0  # seconds
        self._ended = clock()  # the last turn
        self._per_byte: dict[Work, float] = {}  # seconds

    def begin(self, *, busy: bool, most: int) -> None:
        """A turn begins. busy: whether steps run, and wait for it. most: bytes of the largest parcel that waits.

        What is left over from turns before is kept up to the time of one such parcel: a parcel that takes longer than
        a turn's share comes every few turns, and a long wait for parcels is no claim to many at once. Nor is more than
        the time of one owed: where a parcel took a second, by a thread that slept, steps had that second.
        """
        share = self._share * (self._clock() - self._ended)
        self._busy = busy
        one = max(share, self.predict("read", most), self.predict("place", most))
        self._left = min(max(self._left, -one) + share, one)

    def end(self) -> None:
        """The turn has ended: from here on the time is the steps'."""
        self._ended = self._clock()

    def patience(self, most: float, count: int) -> float:
        """Seconds that may be waited for what is under way, `most` at most, so that there is time left to place so many
        bytes: who waited away what placing takes would wait for ever."""
        return most if not self._busy else min(most, max(0.0, self._left - self.predict("place", count)))

    def charge(self, seconds: float) -> None:
        """So long was waited."""
        if self._busy:
            self._left -= seconds

    def predict(self, work: Work, count: int) -> float:
        """Seconds for so many bytes; 0 before the first were measured."""
        return self._per_byte.get(work, 0.0) * count

    def allows(self, work: Work, count: int) -> bool:
        """Whether there is time for so many bytes in this turn."""
        return not self._busy or self.predict(work, count) <= self._left

    @contextlib.contextmanager
    def spend(self, work: Work, count: int) -> Generator[None]:
        """Measures what is done inside, for so many bytes."""
        began = self._clock()
        yield
        seconds = self._clock() - began
        if self._busy:
            self._left -= seconds
        before = self._per_byte.get(work, seconds / count)
        self._per_byte[work] = before + WEIGHT * (min(seconds / count, HICCUP * before) - before)


@dataclass(eq=False)
class Arrival(Generic[Of]):
    """A parcel that is being read, and then added up."""

    of: Of
    offer: Offer
    space: Parcel
    peer: Peer
    reading: Reading
    summed: Summed | None = None  # None: its bytes are not all there


class Arrivals(Generic[Of]):
    """The landing area of a worker, and what is under way to it. The loop's thread uses it."""

    def __init__(
        self,
        parcels: Parcels,
        transport: Transport,
        memory: ParcelMemory,
        budget: Budget,
        clock: Callable[[], float],
    ) -> None:
        """Raises ConfigError where reads cannot go to this process's memory."""
        self.under_way: list[Arrival[Of]] = []
        self.budget = budget
        self._parcels, self._memory = parcels, memory
        self._landing = memory.make(memory.sizes.landing)
        self._landing_B = memory.tensor(self._landing)
        self._told = transport.landing(self._landing)
        self._lender = Lender(memory.sizes.landing, clock)
        self._placing: deque[tuple[Parcel, Ended]] = deque()  # verified, and being put into pages

    @property
    def sizes(self) -> list[int]:
        """Bytes of each parcel that is under way."""
        return [arrival.offer.ticket.size for arrival in self.under_way]

    def read(self, of: Of, offer: Offer, peer: Peer) -> bool:
        """Begins to read a parcel; False where there is no room or no time for it in this turn.

        Raises TransferFailed where it cannot be read.
        """
        ticket = offer.ticket
        if not self.budget.allows("read", ticket.size):
            return False
        while self._placing and self._placing[0][1]():
            self._lender.drop(self._placing.popleft()[0])
        space = self._lender.lend(ticket.size, "", READ_S)
        if space is None:
            return False
        try:
            with self.budget.spend("read", ticket.size):
                reading = peer.read(ticket.offset, self._landing.address + space.offset, ticket.size, READ_S)
        except ValueError as error:
            self._lender.drop(space)
            raise TransferFailed(str(error)) from None
        self.under_way.append(Arrival(of, offer, space, peer, reading))
        return True

    def take(self, arrival: Arrival[Of], pages: Sequence[int]) -> bool:
        """Verifies a parcel and puts it into a job's pages; False where it has not come yet, or there is no time for it
        in this turn.

        Raises TransferFailed, and it is under way no more, where it will not come, or has a wrong byte.
        """
        ticket = arrival.offer.ticket
        parcel_B = self._landing_B[arrival.space.offset : arrival.space.offset + ticket.size]
        try:
            if arrival.summed is None and not arrival.reading.done():
                return False
            if not self.budget.allows("place", ticket.size):
                return False
            if arrival.summed is not None and not arrival.summed.ended():
                return False
            with self.budget.spend("place", ticket.size):
                if arrival.summed is None:
                    arrival.summed = self._memory.sum(parcel_B, ticket.seed)
                    if not arrival.summed.ended():
                        return False
                if arrival.summed.number() != ticket.checksum:
                    raise TransferFailed(f"parcel {ticket.id} of epoch {ticket.epoch} has another checksum than told")
                placed = self._memory.scatter(self._parcels, arrival.offer.piece, pages, parcel_B)
        except TransferFailed:
            self._forget(arrival)
            raise
        self.under_way.remove(arrival)
        self._placing.append((arrival.space, placed))
        return True

    def patience(self) -> float:
        """Seconds that this turn may wait for what is under way: on a GPU that is there long before the next turn."""
        return self.budget.patience(self._memory.patience_s, max(self.sizes)) if self.under_way else 0.0

    def wait(self) -> None:
        """Waits a moment."""
        began = clock.perf_counter()
        clock.sleep(LOOK_S)
        self.budget.charge(clock.perf_counter() - began)

    def cancel(self, of: Of) -> list[Offer]:
        """Returns once nothing for it can arrive any more: -> what was under way."""
        cancelled = [arrival for arrival in self.under_way if arrival.of is of]
        for arrival in cancelled:
            arrival.reading.cancel()
            self._forget(arrival)
        return [arrival.offer for arrival in cancelled]

    def check(self) -> None:
        """Raises AssertionError unless every byte of the landing area is free, or has a parcel under way to it or from
        it into pages."""
        self._lender.check()
        held = [one.space.id for one in self.under_way] + [space.id for space, _ in self._placing]
        assert sorted(one.id for one in self._lender.lent) == sorted(held)

    def _forget(self, arrival: Arrival[Of]) -> None:
        self.under_way.remove(arrival)
        self._lender.drop(arrival.space)
