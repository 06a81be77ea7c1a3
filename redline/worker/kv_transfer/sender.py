"""The KV sender of a prefill worker: fills chunks from prompts' pages, and offers them once their checksum is known.

Other workers read the chunks from its area, under leases (`transport/ledger.py`). On a GPU, filling is an asynchronous
launch that takes less than a millisecond while a step runs: the loop's thread waits for it, since its next iteration
may come only after a whole prefill chunk.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from redline import clock
from redline.messages.handoff import Piece
from redline.messages.parcel import Ticket
from redline.run.kv_chunks import KvChunkLayout
from redline.transport.base import Transport
from redline.transport.ledger import KvChunk, TransferBufferPool
from redline.worker.parcel_memory import ParcelMemory, Summed

LEASE_S = 10.0  # duration of a lease: timeout, in seconds, for a chunk to be read
LOOK_S = 0.00002  # polling interval, in seconds, of chunks that are being filled

Of = TypeVar("Of")  # the owner of a chunk


class _Filling(NamedTuple, Generic[Of]):
    of: Of
    piece: Piece
    parcel: KvChunk
    summed: Summed


class KvSender(Generic[Of]):
    """The send buffer of a worker, from which other workers read KV chunks. Only the loop's thread may use it."""

    def __init__(
        self, parcels: KvChunkLayout, transport: Transport, memory: ParcelMemory, size: int, clock: Callable[[], float]
    ) -> None:
        """size: bytes of the area. Raises ConfigError if there is no room for it."""
        self.area = transport.area(size)
        self.lender = TransferBufferPool(size, clock)
        self.space_B = memory.tensor(self.area.memory)
        self._parcels, self._memory = parcels, memory
        self._filling: deque[_Filling[Of]] = deque()

    def fill(self, of: Of, piece: Piece, pages: Sequence[int], to: str) -> bool:
        """Begins to fill a chunk for the reader `to`; False if there is no room for it now."""
        size = self._parcels.size(piece)
        parcel = self.lender.lend(size, to, LEASE_S)
        if parcel is None:
            return False
        into_B = self.space_B[parcel.offset : parcel.offset + size]
        summed = self._memory.gather(self._parcels, piece, pages, into_B, parcel.seed)
        self._filling.append(_Filling(of, piece, parcel, summed))
        return True

    def filled(self) -> Iterator[tuple[Of, Piece, Ticket | None]]:
        """The chunks that have been filled since the last call, in the order of `fill`. Ticket None: the chunk's reader
        is down or its lease has expired, so its space is free again."""
        until = clock.perf_counter() + self._memory.fill_s
        while self._filling:
            one = self._filling[0]
            while not one.summed.ended():
                if clock.perf_counter() >= until:
                    return
                clock.sleep(LOOK_S)
            self._filling.popleft()
            yield one.of, one.piece, self.lender.offer(one.parcel, one.summed.number())
