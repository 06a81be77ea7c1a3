"""A whole page as one piece of bytes, all layers and the drafter's part, laid out as a parcel of that page is
(`run/handoff.py`).

L layers, B bytes.
"""

import torch
from torch import Tensor

from redline.kernels.by_chip import checksum
from redline.ops import checksum as meaning
from redline.run.handoff import Parcels
from redline.run.kv import KvPool
from redline.wire.job import PageHash, PageId


class WholePages:
    """Between the pages of a pool and the host's memory. Any thread may use it, for pages that nobody else writes."""

    def __init__(self, kv: KvPool) -> None:
        self._planes_LPB = kv.planes.view(torch.uint8).flatten(2)
        self._draft_PB = kv.draft.view(torch.uint8).flatten(1)
        self._tails_PB = kv.tails.view(torch.uint8)
        layers, _, width = self._planes_LPB.shape
        self._sizes = layers * width, self._draft_PB.shape[1], self._tails_PB.shape[1]
        self.size = sum(self._sizes)  # bytes of a page
        self.format = Parcels(kv, self.size).format
        self.device = kv.planes.device
        self.nobody = PageId(kv.pages)  # the page that takes what must be written somewhere

    def take(self, page: PageId, into_B: Tensor) -> None:
        """Copies a page out; on a GPU it is only launched, on the stream of the caller. into_B: uint8 [size], host."""
        target_LB, draft_B, tail_B = self._split(into_B)
        target_LB.copy_(self._planes_LPB[:, page], non_blocking=True)
        draft_B.copy_(self._draft_PB[page], non_blocking=True)
        tail_B.copy_(self._tails_PB[page], non_blocking=True)

    def put(self, page: PageId, from_B: Tensor, hash: PageHash, flags: int) -> Tensor:
        """Copies a page in, else as `take` -> int64 [], whose bits are the `seal` of the bytes that have come.

        The device adds them up: for a thread of a GPU's host that takes ten times as long as the way there."""
        here_B = from_B.to(self.device, non_blocking=True)
        target_LB, draft_B, tail_B = self._split(here_B)
        self._planes_LPB[:, page].copy_(target_LB)
        self._draft_PB[page].copy_(draft_B)
        self._tails_PB[page].copy_(tail_B)
        return checksum(here_B, _seed(hash, flags))

    def _split(self, page_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        target, draft, tail = page_B.split(self._sizes)
        return target.view(self._planes_LPB.shape[0], -1), draft, tail


def seal(bytes_B: Tensor, hash: PageHash, flags: int) -> int:
    """The checksum of a page's bytes under its name and flags: bytes under another page's name do not have it."""
    return meaning.number(checksum(bytes_B, _seed(hash, flags)))


def _seed(hash: PageHash, flags: int) -> int:
    return (int.from_bytes(hash[:8], "little") ^ flags) % 2**64
