"""The residual stream of a prompt's step, whose rows ranks divide among themselves.     T rows, D hidden, W any width.

Ranks add up what each has computed of a sublayer. Of steps of many rows a rank is given the sums of its own rows alone:
it adds them to its residual, norms them, and all gather what each has made of its rows. Of fewer than DIVIDED for each
rank all are whole on every rank. Rows that are divided come in parts, one of which is on its way while the other is
computed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from redline.kernels.group import ALONE, Group
from redline.kernels.hopper.prefill.rowwise import norm_rows

# Rows of a step, for each rank, from which ranks divide them. Measured at Kimi's sizes (prefill-two-h100.json,
# prefill-four-h100.json), milliseconds of a layer with rows divided in one part, in two, and with rows whole: two H100
# and 2,048 rows 4.1, 4.7, 4.3, 8,192 rows 12.9, 13.0, 13.7; four and 2,048 rows 3.7, 4.9, 3.5, 4,096 rows 4.6, 4.6
# and 5.0, 8,192 rows 8.4, 8.2, 9.3.
DIVIDED = 1024
PARTS, PART_ROWS = 2, 4096  # that rows come in, and at least so many rows of each


@dataclass(frozen=True)
class Part:
    """Rows of a step that come together, and the residual of those that are this rank's own."""

    rows: slice  # of the step
    evened: int  # how many they are with those of zeros behind them, so that each rank has as many
    residual: Tensor  # float32 [evened / ranks, D], or of all rows; changed in place
    sums: Callable[[], Tensor] | None = None  # gives once, float32 or bf16, what is to be added to it; None: nothing

    @property
    def count(self) -> int:
        """How many rows of the step there are."""
        return self.rows.stop - self.rows.start

    def of(self, whole_TW: Tensor) -> Tensor:
        """The part's rows of what all rows have, and zeros behind them: [evened, W]."""
        rows_W = whole_TW[self.rows]
        missing = self.evened - self.count
        return F.pad(rows_W, (0, 0, 0, missing)) if missing else rows_W


@dataclass(frozen=True)
class PromptStream:
    """What goes from block to block of a prompt's step, as `ResidualStream` does of tokens that decode."""

    tokens: int  # T
    divided: bool  # whether a rank has its own rows alone
    parts: tuple[Part, ...]
    group: Group

    @staticmethod
    def begin(tokens: int, residual: Callable[[slice], Tensor], group: Group = ALONE) -> "PromptStream":
        """residual: float32 [rows, D] of rows of the step, in memory that is the stream's from then on."""
        if group.ranks == 1 or tokens < DIVIDED * group.ranks:
            rows = slice(0, tokens)
            return PromptStream(tokens, False, (Part(rows, tokens, residual(rows)),), group)
        ranks, count = group.ranks, min(PARTS, max(1, tokens // PART_ROWS))
        bounds = [*(tokens * i // count // ranks * ranks for i in range(count)), tokens]
        parts: list[Part] = []
        for first, end in pairwise(bounds):
            share = -(-(end - first) // ranks)
            own = slice(min(first + group.rank * share, end), min(first + (group.rank + 1) * share, end))
            kept = residual(own)
            if missing := share - kept.shape[0]:
                kept = F.pad(kept, (0, 0, 0, missing))
            parts.append(Part(slice(first, end), share * ranks, kept))
        return PromptStream(tokens, True, tuple(parts), group)

    def normed(self, gamma_D: Tensor, eps: float) -> Iterator[Tensor]:
        """Of each part this rank's own rows bf16 [., D padded to 128], with the sums that were begun added, normed.

        To be asked once: what has been added up comes once.
        """
        for part in self.parts:
            yield norm_rows(part.residual, None if part.sums is None else part.sums(), gamma_D, eps)[1]

    def gather(self, own: Iterable[Tensor]) -> tuple[Tensor, Iterator[slice]]:
        """Begins to gather what each rank has made of its own rows. own: of each part, [., W], taken one by one.

        -> [T, W], and rows of it as they come, the same bits on all ranks. Whoever reads it takes them all first, or
        reads rows that have come.
        """
        if not self.divided:
            (all_TW,) = own
            return all_TW, iter([self.parts[0].rows])
        whole, ends = None, list[Callable[[], Tensor]]()
        for part, own_W in zip(self.parts, own, strict=True):
            if whole is None:
                whole = own_W.new_empty(self.parts[-1].rows.start + self.parts[-1].evened, own_W.shape[1])
            first = part.rows.start
            ends.append(self.group.begin_gather_rows(own_W, whole[first : first + part.evened]))
        assert whole is not None

        def arriving() -> Iterator[slice]:
            for part, end in zip(self.parts, ends, strict=True):
                end()
                yield part.rows

        return whole[: self.tokens], arriving()

    def whole(self, own: Iterable[Tensor]) -> Tensor:
        """As `gather`, once all has come."""
        all_TW, arriving = self.gather(own)
        for _ in arriving:
            pass
        return all_TW

    def adding(self, partial: Callable[[Part], Tensor]) -> "PromptStream":
        """The stream behind a sublayer. partial: what this rank has computed of a part, float32 or bf16 [evened, D],
        which is added up over ranks while that of the next is computed."""
        begin = self.group.begin_add_rows if self.divided else self.group.begin_add
        return replace(self, parts=tuple(replace(part, sums=begin(partial(part))) for part in self.parts))

    def added(self) -> "PromptStream":
        """The stream with the sums that were begun in its residual."""
        for part in self.parts:
            if part.sums is not None:
                part.residual.add_(part.sums())
        return self.settled()

    def settled(self) -> "PromptStream":
        """The stream whose residual has all that was to be added to it."""
        return replace(self, parts=tuple(replace(part, sums=None) for part in self.parts))
