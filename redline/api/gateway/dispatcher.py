"""Sends jobs to workers and passes on their deltas; requeues jobs whose worker cannot continue them.

A requeued job is sent with the tokens generated so far. The next token is a function of prompt, output and seed, and
decoder and parser are in this process, so the stream continues without a gap.

Invariant: an active job is assigned to a worker, is in `unassigned` and waits for one, or is paused.
"""

import asyncio
import logging
import math
from collections.abc import Mapping

import msgspec

from redline import clock
from redline.api.auth.quota import ServedRate
from redline.api.gateway.active_requests import ActiveRequests, JobState
from redline.api.gateway.job_metrics import JobMetrics
from redline.api.telemetry.metrics import Metrics
from redline.errors import MessageTooLarge, WorkerLost
from redline.messages.delta import Delta, Finish
from redline.messages.handoff import Prefill
from redline.messages.job import Abort, Job
from redline.policy.targets import Targets
from redline.router.worker_registry import Route, WorkerHandle, WorkerRegistry

MAX_FAILURES = 3  # requeues of a job after worker failures or timeouts: more often, the job itself may be the cause

log = logging.getLogger("redline.api")


class Dispatcher:
    """The jobs of `requests` on their way to workers and back. Everything runs in one event loop."""

    def __init__(
        self,
        workers: WorkerRegistry,
        requests: ActiveRequests,
        metrics: Metrics,
        measured: JobMetrics,
        served: ServedRate,
        targets: Mapping[str, Targets],
        resume_s: float,
    ) -> None:
        """targets: SLO targets by class, "" for all others. resume_s: as in `Gateway`."""
        self.workers = workers
        self._requests = requests
        self._metrics = metrics
        self._measured = measured
        self._served = served
        self._targets = targets
        self._resume_s = resume_s
        self.unassigned: dict[JobState, asyncio.TimerHandle] = {}  # jobs that wait for a worker, until a timeout

    @property
    def resumes(self) -> bool:
        """Whether a job may wait for another worker if its worker goes down."""
        return self._resume_s > 0

    # -- to the workers

    def dispatch(self, job: JobState) -> None:
        """Send a job that has no worker to one, or let it wait if no worker can take it. Raises MessageTooLarge."""
        if (route := self._route(job, job.message)) is None:
            self._await_worker(job)
        else:
            self._send(job, route, job.message)

    def retry(self) -> None:
        """Send the jobs that wait for a worker: one has become ready."""
        for job in list(self.unassigned):
            self._resend(job)

    def requeue(self, job: JobState, reason: str, *, blamed: bool = True) -> None:
        """Send a job that its worker cannot continue to another one. blamed: the job may be the cause."""
        if job not in self._requests:
            return  # its response has ended in the meantime
        self._requests.unassign(job)
        job.requeue_reason = reason
        job.failures += blamed
        if job.failures > MAX_FAILURES:
            self._fail(job)
            return
        self._requests.rename(job)
        if self.resumes:
            log.info("job %s is requeued after %d tokens: %s", job.id, len(job.output), reason)
            self._metrics.moved()
        self._await_worker(job)

    def withdraw(self, job: JobState, reason: str, *, blamed: bool = False) -> None:
        """Abort a job on its worker, which may still run it, and requeue it."""
        if job.worker is not None:
            job.worker.outbox.put(Abort(job=job.id))
        self.requeue(job, reason, blamed=blamed)

    def pause(self, job: JobState) -> bool:
        """Pause a job whose client does not read: abort it on its worker, which frees its slot and pages until
        `resume`. Returns False if the job has ended, has no token yet, or could not be resumed."""
        if job.worker is None or not job.output or not self.resumes or job not in self._requests:
            return False
        job.worker.outbox.put(Abort(job=job.id))
        self._requests.unassign(job)
        job.requeue_reason = "its client had stopped reading, and reads again"
        self._requests.rename(job)
        log.info("job %s is paused after %d tokens: its client does not read", job.id, len(job.output))
        return True

    def resume(self, job: JobState) -> None:
        """Requeue a paused job with the tokens generated so far, unless its response has ended."""
        if job in self._requests:
            self._await_worker(job)

    def abort(self, job: JobState, finish: Finish) -> None:
        """Stop a job that has not ended: no more deltas are delivered, and the worker is sent an Abort. Idempotent.

        finish: the finish reason for metrics: "aborted" if the client disconnected, else the one that the client sees.
        """
        if job in self._requests:
            if job.worker is not None:
                job.worker.outbox.put(Abort(job=job.id))
            self._requests.remove(job)
            self._measured.ended(job, finish, clock.perf_counter())
            self._stop_waiting(job)

    def stop_resuming(self) -> None:
        """Fail the jobs that wait for a worker, now and later: no other worker will start."""
        self._resume_s = 0.0
        for job in list(self.unassigned):
            self._fail(job)

    # -- from the workers

    def deliver(self, worker: WorkerHandle, delta: Delta) -> None:
        """Pass a delta on to its response. Ignored if the job was aborted before the worker knew, or requeued."""
        if (job := self._requests.find(delta.job, worker)) is None:
            return
        if delta.noted:
            self._measured.noted(job, worker, delta.noted)
        if delta.notes_only:
            return
        if delta.fault == "lost":  # the worker is going down, and has not reported it yet
            worker.draining = True
            self.requeue(job, delta.error or "the worker is going down")
            return
        if not job.started:
            self._requests.start(job)
            job.cached_tokens = job.record.cached = delta.cached_tokens
            if delta.finish not in ("error", "aborted"):
                self._served.served(job.prompt_tokens)
        elif delta.tokens:
            self._requests.prefill_done(job)  # on another worker, or again, if the job was requeued or paused
        now = clock.perf_counter()
        self._measured.received(job, delta, now)
        job.scored += len(delta.prompt_logprobs)
        if delta.tokens:
            job.output += delta.tokens
            job.record.output = len(job.output)
            if (account := job.response.caller.account) is not None:
                account.charge(len(delta.tokens))
        if delta.finish is not None:
            self._requests.remove(job)
            self._measured.ended(job, delta.finish, now)
        if job.requeues and delta.cached_tokens != job.cached_tokens:
            delta = msgspec.structs.replace(delta, cached_tokens=job.cached_tokens)
        job.response.push(job, delta)

    def _await_worker(self, job: JobState) -> None:
        """Let a job without a worker wait for one, if jobs may be resumed; else fail it."""
        if not self.resumes:
            self._fail(job)
            return
        wait_s = self.workers.start_s + self._resume_s
        self.unassigned[job] = asyncio.get_running_loop().call_later(wait_s, self._fail, job)
        self._resend(job)

    def _resend(self, job: JobState) -> None:
        """Send a waiting job with the tokens generated so far, if a worker can take it."""
        message = msgspec.structs.replace(job.message, answer=tuple(job.output), scored=job.scored)
        if (route := self._route(job, message)) is None:
            return
        self._stop_waiting(job)
        try:
            self._send(job, route, message)
        except MessageTooLarge:  # because of the tokens generated so far
            self._fail(job)

    def _route(self, job: JobState, message: Job) -> Route | None:
        return self.workers.route(message, job.sla, self._targets_of(job))

    def _targets_of(self, job: JobState) -> Targets:
        return self._targets.get(job.sla) or self._targets[""]

    def _send(self, job: JobState, route: Route, message: Job) -> None:
        """Raises MessageTooLarge."""
        self._requests.assign(job, route)
        if not job.started:
            job.record.cached = route.expected.cached_tokens
            if (ttft_s := self._targets_of(job).ttft_s) < math.inf:
                left_s = ttft_s - (job.sent_at - job.arrived_at)  # the job may have waited for a worker
                message = msgspec.structs.replace(message, ttft_ms=1e3 * left_s)
        job.trace.record_sent(route, job.requeue_reason)
        if route.prefill is None:
            route.worker.outbox.put(message)
            return
        route.prefill.outbox.put(Prefill(job=message, to=route.worker.kv_address))
        route.worker.outbox.put(msgspec.structs.replace(message, pages_from=route.prefill.kv_address))

    def _stop_waiting(self, job: JobState) -> None:
        if (timer := self.unassigned.pop(job, None)) is not None:
            timer.cancel()

    def _fail(self, job: JobState) -> None:
        """Fail a job that no worker can continue, with all other jobs of its request."""
        self._stop_waiting(job)
        job.response.fail(WorkerLost("the worker that ran this request went down"))
        for other in job.response.jobs:
            self.abort(other, "error")
