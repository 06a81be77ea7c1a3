"""Parcels on their way to the worker that answers: several are read at once, and put into pages as time allows.

The loop's thread has decode steps to launch. What it spends on parcels (a read may be done by whoever begins it, a
parcel is verified and scattered) is therefore a share of the steps' own time: what the next parcel will take is
predicted from what its bytes have taken so far. While nothing runs, nobody is held up, and nothing is held back.
"""

import contextlib
import ctypes
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from redline.kernels.cpu import checksum
from redline.run.handoff import Parcels
from redline.transport.base import Memory, Peer, Reading, TransferFailed, Transport
from redline.transport.ledger import Lender, Parcel
from redline.transport.memory import host_memory
from redline.wire.handoff import Offer

LANDING_BYTES = 32 << 20  # that may be under way at once: eight of the largest parcels
READ_S = 5.0  # for one parcel to come
WEIGHT = 0.25  # of the newest measurement in what is predicted

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
        a turn's share comes every few turns, and a long wait for parcels is no claim to many at once.
        """
        share = self._share * (self._clock() - self._ended)
        self._busy = busy
        self._left = min(self._left + share, max(share, self.predict("read", most), self.predict("place", most)))

    def end(self) -> None:
        """The turn has ended: from here on the time is the steps'."""
        self._ended = self._clock()

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
        self._per_byte[work] = before + WEIGHT * (seconds / count - before)


@dataclass(eq=False)
class Arrival(Generic[Of]):
    """A parcel that is being read."""

    of: Of
    offer: Offer
    space: Parcel
    reading: Reading


class Arrivals(Generic[Of]):
    """The landing area of a worker, and what is under way to it. The loop's thread uses it."""

    def __init__(self, parcels: Parcels, transport: Transport, budget: Budget, clock: Callable[[], float]) -> None:
        """Raises ConfigError where reads cannot go to this process's memory."""
        self.under_way: list[Arrival[Of]] = []
        self._parcels, self._budget = parcels, budget
        self._memory = host_memory(LANDING_BYTES)
        self._landing_B = tensor_of(self._memory)
        self._landing = transport.landing(self._memory)
        self._lender = Lender(LANDING_BYTES, clock)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each parcel that is under way."""
        return [arrival.offer.ticket.size for arrival in self.under_way]

    def read(self, of: Of, offer: Offer, peer: Peer) -> bool:
        """Begins to read a parcel; False where there is no room or no time for it in this turn.

        Raises TransferFailed where it cannot be read.
        """
        ticket = offer.ticket
        if not self._budget.allows("read", ticket.size):
            return False
        space = self._lender.lend(ticket.size, "", READ_S)
        if space is None:
            return False
        try:
            with self._budget.spend("read", ticket.size):
                reading = peer.read(ticket.offset, self._memory.address + space.offset, ticket.size, READ_S)
        except ValueError as error:
            self._lender.drop(space)
            raise TransferFailed(str(error)) from None
        self.under_way.append(Arrival(of, offer, space, reading))
        return True

    def take(self, arrival: Arrival[Of], pages: Sequence[int]) -> bool:
        """Verifies a parcel and puts it into a job's pages; False where it has not come yet, or there is no time for it
        in this turn.

        Raises TransferFailed, and it is under way no more, where it will not come, or has a wrong byte.
        """
        ticket = arrival.offer.ticket
        try:
            if not arrival.reading.done() or not self._budget.allows("place", ticket.size):
                return False
            at = arrival.space.offset
            with self._budget.spend("place", ticket.size):
                seen = checksum.of_memory(self._memory.address + at, ticket.size, ticket.seed)
                if seen != ticket.checksum:
                    raise TransferFailed(f"parcel {ticket.id} of epoch {ticket.epoch} has another checksum than told")
                self._parcels.scatter(arrival.offer.piece, pages, self._landing_B[at : at + ticket.size])
        except TransferFailed:
            self._forget(arrival)
            raise
        self._forget(arrival)
        return True

    def cancel(self, of: Of) -> list[Offer]:
        """Returns once nothing for it can arrive any more: -> what was under way."""
        cancelled = [arrival for arrival in self.under_way if arrival.of is of]
        for arrival in cancelled:
            arrival.reading.cancel()
            self._forget(arrival)
        return [arrival.offer for arrival in cancelled]

    def check(self) -> None:
        """Raises AssertionError unless every byte of the landing area is free or has a parcel under way to it."""
        self._lender.check()
        assert sorted(one.id for one in self._lender.lent) == sorted(one.space.id for one in self.under_way)

    def _forget(self, arrival: Arrival[Of]) -> None:
        self.under_way.remove(arrival)
        self._lender.drop(arrival.space)


def tensor_of(memory: Memory) -> Tensor:
    """uint8 [size] over memory of this process, which has to outlive it."""
    held = (ctypes.c_char * memory.size).from_address(memory.address)
    return torch.frombuffer(memoryview(held), dtype=torch.uint8)
