"""The beginning of a decode step: applies the plan to the slots, and makes the model's inputs from its positions.

A slot holds a job's tokens. The host plans a step without knowing the slots' current lengths; the device knows them.

B rows of a step, K positions of each, T = B K; C columns of a plan, P rope.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.op import Case, Cost, Op
from redline.ops.sample import ODDS

MOST_ROWS = 256  # maximum rows of a step that is captured as a CUDA graph
MOST_POSITIONS = 16  # maximum per row: its last token and its drafts
MOST_STEP = 512  # maximum positions of all rows together
MOST_PAGES = 2  # maximum new pages of a row in one plan
MOST_DRAFTS = MOST_POSITIONS - 1

# Facts of a slot, int64: its limit, its seed, and the bits of its odds (`ops.sample.ODDS`), each a float64.
LIMIT, SEED = range(2)
SLOT_ODDS = slice(2, 2 + len(ODDS))
FACTS = SLOT_ODDS.stop

# Columns of a plan, int64.
SLOT = 0
ASKED = 1  # maximum positions: one and the drafts; 0: the row is padding
LENGTH = 2  # new length of the slot, if the host has changed it; else KEEP
SLOT_FACTS = slice(3, 3 + FACTS)  # valid if LENGTH is given
# Indices in the flattened page tables, into which PAGES are written.
CELLS = slice(SLOT_FACTS.stop, SLOT_FACTS.stop + MOST_PAGES)
PAGES = slice(CELLS.stop, CELLS.stop + MOST_PAGES)
PROPOSE = PAGES.stop  # maximum drafts that the drafter makes after the row; -1: it does not read the row
MATCH = PROPOSE + 1  # minimum length in tokens of a suffix match to draft from; 0: suffix matching is off
GIVEN = MATCH + 1  # number of drafts given by the host, which replace those in the slot
DRAFTS_GIVEN = slice(GIVEN + 1, GIVEN + 1 + MOST_DRAFTS)
GIVEN_BY = DRAFTS_GIVEN.stop  # the source of the given drafts (BY_*)
ALTERED = GIVEN_BY + 1  # how the row's logits are adjusted before sampling (ADJUSTED, MASKED)
COLUMNS = ALTERED + 1

KEEP = -1
ADJUSTED, MASKED = 1, 2  # by the slot's logit adjustments; by masks that the host writes. 3: by both; 0: not at all

# Columns of a result, int64: the slot's length before the step, positions that ran, new tokens, number of drafts for
# the next step, the source of the verified drafts (BY_*) and of the next drafts; the new tokens, the next drafts.
BEFORE, RAN, NEW, DRAFTED, BY, DRAFTED_BY, TOKENS = range(7)
DRAFTS = TOKENS + MOST_POSITIONS
RESULT_COLUMNS = DRAFTS + MOST_DRAFTS
BY_NOBODY, BY_DRAFTER, BY_SUFFIX, BY_GRAMMAR = range(4)  # drafts of a grammar are given by the host

DEFINES = {
    "PLAN_SLOT": SLOT,
    "PLAN_ASKED": ASKED,
    "PLAN_LENGTH": LENGTH,
    "PLAN_FACTS": SLOT_FACTS.start,
    "PLAN_CELLS": CELLS.start,
    "PLAN_PAGES": PAGES.start,
    "PLAN_PROPOSE": PROPOSE,
    "PLAN_MATCH": MATCH,
    "PLAN_GIVEN": GIVEN,
    "PLAN_DRAFTS_GIVEN": DRAFTS_GIVEN.start,
    "PLAN_GIVEN_BY": GIVEN_BY,
    "PLAN_ALTERED": ALTERED,
    "PLAN_COLUMNS": COLUMNS,
    "ADJUSTED": ADJUSTED,
    "MASKED": MASKED,
    "FACTS": FACTS,
    "RESULT_BEFORE": BEFORE,
    "RESULT_RAN": RAN,
    "RESULT_NEW": NEW,
    "RESULT_DRAFTED": DRAFTED,
    "RESULT_BY": BY,
    "RESULT_DRAFTED_BY": DRAFTED_BY,
    "RESULT_TOKENS": TOKENS,
    "RESULT_DRAFTS": DRAFTS,
    "RESULT_COLUMNS": RESULT_COLUMNS,
    "BY_NOBODY": BY_NOBODY,
    "BY_DRAFTER": BY_DRAFTER,
    "BY_SUFFIX": BY_SUFFIX,
    "MOST_POSITIONS": MOST_POSITIONS,
    "MOST_DRAFTS": MOST_DRAFTS,
}
THREADS = 256  # eight positions per block


@dataclass(frozen=True)
class SlotTensors:
    """The state of all slots. The last one belongs to no job: discarded values go there as zeros, or are dropped."""

    tokens: Tensor  # int64 [slots, reach]: each slot's tokens, of prompt and answer
    tables: Tensor  # int32 [slots, pages per slot]: its pages, in order
    lengths: Tensor  # int64 [slots]: number of its tokens
    facts: Tensor  # int64 [slots, FACTS]: its limit, and its sampling parameters
    drafts: Tensor  # int64 [slots, MOST_DRAFTS]: drafts after the slot's last token, to be verified
    drafted: Tensor  # int64 [slots]: number of these drafts
    by: Tensor  # int64 [slots]: their source (BY_*)

    def or_nobody(self, which: Tensor, slots: Tensor) -> Tensor:
        """`slots` where `which` is true, elsewhere the last slot. int64, in the broadcast shape of both."""
        return torch.where(which, slots, self.lengths.shape[0] - 1)


class StepRows(NamedTuple):
    """The inputs of a step of queries only, named as in `Inputs`."""

    ids_T: Tensor  # int64 [T]
    cos_T: Tensor  # float32 [T, P / 2]
    sin_T: Tensor  # float32 [T, P / 2]
    rows_T: Tensor  # int64 [T]: page * 64 + place, the cache row of each position's latent
    slots_Q: Tensor  # int32 [T]
    lengths_Q: Tensor  # int32 [T]: context length of each position, itself included


class StepRowsArgs(NamedTuple):
    """Applies a plan to its slots, and makes the inputs of every row's positions."""

    plan_BC: Tensor  # int64 [B, C], the columns above; B at most MOST_ROWS
    slots: SlotTensors  # lengths, facts and tables are written if the plan contains new ones
    results: Tensor  # int64 [MOST_ROWS, RESULT_COLUMNS]; BEFORE and RAN of the first B rows are written
    frequencies: Tensor  # float32 [P / 2]: radians per position of each rope pair
    positions: int  # K, at most MOST_POSITIONS
    spare_page: int  # a page of no slot, for latents that are not kept


