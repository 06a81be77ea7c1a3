"""Chains: EAGLE-3 drafts one token after another.

It has one row for each token but the first: the token, and the target model's features of the token before it. It reads
every row of a job once those features are available. Rows of its own drafts are overwritten by the true rows of the
next step. The drafter has one layer, so only the row that it drafts from is computed in full; of the other rows only
the latent is needed.

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


class ChainDrafting:
    """An EAGLE-3 drafter for the slots of one runner; `learned.LearnedDrafting` documents the method."""

    def __init__(self, drafter: Eagle3, slots: Slots, kv: KvPool, *, certain: bool) -> None:
        """certain: as in `SlotDrafters`."""
        self._drafter, self._slots, self._kv, self._certain = drafter, slots, kv, certain
        self._places = drafter.served.pages(slots.tokens, slots.tables)

    def read(
        self,
        spans: Sequence[RowSpan],
        firsts: Sequence[int],
        counts: Sequence[int],
        wanted: Sequence[int],
        features_TF: Tensor,
    ) -> None:
        """A row is late if its place is the first of a page that the slot does not have yet: it is computed with the
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
        feature = self._drafter.served.fuse(features_TF, sources)
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
        served = self._drafter.served
        best_alone = all(self._drafts_the_best(slot) for slot, _ in drafting)
        if isinstance(served, Served) and served.chains and best_alone:
            rows, counts = DraftRows(slots, positions, queries), [count for _, count in drafting]
            drafted = draft_chain(feature, served.layer, self._places, rows, counts, self._kv.draft)
            for (slot, count), tokens in zip(drafting, drafted.tolist(), strict=True):
                self._slots.at[slot].proposal = Proposal(tokens[:count])
            return
        normed, fed = self._forward(slots, positions, None, feature, queries)
        if drafting:
            self._propose(drafting, normed, fed)

    def _propose(self, rows: Sequence[tuple[int, int]], normed: Tensor, fed: Tensor) -> None:
        """Drafts one token for all rows, then one more for those that want one, and so on."""
        at = self._slots.at
        drafted: dict[int, tuple[list[int], list[Tensor]]] = {slot: ([], []) for slot, _ in rows}
        done = 0
        while True:
            chosen = self._choose([slot for slot, _ in rows], done, normed)
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
            normed, fed = self._forward(slots, positions, ids, fed, range(len(rows)))
        for slot, (tokens, q) in drafted.items():
            at[slot].proposal = Proposal(tokens, torch.stack(q) if q else None)

    def _choose(self, slots: Sequence[int], done: int, normed: Tensor) -> list[tuple[int, Tensor | None]]:
        if all(map(self._drafts_the_best, slots)):
            return [(token, None) for token in self._drafter.likeliest(normed).tolist()]
        logits_RV = self._drafter.logits(normed)
        of = [self._slots.at[slot] for slot in slots]
        return [draft_token(row_V, slot.sampling, slot.length, done) for row_V, slot in zip(logits_RV, of, strict=True)]

    def _drafts_the_best(self, slot: int) -> bool:
        sampling = self._slots.at[slot].sampling
        return self._certain or sampling.seeded or is_greedy(sampling)

    def _forward(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        ids: Sequence[int] | None,
        feature: Tensor,
        queries: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """(normed states, features to feed back) of the rows `queries`; all rows are written to the drafter's plane.

        positions: of the features. ids: the rows' tokens, which are the next ones; None: the slots' tokens.
        """
        rows = DraftRows(slots, positions, queries, ids)
        return self._drafter.served.read(feature, self._places, rows, self._kv.draft)

    def _pages(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        pages = [position // PAGE_TOKENS for position in positions]
        return self._slots.tables[self._index(slots), self._index(pages)].long()

    def _index(self, places: Sequence[int]) -> Tensor:
        return staged(places, self._slots.tables.device)
