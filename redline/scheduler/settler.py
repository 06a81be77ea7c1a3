"""Settles steps: applies the results of a step's rows to their jobs, and ends the jobs that have finished.

Results come late. After a stop id or an error, rows that were launched in between are dropped when they settle;
positions counted for rejected draft tokens are taken back.
"""

from redline.messages.delta import Delta, Fault
from redline.messages.job import PAGE_TOKENS
from redline.messages.step import Row, RowResult, StepResult, TokenLogprobs
from redline.scheduler.active import ActiveJob
from redline.scheduler.admission import error_delta
from redline.scheduler.counters import PlanCounters
from redline.scheduler.job_pages import JobPages
from redline.scheduler.job_table import JobTable, PlannedStep
from redline.scheduler.notes import Rounds
from redline.scheduler.speculation import Speculation


class StepSettler:
    """Applies results to the jobs of a table. Steps are settled in the order of their launches."""

    def __init__(self, table: JobTable, pages: JobPages, speculation: Speculation, counters: PlanCounters) -> None:
        self._table = table
        self._pages = pages
        self._speculation = speculation
        self._counters = counters

    def settle(self, flight: PlannedStep, result: StepResult, seconds: float | None) -> tuple[list[Delta], int]:
        """Settle the step that was launched first. seconds: its duration; None: unknown. -> the deltas of its jobs, and
        the number of tokens that its decode rows gave to jobs."""
        deltas, delivered = list[Delta](), 0
        drafts_ms = None if seconds is None else self._speculation.predicted_ms(flight.step, result)
        for job, row, outcome in zip(flight.jobs, flight.step.rows, result.rows, strict=True):
            job.flights -= 1
            job.slack -= row.drafts
            if job.finish is None:
                if drafts_ms is not None and seconds is not None and outcome.proposed:
                    job.rounds = job.rounds or Rounds()
                    job.rounds.add(seconds, *drafts_ms)
                delta = self._row(job, row, outcome)
                if delta is not None:
                    deltas.append(delta)
                    delivered += len(delta.tokens) if row.start is None else 0
            elif not job.flights:
                self._table.drained(job)
        return deltas, delivered

    def _row(self, job: ActiveJob, row: Row, outcome: RowResult) -> Delta | None:
        if outcome.error is not None and not job.completed_by(outcome.tokens):
            self._table.end(job, "error")
            fault: Fault = "refused" if outcome.refused else "failed"
            return error_delta(job.job.id, outcome.error, fault, job.cached_tokens)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if row.start is None:
            rejected = row.count - len(outcome.tokens)
            job.planned -= rejected
            job.length -= rejected
            job.computed += len(outcome.tokens)
            self._speculation.settled(outcome)
            job.waiting = outcome.waiting != 0
        else:
            job.computed = row.start + row.count
            # A resumed job has sent some already.
            prompt_logprobs = outcome.prompt_logprobs[max(0, job.scored - row.start) :]
            job.scored += len(prompt_logprobs)
        computed = job.computed
        if row.drafting:
            job.read = computed
        tokens, finish = job.accept(outcome.tokens)
        self._counters.generation_tokens += len(tokens)
        job.forced = min(job.known + outcome.forced, job.limit - 1)  # the last token is never a draft token
        if computed >= (job.kept + 1) * PAGE_TOKENS:
            self._pages.remember(job)
        at_limit = computed >= job.prompt and job.known >= job.limit
        if finish is None and (at_limit or (row.start is None and not tokens)):
            finish = "length"
        if not tokens and finish is None and not prompt_logprobs:
            return None
        noted = job.noted(tokens, finish)
        if finish is not None:
            self._table.end(job, finish)
        return Delta(
            job=job.job.id,
            tokens=tokens,
            finish=finish,
            queued_s=job.queued_s if tokens and len(tokens) == len(job.generated) - len(job.job.answer) else None,
            cached_tokens=job.cached_tokens,
            logprobs=outcome.logprobs[: len(tokens)],
            prompt_logprobs=prompt_logprobs,
            proposed=outcome.proposed,
            accepted=outcome.accepted,
            by=outcome.by,
            noted=noted,
        )
