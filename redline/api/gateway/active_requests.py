"""The jobs that have not ended, and the load that they are on the workers.

Invariant (`ActiveRequests.check`): the load of each worker is that of the jobs assigned to it, and the queue is that of
the jobs without a delta. Only this file writes either.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from redline import clock
from redline.api.auth.quota import Caller
from redline.api.telemetry.request_traces import RequestTrace
from redline.chat.conversation import Picture
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId
from redline.router.request_history import RequestRecord
from redline.router.worker_registry import Route, WorkerHandle, WorkerRegistry


class DeltaSink(Protocol):
    """The response to which a job belongs."""

    caller: Caller
    jobs: "list[JobState]"

    def push(self, job: "JobState", delta: Delta) -> None:
        """Add the next delta of one of its jobs."""
        ...

    def fail(self, error: Exception) -> None:
        """Fail the response with `error`, once the deltas so far are read."""
        ...

    def job_ended(self, tokens: int) -> int | None:
        """Count the end of one of its jobs, with `tokens` output tokens. Returns the longest job's tokens once all have
        ended."""
        ...


@dataclass(eq=False, slots=True)
class JobState:
    """State of one job: its worker, and what has been received of its answer. Times are of time.perf_counter."""

    response: DeltaSink
    choice: int  # its index in the response
    message: Job  # as it was last sent, without the output so far; each requeue gives it a new id
    arrived_at: float  # time of the request's arrival
    record: RequestRecord
    trace: RequestTrace
    first_id: JobId = field(init=False)
    sent_at: float = field(default_factory=clock.perf_counter)  # without the time that serialising takes
    queued_s: float = 0.0  # seconds queued at the worker
    first_token_at: float = field(init=False)
    last_token_at: float = field(init=False)
    worker: WorkerHandle | None = None  # None: no worker at the moment
    route: Route | None = None  # while its prompt is being computed
    requeues: int = 0
    failures: int = 0  # requeues that the job may have caused
    requeue_reason: str = ""
    started: bool = False  # a delta was received
    preempted: bool = False  # and no token was received since
    output: list[int] = field(default_factory=list[int])  # tokens received so far
    scored: int = 0  # prompt tokens whose logprobs were received
    cached_tokens: int = 0  # prompt tokens cached at the first worker
    pictures: tuple[Picture, ...] = ()  # of its prompt

    def __post_init__(self) -> None:
        self.first_id = self.message.id
        self.first_token_at = self.last_token_at = self.arrived_at

    @property
    def id(self) -> JobId:
        """Its id at its worker."""
        return self.message.id

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of its prompt."""
        return len(self.message.tokens)

    @property
    def sla(self) -> str:
        """SLO class of its request."""
        return self.response.caller.sla


class ActiveRequests:
    """The table of active jobs, by id."""

    def __init__(self, workers: WorkerRegistry) -> None:
        self._workers = workers
        self._jobs: dict[JobId, JobState] = {}
        self.waiting = 0  # jobs without a delta so far
        self._waiting_tokens = 0  # their prompt tokens
        self.preparing_tokens = 0  # prompt tokens of requests that are being encoded, and have no job yet

    def __iter__(self) -> Iterator[JobState]:
        return iter(self._jobs.values())

    def __contains__(self, job: JobState) -> bool:
        return job.id in self._jobs

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of jobs without a delta, and of requests that are being encoded."""
        return self._waiting_tokens + self.preparing_tokens

    @property
    def running(self) -> int:
        """Number of jobs that have a delta and have not ended."""
        return len(self._jobs) - self.waiting

    @property
    def requests(self) -> int:
        """Number of requests that are running or waiting."""
        return len({job.response for job in self})

    @property
    def records(self) -> list[RequestRecord]:
        """The active jobs in the form of `RequestHistory`."""
        return [job.record for job in self]

    def at(self, worker: WorkerHandle) -> list[JobState]:
        """The jobs that decode on a worker."""
        return [job for job in self if job.worker is worker]

    def find(self, id: JobId, worker: WorkerHandle) -> JobState | None:
        """The job that a message of `worker` belongs to; None if it has ended, or was requeued."""
        job = self._jobs.get(id)
        return job if job is not None and job.worker is worker else None

    def get(self, id: JobId) -> JobState | None:
        """The job of this id, on whichever worker; None if it has ended, or was requeued."""
        return self._jobs.get(id)

    def add(self, job: JobState) -> None:
        """Add a new job, without a worker."""
        self._jobs[job.id] = job
        self.waiting += 1
        self._waiting_tokens += job.prompt_tokens

    def start(self, job: JobState) -> None:
        """The first delta of a job has arrived."""
        job.started = True
        self.prefill_done(job)
        self._leave_queue(job)

    def remove(self, job: JobState) -> None:
        """A job has ended."""
        del self._jobs[job.id]
        if not job.started:
            self._leave_queue(job)
        self.unassign(job)

    def rename(self, job: JobState) -> None:
        """Give a job that has left its worker a new id: late messages of that worker then refer to no job."""
        job.requeues += 1
        del self._jobs[job.id]
        job.message = msgspec.structs.replace(job.message, id=JobId(f"{job.first_id}.{job.requeues}"))
        self._jobs[job.id] = job

    def assign(self, job: JobState, route: Route) -> None:
        """A job is sent to the worker or workers of a route."""
        job.route, job.worker, job.sent_at, job.preempted = route, route.worker, clock.perf_counter(), False
        self._workers.assign(route, job.message)

    def unassign(self, job: JobState) -> None:
        """A job has left its worker; no effect if it has none."""
        self.prefill_done(job)
        if job.worker is not None:
            job.worker.jobs -= 1
            job.worker = None

    def prefill_done(self, job: JobState) -> None:
        """The prompt of a job does not have to be computed any more; idempotent."""
        if job.route is not None:
            self._workers.prefill_done(job.route, job.id)
            job.route = None

    def check(self) -> None:
        """Raises AssertionError unless the load of every worker, and the queue, are those of the active jobs."""
        for worker in self._workers:
            own = self.at(worker)
            there = [job for job in self if job.route is not None and job.route.prefill is worker]
            assert worker.jobs == len(own) + len(there), f"{worker} counts {worker.jobs} jobs: {own + there}"
            apart = [job for job in own if job.route is not None and job.route.prefill is not None]
            expected = {job.id: job.prompt_tokens for job in apart}
            assert worker.awaiting_prefill == expected, f"{worker} awaits {worker.awaiting_prefill}, not {expected}"
            prompts = {job.id for job in (*own, *there) if job.route is not None} - expected.keys()
            assert worker.prompts.keys() == prompts, f"{worker} computes {[*worker.prompts]}, not {prompts}"
        queue = [job.prompt_tokens for job in self if not job.started]
        assert (self.waiting, self._waiting_tokens) == (len(queue), sum(queue)), "the queue counts other jobs"
        assert self.preparing_tokens >= 0, f"{self.preparing_tokens} tokens are being encoded"
        assert all(id == job.id for id, job in self._jobs.items()), "a job is listed by an earlier id"

    def _leave_queue(self, job: JobState) -> None:
        self.waiting -= 1
        self._waiting_tokens -= job.prompt_tokens
