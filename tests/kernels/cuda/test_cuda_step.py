"""The kernels around the model in a decode step: its inputs, greedy tokens, draft acceptance. Run on the CPU, by
thread.
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.kernels.by_chip import best
from redline.kernels.cpu import native
from redline.kernels.cuda.step.adjust import adjust
from redline.kernels.cuda.step.keep_drafts import keep_drafts
from redline.kernels.cuda.step.read_rows import read_rows
from redline.kernels.cuda.step.step_rows import (
    ASKED,
    BY_SUFFIX,
    CELLS,
    KEEP,
    LENGTH,
    LIMIT,
    MATCH,
    MOST_DRAFTS,
    NEW,
    PAGES,
    RESULT_COLUMNS,
    SLOT,
    SLOT_FACTS,
    SlotTensors,
    random_plan,
    random_slots,
    step_rows,
)
from redline.kernels.cuda.step.suffix_match import suffix_match
from redline.kernels.cuda.step.verify_drafts import shares_of, verify_drafts
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.op import Case
from redline.run.drafting.suffix import SuffixIndex
from tests.emulator.emulator import emulation
from tests.seeds import fresh_generator

pytestmark = [
    pytest.mark.skipif(native.find_compiler() is None, reason="emulation needs a C++ compiler"),
    pytest.mark.usefixtures("poison"),
]


def generator() -> torch.Generator:
    return fresh_generator()


def emulated(kernel: Kernel[Any, Any, Any], *args: Any) -> Any:
    assert kernel.fits(kernel.op.args(*args))
    with emulation():
        return kernel.run(kernel.op.args(*args))


def same(got: Any, want: Any) -> None:
    if dataclasses.is_dataclass(got):
        for name in vars(got):
            same(getattr(got, name), getattr(want, name))
    elif isinstance(got, Tensor) and got.is_floating_point():
        assert torch.allclose(got, want, rtol=0, atol=1e-6)
    elif isinstance(got, Tensor):
        assert torch.equal(got, want)
    elif got is not None:
        for a, b in zip(got, want, strict=True):
            same(a, b)


def check(kernel: Kernel[Any, Any, Any], args: tuple[Any, ...]) -> None:
    """Compare the kernel's outputs, and all of its arguments, with the reference's."""
    theirs = copy.deepcopy(args)
    got, want = emulated(kernel, *args), kernel.op.reference(kernel.op.args(*theirs))
    same(got, want)
    same([x for x in args if not isinstance(x, int)], [x for x in theirs if not isinstance(x, int)])


# ------------------------------------------------------------------------------------------------ the greedy token


@pytest.mark.parametrize("case", list(best.op.cases()), ids=lambda case: case.name)
def test_the_best_is_the_first_of_the_greatest(case: Case):
    check(best.cuda, case.make(generator()))


@pytest.mark.parametrize(("rows", "vocabulary", "stride"), [(1, 163840, 163840), (3, 4100, 4112), (2, 5001, 5003)])
def test_many_are_the_greatest_in_rows_that_lie_apart(rows: int, vocabulary: int, stride: int):
    logits = torch.randint(-3, 2, (rows, stride), generator=generator()).float()[:, :vocabulary]
    logits[0, : vocabulary // 2] = -0.0
    check(best.cuda, (logits.masked_fill_(logits == 1, 0.0),))
    check(best.cuda, (logits,))


def test_more_rows_than_blocks():
    check(best.cuda, (torch.randn(300, 130, generator=generator()),))


def test_a_row_that_is_not_finite_is_told_and_its_token_exists():
    logits = torch.randn(6, 9000, generator=generator())
    logits[0, 8999] = logits[1, 0] = torch.nan
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, 5000] = -torch.inf
    ids, finite = emulated(best.cuda, logits)
    assert finite.tolist() == [False] * 5 + [True]
    assert ids[3] == 0
    assert ids[4:].tolist() == logits[4:].argmax(-1).tolist()
    assert ((ids >= 0) & (ids < 9000)).all()


def test_the_counters_are_as_they_were_when_a_launch_has_ended():
    for rows in (7, 2, 7):
        check(best.cuda, (torch.randn(rows, 9001, generator=generator()),))


# --------------------------------------------------------------------------------------------------------- the step


STEP = step_rows, adjust, verify_drafts, suffix_match, read_rows, keep_drafts


@pytest.mark.parametrize(
    ("kernel", "case"),
    [pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}") for kernel in STEP for case in kernel.op.cases()],
)
def test_a_step_begins_and_ends_as_its_reference(kernel: Kernel[Any, Any, Any], case: Case):
    for _ in range(3):
        check(kernel, case.make(generator()))


@pytest.mark.parametrize("rates", [(), (0.9, 0.5, 0.25)])
def test_steps_that_follow_one_another_leave_what_the_references_leave(rates: tuple[float, ...]):
    g, shares = generator(), torch.tensor(shares_of(rates))
    slots, results = random_slots(g, 9, 8), torch.zeros(64, RESULT_COLUMNS, dtype=torch.int64)
    their_slots, their_results = copy.deepcopy(slots), results.clone()
    frequencies = torch.ones(32)
    for _ in range(6):
        plan = random_plan(g, slots, 8, 5, 4)
        mine = emulated(step_rows, plan, slots, results, frequencies, 4, 72)
        same(mine, step_rows.op.reference(step_rows.op.args(plan, their_slots, their_results, frequencies, 4, 72)))
        hit = torch.rand(8, 3, generator=g) < 0.7
        drafts = mine.ids_T.view(8, 4)[:, 1:]
        tokens = torch.cat([torch.where(hit, drafts, 5), torch.full((8, 1), 6)], 1).flatten()
        finite = torch.rand(32, generator=g) < 0.9
        given = tokens, finite, mine.ids_T, plan
        emulated(verify_drafts, *given, slots, results, shares)
        verify_drafts.op.reference(verify_drafts.op.args(*given, their_slots, their_results, shares))
        same((slots, results), (their_slots, their_results))


def test_a_copy_of_a_row_sees_the_news_of_that_row():
    """The slot's length, limit and page come from the same plan, and do not depend on the block of the copy."""
    pages, rows = 4, 64
    slots = SlotTensors(
        tokens=torch.arange(3 * 300).view(3, 300),
        tables=torch.zeros(3, pages, dtype=torch.int32),
        lengths=torch.full((3,), 7),
        facts=torch.full((3, 6), 9),
        drafts=torch.zeros(3, MOST_DRAFTS, dtype=torch.int64),
        drafted=torch.zeros(3, dtype=torch.int64),
        by=torch.zeros(3, dtype=torch.int64),
    )
    plan = random_plan(generator(), random_slots(generator(), 2, pages), rows, 1, 1)
    plan[:, SLOT], plan[0, ASKED], plan[1:, LENGTH] = 1, 1, KEEP
    plan[0, LENGTH], plan[0, SLOT_FACTS.start + LIMIT] = 65, 100
    plan[:, CELLS] = 2 * pages
    plan[0, CELLS.start], plan[0, PAGES.start] = pages + 1, 33
    step = emulated(step_rows, plan, slots, torch.zeros(64, RESULT_COLUMNS, dtype=torch.int64), torch.ones(32), 1, 50)
    assert step.ids_T.tolist() == [300 + 64] * rows
    assert step.lengths_Q.tolist() == [65] * rows
    assert step.rows_T.tolist() == [33 * PAGE_TOKENS] + [50 * PAGE_TOKENS + t % PAGE_TOKENS for t in range(1, rows)]


def test_the_device_finds_what_the_host_finds():
    """Texts in which few positions are candidates, so that the host compares all of them too."""
    g = generator()
    found = 0
    for alphabet, length in [(300, 900), (40, 200), (2, 12), (1, 40), (60, 30)]:
        text = torch.randint(alphabet, (length,), generator=g)
        if length > 60:
            text[-20:] = text[40:60]
        slots = random_slots(g, 1, 16)
        plan = random_plan(g, slots, 1, 1, 4)
        plan[0, SLOT], plan[0, ASKED], plan[0, MATCH] = 0, 1, 3
        slots.tokens[0, :length], slots.lengths[0] = text, length
        slots.drafted[0] = slots.by[0] = 0
        results = torch.zeros(64, RESULT_COLUMNS, dtype=torch.int64)
        results[0, NEW] = 1
        host = SuffixIndex()
        host.extend(text.tolist())
        tokens, _ = host.propose(MOST_DRAFTS)
        suffix_match.op.reference(suffix_match.op.args(plan, slots, results))
        assert slots.drafts[0, : slots.drafted[0]].tolist() == tokens
        assert bool(tokens) == (slots.by[0] == BY_SUFFIX)
        found += bool(tokens)
    assert found >= 3
