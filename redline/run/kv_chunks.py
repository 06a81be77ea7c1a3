"""Contents of a parcel, the unit of KV transfer: some layers of some positions of a job's pages, gathered into one
block of bytes.

The layers of a page are far apart, each in its own plane, as attention reads them. A network or a second GPU would read
pieces of one page and one layer at a tenth of its bandwidth (docs/kv_transfer.md). So the prefill worker gathers them
into megabytes, and the decode worker scatters them into pages of its own, with page ids of its own. A parcel is

    the target's rows    [layers, positions, bytes of a row]
    the drafter's rows   [places, bytes of a row]                 in the parcel with the last layers, with a drafter
    its tails            [full pages, bytes of a feature]         in the same parcel

Positions of a page after the last one to transfer are not sent.

L layers, N positions, B bytes, W words of a row.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from redline.messages.handoff import Piece
from redline.messages.job import PAGE_TOKENS, PageId
from redline.run.kv import KvPool

VERSION = 1
PARCEL_BYTES = 4 << 20  # largest size, unless one layer of one page is larger


class KvChunkLayout:
    """Converts between the pages of a pool and parcels. `format` identifies the contents of this pool's parcels;
    only workers with the same format exchange parcels."""

    def __init__(self, kv: KvPool, most: int = PARCEL_BYTES) -> None:
        """most: bytes of the target's rows per parcel, unless one layer of one page is larger."""
        planes, draft, tails = kv.planes, kv.draft, kv.tails
        self._kv = kv
        self.layers = planes.shape[0]
        self._rows_LNB = planes.view(torch.uint8).flatten(1, 2)
        # Eight bytes at a time if rows are a multiple of that: indexing single bytes takes seven times as long.
        self._word = torch.int64 if self._rows_LNB.shape[2] % 8 == 0 else torch.uint8
        # The rows of all layers as one dimension: with layers as a dimension of its own, torch launches one copy for
        # every few layers of a large pool, since it counts bytes in 32 bits.
        self._rows_MW = self._rows_LNB.view(self._word).flatten(0, 1)
        self._starts_L = torch.arange(self.layers, device=planes.device) * self._rows_LNB.shape[1]
        self._draft_NB = draft.view(torch.uint8).flatten(0, 1)
        self._tails_PB = tails.view(torch.uint8)
        target = f"{self.layers} x {planes.shape[-1]} {planes.dtype}"
        self.format = f"{VERSION}: {target}, {draft.shape[-1]}, {tails.shape[-1]} {tails.dtype}"
        self._most = most
        self._page = PAGE_TOKENS * self._rows_LNB.shape[2]  # bytes of one layer of a page

    @property
    def drafts(self) -> bool:
        """Whether the pages have rows of a drafter."""
        return self._draft_NB.shape[1] > 0

    def group(self, positions: int) -> int:
        """Number of layers of `positions` positions that fill a parcel; at least one."""
        return max(1, self._most // max(1, self._page * positions // PAGE_TOKENS))

    def pieces(self, first: int, end: int, draft_end: int, layers: tuple[int, int] | None = None) -> Iterator[Piece]:
        """Positions [first, end) of some layers (None: all) as pieces. first: begins a page.

        draft_end: the drafter's rows at places [first, draft_end) go with the last layer; `end`, or one more.
        """
        lowest, highest = layers or (0, self.layers)
        count = max(1, min(highest - lowest, self._most // self._page))  # layers of a parcel, at most
        pages = max(1, self._most // (self._page * count)) if count == highest - lowest else 1
        for at in range(first, end, pages * PAGE_TOKENS):
            to = min(at + pages * PAGE_TOKENS, end)
            for layer in range(lowest, highest, count):
                last = min(layer + count, highest)
                draft = (at, draft_end if to == end else to) if last == self.layers and self.drafts else (0, 0)
                yield Piece(layers=(layer, last), positions=(at, to), draft=draft)

    def size(self, piece: Piece) -> int:
        """Bytes of a parcel."""
        return sum(part[0] * part[1] for part in self._shapes(piece))

    def gather(self, piece: Piece, pages: Sequence[int], into_B: Tensor) -> None:
        """Fills a parcel, after the work launched earlier on the caller's stream.

        pages: of the job, from its first on. into_B: uint8 [size], aligned to a word, on the pages' device or on the
        host; a copy to the host blocks until it is done."""
        rows = self._target(pages, piece)
        parcel_B = into_B if into_B.device == rows.device else torch.empty_like(into_B, device=rows.device)
        target, draft, tails = self._split(piece, parcel_B)
        torch.index_select(self._rows_MW, 0, rows, out=target.view(self._word))
        if draft.numel():
            torch.index_select(self._draft_NB, 0, self._index(pages, *piece.draft), out=draft)
        if tails.numel():
            torch.index_select(self._tails_PB, 0, self._full(pages, piece), out=tails)
        if parcel_B is not into_B:
            into_B.copy_(parcel_B)

    def scatter(self, piece: Piece, pages: Sequence[int], from_B: Tensor) -> None:
        """Writes a parcel into a job's pages. Arguments as in `gather`."""
        rows = self._target(pages, piece)
        target, draft, tails = self._split(piece, from_B.to(rows.device))
        self._rows_MW.index_copy_(0, rows, target.view(self._word))
        if draft.numel():
            self._draft_NB.index_copy_(0, self._index(pages, *piece.draft), draft)
        if tails.numel():
            self._tails_PB.index_copy_(0, self._full(pages, piece), tails)

    def placed(self, event: torch.cuda.Event) -> None:
        """Sets the event at the end of a `scatter` on the GPU's stream of steps."""
        self._kv.placed = event

    def fits(self, piece: Piece, pages: Sequence[int], size: int) -> bool:
        """Whether a piece received from another worker lies within these pages and has `size` bytes."""
        (first, last), (at, to), (place, end) = piece.layers, piece.positions, piece.draft
        there = len(pages) * PAGE_TOKENS
        return (
            0 <= first < last <= self.layers
            and 0 <= at < to <= there
            and at % PAGE_TOKENS == 0
            and 0 <= place <= end <= there
            and (place == end or (place == at and last == self.layers and self.drafts))
            and self.size(piece) == size
        )

    def _shapes(self, piece: Piece) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        (first, last), (at, to), (place, end) = piece.layers, piece.positions, piece.draft
        tails = to // PAGE_TOKENS - at // PAGE_TOKENS if end > place else 0
        return (
            ((last - first) * (to - at), self._rows_LNB.shape[2]),
            (end - place, self._draft_NB.shape[1]),
            (tails, self._tails_PB.shape[1]),
        )

    def _split(self, piece: Piece, parcel_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shapes = self._shapes(piece)
        target, draft, tails = parcel_B.split([rows * width for rows, width in shapes])
        return target.view(*shapes[0]), draft.view(*shapes[1]), tails.view(*shapes[2])

    def _target(self, pages: Sequence[int], piece: Piece) -> Tensor:
        """Row indices of the target's rows of a piece, layer by layer."""
        first, last = piece.layers
        return (self._starts_L[first:last, None] + self._index(pages, *piece.positions)).flatten()

    def _index(self, pages: Sequence[int], first: int, end: int) -> Tensor:
        page = torch.tensor(pages[first // PAGE_TOKENS : -(-end // PAGE_TOKENS)], dtype=torch.int64)
        rows = (page[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
        skipped = first % PAGE_TOKENS
        assert len(rows) >= skipped + end - first, f"positions [{first}, {end}) of a job that has {len(pages)} pages"
        return self._sent(rows[skipped : skipped + end - first])

    def _full(self, pages: Sequence[int], piece: Piece) -> Tensor:
        at, to = piece.positions
        return self._sent(torch.tensor(pages[at // PAGE_TOKENS : to // PAGE_TOKENS]))

    def _sent(self, index: Tensor) -> Tensor:
        """The index on the pages' device; a copy to a GPU is queued on the stream without waiting."""
        there = self._rows_LNB.device
        return index if there.type == "cpu" else index.pin_memory().to(there, non_blocking=True)


def of_its_pages(piece: Piece, pages: Sequence[PageId]) -> tuple[Piece, tuple[PageId, ...]]:
    """The piece relative to the pages that it touches, and these pages. pages: of the job, from its first on."""
    (at, to), (place, end) = piece.positions, piece.draft
    first = at // PAGE_TOKENS
    skipped = first * PAGE_TOKENS
    draft = (place - skipped, end - skipped) if end > place else piece.draft
    moved = Piece(layers=piece.layers, positions=(at - skipped, to - skipped), draft=draft)
    return moved, tuple(pages[first : -(-max(to, end) // PAGE_TOKENS)])
