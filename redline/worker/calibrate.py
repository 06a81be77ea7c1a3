"""What a step costs on this machine, measured once, before the first job: a second or so, less on a GPU.

The steps are real ones over made-up tokens and pages that nobody owns yet. Every job overwrites what they leave in
slots and pages before it reads it.
"""

import math

from redline import clock
from redline.plan.recorded import RecordedShapes
from redline.run.runner import Runner
from redline.tune.costs import StepCosts
from redline.wire.job import PAGE_TOKENS, PageId, Sampling
from redline.wire.step import Begin, Row, Shape, Step

ROWS = 1, 4, 16, 64  # rows of a step; on a CPU, whose time grows with them, as far as 16
COUNTS = 1, 2, 4, 8  # positions of a row
REPEATS = 10  # timed steps of each kind, of which the fastest counts
PASSES = 3  # of the drafter, in a step that measures them: the one that reads, and two that follow
LEAST_MS = 0.02  # of the passes of one step together: what was measured may come to less, by chance
PROMPT = 8  # tokens in each slot before the steps that are timed


def calibrate(runner: Runner, draft_tokens: int) -> StepCosts:
    """Milliseconds of decode steps by rows and positions per row, and of a pass of the learned drafter if there is one.

    The runner must be idle and fresh. Where no job can come to a page of tokens, nothing is measured. Where the shape
    for so many positions is yet to be recorded, the time is read off those of other positions: a deeper shape's would
    keep the planner from ever asking for it.
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
        runner.forget_text(slot)  # its matches cost nothing, and would stand in for the drafter
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
    for _ in range(REPEATS):  # each in turn, so that a slow moment of the machine meets all; and the best of some
        for r, c, passes in wanted:
            best[r, c, passes] = min(best[r, c, passes], _step(runner, r, c, passes, named(r, c)))
    lines = [StepCosts((r,), tuple(measured[r]), (tuple(best[r, c, 0] for c in measured[r]),)) for r in rows]
    target = tuple(tuple(line.step_ms(r, c) for c in counts) for r, line in zip(rows, lines, strict=True))
    if runner.drafter is None:
        return StepCosts(rows, counts, target, padded=runner.overlaps)
    drafts = (max(best[r, 1, PASSES] - best[r, 1, 0], LEAST_MS) / PASSES for r in rows)
    return StepCosts(rows, counts, target, tuple(drafts), padded=runner.overlaps)


def _step(runner: Runner, rows: int, count: int, propose: int, shape: Shape | None) -> float:
    """Milliseconds of one step of decode rows that verify count - 1 drafts each, and draft `propose` tokens."""
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
    """Ids as different as those of a text: they decide which experts a step reads."""
    vocabulary = runner.model.config.vocab_size
    return tuple((seed * 7919 + place * 104729) % vocabulary for place in range(count))
