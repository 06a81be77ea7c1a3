"""State of the running jobs as tensors: each slot's tokens, page table and sampling parameters.

Tokens are kept here, not in the steps: sampling appends to the slot, and the next step reads from it. Drafts are kept
here too, until the row that verifies them. On a CPU the tables are plain memory that only the step thread touches; the
inputs of decode steps are buffers that stay valid until the next step's inputs are requested.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from redline.kernels.cpu.blocks.step_inputs import StepMemory, memory, step_inputs
from redline.kernels.inputs import Chunk, Inputs
from redline.messages.job import PAGE_TOKENS, Sampling
from redline.messages.step import Begin, Drafter, Row
from redline.model.k2.cpu import K2
from redline.ops.staged import staged
from redline.run.drafting.suffix import SuffixIndex
from redline.run.grammar.matcher import Matcher, Matchers


class Proposal(NamedTuple):
    """Draft tokens that follow a slot's last token.

    q: float32 [drafts, V], the distribution that each draft was drawn from; None: the drafts are certain (greedy, or a
    suffix match). by: the drafter.
    """

    tokens: list[int]
    q: Tensor | None = None
    by: Drafter = "learned"

    def until(self, count: int) -> "Proposal":
        """The first `count` drafts, or all if there are fewer."""
        return (
            self
            if count >= len(self.tokens)
            else Proposal(self.tokens[:count], None if self.q is None else self.q[:count], self.by)
        )


NOTHING = Proposal([])
MOST_KEPT = 256  # largest step, in tokens, for which the input buffers are kept: all of them take less than 10 MB


class RowSpan(msgspec.Struct, frozen=True):
    """A row with its positions [start, start + count) in the slot.

    All positions of a decode row except the first are drafts. `drafts` has one token more if the row is cut after the
    last position: that draft is verified, but its own position is not computed.
    """

    row: Row
    slot: int
    start: int
    count: int
    drafts: Proposal = NOTHING

    @property
    def decodes(self) -> bool:
        """Whether the row decodes rather than computes a prompt."""
        return self.row.start is None

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.count

    @property
    def proposed(self) -> int:
        """Number of positions that are drafts."""
        return self.count - 1 if self.decodes else 0


@dataclass
class Slot:
    """State of a slot outside of tensors."""

    prompt: int = 0
    length: int = 0  # prompt and generated tokens; drafts come after them
    limit: int = 0
    pages: int = 0
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1))
    proposal: Proposal = NOTHING
    # tokens that the grammar forces where the next row begins (cuda_graph_runner.py)
    coming: list[int] = field(default_factory=list)
    suffix: SuffixIndex | None = None
    matcher: Matcher | None = None  # None: the job has no grammar
    again: tuple[int, ...] = ()  # generated tokens that the matcher advances over while rows recompute them
    # the drafter's row of the next position is still missing; its feature is in the tails of the previous page
    behind: bool = False
    features: bool = False  # some positions of the prompt are rows of the feature table
    unmasked: Sampling | None = None  # the sampling parameters without the grammar, if the job has one
    error: str | None = None  # why the job cannot continue: its rows must not run
    told: bool = False  # the device has the slot's length and limit, and is ahead of this copy (cuda_graph_runner.py)

    @property
    def choosing(self) -> Sampling:
        """The sampling parameters of the next row: without the grammar while it is idle."""
        if self.matcher is not None and self.unmasked is not None and self.matcher.idle:
            return self.unmasked
        return self.sampling


class Slots:
    """The tensors of all slots, and in `at` the other state of each slot."""

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        vocabulary: int,
        device: torch.device,
        *,
        suffix: bool = False,
        matchers: Matchers | None = None,
        image_token: int = 0,
    ) -> None:
        """slots: number of slots; the last row of each tensor is a spare that belongs to no slot (`SharedState`).

        suffix: whether slots keep the data for suffix matching. matchers: compiles the grammars of jobs; None: jobs
        with a grammar fail. image_token: the id that a prompt has at the positions of an image.
        """
        self._image_token = image_token
        self._vocabulary = vocabulary
        self._matchers = matchers
        self._suffix = suffix
        rows, pages = slots + 1, -(-max_model_len // PAGE_TOKENS)
        self.tokens: Tensor = torch.zeros(rows, max_model_len + 1, dtype=torch.int64, device=device)
        self.tables: Tensor = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.at = [Slot() for _ in range(slots)]
        self._angles: tuple[Tensor, Tensor] | None = None  # cos and sin of every position; CPU only
        self._memories: dict[int, StepMemory] = {}  # by the number of tokens in the step

    @functools.cached_property
    def _memory(self) -> memoryview | None:
        """The memory of `tokens` on a CPU: a direct write takes a tenth of the time of a torch operation."""
        return self.tokens.numpy().data if self.tokens.is_cpu else None

    def empty(self, number: int) -> None:
        """Empties a slot until a job has begun in it.

        Rows launched for a job that could not begin must not see the previous job: its pages may belong to other jobs
        by now.
        """
        self.at[number] = Slot(error="the job could not begin")

    def begin(self, begin: Begin) -> None:
        """Fills a slot with a job: tokens, pages, sampling parameters. A token id outside of the vocabulary becomes
        the slot's error."""
        number, least, most = begin.slot, min(begin.tokens), max(begin.tokens)
        self.empty(number)
        slot = Slot(begin.prompt, len(begin.tokens), begin.limit, sampling=begin.sampling)
        whole = begin.computed is None or begin.computed % PAGE_TOKENS == 0
        slot.behind = begin.drafting and bool(begin.pages) and whole
        if least >= 0 and most < self._vocabulary:
            self.tokens[number, : slot.length] = staged(begin.tokens, self.tokens.device)
            if self._suffix:
                slot.suffix = SuffixIndex()
                slot.suffix.extend(begin.tokens)
        else:
            wrong = least if least < 0 else most
            slot.error = f"token ids must be between 0 and {self._vocabulary - 1}; the prompt contains {wrong}"
        if begin.sampling.grammar is not None:
            if self._matchers is None:
                slot.error = "the job has a grammar, but this engine has no tokenizer vocabulary to compile it with"
            else:
                grammar, least = begin.sampling.grammar, 0
                # once the grammar has begun, it decides where the output may end, so the matcher enforces min_tokens
                if grammar.text:
                    least = begin.sampling.min_tokens
                    slot.sampling = msgspec.structs.replace(begin.sampling, min_tokens=0)
                # The output of a preempted job may be long. Its rows recompute it, one step's tokens at a time.
                answer, rows_follow = begin.tokens[begin.prompt :], begin.computed is None
                slot.again, followed = (answer, ()) if rows_follow else ((), answer)
                slot.matcher = self._matchers.begin(grammar, followed, least=least, stop_ids=begin.sampling.stop_ids)
                slot.unmasked = msgspec.structs.replace(slot.sampling, grammar=None)
        for features in begin.features:
            end = features.start + len(features.rows)
            ids = torch.tensor(features.rows, device=self.tokens.device) + self._vocabulary
            self.tokens[number, features.start : end] = ids
        slot.features = bool(begin.features)
        self.add_pages(number, begin.pages)
        slot.pages = len(begin.pages)
        self.at[number] = slot

    def known(self, number: int, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) of a slot as ids of the vocabulary; positions of an image have the image token."""
        ids = self.tokens[number, start:stop]
        return ids.where(ids < self._vocabulary, self._image_token) if self.at[number].features else ids

    def add_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Appends page ids to a slot's table."""
        if pages:
            have = self.at[slot].pages
            self.tables[slot, have : have + len(pages)] = staged(pages, self.tables.device, torch.int32)
            self.at[slot].pages = have + len(pages)

    def span(self, row: Row) -> RowSpan:
        """A row's positions, from the slot's current length on. Writes the drafts to verify after the slot's tokens.

        A decode row of a job that has reached its limit has no positions.
        """
        slot = self.at[row.slot]
        if slot.again and slot.matcher is not None:
            end = slot.length if row.start is None else row.start + row.count
            count = max(0, end - (slot.length - len(slot.again)))
            slot.matcher.follow(slot.again[:count])
            slot.again = slot.again[count:]
        if row.start is not None:
            return RowSpan(row, row.slot, row.start, row.count)
        length, room = slot.length, slot.limit - slot.length
        if room <= 0:
            return RowSpan(row, row.slot, length, 0)
        if not slot.proposal.tokens:
            return RowSpan(row, row.slot, length - 1, 1)
        drafts = slot.proposal.until(min(row.drafts, room - 1))
        computed = len(drafts.tokens)
        if slot.matcher is not None:
            # The draft after these is verified like any other, as the last one (`Matcher.allowed`).
            computed = slot.matcher.allowed(drafts.tokens)
            drafts = drafts.until(computed + 1)
        self._write(row.slot, drafts.tokens[:computed], length)
        return RowSpan(row, row.slot, length - 1, 1 + computed, drafts)

    def append(self, number: int, tokens: Sequence[int], position: int) -> None:
        """Appends accepted tokens. The tokens that the grammar forces after them become the slot's drafts.

        position: of the first token, equal to the slot's length.
        """
        self._write(number, tokens, position)
        self.learn(number, tokens, position)
        slot = self.at[number]
        slot.told, slot.coming = False, []
        if slot.matcher is not None:
            slot.matcher.advance(tokens)
            slot.proposal = Proposal(slot.matcher.forced(), by="grammar")

    def learn(self, number: int, tokens: Sequence[int], position: int) -> None:
        """As `append`, if the tensors hold the tokens already and the matcher advances by itself. Discards the
        slot's drafts."""
        slot = self.at[number]
        slot.length = position + len(tokens)
        slot.proposal = NOTHING
        if slot.suffix is not None:
            slot.suffix.extend(tokens)

    def _write(self, number: int, tokens: Sequence[int], position: int) -> None:
        if not tokens:
            return
        if self._memory is not None:
            for place, token in enumerate(tokens, position):
                self._memory[number, place] = token
        elif len(tokens) == 1:
            self.tokens[number, position] = tokens[0]
        else:
            self.tokens[number, position : position + len(tokens)] = staged(tokens, self.tokens.device)

    def inputs(self, spans: Sequence[RowSpan], model: K2) -> Inputs:
        """Inputs of the forward pass, in the order of the spans: prompt positions as chunks, generated ones as queries.

        The form of attention for a position depends on the position alone: the expanded form within the prompt, the
        absorbed form from there on. So recomputing a preempted job gives the same bits, and so does verifying a token
        compared with decoding it alone.
        """
        if self._memory is not None and (given := self._decoding(spans, model)) is not None:
            return given
        device = self.tokens.device
        slots: list[int] = []
        positions: list[int] = []
        chunks: list[Chunk] = []
        queries: list[int] = []
        for span in spans:
            first, prompt = len(slots), self.at[span.slot].prompt
            slots.extend([span.slot] * span.count)
            positions.extend(range(span.start, span.end))
            if span.start >= prompt:
                queries.extend(range(first, first + span.count))
            else:
                assert span.end <= prompt, f"{span.row} crosses the end of its prompt"
                chunks.append(Chunk(first, span.count, span.start, span.slot))
        # Flat indices of each token and of its page in the two tensors, computed with numpy: torch operations cost more
        # here.
        slot, position, query = np.array(slots), np.array(positions), np.array(queries, dtype=np.int64)
        page, place = np.divmod(position, PAGE_TOKENS)
        index = [slot * self.tokens.shape[1] + position, slot * self.tables.shape[1] + page, place, position]
        id_T, page_T, place_T, position_T = staged(np.array(index), device).unbind(0)
        asked = np.array([query, slot[query], position[query] + 1])
        tokens_Q, slots_Q, lengths_Q = staged(asked, device, torch.int32).unbind(0)
        if self.tokens.is_cpu:
            cos, sin = (of_all[position_T] for of_all in self._all_angles(model))
        else:
            cos, sin = model.angles(position_T)
        return Inputs(
            ids_T=self.tokens.take(id_T),
            cos_T=cos,
            sin_T=sin,
            rows_T=torch.add(place_T, self.tables.take(page_T), alpha=PAGE_TOKENS),
            chunks=chunks,
            tokens_Q=tokens_Q,
            slots_Q=slots_Q,
            lengths_Q=lengths_Q,
            tables=self.tables,
        )

    def _decoding(self, spans: Sequence[RowSpan], model: K2) -> Inputs | None:
        """The inputs of a step if all of its tokens are queries and there are at most MOST_KEPT; else None."""
        asked: list[int] = []
        tokens = 0
        for span in spans:
            if span.start < self.at[span.slot].prompt:
                return None
            asked += span.slot, span.start, span.count
            tokens += span.count
        if tokens > MOST_KEPT:
            return None
        into = self._memories.get(tokens)
        if into is None:
            into = self._memories[tokens] = memory(tokens, self.tables, *self._all_angles(model))
        step_inputs(self.tokens, into, asked)
        return into.inputs

    def _all_angles(self, model: K2) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, computed once, so that a position's values do not depend on the batch."""
        if self._angles is None:
            self._angles = model.angles(torch.arange(self.tokens.shape[1]))
        return self._angles
