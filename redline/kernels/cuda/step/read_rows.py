"""After a step, makes the rows that a learned drafter reads, from the step's results.

A drafter's row reads the token at place p + 1, is rotated by p, and is stored at place p + 1 of its slot's pages; place
0 is unused. The accepted positions of each row of the step are read; the drafter drafts from the last of them.

B rows of a step, K positions of each, T = B K; P rope of the drafter.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.step.step_rows import (
    ASKED,
    BEFORE,
    DEFINES,
    LIMIT,
    MOST_ROWS,
    NEW,
    PROPOSE,
    RESULT_COLUMNS,
    SLOT,
    THREADS,
    TOKENS,
    SlotTensors,
    random_plan,
    random_slots,
)
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.op import Case, Cost, Op


class ReadRows(NamedTuple):
    """The drafter's rows [T], and for each row of the step [B] the one to draft from."""

    ids_T: Tensor  # int64: the rows' tokens
    cos_T: Tensor  # float32 [T, P / 2]
    sin_T: Tensor
    rows_T: Tensor  # int64: page * 64 + place; the spare page for a rejected position
    tails_T: Tensor  # int64: the page whose last feature is the row's, or the spare page
    last_B: Tensor  # int32: index among T of the row to draft from
    slots_B: Tensor  # int32
    lengths_B: Tensor  # int32: number of visible places, its own included; 2 if the drafter does not read the row


class ReadRowsArgs(NamedTuple):
    """Arguments of `read_rows`."""

    plan_BC: Tensor  # int64 [B, COLUMNS]
    slots: SlotTensors
    results: Tensor  # int64 [MOST_ROWS, RESULT_COLUMNS], settled
    frequencies: Tensor  # float32 [P / 2]: radians per position, the drafter's
    positions: int  # K
    spare_page: int


