"""A whole page as one piece of bytes, all layers and the drafter's part, laid out as a parcel of that page is
(`run/handoff.py`).

On a GPU many go together: their layers are gathered into one piece of its memory and added up there, by a launch each,
and every page is one copy of its own to where it lies on the host; or the same backwards. Copies take all the time then
that there is. Nothing waits for the device.

L layers, N pages that go together, B bytes, W words.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.by_chip import checksum, checksums
from redline.ops import checksum as meaning
from redline.run.handoff import Parcels
from redline.run.kv import KvPool
from redline.wire.job import PageHash, PageId

TOGETHER = 16  # pages that a GPU gathers or places at once: some 70 MB of Kimi's, twice, of its memory


class Taken(NamedTuple):
    """Pages whose copies are launched, or done. sums: int64 [N] on the device, whose bits are their seals; None: nobody
    has added them up. gathered: from here on the pages may be overwritten; None: at once."""

    sums: Tensor | None
    gathered: torch.cuda.Event | None


class WholePages:
    """Between the pages of a pool and the host's memory, for pages that nobody else writes.

    One thread at a time may take pages, and one may put some, each on a stream of its own where there are streams.
    """

    def __init__(self, kv: KvPool, together: int | None = None) -> None:
        """together: pages that go by way of memory of the device at once; None: on a GPU TOGETHER, and on a CPU each
        goes by itself, straight."""
        self._planes_LPB = kv.planes.view(torch.uint8).flatten(2)
        self._draft_PB = kv.draft.view(torch.uint8).flatten(1)
        self._tails_PB = kv.tails.view(torch.uint8)
        layers, _, width = self._planes_LPB.shape
        self._sizes = layers * width, self._draft_PB.shape[1], self._tails_PB.shape[1]
        self.size = sum(self._sizes)  # bytes of a page
        self.format = Parcels(kv, self.size).format
        self.device = kv.planes.device
        self.nobody = PageId(kv.pages)  # the page that takes what must be written somewhere
        self._gpu = self.device.type == "cuda"
        self.together = together or (TOGETHER if self._gpu else 1)
        self._out_NB = self._in_NB = None
        if self._gpu or together is not None:
            with torch.inference_mode(False):  # a thread that is not in that mode writes to it too
                shape = 2, self.together, self.size
                self._out_NB, self._in_NB = torch.empty(shape, dtype=torch.uint8, device=self.device)
        # Eight bytes at a time where there are so many: a byte at a time, indexing takes seven times as long.
        word = torch.int64 if all(size % 8 == 0 for size in (*self._sizes, width)) else torch.uint8
        self._parts_PW = (
            self._planes_LPB.view(word).transpose(0, 1),  # [pages, layers, words]
            *(part_PB.view(word) if part_PB.numel() else part_PB for part_PB in (self._draft_PB, self._tails_PB)),
        )

    def take(self, pages: Sequence[PageId], into: Sequence[Tensor], seeds: Sequence[int]) -> Taken:
        """Copies at most `together` pages out; on a GPU it is only launched, on the stream of the caller. into: for
        each uint8 [size], of the host. seeds: of their seals."""
        if self._out_NB is None:
            for page, into_B in zip(pages, into, strict=True):
                target_LB, draft_B, tail_B = self._split(into_B)
                target_LB.copy_(self._planes_LPB[:, page])
                draft_B.copy_(self._draft_PB[page])
                tail_B.copy_(self._tails_PB[page])
            return Taken(None, None)
        rows_NB = self._out_NB[: len(pages)]
        index = self._sent(pages)
        for part_PW, to_NW in zip(self._parts_PW, self._split_rows(rows_NB), strict=True):
            if to_NW.numel():
                torch.index_select(part_PW, 0, index, out=to_NW)
        gathered = self._mark()
        sums = checksums(rows_NB, tuple(seeds))
        for row_B, into_B in zip(rows_NB, into, strict=True):
            into_B.copy_(row_B, non_blocking=True)
        return Taken(sums, gathered)

    def put(self, pages: Sequence[PageId], sources: Sequence[Tensor], seeds: Sequence[int]) -> Tensor:
        """Copies pages in, else as `take` -> int64 [N], whose bits are the seals of the bytes that have come.

        The device adds them up: for a thread of a GPU's host that takes ten times as long as the way there."""
        if self._in_NB is None:
            sums = list[Tensor]()
            for page, source_B, seed in zip(pages, sources, seeds, strict=True):
                target_LB, draft_B, tail_B = self._split(source_B)
                self._planes_LPB[:, page].copy_(target_LB)
                self._draft_PB[page].copy_(draft_B)
                self._tails_PB[page].copy_(tail_B)
                sums.append(checksum(source_B, seed))
            return torch.stack(sums)
        rows_NB = self._in_NB[: len(pages)]
        for row_B, source_B in zip(rows_NB, sources, strict=True):
            row_B.copy_(source_B, non_blocking=True)
        index = self._sent(pages)
        for part_PW, from_NW in zip(self._parts_PW, self._split_rows(rows_NB), strict=True):
            if from_NW.numel():
                part_PW.index_copy_(0, index, from_NW)
        return checksums(rows_NB, tuple(seeds))

    def _split(self, page_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        target, draft, tail = page_B.split(self._sizes)
        return target.view(self._planes_LPB.shape[0], -1), draft, tail

    def _split_rows(self, rows_NB: Tensor) -> tuple[Tensor, ...]:
        """As `_parts_PW` has them."""
        parts = [
            part.view(whole.dtype) for part, whole in zip(rows_NB.split(self._sizes, 1), self._parts_PW, strict=True)
        ]
        return parts[0].unflatten(1, (self._planes_LPB.shape[0], -1)), *parts[1:]

    def _sent(self, pages: Sequence[PageId]) -> Tensor:
        """Their numbers on the device; to a GPU they go behind what the stream has, and nobody waits."""
        index = torch.tensor(pages, dtype=torch.int64)
        return index.pin_memory().to(self.device, non_blocking=True) if self._gpu else index

    def _mark(self) -> torch.cuda.Event | None:
        if not self._gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def staged_bytes(page_bytes: int) -> int:
    """Bytes of a GPU's memory that its `WholePages` take."""
    return 2 * TOGETHER * page_bytes


def seal(bytes_B: Tensor, seed: int) -> int:
    """The checksum of a page's bytes under its seed: bytes under another page's name do not have it."""
    return meaning.number(checksum(bytes_B, seed))


def seed_of(hash: PageHash, flags: int) -> int:
    """The seed of a page's seal, by its name and flags."""
    return (int.from_bytes(hash[:8], "little") ^ flags) % 2**64
