"""Stores a drafted token of each row in its slot, and makes the drafter's next row from it.

The next row reads the token at the next place, and sees one more place (`read_rows` describes a drafter's rows).

B rows of a step, P rope of the drafter.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.step.read_rows import random_results
from redline.kernels.cuda.step.step_rows import (
    ASKED,
    BY_SUFFIX,
    DEFINES,
    DRAFTED,
    DRAFTS,
    LIMIT,
    MOST_DRAFTS,
    NEW,
    PROPOSE,
    SLOT,
    THREADS,
    SlotTensors,
    random_plan,
    random_slots,
)
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.op import Case, Cost, Op


@dataclass(frozen=True)
class NextRows:
    """The drafter's row of each row of the step, [B]: the inputs of a pass."""

    ids_B: Tensor  # int64
    cos_B: Tensor  # float32 [B, P / 2]
    sin_B: Tensor
    rows_B: Tensor  # int64: page * 64 + place
    lengths_B: Tensor  # int32: number of visible places, its own included


class KeepDraftsArgs(NamedTuple):
    """Arguments of `keep_drafts`."""

    token_B: Tensor  # int64: the drafted tokens
    plan_BC: Tensor  # int64 [B, COLUMNS]
    slots: SlotTensors  # `drafts` and `drafted` are written
    results: Tensor  # int64 [MOST_ROWS, RESULT_COLUMNS]; DRAFTED and DRAFTS are written
    next: NextRows  # on input its lengths are those of the rows that were drafted from; all fields are written
    frequencies: Tensor  # float32 [P / 2]: radians per position, the drafter's
    spare_page: int


def reference(args: KeepDraftsArgs) -> None:
    """Rows that want no more drafts store none, and neither do rows with drafts from a suffix match.

    Their next rows, and those after a last draft, go to the spare page. No data-dependent shapes, so a CUDA graph can
    capture it.
    """
    plan_BC, slots, following = args.plan_BC, args.slots, args.next
    rows, slot_B = plan_BC.shape[0], plan_BC[:, SLOT]
    results, limit_B, done_B = args.results[:rows], slots.facts[slot_B, LIMIT], slots.drafted[slot_B]
    wanted_B = torch.minimum(plan_BC[:, PROPOSE], limit_B - slots.lengths[slot_B] - 1).clamp(max=MOST_DRAFTS)
    live_B = (plan_BC[:, ASKED] > 0) & (results[:, NEW] > 0) & (done_B < wanted_B) & (slots.by[slot_B] != BY_SUFFIX)
    token_B, column_B = args.token_B.clamp(min=0), done_B * live_B
    into_B = slots.or_nobody(live_B, slot_B)
    slots.drafts[into_B, column_B] = token_B * live_B
    slots.drafted[into_B] = (done_B + 1) * live_B
    of_row_B = torch.arange(rows, device=plan_BC.device)
    results[:, DRAFTED] = torch.where(live_B, done_B + 1, results[:, DRAFTED])
    results[of_row_B, DRAFTS + column_B] = torch.where(live_B, token_B, results[of_row_B, DRAFTS + column_B])
    place_B = following.lengths_B.long()
    writes_B = live_B & (done_B + 1 < wanted_B) & (place_B <= limit_B - 2)  # no page is guaranteed after the last draft
    page_B = slots.tables[slot_B, place_B * writes_B // PAGE_TOKENS].long()
    angle = (place_B - 1).float()[:, None] * args.frequencies
    following.ids_B.copy_(token_B * live_B)
    following.cos_B.copy_(angle.cos())
    following.sin_B.copy_(angle.sin())
    spare_B = args.spare_page * PAGE_TOKENS + of_row_B % PAGE_TOKENS
    following.rows_B.copy_(torch.where(writes_B, page_B * PAGE_TOKENS + place_B % PAGE_TOKENS, spare_B))
    following.lengths_B.add_(writes_B.int())


_Launch = launch_record("step/keep_drafts.cu", "KeepDraftsLaunch")


@functools.cache
def _kernel() -> CudaKernel:
    return CudaKernel(
        "step/keep_drafts.cu",
        "keep_drafts",
        _Launch,
        {**DEFINES, "PAGE_TOKENS": PAGE_TOKENS},
        shared=0,
        threads=THREADS,
    )


def cuda(args: KeepDraftsArgs) -> None:
    """One launch, a warp per row."""
    slots, following = args.slots, args.next
    count = args.plan_BC.shape[0]
    given = _Launch(
        token=args.token_B,
        plan=args.plan_BC,
        tables=slots.tables,
        lengths=slots.lengths,
        facts=slots.facts,
        drafts=slots.drafts,
        drafted=slots.drafted,
        by=slots.by,
        results=args.results,
        frequencies=args.frequencies,
        ids=following.ids_B,
        cos=following.cos_B,
        sin=following.sin_B,
        rows=following.rows_B,
        contexts=following.lengths_B,
        count=count,
        pages=slots.tables.shape[1],
        pairs=args.frequencies.shape[0],
        spare_page=args.spare_page,
    )
    _kernel().launch(given, -(-count // (THREADS // 32)))


def cost(args: KeepDraftsArgs) -> Cost:
    """Bytes of the plan, of the drafts, and of the next rows."""
    rows = args.plan_BC.shape[0]
    return Cost(args.plan_BC.nbytes + rows * (64 + 8 * args.frequencies.shape[0] + 24))


def cases() -> Iterator[Case]:
    """Shapes of captured steps, in which some rows are padding."""

    def make(rows: int, real: int, pages: int = 8):
        def inputs(g: torch.Generator) -> KeepDraftsArgs:
            slots = random_slots(g, real + 3, pages)
            plan = random_plan(g, slots, rows, real, 4)
            frequencies = 50000 ** -torch.linspace(0, 1, 32)
            results = random_results(g, plan, slots, 4)
            lengths = slots.lengths[plan[:, SLOT]].clamp(min=2).int()
            empty = torch.zeros(rows, dtype=torch.int64)
            following = NextRows(empty, torch.zeros(rows, 32), torch.zeros(rows, 32), empty.clone(), lengths)
            token = torch.randint(-1, 1000, (rows,), generator=g)
            return KeepDraftsArgs(token, plan, slots, results, following, frequencies, slots.tables.numel())

        return inputs

    yield Case("B=1", make(1, 1))
    yield Case("B=4, one to fill the shape", make(4, 3))
    yield Case("B=64", make(64, 40))
    yield Case("B=256", make(256, 250))


keep_drafts = Kernel(
    Op("keep_drafts", KeepDraftsArgs, reference, cost, cases, rtol=1e-6, writes=("slots", "results", "next")),
    cuda,
    "cuda",
)
