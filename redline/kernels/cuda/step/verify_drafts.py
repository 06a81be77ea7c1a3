"""The end of a decode step: verifies drafts, and appends the accepted tokens to their slots and to the results.

Each position's token was sampled as without drafts, and a draft is accepted while it equals the sample
(run/drafting/verify.py). Under synthetic acceptance, which is for benchmarks, the number of accepted drafts is a random
function of (seed, position).

B rows of a step, K positions of each, T = B K, D = MOST_DRAFTS.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.step.step_rows import (
    ASKED,
    BEFORE,
    BY_DRAFTER,
    BY_NOBODY,
    DEFINES,
    DRAFTED,
    DRAFTED_BY,
    LIMIT,
    MOST_DRAFTS,
    MOST_ROWS,
    NEW,
    RAN,
    RESULT_COLUMNS,
    SEED,
    SLOT,
    TOKENS,
    SlotTensors,
    random_plan,
    random_slots,
)
from redline.kernels.kernel import Kernel
from redline.ops.draws import VERDICT, uniforms_of
from redline.ops.op import Case, Cost, Op


class VerifyDraftsArgs(NamedTuple):
    """Compares each row's drafts with the samples, and appends the accepted tokens."""

    token_T: Tensor  # int64 [T]: the sample at each position, in order
    finite_T: Tensor  # bool [T]: whether its logits are finite
    ids_T: Tensor  # int64 [T]: the input token of each position
    plan_BC: Tensor  # int64 [B, C]: as in `step_rows`
    # Tokens and lengths are written. `drafted` becomes 0, since a row's drafts have been verified, and `by` becomes
    # BY_DRAFTER, since the drafter makes the next drafts unless there is a suffix match.
    slots: SlotTensors
    results: Tensor  # int64 [MOST_ROWS, RESULT_COLUMNS]: BEFORE and RAN are read; NEW, DRAFTED* and TOKENS are written
    # int64 [D], in units of 2^-53: the share of rounds in which the first 1, 2 ... drafts are all accepted, whatever
    # was sampled (`shares_of`); NO_SHARES: drafts are accepted while they equal the samples.
    shares_D: Tensor


NO_SHARES = (-1,) * MOST_DRAFTS


def shares_of(rates: Sequence[float]) -> tuple[int, ...]:
    """`shares_D` for these rates, from 0 to 1; NO_SHARES if there are none. Drafts beyond the rates are rejected."""
    if not rates:
        return NO_SHARES
    return *(math.ceil(rate * 2**53) for rate in rates[:MOST_DRAFTS]), *(0,) * (MOST_DRAFTS - len(rates))


def reference(args: VerifyDraftsArgs) -> None:
    """No data-dependent shapes, so a CUDA graph can capture it."""
    plan_BC, slots, results = args.plan_BC, args.slots, args.results
    rows = plan_BC.shape[0]
    token_BK, finite_BK = args.token_T.view(rows, -1), args.finite_T.view(rows, -1)
    positions, slot_B, results = token_BK.shape[1], plan_BC[:, SLOT], results[:rows]
    length_B, of_row_K = results[:, BEFORE], torch.arange(positions, device=plan_BC.device)
    # A wrong draft may cause non-finite logits that the answer itself would not have: later drafts are then rejected.
    holds_BK = finite_BK & (of_row_K < results[:, RAN, None])
    if positions > 1:
        draft_BD, synthetic = args.ids_T.view(rows, -1)[:, 1:], args.shares_D[0] >= 0
        draw_B1 = uniforms_of(slots.facts[slot_B, SEED], VERDICT, length_B)[:, None] * 2.0**53
        right_BD = torch.where(synthetic, draw_B1 < args.shares_D[: positions - 1], token_BK[:, :-1] == draft_BD)
        holds_BK[:, 1:] &= right_BD
        # An accepted draft is the token, whatever was sampled.
        held_BD = synthetic & (holds_BK.long().cumprod(1)[:, 1:] > 0)
        token_BK = torch.cat([torch.where(held_BD, draft_BD, token_BK[:, :-1]), token_BK[:, -1:]], 1)
    prefix_BK = holds_BK.long().cumprod(1)
    new_B = prefix_BK.sum(1)
    into_BK = slots.or_nobody(prefix_BK > 0, slot_B[:, None])
    slots.tokens[into_BK, (length_B[:, None] + of_row_K) * prefix_BK] = token_BK * prefix_BK
    slots.lengths[slots.or_nobody(new_B > 0, slot_B)] = (length_B + new_B) * (new_B > 0)
    asked_B = slots.or_nobody(plan_BC[:, ASKED] > 0, slot_B)
    slots.drafted[asked_B] = 0
    slots.by[asked_B] = BY_DRAFTER
    slots.by[-1] = BY_NOBODY
    results[:, NEW], results[:, DRAFTED], results[:, DRAFTED_BY] = new_B, 0, BY_DRAFTER
    results[:, TOKENS : TOKENS + positions] = token_BK


