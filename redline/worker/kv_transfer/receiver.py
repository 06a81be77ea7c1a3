"""The KV receiver of a decode worker: reads several chunks at once, and scatters them into pages within a time budget.

The loop's thread has decode steps to launch. Its time for KV chunks (a transport may read in the calling thread; each
chunk is verified and scattered) is therefore limited to a share of the steps' time: the time of the next chunk is
predicted from the measured time per byte. While no step runs, there is no limit.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from redline import clock
from redline.messages.handoff import ChunkReady
from redline.run.kv_chunks import KvChunkLayout
from redline.transport.base import Peer, RemoteRead, TransferFailed, Transport
from redline.transport.ledger import KvChunk, TransferBufferPool
from redline.worker.parcel_memory import Ended, ParcelMemory, Summed

LOOK_S = 0.00002  # polling interval, in seconds, of transfers in progress
READ_S = 5.0  # timeout, in seconds, of one chunk's read
WEIGHT = 0.25  # weight of the newest measurement in the prediction
HICCUP = 4.0  # measurements are capped at this multiple of the prediction: a longer one has waited for other work

Of = TypeVar("Of")  # the owner of a chunk
Work = Literal["read", "place"]


class ReceiveBudget:
    """Time budget of the loop's thread for KV chunks. share: share of the time between two iterations, while steps
    run."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._share, self._clock = share, clock
        self._busy = False
        self._left = 0.0  # remaining seconds
        self._ended = clock()  # end of the last iteration
        self._per_byte: dict[Work, float] = {}  # seconds per byte

    def begin(self, *, busy: bool, most: int) -> None:
        """An iteration begins. busy: whether steps run and wait for it. most: bytes of the largest waiting chunk.

        Unused time of earlier iterations is kept up to the predicted time of one such chunk: a chunk that takes longer
        than one iteration's share is handled every few iterations, and a long wait for chunks does not allow many at
        once. An overrun, too, is limited to the time of one chunk: if a chunk took a second because the thread was
        not running, the steps had that second.
        """
        share = self._share * (self._clock() - self._ended)
        self._busy = busy
        one = max(share, self.predict("read", most), self.predict("place", most))
        self._left = min(max(self._left, -one) + share, one)

    def end(self) -> None:
        """The iteration's work on chunks has ended; the time from now on belongs to the steps."""
        self._ended = self._clock()

    def patience(self, most: float, count: int) -> float:
        """Seconds, at most `most`, to wait for transfers in progress, so that enough time is left to place `count`
        bytes: otherwise every iteration could spend its budget on waiting and never place a chunk."""
        return most if not self._busy else min(most, max(0.0, self._left - self.predict("place", count)))

    def charge(self, seconds: float) -> None:
        """Subtracts `seconds` of waiting from the budget."""
        if self._busy:
            self._left -= seconds

    def predict(self, work: Work, count: int) -> float:
        """Predicted seconds for `count` bytes; 0 before the first measurement."""
        return self._per_byte.get(work, 0.0) * count

    def allows(self, work: Work, count: int) -> bool:
        """Whether there is time for `count` bytes in this iteration."""
        return not self._busy or self.predict(work, count) <= self._left

    @contextlib.contextmanager
    def spend(self, work: Work, count: int) -> Generator[None]:
        """Measures the time of the enclosed work on `count` bytes."""
        began = self._clock()
        yield
        seconds = self._clock() - began
        if self._busy:
            self._left -= seconds
        before = self._per_byte.get(work, seconds / count)
        self._per_byte[work] = before + WEIGHT * (min(seconds / count, HICCUP * before) - before)


@dataclass(eq=False)
class Arrival(Generic[Of]):
    """A chunk that is being read or checksummed."""

    of: Of
    offer: ChunkReady
    space: KvChunk
    peer: Peer
    reading: RemoteRead
    summed: Summed | None = None  # its checksum; None: the read is not complete


class KvReceiver(Generic[Of]):
    """The receive buffer of a worker and the transfers into it. Only the loop's thread may use it."""

    def __init__(
        self,
        parcels: KvChunkLayout,
        transport: Transport,
        memory: ParcelMemory,
        budget: ReceiveBudget,
        clock: Callable[[], float],
    ) -> None:
        """Raises ConfigError if the transport cannot write to this process's memory."""
        self.under_way: list[Arrival[Of]] = []
        self.budget = budget
        self._parcels, self._memory = parcels, memory
        self._landing = memory.make(memory.sizes.landing)
        self._landing_B = memory.tensor(self._landing)
        self._told = transport.landing(self._landing)
        self._lender = TransferBufferPool(memory.sizes.landing, clock)
        self._placing: deque[tuple[KvChunk, Ended]] = deque()  # verified, and being scattered into pages

    @property
    def sizes(self) -> list[int]:
        """Bytes of each chunk in progress."""
        return [arrival.offer.ticket.size for arrival in self.under_way]

    def read(self, of: Of, offer: ChunkReady, peer: Peer) -> bool:
        """Begins to read a chunk; False if there is no room or no time for it in this iteration.

        Raises TransferFailed if it cannot be read.
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
        """Verifies a chunk and scatters it into a job's pages; False if it has not arrived yet, or if there is no time
        for it in this iteration.

        Raises TransferFailed, and drops the chunk, if its read has failed or its checksum is wrong.
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
                    raise TransferFailed(f"wrong checksum of KV chunk {ticket.id} of epoch {ticket.epoch}")
                placed = self._memory.scatter(self._parcels, arrival.offer.piece, pages, parcel_B)
        except TransferFailed:
            self._forget(arrival)
            raise
        self.under_way.remove(arrival)
        self._placing.append((arrival.space, placed))
        return True

    def patience(self) -> float:
        """Seconds that this iteration may wait for transfers in progress: on a GPU they complete long before the next
        iteration."""
        return self.budget.patience(self._memory.patience_s, max(self.sizes)) if self.under_way else 0.0

    def wait(self) -> None:
        """Sleeps for LOOK_S seconds and charges the time to the budget."""
        began = clock.perf_counter()
        clock.sleep(LOOK_S)
        self.budget.charge(clock.perf_counter() - began)

    def cancel(self, of: Of) -> list[ChunkReady]:
        """Cancels all reads for an owner: returns once none of its chunks can arrive any more. -> their offers."""
        cancelled = [arrival for arrival in self.under_way if arrival.of is of]
        for arrival in cancelled:
            arrival.reading.cancel()
            self._forget(arrival)
        return [arrival.offer for arrival in cancelled]

    def check(self) -> None:
        """Raises AssertionError unless every byte of the buffer is free, or belongs to a chunk that is being read or
        scattered into pages."""
        self._lender.check()
        held = [one.space.id for one in self.under_way] + [space.id for space, _ in self._placing]
        assert sorted(one.id for one in self._lender.lent) == sorted(held)

    def _forget(self, arrival: Arrival[Of]) -> None:
        self.under_way.remove(arrival)
        self._lender.drop(arrival.space)
