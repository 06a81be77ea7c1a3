"""Asynchronous copies of whole pages: on a GPU one stream for saves and one for fetches, their dependencies, and the
checksums of the copied pages.

Calls block only if their docstring states it. On a CPU a copy is done when its call returns.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline import clock
from redline.messages.job import PageId
from redline.run.tiers.pages import WholePages

SUMS = 512  # checksums per block of pinned memory: more than are ever saved together
MADE = 8  # copies launched in a row at startup, so that their host resources are allocated by then


class Copied(NamedTuple):
    """Launched copies. ended: event at their end; None: they are done. sums: the checksums of the pages, int64 on
    the host, valid once the copies have ended; None: not computed."""

    ended: torch.cuda.Event | None
    sums: Tensor | None


class Leaving(NamedTuple):
    """A page to copy to the host, with its target there, uint8 [bytes of a page], and the seed of its checksum."""

    page: PageId
    into_B: Tensor
    seed: int


class Copies:
    """Copies between one engine's pages and host memory. One thread at a time may save, and one may bring."""

    def __init__(self, pages: WholePages) -> None:
        self._pages = pages
        self._gpu = pages.device.type == "cuda"
        # High priority: ahead of the waiting thread blocks of steps.
        self._out, self._in = (torch.cuda.Stream(pages.device, priority=-1) if self._gpu else None for _ in range(2))
        # By saved page: the event after which it may be overwritten
        self._gathered: dict[PageId, torch.cuda.Event] = {}

    def save(self, leaving: Sequence[Leaving]) -> Copied:
        """Copies pages to the host, in this order. Work launched on the stream of steps from then on may overwrite
        them, and so may later calls of `bring`."""
        sums: Tensor | None = None
        gathered: torch.cuda.Event | None = None
        self._behind_parcels(self._out)
        with _on(self._out):
            for at in range(0, len(leaving), self._pages.together):
                pages, into, seeds = zip(*leaving[at : at + self._pages.together], strict=True)
                taken = self._pages.take(pages, into, seeds)
                if taken.sums is not None:
                    if sums is None:
                        sums = self._sums(len(leaving))
                    sums[at : at + len(pages)].copy_(taken.sums, non_blocking=True)
                if (gathered := taken.gathered) is not None:
                    self._gathered.update(dict.fromkeys(pages, gathered))
            if gathered is not None:
                torch.cuda.default_stream(self._pages.device).wait_event(gathered)
            return Copied(self.mark(), sums)

    def after(self, event: torch.cuda.Event) -> None:
        """Later calls of `bring` wait for the event on the device."""
        if self._in is not None:
            self._in.wait_event(event)

    def bring(self, pages: Sequence[PageId], sources: Sequence[Tensor], seeds: Sequence[int]) -> Copied:
        """Copies pages from the host into the pool, after earlier saves of the same pages are gathered. Arguments as
        in `WholePages.put`."""
        gathered = [event for page in pages if (event := self._gathered.pop(page, None)) is not None]
        for event in {id(event): event for event in gathered}.values():
            self.after(event)
        self._behind_parcels(self._in)
        with _on(self._in):
            sums = self._pages.put(pages, sources, seeds)
            if self._gpu:
                sums = self._sums(len(pages)).copy_(sums, non_blocking=True)
            return Copied(self.mark(), sums)

    def brought(self) -> None:
        """Blocks until all copies into the pool have ended."""
        if self._in is not None:
            self._in.synchronize()

    def close(self) -> None:
        """Blocks until all copies have ended."""
        self.brought()
        if self._out is not None:
            self._out.synchronize()

    def measure(self, page_B: Tensor, clock: Callable[[], float] = clock.perf_counter) -> float:
        """Measures the seconds per page to copy a full batch from the host: zeros, from host memory of a page's
        size, into the spare page. Blocks. Also compiles and allocates what copies need."""
        count = self._pages.together
        page_B.zero_()
        nobody, seconds = [self._pages.nobody] * count, math.inf
        for _ in range(3):
            began = clock()
            wait(self.bring(nobody, [page_B] * count, [0] * count).ended)
            seconds = min(seconds, clock() - began)
        made = [self.save([Leaving(self._pages.nobody, page_B, 0)] * count) for _ in range(MADE)]
        wait(made[-1].ended)
        return seconds / count

    def mark(self) -> torch.cuda.Event | None:
        """Records an event after the work launched on the current stream; None on a CPU."""
        if not self._gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _behind_parcels(self, stream: torch.cuda.Stream | None) -> None:
        """Makes the stream wait for the last KV transfer from another worker: it may still be writing to a page that
        has been freed and reused since."""
        placed = self._pages.placed
        if stream is not None and placed is not None and not placed.query():
            stream.wait_event(placed)

    def _sums(self, pages: int) -> Tensor:
        """Host memory for the checksums of `pages` pages; blocks of one size, so that the allocator can reuse
        released ones."""
        return torch.empty(max(SUMS, pages), dtype=torch.int64, pin_memory=self._gpu)[:pages]


def wait(event: torch.cuda.Event | None) -> None:
    """Blocks until the GPU has reached the event."""
    if event is not None:
        event.synchronize()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Context manager: work on a GPU goes to this stream."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
