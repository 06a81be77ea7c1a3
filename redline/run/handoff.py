"""What travels in a parcel: some layers of some positions of a job's pages, gathered into one piece of bytes.

A page's layers lie far apart, each in its plane, since that is how attention reads them; in pieces of one page and
layer a network, or a second GPU, is read at a tenth of its speed (docs/handoff.md). So whoever computes gathers them
into megabytes, and whoever answers puts them into pages of its own, whose numbers are its own affair. A parcel is

    the target's rows    [layers, positions, bytes of a row]
    the drafter's rows   [places, bytes of a row]                 in the parcel with the last layers, where there is one
    its tails            [full pages, bytes of a feature]         likewise

What is behind the last position in its page does not travel.

L layers, N positions, B bytes, W words of a row.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from redline.run.kv import KvPool
from redline.wire.handoff import Piece
from redline.wire.job import PAGE_TOKENS, PageId

VERSION = 1
PARCEL_BYTES = 4 << 20  # at most, where a page of one layer is no more


class Parcels:
    """Between the pages of a pool and parcels. `format` names what parcels of this pool hold: others have another."""

    def __init__(self, kv: KvPool, most: int = PARCEL_BYTES) -> None:
        """most: bytes of the target's rows in a parcel, where a page of one layer is no more."""
        planes, draft, tails = kv.planes, kv.draft, kv.tails
        self._kv = kv
        self.layers = planes.shape[0]
        self._rows_LNB = planes.view(torch.uint8).flatten(1, 2)
        # Eight bytes at a time where rows have so many: a byte at a time, indexing takes seven times as long.
        self._word = torch.int64 if self._rows_LNB.shape[2] % 8 == 0 else torch.uint8
        # Rows of all layers one behind the other: with layers as a dimension torch launches a copy for each few layers
        # of a large pool, since it counts bytes in 32 bits.
        self._rows_MW = self._rows_LNB.view(self._word).flatten(0, 1)
        self._starts_L = torch.arange(self.layers, device=planes.device) * self._rows_LNB.shape[1]
        self._draft_NB = draft.view(torch.uint8).flatten(0, 1)
        self._tails_PB = tails.view(torch.uint8)
        target = f"{self.layers} x {planes.shape[-1]} {planes.dtype}"
        self.format = f"{VERSION}: {target}, {draft.shape[-1]}, {tails.shape[-1]} {tails.dtype}"
        self._most = most
        self._page = PAGE_TOKENS * self._rows_LNB.shape[2]  # bytes of one layer

    @property
    def drafts(self) -> bool:
        """Whether the pages have rows of a drafter."""
        return self._draft_NB.shape[1] > 0

    def group(self, positions: int) -> int:
        """How many layers of so many positions fill a parcel; one, where it holds less."""
        return max(1, self._most // max(1, self._page * positions // PAGE_TOKENS))

    def pieces(self, first: int, end: int, draft_end: int, layers: tuple[int, int] | None = None) -> Iterator[Piece]:
        """Positions [first, end) of some layers, None: of all, as pieces. first: begins a page.

        draft_end: the drafter's rows at places [first, draft_end) go with the last layer; end, or one more.
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
        """Fill a parcel, once what was launched before on the caller's stream has run. pages: of the job, from its
        first on. into_B: uint8 [size], which begins at a whole word; of the pages' device, or of the host: then this
        waits for it."""
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
        """Put what a parcel holds into a job's pages. As in `gather`."""
        rows = self._target(pages, piece)
        target, draft, tails = self._split(piece, from_B.to(rows.device))
        self._rows_MW.index_copy_(0, rows, target.view(self._word))
        if draft.numel():
            self._draft_NB.index_copy_(0, self._index(pages, *piece.draft), draft)
        if tails.numel():
            self._tails_PB.index_copy_(0, self._full(pages, piece), tails)

    def placed(self, event: torch.cuda.Event) -> None:
        """A GPU's stream of steps has the end of a `scatter` here."""
        self._kv.placed = event

    def fits(self, piece: Piece, pages: Sequence[int], size: int) -> bool:
        """Whether a piece that somebody else has told of is one of these pages, and has so many bytes."""
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
        """Where the target's rows of a piece lie, layer by layer."""
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
        """On the pages' device; to a GPU it goes behind what the stream has, and nobody waits."""
        there = self._rows_LNB.device
        return index if there.type == "cpu" else index.pin_memory().to(there, non_blocking=True)


def of_its_pages(piece: Piece, pages: Sequence[PageId]) -> tuple[Piece, tuple[PageId, ...]]:
    """The piece as one of the pages that it touches alone, and these. pages: of the job, from its first on."""
    (at, to), (place, end) = piece.positions, piece.draft
    first = at // PAGE_TOKENS
    skipped = first * PAGE_TOKENS
    draft = (place - skipped, end - skipped) if end > place else piece.draft
    moved = Piece(layers=piece.layers, positions=(at - skipped, to - skipped), draft=draft)
    return moved, tuple(pages[first : -(-max(to, end) // PAGE_TOKENS)])
