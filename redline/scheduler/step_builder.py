"""Builds the next step: which running jobs get a row, how many positions each row has, and which waiting jobs start.

A step is scheduled on top of the launched steps, before their results are known: a row continues where the last one
will have ended, and draft tokens in flight are counted as accepted.

Every decoding job gets one row, so none of them starves. The rest of the token budget goes to prefill and to draft
tokens, which get at most half of it while prompts wait. If the step time is bounded, the prefill budget of a mixed step
is reduced, but never to zero (`prefill_budget`). Up to half of the prefill budget goes to prompts with less to compute
than the oldest, and the rest to the oldest first. The token budget is not smaller than the number of slots, so the
oldest prompt always gets some. When no page is free, the running job that started last is preempted and requeued in
front of the waiting jobs. So the oldest job always advances, and every job becomes the oldest.

For throughput, when time to first token does not matter, waiting jobs can be admitted in groups (`admit_together`),
with whole prompts if they fit: fewer steps contain prefill.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from redline.messages.delta import Delta, Preempted
from redline.messages.job import PAGE_TOKENS, PageId
from redline.messages.step import Begin, Row, Shape, Step
from redline.scheduler.active import ActiveJob, pages_for
from redline.scheduler.admission import Admission
from redline.scheduler.config import PlanConfig
from redline.scheduler.counters import PlanCounters
from redline.scheduler.job_pages import JobPages
from redline.scheduler.job_table import JobTable, PlannedStep
from redline.scheduler.notes import Pause
from redline.scheduler.prefill_budget import PrefillBudget
from redline.scheduler.recorded import RecordedShapes
from redline.scheduler.speculation import Speculation


class _PlannedRow(NamedTuple):
    """A row that is being scheduled: the next positions of a job. In a decode row all but the first are draft
    tokens."""

    job: ActiveJob
    positions: int
    decodes: bool

    @property
    def samples(self) -> bool:
        job = self.job
        return self.decodes or (job.planned + self.positions == job.length < job.limit)


class StepBuilder:
    """Schedules steps over the jobs of a table. A step never has two rows of one slot; decode rows come first."""

    def __init__(
        self,
        config: PlanConfig,
        table: JobTable,
        pages: JobPages,
        admission: Admission,
        speculation: Speculation,
        recorded: RecordedShapes,
        beside: PrefillBudget,
        counters: PlanCounters,
        clock: Callable[[], float] | None,
    ) -> None:
        """clock: as in `JobTable`."""
        self._preempted: list[Delta] = []  # notes of preempted jobs that are not sent yet
        self._config = config
        self._table = table
        self._pages = pages
        self._admission = admission
        self._speculation = speculation
        self._recorded = recorded
        self._beside = beside
        self._counters = counters
        self._clock = clock
        self._admitting = False  # until the queue is empty or no slot is free

    def build(self) -> Step | None:
        """The next step to launch; None if nothing can be scheduled before another step is settled.

        A step never has two rows of one slot, and a Begin always comes with a row. Decode rows come before all others.
        """
        if len(self._table.flights) > self._config.ahead:
            return None
        self._admission.take_compiled()
        decoding, prompts = self._ready()
        begins = self._admission.begin_landed(decoding)
        budget = self._config.step_tokens - len(decoding)
        spare = budget // 2 if prompts or (self._table.waiting and self._table.free_slots) else budget
        parts: list[_PlannedRow] = []
        forced = self._forced(decoding)
        for job in decoding:
            # Suffix matches come in runs: if the last known row had no match, none is expected now.
            drafts = min(max(job.proposed if job.drafting or job.waiting else 0, forced.get(job, 0)), spare)
            if drafts:
                drafts = self._pages.paged(job, job.planned + 1 + job.drafting, drafts)
            parts.append(_PlannedRow(job, 1 + drafts, decodes=True))
            spare -= drafts
            budget -= drafts
        budget = self._beside.tokens(budget, decoding, prompts, self._table.waiting, enter=bool(self._table.free_slots))
        quick = self._quick(prompts, begins, budget // 2)
        parts += quick
        budget -= sum(part.positions for part in quick)
        first = {part.job for part in quick}
        for job in prompts:
            if not budget:
                break
            if job not in first:
                parts.append(_PlannedRow(job, job.next_count(budget), decodes=False))
                budget -= parts[-1].positions
        enough = min(self._config.admit_together, len(self._table.waiting))
        self._admitting = self._admitting or bool(prompts) or len(self._table.free_slots) >= enough
        while self._admitting and budget and self._table.waiting and self._table.free_slots:
            due = self._table.waiting.due()
            if begins and self._config.admit_together > 1 and due.known > budget:
                break  # split in two chunks it would take two steps
            begin = self._admission.admit(due)
            if begin is None:
                break
            begins.append(begin)
            job = due
            parts.append(_PlannedRow(job, job.next_count(budget), decodes=False))
            budget -= parts[-1].positions
        self._admitting = self._admitting and bool(self._table.waiting and self._table.free_slots)
        self._beside.left(budget)
        encodes = self._table.features.next() if self._table.features is not None else ()
        if not parts and not encodes:
            return None
        self._counters.planned += 1
        rows = self._rows(parts)
        shape = self._shape(parts[: len(decoding)])
        step = Step(number=self._counters.planned, begins=tuple(begins), rows=rows, shape=shape, encodes=encodes)
        self._table.flights.append(PlannedStep(step, [part.job for part in parts]))
        return step

    def _forced(self, decoding: Sequence[ActiveJob]) -> dict[ActiveJob, int]:
        """Number of draft tokens in the next row, for each job with forced tokens (by its grammar) there."""
        # Draft tokens in flight are counted as accepted; if some are rejected, more tokens are forced than requested
        # here.
        left = {job: job.forced - job.length for job in decoding if job.forced > job.length}
        if not left:
            return left
        depth = self._speculation.forced(len(decoding), list(left.values()), self._recorded.drafts(len(decoding)))
        anyway = max((job.proposed for job in decoding if job.drafting or job.waiting), default=0)
        return {job: min(count, max(depth, anyway)) for job, count in left.items()}

    def _quick(self, prompts: Sequence[ActiveJob], begins: list[Begin], share: int) -> list[_PlannedRow]:
        """Rows for prompts with less to compute than the oldest (or the next waiting job), out of `share` tokens of
        the step, shortest first; waiting jobs are started, and added to `begins`. Returns none if jobs are admitted
        in groups: then time to first token does not matter, and the oldest prompt gets the share."""
        parts: list[_PlannedRow] = []
        if self._config.admit_together > 1 or not (len(prompts) > 1 or self._table.waiting):
            return parts
        oldest = prompts[0].known - prompts[0].planned if prompts else self._table.waiting.due().work
        short = [(job.known - job.planned, job.entry or 0, job) for job in prompts[1:]]
        heapq.heapify(short)
        while share:
            least = short[0][0] if short else oldest
            waiting = None
            if self._table.waiting and self._table.free_slots:
                waiting = self._table.waiting.quick(min(least, oldest))
            if waiting is not None:
                begin = self._admission.admit(waiting)
                if begin is None:
                    break
                begins.append(begin)
                job = waiting
            elif least < oldest:
                job = heapq.heappop(short)[2]
            else:
                break
            parts.append(_PlannedRow(job, job.next_count(share), decodes=False))
            share -= parts[-1].positions
        return parts

    def _shape(self, decoding: Sequence[_PlannedRow]) -> Shape | None:
        """The CUDA graph for these decode rows, once their pages are sent."""
        if not decoding:
            return None
        positions = max(part.positions for part in decoding)
        return self._recorded.choose(len(decoding), positions, PAGE_TOKENS * max(part.job.sent for part in decoding))

    def _ready(self) -> tuple[list[ActiveJob], list[ActiveJob]]:
        """Running jobs that can have a row now: those in decode, each with a page for its next position, and those
        with known tokens to compute (prefill)."""
        decoding: list[ActiveJob] = []
        prompts: list[ActiveJob] = []
        held_back: ActiveJob | None = None  # to be preempted once its steps in flight have settled
        for job in self._table.running:
            if job is held_back:
                continue
            if not job.decodes:
                if job.planned < job.target:
                    prompts.append(job)
                continue
            if job.room <= 0:
                continue
            # The drafter's row of the next token is at the next position.
            end = min(job.planned + 1 + job.drafting, job.target)
            if end > len(job.pages) * PAGE_TOKENS:
                held_back = self._grow(job)
                if end > len(job.pages) * PAGE_TOKENS:
                    continue
            decoding.append(job)
        return decoding, prompts

    def _rows(self, parts: Sequence[_PlannedRow]) -> tuple[Row, ...]:
        """Schedule these rows. The draft tokens proposed fit into the next step."""
        sampling = [part.samples for part in parts]
        jobs = [part.job for part in itertools.compress(parts, sampling)]
        lengths = iter(self._speculation.lengths(jobs, self._recorded.drafts(len(jobs))))
        spare, follows = self._config.step_tokens - len(self._table.running), self._speculation.follows
        rows: list[Row] = []
        for part, samples in zip(parts, sampling, strict=True):
            job = part.job
            job.drafting = job.drafting and follows
            propose = min(next(lengths), spare) if samples else 0
            if propose or (samples and job.drafting):
                # The drafter's row of the token that this row samples is at the next position.
                propose = min(propose, self._pages.paged(job, job.planned + part.positions, max(1, propose)))
                spare -= propose
            rows.append(self._row(part, samples, propose))
        return tuple(rows)

    def _row(self, part: _PlannedRow, samples: bool, propose: int) -> Row:
        job, count, decodes = part
        drafts = count - 1 if decodes else 0
        start, end = job.planned, job.planned + count
        job.planned = end
        if samples:
            job.length += 1 + drafts
        job.slack += drafts
        job.flights += 1
        job.proposed = propose
        slot = job.slot
        assert slot is not None
        new_pages: tuple[PageId, ...] = ()
        end = min(end + max(propose, samples and job.drafting), job.target)
        if end > job.sent * PAGE_TOKENS:
            needed = min(pages_for(end), len(job.pages))
            new_pages = tuple(job.pages[job.sent : needed])
            job.sent = needed
        return Row(
            slot=slot,
            start=None if decodes else start,
            count=count,
            drafts=drafts,
            propose=propose,
            least=self._speculation.least if propose else 0.0,
            drafting=job.drafting,
            new_pages=new_pages,
            samples=samples,
        )

    def _grow(self, job: ActiveJob) -> ActiveJob | None:
        """Give the job one more page. If no page is available, preempt the running job that started last, possibly
        this one; if that job has steps in flight, it is returned instead, to be held back until they have settled."""
        while not self._pages.obtainable:
            victim = self._table.running[-1]
            if victim.flights:
                return victim
            self.preempt(victim, job)
            if victim is job:
                return None
        job.pages += self._pages.take(1)
        return None

    def preempt(self, job: ActiveJob, by: ActiveJob) -> None:
        """Preempt a running job. by: the job that needs the page."""
        lost = job.computed
        self._table.put_back(job)
        self._counters.preemptions += 1
        job.pause = Pause(lost, self._clock)
        matched = self._pages.match(job)
        note = Preempted(
            by=by.job.id,
            running=len(self._table.running),
            pages=self._pages.pool.total,
            lost_tokens=lost,
            again_tokens=max(0, lost - PAGE_TOKENS * len(matched)),
            short_pages=self._admission.short_pages(job, matched),
        )
        self._preempted.append(Delta(job=job.job.id, cached_tokens=job.cached_tokens, noted=(note,)))

    def notes(self) -> list[Delta]:
        """Deltas with the notes of jobs preempted since the last call that have not ended since."""
        notes, self._preempted = self._preempted, []
        return [delta for delta in notes if delta.job in self._table.jobs]
