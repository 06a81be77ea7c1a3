"""What is measured of jobs: metrics, SLO attainment, traces, and the answer lengths that routing expects.

It reads jobs and changes only their times and their traces.
"""

import logging
from collections.abc import Sequence

from redline.api.gateway.active_requests import ActiveRequests, JobState
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.sla import Attainment, RequestTimes
from redline.messages.delta import Delta, Finish, Note, Preempted, Resumed
from redline.messages.job import PAGE_TOKENS
from redline.router.latency_model import LatencyModel
from redline.router.preemption_forecast import ConcurrentAnswer, goes_on
from redline.router.worker_registry import WorkerHandle

log = logging.getLogger("redline.api")


class JobMetrics:
    """Measures the jobs of `requests`. `pace` learns the lengths of complete answers."""

    def __init__(self, metrics: Metrics, attainment: Attainment, pace: LatencyModel, requests: ActiveRequests) -> None:
        self._metrics = metrics
        self._attainment = attainment
        self._pace = pace
        self._requests = requests

    def received(self, job: JobState, delta: Delta, now: float) -> None:
        """A delta has arrived; its tokens are not in `job.output` yet."""
        job.trace.record_delta(delta, now)
        if delta.queued_s is not None:
            job.queued_s = delta.queued_s
        if not (tokens := len(delta.tokens)):
            return
        if job.output:
            self._metrics.tokens.generated(tokens, now - job.last_token_at)
        else:
            job.first_token_at = now
            self._metrics.time_to_first_token.observe(now - job.arrived_at)
            self._metrics.tokens.generated(tokens, None)
        job.last_token_at = now

    def ended(self, job: JobState, finish: Finish, now: float) -> None:
        """A job has ended. finish: "aborted" if the client disconnected, else the reason that the client sees."""
        tokens = len(job.output)
        job.trace.record_end(finish, tokens, now)
        job.record.ended = finish in ("stop", "length")
        if job.record.ended:
            self._pace.answered(job.sla, tokens)
        self._metrics.finished(finish)
        self._metrics.e2e_latency.observe(now - job.arrived_at)
        first_token_s = job.first_token_at - job.arrived_at if tokens else None
        token_s = (job.last_token_at - job.first_token_at) / (tokens - 1) if tokens > 1 else None
        self._attainment.ended(job.sla, RequestTimes(now - job.arrived_at, first_token_s, token_s), finish)
        self._metrics.job_ended(job.prompt_tokens, tokens)
        if tokens:
            prefill_s = max(0.0, job.first_token_at - job.sent_at - job.queued_s)
            self._metrics.job_took(job.queued_s, prefill_s, job.last_token_at - job.first_token_at)
        if (longest := job.response.job_ended(tokens)) is not None:
            self._metrics.answered_whole(longest)
        if token_s is not None:
            self._metrics.time_per_output_token.observe(token_s)

    def noted(self, job: JobState, worker: WorkerHandle, notes: Sequence[Note]) -> None:
        """A worker's notes for a job's trace have arrived, before the tokens of the same delta."""
        prefill = None if job.started or job.route is None else job.route.prefill
        for note in notes:
            if not isinstance(note, Preempted):
                job.preempted = job.preempted and not isinstance(note, Resumed)
                job.trace.record_note(note, job.id)
                continue
            job.preempted = True
            # A prefill worker's other prompts are not known here, and none of them is decoding.
            expected = goes_on(note, self._concurrent(job, worker) if prefill is None else (), self._pace)
            job.trace.record_note(note, job.id, expected, len(job.output))
            log.info(
                "job %s was preempted on %s after %d tokens, for a page of %s: all %d are in use; %d tokens to compute "
                "again; predicted to continue in %.3f s, of which %.3f s until pages are free",
                *(job.id, (prefill or worker).name, len(job.output)),
                "its own" if note.by == job.id else f"job {note.by}",
                *(note.pages, note.again_tokens, sum(expected), expected.wait_s),
            )

    def _concurrent(self, job: JobState, worker: WorkerHandle) -> list[ConcurrentAnswer]:
        """The other decoding jobs of a worker; preempted ones have no pages to give back."""
        return [
            ConcurrentAnswer(
                -(-(other.prompt_tokens + len(other.output)) // PAGE_TOKENS),
                *(len(other.output), other.message.sampling.max_tokens, other.sla),
            )
            for other in self._requests.at(worker)
            if other is not job and other.started and not other.preempted
        ]
