"""Drafting: after the rows are settled, the drafter reads the accepted tokens, and proposes drafts for each slot's next
row.

A learned drafter is a chain (EAGLE-3, `chain.py`) or a block (DFlash, DSpark, `block.py`). A suffix match costs
nothing, and replaces the learned drafter if the text repeats itself for SURE tokens or more.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from redline.messages.job import PAGE_TOKENS
from redline.model.block.module import BlockDrafter
from redline.model.drafter import Drafter
from redline.run.drafting.block import BlockDrafting
from redline.run.drafting.chain import ChainDrafting
from redline.run.kv import KvPool
from redline.run.slots import Proposal, RowSpan, Slots

SURE = 8  # tokens of a suffix match from which it is preferred to the learned drafter


class LearnedDrafting(Protocol):
    """A learned drafter for the slots of one runner."""

    def read(
        self,
        spans: Sequence[RowSpan],
        firsts: Sequence[int],
        counts: Sequence[int],
        wanted: Sequence[int],
        features_TF: Tensor,
    ) -> None:
        """Writes the drafter's rows of these spans, and leaves a proposal of the wanted number of tokens in each slot.

        firsts, counts, features_TF: as in `SlotDrafters.follow`.
        """
        ...


class SlotDrafters:
    """The drafters of one runner: the learned one, if there is one, and suffix matches."""

    def __init__(self, drafter: Drafter | None, slots: Slots, kv: KvPool, *, certain: bool = False) -> None:
        """certain: every draft is the drafter's argmax, as in captured steps; if false, rows for block verification
        sample their drafts."""
        self._learned: LearnedDrafting | None = None
        if isinstance(drafter, BlockDrafter):
            self._learned = BlockDrafting(drafter, slots, kv, certain=certain)
        elif drafter is not None:
            self._learned = ChainDrafting(drafter, slots, kv, certain=certain)
        self._slots = slots
        self.drafted: tuple[int, ...] = ()  # tokens drafted in the last `follow`, for each row with learned drafts

    def follow(
        self, spans: Sequence[RowSpan], firsts: Sequence[int], counts: Sequence[int], features_TF: Tensor | None
    ) -> None:
        """The drafter reads the accepted tokens, and leaves a proposal in each slot for which a row requests one.

        firsts       the first token of each span, counted from the step's first
        counts       number of accepted positions of each span
        features_TF  [tokens of the step, layers * D]: the target's hidden states; None if no row uses the learned
                     drafter
        """
        wanted = [self._wanted(span) for span in spans]
        self.drafted = tuple(filter(None, wanted))
        reading = [i for i, span in enumerate(spans) if span.row.drafting]
        if not reading:
            return
        assert self._learned is not None, "a row needs the learned drafter, but there is none"
        assert features_TF is not None, "the drafter needs the model's hidden states"
        self._learned.read(
            [spans[i] for i in reading],
            [firsts[i] for i in reading],
            [counts[i] for i in reading],
            [wanted[i] for i in reading],
            features_TF,
        )

    def read(self, spans: Sequence[RowSpan], firsts: Sequence[int], features_TF: Tensor) -> None:
        """The drafter reads the prompt tokens that the host knows, and drafts nothing. Arguments as in `follow`.

        The row of a token that is still to be chosen is left out.
        """
        assert self._learned is not None, "a row needs the learned drafter, but there is none"
        counts = [span.count for span in spans]
        self._learned.read(spans, firsts, counts, [0] * len(spans), features_TF)

    def _wanted(self, span: RowSpan) -> int:
        """How many tokens the learned drafter should propose: none if a grammar forces some, which are always
        accepted. A suffix match is left in the slot here."""
        slot = self._slots.at[span.slot]
        if slot.proposal.tokens:
            return 0
        room = min(slot.limit - slot.length - 1, slot.pages * PAGE_TOKENS - slot.length + 1)
        count = min(span.row.propose, room)
        if count <= 0:
            return 0
        if slot.suffix is not None:
            tokens, match = slot.suffix.propose(count)
            if tokens and (match >= SURE or not span.row.drafting):
                slot.proposal = Proposal(tokens, by="suffix")
                return 0
        return count if span.row.drafting else 0
