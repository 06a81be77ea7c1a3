"""Sequence parallel residual stream of a prefill step: ranks divide its rows.     T rows, D hidden, W any width.

Each sublayer ends in a reduction over ranks. In large steps it is a reduce-scatter: each rank gets the sums of its own
rows, adds them to its residual and norms them, and an all-gather distributes the results. With fewer than DIVIDED rows
per rank it is an all-reduce, and every rank has all rows. Divided rows are processed in parts, so that the
communication of one part overlaps with the computation of the next.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.prefill.rowwise import norm_rows
from redline.kernels.group import ALONE, Group

# Minimum rows per rank of a step for which ranks divide them. Measured at Kimi's sizes (prefill-two-h100.json,
# prefill-four-h100.json), milliseconds per layer with rows divided in one part, divided in two parts, and not divided:
# two H100 and 2,048 rows 4.1, 4.7, 4.3, 8,192 rows 12.9, 13.0, 13.7; four and 2,048 rows 3.7, 4.9, 3.5, 4,096 rows
# 4.6, 4.6 and 5.0, 8,192 rows 8.4, 8.2, 9.3.
DIVIDED = 1024
PARTS, PART_ROWS = 2, 4096  # maximum number of parts, and minimum rows per part


@dataclass(frozen=True)
class CommunicatedRows:
    """Rows of a step that are communicated together, and the residual of this rank's rows among them."""

    rows: slice  # of the step
    evened: int  # number of rows including zero padding, so that each rank has the same number
    residual: Tensor  # float32 [evened / ranks, D], or of all rows; changed in place
    sums: Callable[[], Tensor] | None = None  # finishes the pending reduction, float32 or bf16; call once. None: none

    @property
    def count(self) -> int:
        """Number of rows of the step in this part."""
        return self.rows.stop - self.rows.start

    def of(self, whole_TW: Tensor) -> Tensor:
        """This part's rows of a tensor of all rows, padded with zeros: [evened, W]."""
        rows_W = whole_TW[self.rows]
        missing = self.evened - self.count
        return F.pad(rows_W, (0, 0, 0, missing)) if missing else rows_W


@dataclass(frozen=True)
class PromptStream:
    """The state between blocks of a prefill step; the counterpart of `ResidualStream` in decode steps."""

    tokens: int  # T
    divided: bool  # whether a rank has only its own rows
    parts: tuple[CommunicatedRows, ...]
    group: Group

    @staticmethod
    def begin(tokens: int, residual: Callable[[slice], Tensor], group: Group = ALONE) -> "PromptStream":
        """residual: returns float32 [rows, D] for rows of the step; the stream takes ownership of the memory."""
        if group.ranks == 1 or tokens < DIVIDED * group.ranks:
            rows = slice(0, tokens)
            return PromptStream(tokens, False, (CommunicatedRows(rows, tokens, residual(rows)),), group)
        ranks, count = group.ranks, min(PARTS, max(1, tokens // PART_ROWS))
        bounds = [*(tokens * i // count // ranks * ranks for i in range(count)), tokens]
        parts: list[CommunicatedRows] = []
        for first, end in pairwise(bounds):
            share = -(-(end - first) // ranks)
            own = slice(min(first + group.rank * share, end), min(first + (group.rank + 1) * share, end))
            kept = residual(own)
            if missing := share - kept.shape[0]:
                kept = F.pad(kept, (0, 0, 0, missing))
            parts.append(CommunicatedRows(slice(first, end), share * ranks, kept))
        return PromptStream(tokens, True, tuple(parts), group)

    def normed(self, gamma_D: Tensor, eps: float) -> Iterator[Tensor]:
        """For each part this rank's rows bf16 [., D padded to 128], with the pending sums added, normed.

        Can be iterated once, since pending sums can be finished only once.
        """
        for part in self.parts:
            yield norm_rows(part.residual, None if part.sums is None else part.sums(), gamma_D, eps)[1]

    def gather(self, own: Iterable[Tensor]) -> tuple[Tensor, Iterator[slice]]:
        """Begins an all-gather of each rank's rows. own: for each part, [., W], taken one by one.

        -> [T, W], and its ranges of rows as they arrive, with the same bits on all ranks. Readers must consume all
        ranges first, or read only rows that have arrived.
        """
        if not self.divided:
            (all_TW,) = own
            return all_TW, iter([self.parts[0].rows])
        whole, ends = None, list[Callable[[], Tensor]]()
        for part, own_W in zip(self.parts, own, strict=True):
            if whole is None:
                whole = own_W.new_empty(self.parts[-1].rows.start + self.parts[-1].evened, own_W.shape[1])
            first = part.rows.start
            ends.append(self.group.begin_all_gather_rows(own_W, whole[first : first + part.evened]))
        assert whole is not None

        def arriving() -> Iterator[slice]:
            for part, end in zip(self.parts, ends, strict=True):
                end()
                yield part.rows

        return whole[: self.tokens], arriving()

    def whole(self, own: Iterable[Tensor]) -> Tensor:
        """As `gather`, blocking until all rows have arrived."""
        all_TW, arriving = self.gather(own)
        for _ in arriving:
            pass
        return all_TW

    def adding(self, partial: Callable[[CommunicatedRows], Tensor]) -> "PromptStream":
        """The stream after a sublayer. partial: computes this rank's partial sums of a part, float32 or bf16
        [evened, D]; they are reduced over ranks while the next part is computed."""
        begin = self.group.begin_reduce_scatter if self.divided else self.group.begin_all_reduce
        return replace(self, parts=tuple(replace(part, sums=begin(partial(part))) for part in self.parts))

    def added(self) -> "PromptStream":
        """The stream with all pending sums added to its residual."""
        for part in self.parts:
            if part.sums is not None:
                part.residual.add_(part.sums())
        return self.settled()

    def settled(self) -> "PromptStream":
        """The stream marked as having no pending sums."""
        return replace(self, parts=tuple(replace(part, sums=None) for part in self.parts))
