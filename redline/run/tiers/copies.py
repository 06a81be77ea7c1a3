"""Copies of whole pages that are under way: on a GPU a stream for those that leave and one for those that come, what
waits for what, and the seals of what was copied.

Nothing here waits, but where it says so. On a CPU a copy is done when its call returns.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline import clock
from redline.run.tiers.pages import WholePages
from redline.wire.job import PageId

SUMS = 512  # seals of a piece of memory, which is pinned: most that are saved together are fewer
MADE = 8  # as many copies, one behind another, are launched at the start: what they take of the host is there then


class Copied(NamedTuple):
    """Copies that are launched. ended: None: they are done. sums: the seals of the pages, int64, on the host once they
    have ended; None: nobody has added them up."""

    ended: torch.cuda.Event | None
    sums: Tensor | None


class Leaving(NamedTuple):
    """A page that is to be copied to the host: uint8 [bytes of a page] there, and the seed of its seal."""

    page: PageId
    into_B: Tensor
    seed: int


class Copies:
    """Between one engine's pages and the host's memory. One thread at a time may save, and one may bring."""

    def __init__(self, pages: WholePages) -> None:
        self._pages = pages
        self._gpu = pages.device.type == "cuda"
        # Before the blocks of steps that wait.
        self._out, self._in = (torch.cuda.Stream(pages.device, priority=-1) if self._gpu else None for _ in range(2))
        self._gathered: dict[
            PageId, torch.cuda.Event
        ] = {}  # of pages that were saved: from when they may be overwritten

    def save(self, leaving: Sequence[Leaving]) -> Copied:
        """Copies pages to the host, in this order. What is launched on the stream of steps from then on may overwrite
        them, and so may what is brought."""
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
        """What is brought from now on comes behind it."""
        if self._in is not None:
            self._in.wait_event(event)

    def bring(self, pages: Sequence[PageId], sources: Sequence[Tensor], seeds: Sequence[int]) -> Copied:
        """Copies pages from the host to their places, once what was saved from there is gathered. As
        `WholePages.put`."""
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
        """The host waits until nothing is being brought any more."""
        if self._in is not None:
            self._in.synchronize()

    def close(self) -> None:
        """The host waits until nothing is under way any more."""
        self.brought()
        if self._out is not None:
            self._out.synchronize()

    def measure(self, page_B: Tensor, clock: Callable[[], float] = clock.perf_counter) -> float:
        """Seconds that a page takes to be brought, of as many as go together: zeros, by way of memory of the host of a
        page's size, into nobody's. What copies need is compiled and made by then."""
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
        """The end of what was launched on this stream; None where it is done."""
        if not self._gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _behind_parcels(self, stream: torch.cuda.Stream | None) -> None:
        """A parcel that came from another worker may still be on its way into a page that has been given away since."""
        placed = self._pages.placed
        if stream is not None and placed is not None and not placed.query():
            stream.wait_event(placed)

    def _sums(self, pages: int) -> Tensor:
        """Memory of the host for so many seals; pieces of one size, so that those that are no longer used do again."""
        return torch.empty(max(SUMS, pages), dtype=torch.int64, pin_memory=self._gpu)[:pages]


def wait(event: torch.cuda.Event | None) -> None:
    """The host waits until a GPU has come to it."""
    if event is not None:
        event.synchronize()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Inside, a GPU's work goes to this stream."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