def reference(args: ReadRowsArgs) -> ReadRows:
    """No data-dependent shapes, so a CUDA graph can capture it. Rows beyond a job's last page go to the spare page."""
    plan_BC, slots, positions = args.plan_BC, args.slots, args.positions
    rows, slot_B = plan_BC.shape[0], plan_BC[:, SLOT]
    results, limit_B = args.results[:rows], slots.facts[slot_B, LIMIT]
    of_row_K = torch.arange(positions, device=plan_BC.device)
    read_B = (plan_BC[:, ASKED] > 0) & (plan_BC[:, PROPOSE] >= 0)
    reads_BK = read_B[:, None] & (of_row_K < results[:, NEW, None])
    at_BK = (results[:, BEFORE, None] - 1 + of_row_K) * reads_BK
    page_BK = slots.tables[slot_B[:, None], at_BK // PAGE_TOKENS].long()
    ends_BK = reads_BK & (at_BK % PAGE_TOKENS == PAGE_TOKENS - 1)
    writes_BK = reads_BK & (at_BK + 2 <= limit_B[:, None] - 1)
    place_BK = (at_BK + 1) * writes_BK
    row_BK = slots.tables[slot_B[:, None], place_BK // PAGE_TOKENS].long() * PAGE_TOKENS + place_BK % PAGE_TOKENS
    spare_BK = (
        args.spare_page * PAGE_TOKENS
        + torch.arange(rows * positions, device=plan_BC.device).view(rows, positions) % PAGE_TOKENS
    )
    angle = at_BK.flatten().float()[:, None] * args.frequencies
    new_B = results[:, NEW].clamp(min=1)
    return ReadRows(
        ids_T=(results[:, TOKENS : TOKENS + positions] * reads_BK).flatten(),
        cos_T=angle.cos(),
        sin_T=angle.sin(),
        rows_T=torch.where(writes_BK, row_BK, spare_BK).flatten(),
        tails_T=torch.where(ends_BK, page_BK, args.spare_page).flatten(),
        last_B=(torch.arange(rows, device=plan_BC.device) * positions + new_B - 1).int(),
        slots_B=slot_B.int(),
        lengths_B=(torch.minimum(results[:, BEFORE] + new_B, limit_B - 1) * read_B).clamp(min=2).int(),
    )


_Launch = launch_record("step/read_rows.cu", "ReadRowsLaunch")


@functools.cache
def _kernel() -> CudaKernel:
    return CudaKernel(
        "step/read_rows.cu", "read_rows", _Launch, {**DEFINES, "PAGE_TOKENS": PAGE_TOKENS}, shared=0, threads=THREADS
    )


def cuda(args: ReadRowsArgs) -> ReadRows:
    """One launch, a warp per position."""
    plan_BC, slots = args.plan_BC, args.slots
    count, pairs, device = plan_BC.shape[0], args.frequencies.shape[0], plan_BC.device
    tokens = count * args.positions

    def made(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    read = ReadRows(
        ids_T=made(tokens, dtype=torch.int64),
        cos_T=made(tokens, pairs, dtype=torch.float32),
        sin_T=made(tokens, pairs, dtype=torch.float32),
        rows_T=made(tokens, dtype=torch.int64),
        tails_T=made(tokens, dtype=torch.int64),
        last_B=made(count, dtype=torch.int32),
        slots_B=made(count, dtype=torch.int32),
        lengths_B=made(count, dtype=torch.int32),
    )
    given = _Launch(
        plan=plan_BC,
        tables=slots.tables,
        facts=slots.facts,
        results=args.results,
        frequencies=args.frequencies,
        ids=read.ids_T,
        cos=read.cos_T,
        sin=read.sin_T,
        rows=read.rows_T,
        tails=read.tails_T,
        last=read.last_B,
        slots=read.slots_B,
        contexts=read.lengths_B,
        count=count,
        positions=args.positions,
        pages=slots.tables.shape[1],
        pairs=pairs,
        spare_page=args.spare_page,
    )
    _kernel().launch(given, -(-tokens // (THREADS // 32)))
    return read


def cost(args: ReadRowsArgs) -> Cost:
    """Bytes of the plan, the results, and the outputs."""
    rows = args.plan_BC.shape[0]
    made = rows * args.positions * (8 * args.frequencies.shape[0] + 24) + 12 * rows
    return Cost(args.plan_BC.nbytes + rows * 8 * (RESULT_COLUMNS + 2) + made)


def random_results(g: torch.Generator, plan: Tensor, slots: SlotTensors, positions: int) -> Tensor:
    """Settled results of a plan: some rows produced no token, some are at their limit."""
    results = torch.full((MOST_ROWS, RESULT_COLUMNS), -7)
    rows, slot = plan.shape[0], plan[:, SLOT]
    new = torch.randint(positions + 1, (rows,), generator=g) * (plan[:, ASKED] > 0)
    results[:rows, NEW] = torch.minimum(new, slots.lengths[slot] - 1)
    results[:rows, BEFORE] = slots.lengths[slot] - results[:rows, NEW]
    results[:rows, TOKENS : TOKENS + positions] = torch.randint(1000, (rows, positions), generator=g)
    return results


def cases() -> Iterator[Case]:
    """Shapes of captured steps, in which some rows are padding."""

    def make(rows: int, real: int, positions: int, pages: int = 8):
        def inputs(g: torch.Generator) -> ReadRowsArgs:
            slots = random_slots(g, real + 3, pages)
            plan = random_plan(g, slots, rows, real, positions)
            frequencies = 50000 ** -torch.linspace(0, 1, 32)
            results = random_results(g, plan, slots, positions)
            return ReadRowsArgs(plan, slots, results, frequencies, positions, slots.tables.numel())

        return inputs

    yield Case("B=1 K=1", make(1, 1, 1))
    yield Case("B=4 K=3, one to fill the shape", make(4, 3, 3))
    yield Case("B=8 K=5", make(8, 8, 5))
    yield Case("B=64 K=8", make(64, 40, 8))
    yield Case("B=32 K=16", make(32, 30, 16))
    yield Case("B=256 K=2", make(256, 250, 2))


read_rows = Kernel(Op("read_rows", ReadRowsArgs, reference, cost, cases, rtol=1e-6), cuda, "cuda")
