"""KV data that rank 0 receives for all tensor parallel ranks: chunks of another worker, and pages of KV offload tiers.

Both are in memory that the ranks share, on the host or on rank 0's GPU. Rank 0 verifies them and sends a command to the
other ranks, which copy the same bytes into the same pages before the first step that reads them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.messages.handoff import Piece
from redline.messages.job import PAGE_TOKENS, PageId
from redline.run.kv import KvPool
from redline.run.kv_chunks import KvChunkLayout
from redline.transport.base import MemoryRange
from redline.transport.peer import GpuDriver
from redline.worker.parcel_memory import BufferSizes, Ended, HostParcels, ParcelMemory, Summed, pin
from redline.worker.ranks import Ranks


class RankParcels:
    """A `ParcelMemory` of rank 0: chunks are received into memory that the ranks share, and copied to all ranks' pages.

    Chunks are sent by rank 0 alone, since pages are replicated on every rank.
    """

    def __init__(self, ranks: Ranks, own: ParcelMemory, chip: GpuDriver | None = None) -> None:
        """own: handles rank 0's own pages. chip: the GPU that allocates the shared memory; None: host memory."""
        self._ranks, self._own, self._chip = ranks, own, chip
        self.fill_s, self.patience_s = own.fill_s, own.patience_s

    @property
    def sizes(self) -> BufferSizes:
        """As `ParcelMemory.sizes`."""
        return self._own.sizes

    def make(self, size: int) -> MemoryRange:
        """As `ParcelMemory.make`."""
        return self._ranks.share(size) if self._chip is None else self._ranks.export(self._chip, size)

    def tensor(self, memory: MemoryRange) -> Tensor:
        """As `ParcelMemory.tensor`."""
        return self._own.tensor(memory)

    def gather(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.gather`, from the pages of rank 0."""
        return self._own.gather(parcels, piece, pages, into_B, seed)

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.sum`."""
        return self._own.sum(parcel_B, seed)

    def scatter(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """As `ParcelMemory.scatter`, into the pages of every rank. Raises RankLost, now or when the result is polled,
        if a rank is down."""
        theirs = self._ranks.scatter(piece, [PageId(page) for page in pages], from_B)
        ours = self._own.scatter(parcels, piece, pages, from_B)
        return lambda: theirs() and ours()


class RankPages:
    """Copies whole pages of rank 0's offload store into all ranks' pages (`run.tiers.store.Others`)."""

    def __init__(self, ranks: Ranks, kv: KvPool) -> None:
        """kv: rank 0's pool."""
        parcels = KvChunkLayout(kv)
        page = 0, PAGE_TOKENS
        self._ranks, self._gpu = ranks, kv.planes.is_cuda
        self._whole = Piece(layers=(0, parcels.layers), positions=page, draft=page if parcels.drafts else (0, 0))

    def memory(self, size: int) -> Tensor:
        """As `Others.memory`."""
        memory = self._ranks.share(size)
        with torch.inference_mode(False):  # the store's thread, which is not in inference mode, writes to it too
            memory_B = HostParcels().tensor(memory)
        if self._gpu:
            pin(memory_B, memory)
        return memory_B

    def put(self, page: PageId, bytes_B: Tensor) -> Ended:
        """As `Others.put`."""
        return self._ranks.scatter(self._whole, [page], bytes_B)
