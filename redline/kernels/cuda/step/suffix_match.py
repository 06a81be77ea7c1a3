"""After a settled step, drafts by suffix matching (prompt lookup): the tokens that followed an earlier occurrence of a
slot's latest tokens.

The counterpart of `run/drafting/suffix.py` on the host, for tokens that are so far known only on the device; it
searches every earlier position rather than some candidates.

B rows of a step.
"""

import functools
from collections.abc import Iterator
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
    DRAFTED_BY,
    DRAFTS,
    MATCH,
    MOST_DRAFTS,
    NEW,
    SLOT,
    SlotTensors,
    random_plan,
    random_slots,
)
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

WINDOW = 1 << 15  # number of tokens searched; a position among them has 16 bits in the keys that blocks compare
SHORTEST = 3  # minimum match in tokens: matches of one or two are often chance
DEPTH = 32  # maximum match in tokens; longer ones are not better
THREADS = 1024


class SuffixMatchArgs(NamedTuple):
    """Arguments of `suffix_match`."""

    plan_BC: Tensor  # int64 [B, COLUMNS]: SLOT, ASKED and MATCH are read
    slots: SlotTensors  # settled; drafts, drafted and by are written if a match is long enough
    results: Tensor  # int64 [MOST_ROWS, RESULT_COLUMNS], settled; then DRAFTED, DRAFTED_BY and DRAFTS are written


def reference(args: SuffixMatchArgs) -> None:
    """The longest match wins, the latest one if tied. A match that overlaps its continuation is a repetition, which is
    continued periodically. No data-dependent shapes, so a CUDA graph can capture it."""
    plan_BC, slots = args.plan_BC, args.slots
    rows, slot_B = plan_BC.shape[0], plan_BC[:, SLOT]
    results, length_B = args.results[:rows], slots.lengths[slot_B]
    window = min(WINDOW, slots.tokens.shape[1])
    oldest_B = (length_B - window).clamp(min=0)
    count_B = length_B - oldest_B
    of_window_W = torch.arange(window, device=plan_BC.device)
    at_BW = (oldest_B[:, None] + of_window_W).clamp(max=slots.tokens.shape[1] - 1)
    text_BW = slots.tokens[slot_B[:, None], at_BW]
    # For the match that ends before position p of the window: the number of equal tokens, counted backwards.
    going_BW = (of_window_W > 0) & (of_window_W < count_B[:, None])
    equal_BW = torch.zeros_like(text_BW)
    for back in range(1, DEPTH + 1):
        theirs_BW = text_BW.gather(1, (of_window_W - back).clamp(min=0).expand(rows, window))
        mine_B1 = text_BW.gather(1, (count_B - back).clamp(min=0)[:, None])
        going_BW = going_BW & (of_window_W >= back) & (theirs_BW == mine_B1)
        equal_BW += going_BW
    key_B = (equal_BW * (1 << 16) + of_window_W).amax(1)
    matched_B, end_B = key_B >> 16, key_B & 0xFFFF
    asked_B = (plan_BC[:, ASKED] > 0) & (plan_BC[:, MATCH] > 0) & (results[:, NEW] > 0)
    found_B = asked_B & (matched_B >= SHORTEST) & (matched_B >= plan_BC[:, MATCH])
    of_draft_D = torch.arange(MOST_DRAFTS, device=plan_BC.device)
    place_BD = end_B[:, None] + of_draft_D % (count_B - end_B).clamp(min=1)[:, None]
    drafts_BD = text_BW.gather(1, place_BD.clamp(max=window - 1)) * found_B[:, None]
    into_B = slots.or_nobody(found_B, slot_B)
    slots.drafts[into_B] = drafts_BD
    slots.drafted[into_B] = MOST_DRAFTS * found_B
    slots.by[into_B] = BY_SUFFIX * found_B
    results[:, DRAFTED] = torch.where(found_B, MOST_DRAFTS, results[:, DRAFTED])
    results[:, DRAFTED_BY] = torch.where(found_B, BY_SUFFIX, results[:, DRAFTED_BY])
    of_results = slice(DRAFTS, DRAFTS + MOST_DRAFTS)
    results[:, of_results] = torch.where(found_B[:, None], drafts_BD, results[:, of_results])


_Launch = launch_record("step/suffix_match.cu", "SuffixMatchLaunch")


@functools.cache
def _kernel() -> CudaKernel:
    defines = {**DEFINES, "WINDOW": WINDOW, "DEPTH": DEPTH, "SHORTEST": SHORTEST}
    return CudaKernel(
        "step/suffix_match.cu", "suffix_match", _Launch, defines, shared=THREADS // 32 * 4, threads=THREADS
    )


def cuda(args: SuffixMatchArgs) -> None:
    """The reference's result; one block per row, which reads its window once."""
    slots = args.slots
    given = _Launch(
        plan=args.plan_BC,
        tokens=slots.tokens,
        lengths=slots.lengths,
        drafts=slots.drafts,
        drafted=slots.drafted,
        by=slots.by,
        results=args.results,
        reach=slots.tokens.shape[1],
    )
    _kernel().launch(given, args.plan_BC.shape[0])


def cost(args: SuffixMatchArgs) -> Cost:
    """The maximum window of every row, and its plan."""
    rows = args.plan_BC.shape[0]
    return Cost(args.plan_BC.nbytes + rows * 8 * min(WINDOW, args.slots.tokens.shape[1]))


def cases() -> Iterator[Case]:
    """Texts with few distinct tokens, which repeat often, and one longer than the window."""

    def make(rows: int, real: int, pages: int, alphabet: int):
        def inputs(g: torch.Generator) -> SuffixMatchArgs:
            slots = random_slots(g, real + 3, pages)
            slots.tokens[:-1] = torch.randint(alphabet, slots.tokens[:-1].shape, generator=g)
            plan = random_plan(g, slots, rows, real, 4)
            results = random_results(g, plan, slots, 4)
            return SuffixMatchArgs(plan, slots, results)

        return inputs

    yield Case("B=1", make(1, 1, 2, 3))
    yield Case("B=4, one to fill the shape", make(4, 3, 8, 4))
    yield Case("B=8, a repetition", make(8, 8, 4, 1))
    yield Case("B=64", make(64, 40, 8, 8))
    yield Case("B=256", make(256, 250, 2, 8))
    yield Case("B=2, longer than the window", make(2, 2, 600, 20))


suffix_match = Kernel(
    Op("suffix_match", SuffixMatchArgs, reference, cost, cases, writes=("slots", "results")), cuda, "cuda"
)