_Launch = launch_record("step/verify_drafts.cu", "VerifyDraftsLaunch")


@functools.cache
def _kernel() -> CudaKernel:
    defines = {**DEFINES, "FACT_SEED": SEED, "VERDICT": VERDICT}
    return CudaKernel("step/verify_drafts.cu", "verify_drafts", _Launch, defines, shared=0, threads=MOST_ROWS)


def cuda(args: VerifyDraftsArgs) -> None:
    """The reference's result; one thread per row."""
    slots = args.slots
    count = args.plan_BC.shape[0]
    given = _Launch(
        chosen=args.token_T,
        finite=args.finite_T,
        ids=args.ids_T,
        plan=args.plan_BC,
        tokens=slots.tokens,
        lengths=slots.lengths,
        drafted=slots.drafted,
        by=slots.by,
        facts=slots.facts,
        results=args.results,
        shares=args.shares_D,
        count=count,
        positions=args.token_T.shape[0] // max(count, 1),
        reach=slots.tokens.shape[1],
    )
    _kernel().launch(given, -(-count // MOST_ROWS))


def cost(args: VerifyDraftsArgs) -> Cost:
    """The positions' tokens read and written twice, their flags, the plan, and four numbers per row."""
    return Cost(3 * args.token_T.nbytes + args.finite_T.nbytes + args.plan_BC.nbytes + 32 * args.plan_BC.shape[0])


def cases() -> Iterator[Case]:
    """Up to 256 rows, up to 16 positions of a row, accepted and rejected drafts, padding rows, synthetic acceptance."""

    def make(rows: int, real: int, positions: int, rates: Sequence[float] = ()):
        def inputs(g: torch.Generator) -> VerifyDraftsArgs:
            slots = random_slots(g, real + 3, 4)
            plan = random_plan(g, slots, rows, real, positions)
            results = torch.full((MOST_ROWS, RESULT_COLUMNS), -7)
            length, limit = slots.lengths[plan[:, SLOT]], slots.facts[plan[:, SLOT], LIMIT]
            asked = torch.randint(positions + 1, (rows,), generator=g)
            results[:rows, BEFORE], results[:real, RAN] = length, torch.minimum(asked, limit - length)[:real]
            results[real:rows, RAN] = 0
            wrong = torch.rand(rows, positions - 1, generator=g) < 0.2
            ids = torch.randint(1000, (rows, positions), generator=g)
            token = torch.cat([ids[:, 1:] + wrong.long(), torch.randint(1000, (rows, 1), generator=g)], 1).flatten()
            finite = torch.rand(rows * positions, generator=g) < 0.95
            shares = torch.tensor(shares_of(rates))
            return VerifyDraftsArgs(token, finite, ids.flatten(), plan, slots, results, shares)

        return inputs

    yield Case("B=1 K=1", make(1, 1, 1))
    yield Case("B=4 K=3, one to fill the shape", make(4, 3, 3))
    yield Case("B=8 K=5", make(8, 8, 5))
    yield Case("B=64 K=8", make(64, 40, 8))
    yield Case("B=32 K=16", make(32, 30, 16))
    yield Case("B=256 K=2", make(256, 250, 2))
    yield Case("B=64 K=8, drawn verdicts", make(64, 40, 8, rates=(1.0, 0.9, 0.7, 0.5, 0.4, 0.3, 0.2)))


verify_drafts = Kernel(
    Op("verify_drafts", VerifyDraftsArgs, reference, cost, cases, writes=("slots", "results")), cuda, "cuda"
)
