"""A whole KV page as one block of bytes, all layers and the drafter's part, in the layout of a parcel of that page
(`run/kv_chunks.py`).

On a GPU many pages are copied together: one launch gathers their layers into one buffer on the device, one computes
their checksums there, and each page is then a single copy to its place in host memory; or the same in reverse. So
nearly all of the time is spent in copies. Nothing waits for the device.

L layers, N pages that are copied together, B bytes, W words.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.by_chip import checksum, checksums
from redline.messages.job import PageHash, PageId
from redline.ops import checksum as meaning
from redline.run.kv import KvPool
from redline.run.kv_chunks import KvChunkLayout

TOGETHER = 16  # pages that a GPU gathers or scatters at once: two buffers of some 70 MB of its memory for Kimi


class Taken(NamedTuple):
    """Pages with launched or finished copies. sums: int64 [N] on the device, bits are the checksums; None: not
    computed. gathered: event after which the pages may be overwritten; None: at once."""

    sums: Tensor | None
    gathered: torch.cuda.Event | None


class WholePages:
    """Copies between the pages of a pool and host memory, for pages that are not written by others.

    One thread at a time may take pages, and one may put pages, each on a stream of its own if there are streams.
    """

    def __init__(self, kv: KvPool, together: int | None = None) -> None:
        """together: pages that are gathered in a device buffer at once; None: TOGETHER on a GPU; on a CPU each page
        is copied directly."""
        self._kv = kv
        self._planes_LPB = kv.planes.view(torch.uint8).flatten(2)
        self._draft_PB = kv.draft.view(torch.uint8).flatten(1)
        self._tails_PB = kv.tails.view(torch.uint8)
        layers, _, width = self._planes_LPB.shape
        self._sizes = layers * width, self._draft_PB.shape[1], self._tails_PB.shape[1]
        self.size = sum(self._sizes)  # bytes per page
        self.format = KvChunkLayout(kv, self.size).format
        self.device = kv.planes.device
        self.nobody = PageId(kv.pages)  # the spare page, for writes to be discarded
        self._gpu = self.device.type == "cuda"
        self.together = together or (TOGETHER if self._gpu else 1)
        self._out_NB = self._in_NB = None
        if self._gpu or together is not None:
            with torch.inference_mode(False):  # a thread that is not in inference mode writes to them too
                shape = 2, self.together, self.size
                self._out_NB, self._in_NB = torch.empty(shape, dtype=torch.uint8, device=self.device)
        # Eight bytes at a time if all sizes are multiples of that: indexing single bytes takes seven times as long.
        word = torch.int64 if all(size % 8 == 0 for size in (*self._sizes, width)) else torch.uint8
        self._parts_PW = (
            self._planes_LPB.view(word).transpose(0, 1),  # [pages, layers, words]
            *(part_PB.view(word) if part_PB.numel() else part_PB for part_PB in (self._draft_PB, self._tails_PB)),
        )

    @property
    def placed(self) -> torch.cuda.Event | None:
        """`KvPool.placed`."""
        return self._kv.placed

    def take(self, pages: Sequence[PageId], into: Sequence[Tensor], seeds: Sequence[int]) -> Taken:
        """Copies at most `together` pages to the host; on a GPU the copies are only launched, on the caller's
        stream. into: for each page uint8 [size] on the host. seeds: of their checksums."""
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
        """Copies pages from the host, otherwise as `take` -> int64 [N], bits are the checksums of the received bytes.

        The device computes them: a host thread would take ten times as long as the copy."""
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
        """The parts of the rows, in the shapes of `_parts_PW`."""
        parts = [
            part.view(whole.dtype) for part, whole in zip(rows_NB.split(self._sizes, 1), self._parts_PW, strict=True)
        ]
        return parts[0].unflatten(1, (self._planes_LPB.shape[0], -1)), *parts[1:]

    def _sent(self, pages: Sequence[PageId]) -> Tensor:
        """The page ids on the device; a copy to a GPU is queued on the stream without waiting."""
        index = torch.tensor(pages, dtype=torch.int64)
        return index.pin_memory().to(self.device, non_blocking=True) if self._gpu else index

    def _mark(self) -> torch.cuda.Event | None:
        if not self._gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def staged_bytes(page_bytes: int) -> int:
    """Bytes of GPU memory that its `WholePages` take."""
    return 2 * TOGETHER * page_bytes


def seal(bytes_B: Tensor, seed: int) -> int:
    """The checksum of a page's bytes under its seed: the same bytes under another page's hash have another checksum."""
    return meaning.number(checksum(bytes_B, seed))


def seed_of(hash: PageHash, flags: int) -> int:
    """The seed of a page's checksum, from its hash and flags."""
    return (int.from_bytes(hash[:8], "little") ^ flags) % 2**64
