"""Drafting: after the rows are settled, the drafter reads the accepted tokens, and proposes drafts for each slot's next
row.

A learned drafter (EAGLE-3) has one row for each token but the first: the token, and the target model's features of the
token before it. It reads every row of a job once those features are available. Rows of its own drafts are overwritten
by the true rows of the next step. The drafter has one layer, so only the row that it drafts from is computed in full;
of the other rows only the latent is needed.

A suffix match costs nothing, and replaces the learned drafter if the text repeats itself for SURE tokens or more.

T drafter rows, R slots that draft, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.kernels.cpu.blocks.draft_pass import DraftRows
from redline.messages.job import PAGE_TOKENS
from redline.model.eagle3.module import Eagle3
from redline.model.eagle3.one_call import draft_chain
from redline.model.eagle3.serve import Served
from redline.ops.staged import staged
from redline.run.drafting.verify import draft_token
from redline.run.kv import KvPool
from redline.run.sampling.on_host import is_greedy
from redline.run.slots import Proposal, RowSpan, Slots

SURE = 8  # tokens of a suffix match from which it is preferred to the learned drafter


class SlotDrafters:
    """The drafters of one runner: the learned one, if there is one, and suffix matches."""

    def __init__(self, drafter: Eagle3 | None, slots: Slots, kv: KvPool, *, certain: bool = False) -> None:
        """certain: every draft is the drafter's argmax, as in captured steps; if false, rows for block verification
        sample their drafts."""
        self._certain = certain
        self._drafter = drafter
        self._slots = slots
        self._kv = kv
        self.drafted: tuple[int, ...] = ()  # tokens drafted in the last `follow`, for each row with learned drafts
        self._places = drafter.served.pages(slots.tokens, slots.tables) if drafter is not None else None

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
        assert self._drafter is not None, "a row needs the learned drafter, but there is none"
        assert features_TF is not None, "the drafter needs the model's hidden states"
        self._read(
            self._drafter,
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
        assert self._drafter is not None, "a row needs the learned drafter, but there is none"
        counts = [span.count for span in spans]
        self._read(self._drafter, spans, firsts, counts, [0] * len(spans), features_TF)

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

    def _read(
        self,
        drafter: Eagle3,
        spans: Sequence[RowSpan],
        firsts: Sequence[int],
        counts: Sequence[int],
        wanted: Sequence[int],
        features_TF: Tensor,
    ) -> None:
        """Writes the drafter's rows of these spans, and drafts the wanted tokens after them.

        A row is late if its place is the first of a page that the slot does not have yet: it is computed with the
        slot's next row, from `tails`, as after a cached page. So is a row with an unknown token, at the end of a prompt
        that is only prefilled: it may be computed for another job that begins from the cached pages.
        """
        slots: list[int] = []
        positions: list[int] = []  # positions of the features; the row's token is the next one
        sources: list[int] = []
        queries: list[int] = []
        drafting: list[tuple[int, int]] = []
        late: list[int] = []
        behind = [span for span in spans if self._slots.at[span.slot].behind]
        for span, first, count, drafts in zip(spans, firsts, counts, wanted, strict=True):
            slot = self._slots.at[span.slot]
            place = span.start + count  # place of the last row
            slot.behind = place == slot.pages * PAGE_TOKENS
            if slot.behind or place == slot.length:
                late.append(len(slots) + count - 1)
            slots.extend([span.slot] * count)
            positions.extend(range(span.start, span.start + count))
            sources.extend(range(first, first + count))
            if drafts:
                queries.append(len(slots) - 1)
                drafting.append((span.slot, drafts))
        if not positions and not behind:
            return
        feature = drafter.served.fuse(features_TF, sources)
        ends = [i for i, position in enumerate(positions) if position % PAGE_TOKENS == PAGE_TOKENS - 1]
        if ends:
            tails = self._pages([slots[i] for i in ends], [positions[i] for i in ends])
            self._kv.tails[tails] = feature[self._index(ends)]
        if late:
            kept = [i for i in range(len(slots)) if i not in late]
            feature = feature[self._index(kept)]
            slots, positions = [slots[i] for i in kept], [positions[i] for i in kept]
            queries = [kept.index(i) for i in queries]
        if behind:
            tails = self._pages([span.slot for span in behind], [span.start - 1 for span in behind])
            feature = torch.cat([feature, self._kv.tails[tails]])
            slots += [span.slot for span in behind]
            positions += [span.start - 1 for span in behind]
        if not slots:
            return
        served = drafter.served
        best_alone = all(self._drafts_the_best(slot) for slot, _ in drafting)
        if isinstance(served, Served) and served.chains and self._places is not None and best_alone:
            rows, counts = DraftRows(slots, positions, queries), [count for _, count in drafting]
            drafted = draft_chain(feature, served.layer, self._places, rows, counts, self._kv.draft)
            for (slot, count), tokens in zip(drafting, drafted.tolist(), strict=True):
                self._slots.at[slot].proposal = Proposal(tokens[:count])
            return
        normed, fed = self._forward(drafter, slots, positions, None, feature, queries)
        if drafting:
            self._propose(drafter, drafting, normed, fed)

    def _propose(self, drafter: Eagle3, rows: Sequence[tuple[int, int]], normed: Tensor, fed: Tensor) -> None:
        """Drafts one token for all rows, then one more for those that want one, and so on."""
        at = self._slots.at
        drafted: dict[int, tuple[list[int], list[Tensor]]] = {slot: ([], []) for slot, _ in rows}
        done = 0
        while True:
            chosen = self._choose(drafter, [slot for slot, _ in rows], done, normed)
            for (slot, _), (token, q) in zip(rows, chosen, strict=True):
                drafted[slot][0].append(token)
                if q is not None:
                    drafted[slot][1].append(q)
            done += 1
            going = [i for i, (_, wanted) in enumerate(rows) if wanted > done]
            if not going:
                break
            if len(going) < len(rows):
                fed = fed[going]
            rows, ids = [rows[i] for i in going], [chosen[i][0] for i in going]
            slots = [slot for slot, _ in rows]
            positions = [at[slot].length - 2 + done for slot in slots]
            normed, fed = self._forward(drafter, slots, positions, ids, fed, range(len(rows)))
        for slot, (tokens, q) in drafted.items():
            at[slot].proposal = Proposal(tokens, torch.stack(q) if q else None)

    def _choose(
        self, drafter: Eagle3, slots: Sequence[int], done: int, normed: Tensor
    ) -> list[tuple[int, Tensor | None]]:
        if all(map(self._drafts_the_best, slots)):
            return [(token, None) for token in drafter.likeliest(normed).tolist()]
        logits_RV = drafter.logits(normed)
        of = [self._slots.at[slot] for slot in slots]
        return [draft_token(row_V, slot.sampling, slot.length, done) for row_V, slot in zip(logits_RV, of, strict=True)]

    def _drafts_the_best(self, slot: int) -> bool:
        sampling = self._slots.at[slot].sampling
        return self._certain or sampling.seeded or is_greedy(sampling)

    def _forward(
        self,
        drafter: Eagle3,
        slots: Sequence[int],
        positions: Sequence[int],
        ids: Sequence[int] | None,
        feature: Tensor,
        queries: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """(normed states, features to feed back) of the rows `queries`; all rows are written to the drafter's plane.

        positions: of the features. ids: the rows' tokens, which are the next ones; None: the slots' tokens.
        """
        assert self._places is not None, "only a learned drafter has rows"
        rows = DraftRows(slots, positions, queries, ids)
        return drafter.served.read(feature, self._places, rows, self._kv.draft)

    def _pages(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        pages = [position // PAGE_TOKENS for position in positions]
        return self._slots.tables[self._index(slots), self._index(pages)].long()

    def _index(self, places: Sequence[int]) -> Tensor:
        return staged(places, self._slots.tables.device)
