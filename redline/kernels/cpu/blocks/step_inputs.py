"""The inputs of a decode-only step, gathered from the slots.        T tokens, P rope.

Every step of T tokens writes them into the same memory: allocating a tensor takes longer than filling it.
"""

import ctypes
import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cuda.step.step_rows import StepRows
from redline.kernels.inputs import Inputs
from redline.kernels.kernel import Kernel
from redline.kernels.record import ArgumentStruct
from redline.messages.job import PAGE_TOKENS
from redline.ops.op import Case, Cost, Op

_step_inputs = native.function("step_inputs")
_StepMemory = native.record("StepMemory")


@dataclass(frozen=True)
class StepMemory:
    """The output memory of a step of T tokens, and the tables of its angles."""

    cos: Tensor  # float32 [positions, P / 2]: read
    sin: Tensor  # as cos
    inputs: Inputs  # of T queries; token t is query t. Written, except tokens_Q and tables

    @functools.cached_property
    def written(self) -> StepRows:
        """The tensors that a step writes, as `step_inputs` returns them."""
        i = self.inputs
        return StepRows(i.ids_T, i.cos_T, i.sin_T, i.rows_T, i.slots_Q, i.lengths_Q)

    @functools.cached_property
    def address(self) -> int:
        """Address of the record that the kernels read; valid for its lifetime."""
        return ctypes.addressof(self._layout)

    @functools.cached_property
    def _layout(self) -> ArgumentStruct:
        """The record that the kernel reads."""
        i = self.inputs
        return _StepMemory(
            tables=i.tables,
            cos=self.cos,
            sin=self.sin,
            ids=i.ids_T,
            cos_T=i.cos_T,
            sin_T=i.sin_T,
            rows=i.rows_T,
            slots=i.slots_Q,
            lengths=i.lengths_Q,
            table_width=i.tables.shape[1],
            pairs=self.cos.shape[1],
            page_tokens=PAGE_TOKENS,
        )


def memory(tokens: int, tables: Tensor, cos: Tensor, sin: Tensor) -> StepMemory:
    """Memory for steps of `tokens` tokens. tables int32 [slots, pages per slot]; cos, sin float32 [position, P / 2]."""
    pairs, device = cos.shape[1], cos.device
    inputs = Inputs(
        ids_T=torch.empty(tokens, dtype=torch.int64, device=device),
        cos_T=torch.empty(tokens, pairs, device=device),
        sin_T=torch.empty(tokens, pairs, device=device),
        rows_T=torch.empty(tokens, dtype=torch.int64, device=device),
        chunks=(),
        tokens_Q=torch.arange(tokens, dtype=torch.int32, device=device),
        slots_Q=torch.empty(tokens, dtype=torch.int32, device=device),
        lengths_Q=torch.empty(tokens, dtype=torch.int32, device=device),
        tables=tables,
    )
    return StepMemory(cos, sin, inputs)


class StepInputsArgs(NamedTuple):
    """Gathers the tokens, angles, cache rows and contexts of all positions of a step."""

    tokens: Tensor  # int64 [slots, places]: each slot's tokens; rows may be strided
    into: StepMemory  # for T tokens, the sum of the counts in `spans`; written, except tokens_Q and tables
    spans: Sequence[int]  # slot, first position and count of each row, flattened


def reference(args: StepInputsArgs) -> StepRows:
    """-> the written tensors of `into`; the next step with the same number of tokens overwrites them."""
    into, spans = args.into, args.spans
    spans = list(spans)
    rows = list(zip(spans[::3], spans[1::3], spans[2::3], strict=True))
    slot_T = torch.tensor([slot for slot, _, count in rows for _ in range(count)])
    position_T = torch.tensor([position for _, start, count in rows for position in range(start, start + count)])
    page_T = into.inputs.tables[slot_T, position_T // PAGE_TOKENS].long()
    values = StepRows(
        ids_T=args.tokens[slot_T, position_T],
        cos_T=into.cos[position_T],
        sin_T=into.sin[position_T],
        rows_T=page_T * PAGE_TOKENS + position_T % PAGE_TOKENS,
        slots_Q=slot_T,
        lengths_Q=position_T + 1,
    )
    for to, value in zip(into.written, values, strict=True):
        to.copy_(value)
    return into.written


def kernel(args: StepInputsArgs) -> StepRows:
    """One native call that fills and returns the tensors of `into`."""
    tokens, given = args.tokens, array("i", args.spans)
    spans, values = given.buffer_info()
    _step_inputs(tokens=tokens, reach=tokens.shape[1], memory=args.into.address, spans=spans, S=values // 3)
    return args.into.written


def cost(args: StepInputsArgs) -> Cost:
    """Each output is read once from its source and written once; operations are not counted."""
    return Cost(2 * sum(x.nbytes for x in args.into.written))


def cases() -> Iterator[Case]:
    """One token, rows of one token each, and rows of several tokens that verify drafts."""

    def make(counts: tuple[int, ...], pages: int, pairs: int):
        def inputs(g: torch.Generator) -> StepInputsArgs:
            slots, places = len(counts) + 2, pages * PAGE_TOKENS
            tables = torch.randperm(slots * pages, generator=g).to(torch.int32).view(slots, pages)
            angle = torch.rand(places, pairs, generator=g) * 6.28
            tokens = torch.randint(1000, (slots, places + 1), generator=g)
            starts = [int(torch.randint(places - count, (1,), generator=g)) for count in counts]
            rows = zip(torch.randperm(slots, generator=g).tolist(), starts, counts, strict=False)
            return StepInputsArgs(
                tokens, memory(sum(counts), tables, angle.cos(), angle.sin()), [n for row in rows for n in row]
            )

        return inputs

    yield Case("one token", make((1,), 3, 32))
    yield Case("16 rows", make((1,) * 16, 16, 32))
    yield Case("rows that verify drafts", make((4, 1, 3, 64, 2), 2, 5))


step_inputs = Kernel(Op("step_inputs", StepInputsArgs, reference, cost, cases, rtol=0.0), kernel, "cpu")
