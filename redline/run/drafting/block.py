"""Blocks: DFlash and DSpark draft all tokens in one pass over the last token and mask tokens.

The drafter's rows are the context: one for each token whose target states are known, stored at the token's own place.
DSpark chooses its tokens one after another, each with a bias by the one before, from the logits of that one pass.
DFlash's positions do not know of one another: samples drawn from each alone do not fit together (1.16 instead of 2.96
tokens a round at temperature 1, z-lab/dflash issue 169), so its drafts are always each position's argmax.

R slots that draft, B positions of a block, D hidden, V draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.messages.job import PAGE_TOKENS
from redline.messages.step import Row
from redline.model.block.module import BlockDrafter
from redline.model.block.serve import BlockRows, ServedBlock
from redline.ops.staged import staged
from redline.run.drafting.verify import draft_token
from redline.run.graphs.block_round import used_positions
from redline.run.kv import KvPool
from redline.run.sampling.on_host import is_greedy
from redline.run.slots import Proposal, RowSpan, Slots


class BlockDrafting:
    """A block drafter for the slots of one runner; `learned.LearnedDrafting` documents the method."""

    def __init__(self, drafter: BlockDrafter, slots: Slots, kv: KvPool, *, certain: bool) -> None:
        """certain: as in `SlotDrafters`."""
        self._served, self._slots, self._kv = drafter.served, slots, kv
        self._certain = certain or not drafter.config.markov_rank

    def read(
        self,
        spans: Sequence[RowSpan],
        firsts: Sequence[int],
        counts: Sequence[int],
        wanted: Sequence[int],
        features_TF: Tensor,
    ) -> None:
        for span in spans:
            self._slots.at[span.slot].behind = False  # no row waits for a next page
        slots = [span.slot for span, count in zip(spans, counts, strict=True) for _ in range(count)]
        positions = [span.start + i for span, count in zip(spans, counts, strict=True) for i in range(count)]
        sources = [first + i for first, count in zip(firsts, counts, strict=True) for i in range(count)]
        if positions:
            slot_T, place_T, source_T = (self._sent(each) for each in (slots, positions, sources))
            page_T = self._slots.tables[slot_T, place_T // PAGE_TOKENS].long()
            rows_T = page_T * PAGE_TOKENS + place_T % PAGE_TOKENS
            self._served.read(features_TF[source_T], place_T, rows_T, self._kv.draft)
        drafting = [(span.row, drafts) for span, drafts in zip(spans, wanted, strict=True) if drafts]
        if drafting:
            self._propose(drafting)

    def _propose(self, rows: Sequence[tuple[Row, int]]) -> None:
        """rows: with how many drafts each wants; a row gets fewer if the block has fewer, or if the rest does not pay
        off (`Row.least`), but never none: what one more round would verify is not known before it."""
        served, of = self._served, [self._slots.at[row.slot] for row, _ in rows]
        config, slot_R = served.config, self._sent([row.slot for row, _ in rows])
        start_R = self._sent([slot.length - 1 for slot in of])
        before_R = self._slots.tokens[slot_R, start_R]
        anchor, size_R = int(not config.sample_from_anchor), torch.full_like(start_R, config.block_size)
        if not isinstance(served, ServedBlock):  # it stores a block's rows, and not all of their places have pages
            size_R = used_positions(config, start_R + 1, self._sent([wanted for _, wanted in rows]))
        given = before_R, start_R, size_R, self._slots.tables[slot_R]
        blocks = BlockRows(*given, max(slot.length for slot in of), self._kv.pages)
        normed_RBD = served.states(blocks, self._kv.draft)
        count = min(config.drafts, max(wanted for _, wanted in rows))
        normed_RnD = normed_RBD[:, anchor : anchor + count]
        logits_RnV = served.logits(normed_RnD.flatten(0, 1)).unflatten(0, normed_RnD.shape[:2])
        certain = [self._certain or slot.sampling.seeded or is_greedy(slot.sampling) for slot in of]
        drafted: list[list[int]] = [[] for _ in rows]
        drawn: list[list[Tensor]] = [[] for _ in rows]
        bounded = any(row.least for row, _ in rows)
        accepted = [1.0] * len(rows)  # probability that all drafts of the row so far are
        paid = [wanted for _, wanted in rows]
        for done in range(count):
            logits_RV = served.biased(logits_RnV[:, done], before_R)
            if bounded:
                assert isinstance(served, ServedBlock), "a GPU's rows are padded, so drafts have no bound"
                probable = served.acceptance(normed_RnD[:, done], logits_RV, before_R)
                for i, (row, _) in enumerate(rows):
                    accepted[i] *= probable[i]
                    if done and accepted[i] < row.least:
                        paid[i] = min(paid[i], done)
                if done >= max(paid):
                    break
            tokens = served.likeliest(logits_RV).tolist()
            for i, slot in enumerate(of):
                if not certain[i]:
                    assert isinstance(served, ServedBlock), "drafts of captured steps are certain"
                    tokens[i], q = draft_token(served.whole(logits_RV[i]), slot.sampling, slot.length, done)
                    assert q is not None, "a row that samples draws its drafts from a distribution"
                    drawn[i].append(q)
                drafted[i].append(tokens[i])
            before_R = self._sent(tokens)
        for i, slot in enumerate(of):
            slot.proposal = Proposal(drafted[i], torch.stack(drawn[i]) if drawn[i] else None).until(paid[i])

    def _sent(self, values: Sequence[int]) -> Tensor:
        return staged(values, self._slots.tables.device)
