"""The running jobs as tensors: each slot's tokens, page table and sampling.

Tokens live here, not in the steps: sampling appends to its slot, and the next step reads what it finds. On a CPU the
tables are plain memory that the step thread alone touches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.model.k2 import K2, Chunk, Inputs
from redline.wire.job import PAGE_TOKENS, Sampling
from redline.wire.step import Begin, Row


class Slots:
    """tokens int64 [slots, max_model_len + 1]; tables int32 [slots, pages per slot].

    `errors` has a line for a slot whose job has ids that are no tokens: its rows must not run.
    """

    def __init__(self, slots: int, max_model_len: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self.tokens: Tensor = torch.zeros(slots, max_model_len + 1, dtype=torch.int64, device=device)
        self.tables: Tensor = torch.zeros(slots, -(-max_model_len // PAGE_TOKENS), dtype=torch.int32, device=device)
        self.prompt = [0] * slots
        self.sampling: list[Sampling] = [Sampling(max_tokens=1)] * slots
        self.errors: list[str | None] = [None] * slots
        self._pages = [0] * slots

    def begin(self, begin: Begin) -> None:
        slot, least, most = begin.slot, min(begin.tokens), max(begin.tokens)
        if least >= 0 and most < self._vocabulary:
            self.errors[slot] = None
            self.tokens[slot, : len(begin.tokens)] = torch.tensor(begin.tokens, device=self.tokens.device)
        else:
            wrong = least if least < 0 else most
            self.errors[slot] = f"token ids go from 0 to {self._vocabulary - 1}; the prompt has {wrong}"
        self.prompt[slot] = begin.prompt
        self.sampling[slot] = begin.sampling
        self._pages[slot] = 0
        self.add_pages(slot, begin.pages)

    def add_pages(self, slot: int, pages: Sequence[int]) -> None:
        if pages:
            have = self._pages[slot]
            new = torch.tensor(pages, dtype=torch.int32, device=self.tables.device)
            self.tables[slot, have : have + len(pages)] = new
            self._pages[slot] = have + len(pages)

    def inputs(self, rows: Sequence[Row], model: K2) -> Inputs:
        """The step's tokens in the order of its rows: prompt rows as chunks, generated ones as queries.

        Which form of attention computes a position depends on the position alone: below the prompt's length the
        expanded one, from there on the absorbed one. So a pre-empted job that is computed again gets the same bits.
        """
        device = self.tokens.device
        slots: list[int] = []
        positions: list[int] = []
        chunks: list[Chunk] = []
        queries: list[int] = []
        for row in rows:
            first = len(slots)
            slots.extend([row.slot] * row.count)
            positions.extend(range(row.start, row.start + row.count))
            if row.start >= self.prompt[row.slot]:
                queries.extend(range(first, first + row.count))
            else:
                assert row.start + row.count <= self.prompt[row.slot], f"{row} crosses the end of its prompt"
                chunks.append(Chunk(first, row.count, row.start, row.slot))
        slot_T = torch.tensor(slots, device=device)
        position_T = torch.tensor(positions, device=device)
        cos, sin = model.angles(position_T)
        pages_T = self.tables[slot_T, position_T // PAGE_TOKENS].long()
        return Inputs(
            ids_T=self.tokens[slot_T, position_T],
            cos_T=cos,
            sin_T=sin,
            rows_T=pages_T * PAGE_TOKENS + position_T % PAGE_TOKENS,
            chunks=chunks,
            tokens_Q=torch.tensor(queries, dtype=torch.int32, device=device),
            slots_Q=torch.tensor([slots[i] for i in queries], dtype=torch.int32, device=device),
            lengths_Q=torch.tensor([positions[i] + 1 for i in queries], dtype=torch.int32, device=device),
            tables=self.tables,
        )
