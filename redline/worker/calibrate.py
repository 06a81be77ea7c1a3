"""Measures the time of decode steps on this machine, once, before the first job: about a second, less on a GPU.

The steps are real ones, with synthetic tokens and pages that are not allocated yet. Jobs overwrite the slots and pages
before they read them.
"""

import math

from redline import clock
from redline.messages.job import PAGE_TOKENS, PageId, Sampling
from redline.messages.step import Begin, Row, Shape, Step
from redline.policy.costs import StepCosts
from redline.run.runner import Runner
from redline.scheduler.recorded import RecordedShapes

ROWS = 1, 4, 16, 64  # rows of a step; at most 16 on a CPU, where the time grows with the rows
COUNTS = 1, 2, 4, 8  # positions of a row
REPEATS = 10  # timed steps of each kind; the fastest one counts
PASSES = 3  # drafts in a step that measures a drafter's passes: a chain's reads the new tokens, and two follow
LEAST_MS = 0.02  # lower bound for the passes of one step together; by noise, the measured difference may be less
PROMPT = 8  # tokens in each slot before the timed steps


def calibrate(runner: Runner, draft_tokens: int) -> StepCosts:
    """Milliseconds of decode steps by rows and positions per row, and of a pass of the learned drafter if there is one.

    The runner must be idle and fresh. If no job can be as long as a page, nothing is measured. If the CUDA graph for a
    number of positions is not captured yet, its time is interpolated from those of other numbers: the time of a larger
    graph would keep the planner from ever requesting it.
    """
    if runner.slots.tokens.shape[1] <= PAGE_TOKENS:
        return StepCosts()
    most = min(len(runner.slots.at), runner.kv.pages, ROWS[-1] if runner.overlaps else 16)
    rows = tuple(count for count in ROWS if count <= most)
    counts = tuple(sorted({1, 1 + draft_tokens, *(count for count in COUNTS if count <= 1 + draft_tokens)}))
    for slot in range(rows[-1]):
        begin = Begin(
            slot=slot,
            tokens=_tokens(runner, slot, PROMPT),
            prompt=PROMPT,
            pages=(),
            sampling=Sampling(max_tokens=PAGE_TOKENS, temperature=0),
            limit=PAGE_TOKENS,
            drafting=runner.drafter is not None,
        )
        known = Row(slot=slot, start=0, count=PROMPT, new_pages=(PageId(slot),), drafting=begin.drafting)
        runner.launch(Step(number=0, begins=(begin,), rows=(known,))).wait()
        runner.forget_text(slot)  # suffix matches take no time, and would replace the drafter's passes
    shapes = RecordedShapes(runner.recorded)

    def named(rows: int, count: int) -> Shape | None:
        return shapes.choose(rows, count, PAGE_TOKENS)

    def is_measured(rows: int, count: int) -> bool:
        shape = named(rows, count)
        return count == 1 or shape is None or shape.positions == count

    measured = {r: [c for c in counts if is_measured(r, c)] for r in rows}
    wanted = [(r, c, 0) for r in rows for c in measured[r]]
    if runner.drafter is not None:
        wanted += [(r, 1, PASSES) for r in rows]
    best = dict.fromkeys(wanted, math.inf)
    for _ in range(REPEATS):  # interleaved, so that a slow moment of the machine affects all kinds
        for r, c, passes in wanted:
            best[r, c, passes] = min(best[r, c, passes], _step(runner, r, c, passes, named(r, c)))
    lines = [StepCosts((r,), tuple(measured[r]), (tuple(best[r, c, 0] for c in measured[r]),)) for r in rows]
    target = tuple(tuple(line.step_ms(r, c) for c in counts) for r, line in zip(rows, lines, strict=True))
    if runner.drafter is None:
        return StepCosts(rows, counts, target, padded=runner.overlaps)
    passes = runner.drafter.config.passes(PASSES)
    drafts = (max(best[r, 1, PASSES] - best[r, 1, 0], LEAST_MS) / passes for r in rows)
    return StepCosts(rows, counts, target, tuple(drafts), padded=runner.overlaps, draft_once=passes == 1)


def _step(runner: Runner, rows: int, count: int, propose: int, shape: Shape | None) -> float:
    """Milliseconds of one step of decode rows that verify count - 1 draft tokens each, and draft `propose` tokens."""
    for slot in range(rows):
        runner.place(slot, PROMPT + 1, _tokens(runner, slot + 1, count - 1))
    step = Step(
        number=0,
        shape=shape,
        rows=tuple(
            Row(slot=slot, start=None, count=count, drafts=count - 1, propose=propose, drafting=propose > 0)
            for slot in range(rows)
        ),
    )
    start = clock.perf_counter()
    runner.launch(step).wait()
    return (clock.perf_counter() - start) * 1000


def _tokens(runner: Runner, seed: int, count: int) -> tuple[int, ...]:
    """Token ids as varied as those of a text, since they determine which experts a step reads."""
    vocabulary = runner.model.config.vocab_size
    return tuple((seed * 7919 + place * 104729) % vocabulary for place in range(count))