def reference(args: StepRowsArgs) -> StepRows:
    """-> the inputs of B K positions, row by row. No data-dependent shapes, so a CUDA graph can capture it.

    The drafts of a row are those given by the host, else those in the slot. An unused position repeats the first one of
    its row, and its latent goes to the spare page.
    """
    plan_BC, slots, positions = args.plan_BC, args.slots, args.positions
    rows, slot_B = plan_BC.shape[0], plan_BC[:, SLOT]
    _take_over(plan_BC, slots)
    length_B, limit_B = slots.lengths[slot_B], slots.facts[slot_B, LIMIT]
    given_B = plan_BC[:, GIVEN] > 0
    drafts_BD = torch.where(given_B[:, None], plan_BC[:, DRAFTS_GIVEN], slots.drafts[slot_B])
    count_B = torch.where(given_B, plan_BC[:, GIVEN], slots.drafted[slot_B])
    by_B = torch.where(given_B, plan_BC[:, GIVEN_BY], slots.by[slot_B])
    ran_B = torch.minimum(torch.minimum(plan_BC[:, ASKED], 1 + count_B), limit_B - length_B).clamp(min=0)
    of_row_K = torch.arange(positions, device=plan_BC.device)
    live_BK = of_row_K < ran_B[:, None]
    # A job at its limit has no page for its last token's position, but the previous position has been computed.
    start_B = torch.minimum(length_B - 1, limit_B - 2).clamp(min=0)
    place_BK = start_B[:, None] + of_row_K * live_BK
    last_B1 = slots.tokens[slot_B, start_B][:, None]
    drafted_BK = torch.cat([last_B1, drafts_BD[:, : positions - 1]], 1)
    slot_BK = slot_B[:, None].expand(rows, positions)
    row_BK = slots.tables[slot_BK, place_BK // PAGE_TOKENS].long() * PAGE_TOKENS + place_BK % PAGE_TOKENS
    spare_BK = torch.arange(rows * positions, device=plan_BC.device).view(rows, positions) % PAGE_TOKENS
    angle = place_BK.flatten().float()[:, None] * args.frequencies
    args.results[:rows, BEFORE], args.results[:rows, RAN] = length_B, ran_B
    args.results[:rows, BY] = by_B * (ran_B > 1)
    return StepRows(
        ids_T=torch.where(live_BK, drafted_BK, last_B1).flatten(),
        cos_T=angle.cos(),
        sin_T=angle.sin(),
        rows_T=torch.where(live_BK, row_BK, args.spare_page * PAGE_TOKENS + spare_BK).flatten(),
        slots_Q=slot_BK.flatten().int(),
        lengths_Q=(place_BK.flatten() + 1).int(),
    )


def _take_over(plan_BC: Tensor, slots: SlotTensors) -> None:
    """Writes into the slots the values that the host has changed: new pages, and new lengths, which invalidate the
    slot's drafts."""
    told_B = plan_BC[:, LENGTH] != KEEP
    into_B = slots.or_nobody(told_B, plan_BC[:, SLOT])
    slots.lengths[into_B] = plan_BC[:, LENGTH] * told_B
    slots.facts[into_B] = plan_BC[:, SLOT_FACTS] * told_B[:, None]
    slots.drafted[into_B] = 0
    slots.tables.view(-1)[plan_BC[:, CELLS]] = plan_BC[:, PAGES].int()


_Launch = launch_record("step/step_rows.cu", "StepRowsLaunch")


@functools.cache
def _kernel() -> CudaKernel:
    defines = {**DEFINES, "PAGE_TOKENS": PAGE_TOKENS}
    return CudaKernel("step/step_rows.cu", "step_rows", _Launch, defines, shared=0, threads=THREADS)


def cuda(args: StepRowsArgs) -> StepRows:
    """The reference's result; one warp per position."""
    plan_BC, slots = args.plan_BC, args.slots
    count, pairs, device = plan_BC.shape[0], args.frequencies.shape[0], plan_BC.device
    tokens = count * args.positions

    def made(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    step = StepRows(
        ids_T=made(tokens, dtype=torch.int64),
        cos_T=made(tokens, pairs, dtype=torch.float32),
        sin_T=made(tokens, pairs, dtype=torch.float32),
        rows_T=made(tokens, dtype=torch.int64),
        slots_Q=made(tokens, dtype=torch.int32),
        lengths_Q=made(tokens, dtype=torch.int32),
    )
    given = _Launch(
        plan=plan_BC,
        tokens=slots.tokens,
        tables=slots.tables,
        lengths=slots.lengths,
        facts=slots.facts,
        drafts=slots.drafts,
        drafted=slots.drafted,
        by=slots.by,
        results=args.results,
        frequencies=args.frequencies,
        ids=step.ids_T,
        cos=step.cos_T,
        sin=step.sin_T,
        rows=step.rows_T,
        slots=step.slots_Q,
        contexts=step.lengths_Q,
        count=count,
        positions=args.positions,
        reach=slots.tokens.shape[1],
        pages=slots.tables.shape[1],
        pairs=pairs,
        spare_page=args.spare_page,
    )
    _kernel().launch(given, -(-tokens // (THREADS // 32)))
    return step


def cost(args: StepRowsArgs) -> Cost:
    """The plan, 32 bytes of each row's slot and result, and the inputs of every position."""
    rows = args.plan_BC.shape[0]
    return Cost(args.plan_BC.nbytes + 32 * rows + rows * args.positions * (8 * args.frequencies.shape[0] + 24))


def random_slots(g: torch.Generator, slots: int, pages: int) -> SlotTensors:
    """Slots with different numbers of tokens and limits, some at their limit; the last one is empty."""
    reach = pages * PAGE_TOKENS + 1
    tables = torch.randperm((slots + 1) * pages, generator=g).to(torch.int32).view(slots + 1, pages)
    limits = torch.randint(2, reach, (slots + 1,), generator=g)
    lengths = (limits - torch.randint(9, (slots + 1,), generator=g)).clamp(min=1)
    facts = torch.randint(1 << 40, (slots + 1, FACTS), generator=g)
    facts[:, LIMIT] = limits
    tokens = torch.randint(1000, (slots + 1, reach), generator=g)
    drafts = torch.randint(1000, (slots + 1, MOST_DRAFTS), generator=g)
    drafted = torch.randint(MOST_DRAFTS + 1, (slots + 1,), generator=g)
    by = torch.randint(BY_DRAFTER, BY_SUFFIX + 1, (slots + 1,), generator=g)
    for part in (lengths, facts, tables, tokens, drafts, drafted, by):
        part[-1] = 0
    return SlotTensors(tokens, tables, lengths, facts, drafts, drafted, by)


def random_plan(g: torch.Generator, slots: SlotTensors, rows: int, real: int, positions: int) -> Tensor:
    """`real` rows with a slot each, every second one with changes and a new page; then padding rows."""
    nobody, pages = slots.tables.shape[0] - 1, slots.tables.shape[1]
    plan = torch.zeros(rows, COLUMNS, dtype=torch.int64)
    plan[:, SLOT] = torch.cat([torch.randperm(nobody, generator=g)[:real], torch.zeros(rows - real).long()])
    plan[real:, SLOT] = plan[0, SLOT]
    plan[:, LENGTH], plan[:, CELLS] = KEEP, nobody * pages
    plan[:real, ASKED] = torch.randint(1, positions + 1, (real,), generator=g)
    plan[:, PROPOSE] = torch.randint(-1, MOST_DRAFTS + 1, (rows,), generator=g)
    plan[:, MATCH] = torch.randint(6, (rows,), generator=g)
    plan[:real, DRAFTS_GIVEN] = torch.randint(1000, (real, MOST_DRAFTS), generator=g)
    for row in range(0, real, 2):
        plan[row, SLOT_FACTS] = torch.randint(1 << 40, (FACTS,), generator=g)
        plan[row, LENGTH] = torch.randint(1, slots.tokens.shape[1] - 10, (1,), generator=g)
        plan[row, SLOT_FACTS.start + LIMIT] = plan[row, LENGTH] + torch.randint(10, (1,), generator=g)
        plan[row, CELLS.start] = plan[row, SLOT] * pages + torch.randint(pages, (1,), generator=g)
        plan[row, PAGES.start] = torch.randint((nobody + 1) * pages, (1,), generator=g)
    for row in range(0, real, 3):
        plan[row, GIVEN] = torch.randint(MOST_DRAFTS + 1, (1,), generator=g)
        plan[row, GIVEN_BY] = BY_GRAMMAR - row // 3 % BY_GRAMMAR
    return plan


def cases() -> Iterator[Case]:
    """Up to 256 rows, up to 16 positions of a row, padding rows, and a long context."""

    def make(rows: int, real: int, positions: int, pages: int = 8):
        def inputs(g: torch.Generator) -> StepRowsArgs:
            slots = random_slots(g, real + 3, pages)
            plan = random_plan(g, slots, rows, real, positions)
            results = torch.full((MOST_ROWS, RESULT_COLUMNS), -7)
            frequencies = 50000 ** -torch.linspace(0, 1, 32)
            return StepRowsArgs(plan, slots, results, frequencies, positions, slots.tables.numel())

        return inputs

    yield Case("B=1 K=1", make(1, 1, 1))
    yield Case("B=1 K=1, a long context", make(1, 1, 1, pages=4096))
    yield Case("B=4 K=3, one to fill the shape", make(4, 3, 3))
    yield Case("B=64 K=8", make(64, 40, 8))
    yield Case("B=32 K=16", make(32, 30, 16))
    yield Case("B=256 K=2", make(256, 250, 2))


step_rows = Kernel(
    Op("step_rows", StepRowsArgs, reference, cost, cases, rtol=1e-6, writes=("slots", "results")), cuda, "cuda"
)
