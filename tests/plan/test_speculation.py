"""Drafts are tried before they are judged, and again after they were found wanting."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from redline.plan.active import ActiveJob
from redline.plan.speculation import Speculation
from redline.tune.costs import StepCosts
from redline.wire.step import Row, RowResult, Step, StepResult
from tests.fakes import make_job

COSTS = StepCosts(rows=(1, 4), counts=(1, 2, 4, 8), target_ms=((10, 13, 18, 30), (14, 22, 40, 78)), draft_ms=(2.5, 2.5))
"""Three drafts that hold at 0.95 make one stream 1.4 times as fast; at 0.7 they are not worth their time."""


def served(speculation: Speculation, rate: float, rows: int, learned: bool = True, seed: int = 0) -> list[int]:
    """What a job's rows are asked to propose, one after another, a draft that is reached holding at this rate."""
    random_ = random.Random(seed)
    job = ActiveJob(make_job("job", (1, 2, 3), max_tokens=10**6), 0, 10**6)
    asked: list[int] = []
    for _ in range(rows):
        job.drafting = learned and speculation.follows
        (length,) = speculation.lengths([job])
        accepted = 0
        while accepted < length and random_.random() < rate:
            accepted += 1
        row = Row(slot=0, start=None, count=1 + length, drafts=length, drafting=job.drafting)
        speculation.settled(job, row, RowResult(tokens=(0,) * (accepted + 1), proposed=length, accepted=accepted))
        asked.append(length)
    return asked


def mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("learned", [True, False])
def test_a_good_drafter_is_found_out_where_a_middling_one_would_not_pay(learned: bool):
    speculation = Speculation(7, learned, COSTS)
    assert mean(served(speculation, 0.95, 400, learned)[-100:]) > 2.5
    assert speculation.follows is learned


@pytest.mark.parametrize("learned", [True, False])
def test_a_bad_drafter_costs_little(learned: bool):
    speculation = Speculation(7, learned, COSTS)
    asked = served(speculation, 0.05, 3000, learned)
    assert mean(asked[100:]) < 0.15


@pytest.mark.parametrize("learned", [True, False])
def test_a_drafter_that_was_bad_is_tried_again(learned: bool):
    """What was bad for one user's text may be good for the next one's."""
    speculation = Speculation(7, learned, COSTS)
    served(speculation, 0.05, 1000, learned)
    assert mean(served(speculation, 0.95, 6000, learned, seed=1)[-100:]) > 2.5


def test_the_passes_of_a_step_are_those_that_its_rows_ask_for(monkeypatch: pytest.MonkeyPatch):
    """The first pass reads every row that the drafter follows; each further one drafts for those that want more."""
    seen: list[tuple[int, int, list[float], float]] = []

    def observed(self: StepCosts, rows: int, positions: int, passes: list[float], ms: float) -> StepCosts:
        seen.append((rows, positions, passes, ms))
        return self

    monkeypatch.setattr(StepCosts, "observed", observed)
    speculation = Speculation(7, True, COSTS)

    def took(
        *proposals: int, number: int = 2, drafting: bool = True, ran: bool = True, start: int | None = None
    ) -> None:
        rows = tuple(
            Row(slot=slot, start=start, count=3, drafts=2, propose=propose, drafting=drafting)
            for slot, propose in enumerate(proposals)
        )
        outcome = RowResult(tokens=(1,), proposed=2) if ran else RowResult()
        results = StepResult(number=number, rows=(outcome,) * len(rows))
        speculation.took(Step(number=number, rows=rows), results, 0.5)

    took(3, 1, 0)
    took(2, 2)
    took(1)
    took(0, 0)
    took(3, 3, drafting=False)
    took(3, number=3)
    took(3, ran=False)
    took(3, start=5)
    assert seen == [
        (3, 9, [3, 1, 1], 500),
        (2, 6, [2, 2], 500),
        (1, 3, [1], 500),
        (2, 6, [2], 500),
        (2, 6, [], 500),
    ]


def test_matches_of_few_rows_are_not_paid_for_by_all():
    """One row of four has a match that holds: where all rows cost what the longest does, that is too little."""
    for padded in (False, True):
        speculation = Speculation(7, False, replace(COSTS, padded=padded))
        jobs = [ActiveJob(make_job(f"{n}", (1, 2, 3), max_tokens=10**6), 0, 10**6) for n in range(4)]
        asked: list[list[int]] = []
        for _ in range(400):
            asked.append(speculation.lengths(jobs))
            outs = [RowResult(tokens=(0,) * (1 + n), proposed=n, accepted=n) for n in (asked[-1][0], 0, 0, 0)]
            rows = tuple(Row(slot=slot, start=None, count=1 + n, drafts=n) for slot, n in enumerate(asked[-1]))
            for job, row, out in zip(jobs, rows, outs, strict=True):
                speculation.settled(job, row, out)
            speculation.took(Step(number=1, rows=rows), StepResult(number=1, rows=tuple(outs)), 0.01)
        assert (mean([max(lengths) for lengths in asked[-100:]]) < 0.5) is padded
