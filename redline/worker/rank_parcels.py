"""What rank 0 brings in from outside, for every rank: parcels of another worker, and pages of memory below its cache.

Both lie in memory that the ranks share, of the host or of rank 0's GPU. Rank 0 verifies them and tells the others, who
put the same bytes into the same pages, before the first step that reads them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.run.handoff import Parcels
from redline.run.kv import KvPool
from redline.transport.base import Memory
from redline.transport.peer import Chip
from redline.wire.handoff import Piece
from redline.wire.job import PAGE_TOKENS, PageId
from redline.worker.parcel_memory import Ended, HostParcels, ParcelMemory, Sizes, Summed, pin
from redline.worker.ranks import Ranks


class RankParcels:
    """A `ParcelMemory` of rank 0: what comes lies in memory that ranks share, and goes into the pages of all.

    What leaves does so from rank 0 alone: pages are whole on every rank, and the same.
    """

    def __init__(self, ranks: Ranks, own: ParcelMemory, chip: Chip | None = None) -> None:
        """own: for what rank 0 does with its own pages. chip: the GPU whose memory it is; None: it is the host's."""
        self._ranks, self._own, self._chip = ranks, own, chip
        self.fill_s, self.patience_s = own.fill_s, own.patience_s

    @property
    def sizes(self) -> Sizes:
        """As `ParcelMemory.sizes`."""
        return self._own.sizes

    def make(self, size: int) -> Memory:
        """As `ParcelMemory.make`."""
        return self._ranks.share(size) if self._chip is None else self._ranks.export(self._chip, size)

    def tensor(self, memory: Memory) -> Tensor:
        """As `ParcelMemory.tensor`."""
        return self._own.tensor(memory)

    def gather(self, parcels: Parcels, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.gather`, from the pages of rank 0."""
        return self._own.gather(parcels, piece, pages, into_B, seed)

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.sum`."""
        return self._own.sum(parcel_B, seed)

    def scatter(self, parcels: Parcels, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """As `ParcelMemory.scatter`, into the pages of every rank. Raises RankLost, now or when it is asked, where one
        is lost."""
        theirs = self._ranks.scatter(piece, [PageId(page) for page in pages], from_B)
        ours = self._own.scatter(parcels, piece, pages, from_B)
        return lambda: theirs() and ours()


class RankPages:
    """Whole pages of rank 0's store (`run.tiers.store.Others`) that all ranks put into theirs."""

    def __init__(self, ranks: Ranks, kv: KvPool) -> None:
        """kv: of rank 0."""
        parcels = Parcels(kv)
        page = 0, PAGE_TOKENS
        self._ranks, self._gpu = ranks, kv.planes.is_cuda
        self._whole = Piece(layers=(0, parcels.layers), positions=page, draft=page if parcels.drafts else (0, 0))

    def memory(self, size: int) -> Tensor:
        """As `Others.memory`."""
        memory = self._ranks.share(size)
        with torch.inference_mode(False):  # the store's thread writes to it too, which is not in that mode
            memory_B = HostParcels().tensor(memory)
        if self._gpu:
            pin(memory_B, memory)
        return memory_B

    def put(self, page: PageId, bytes_B: Tensor) -> Ended:
        """As `Others.put`."""
        return self._ranks.scatter(self._whole, [page], bytes_B)
