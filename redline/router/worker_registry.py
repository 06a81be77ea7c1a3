"""The workers as one replica of the API sees them, and the choice of the worker for a job.

A worker has a name, and an epoch that increases with each start. A `WorkerHandle` is one start of one worker: each
start has its own inbox, so late messages of an earlier start are not received. `WorkerRegistry` holds the state; the
choice is a pure function of it (`placement.py`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from redline.messages.channel import Outbox
from redline.messages.job import PAGE_TOKENS, Job, JobId, PageHash, PagesFrom
from redline.messages.news import Cached, Heartbeat, Load, Ping, Ready, Recall, Role, TakeRole
from redline.policy.pairs import Work
from redline.policy.targets import Targets
from redline.router.index import PageIndex
from redline.router.latency_model import LatencyModel, PrefillShare
from redline.router.placement import NO_TARGETS, PlacementCandidate, PredictedPlacement, apart, beside, predict

# Timeout: without a heartbeat (sent every pulse.BEAT_S) for this long, a worker is taken as stopped or down.
SILENT_S = 5.0
MOVE_S = 1.0  # timeout after which a worker's answers are resumed on others, if another worker responds
STALLED_S = 60.0  # maximum time of one step; a longer one may be legitimate, but no new requests should be sent here
MOST_SEARCHED = 64  # newest jobs of a worker that are searched for pages that it is about to have


class QueuedPrompt(NamedTuple):
    """A job with a prompt that a worker has not computed yet."""

    tokens: int  # tokens to compute
    pages: tuple[PageHash, ...]


class WorkerHandle:
    """One start of one worker. `ready` is None until it accepts jobs; `lost` is the reason of its end, once it has
    ended."""

    def __init__(
        self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "", at: str | None = None
    ) -> None:
        """inbox: the address at which it receives messages of other workers. at: its machine, if it is a remote one."""
        self.name = name
        self.inbox = inbox
        self.at = at
        self.down_announced = False  # the other workers have been notified that it is down
        self.role: Role = role  # the role by which new jobs are sent to it
        self.switching_since: float | None = None  # time at which its role switch started; None: no switch in progress
        self.confirmed_role: Role = role  # the newest role that its loop has confirmed
        self.epoch = epoch
        self.outbox = outbox
        self.ready: Ready | None = None
        self.lost: str | None = None
        self.previous_end: str | None = None  # why the worker's previous start ended
        self.draining = False  # it gets no new jobs, because it is about to be replaced
        self.pid: int | None = None  # of its process, if that is on this host
        self.load: Load | None = None  # its newest gauges and counters
        self.jobs = 0  # unfinished jobs sent to it
        self.awaiting_prefill: dict[
            JobId, int
        ] = {}  # of these, jobs in prefill on another worker: tokens of the prompt
        self.last_assigned = 0  # sequence number, among all jobs, of the last one sent to it; 0: none
        self.peer_jobs = 0  # `jobs` of the other API replicas
        self.peer_tokens = 0  # prompt tokens in `prompts` of the other API replicas
        self.prompts: dict[JobId, QueuedPrompt] = {}  # jobs in prefill there, until their first token
        self.prefill_share = PrefillShare()  # prefill work sent to it
        self.last_timed_step = 0  # number of its newest step that was added to `latency_model`
        self.joined_at = 0.0  # time of its start
        self.beats = 0
        self.heartbeat_at: float | None = None  # time of the last heartbeat; None: it sends none
        self.step_s = 0.0
        self._last_step_s = 0.0  # of the previous heartbeat: pings sent during that step may not have been read yet
        self._pings = 0
        self._unanswered: deque[tuple[int, float]] = deque()  # pings without a reply: number, and time of sending

    @property
    def decodes(self) -> bool:
        """Whether it accepts jobs to decode."""
        return self.ready is not None and self.role != "prefill"

    def switch_role(self, role: Role, now: float) -> None:
        """Set its role, and send it to the worker. The caller ends or moves the jobs of the previous role."""
        self.role, self.switching_since = role, now
        self.outbox.put(TakeRole(role=role))

    def record_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        self.beats += 1
        self._last_step_s = self.step_s
        self.heartbeat_at, self.step_s = now, beat.turn_s
        while self._unanswered and self._unanswered[0][0] <= beat.knock:
            self._unanswered.popleft()

    @property
    def busy(self) -> bool:
        """Whether it has jobs, or has not replied to a ping since it had some."""
        of_its_own = self.load is not None and bool(self.load.running or self.load.waiting)
        return bool(self.jobs or self._unanswered or of_its_own)

    def ping(self, now: float, replica: str = "") -> None:
        """Send a ping, to which its next heartbeat replies. replica: the API replica that sends it."""
        self._pings += 1
        self._unanswered.append((self._pings, now))
        self.outbox.put(Ping(number=self._pings, replica=replica))

    def silent_s(self, now: float) -> float:
        """Seconds since its last heartbeat, or since the oldest ping without a reply; the time of a running step
        does not count for a ping."""
        beat_s = 0.0 if self.heartbeat_at is None else now - self.heartbeat_at
        ping_s = now - self._unanswered[0][1] if self._unanswered else 0.0
        return max(beat_s, ping_s - max(self.step_s, self._last_step_s))

    def shift_timeouts(self, seconds: float) -> None:
        """The event loop stalled for `seconds`; do not count that as worker silence."""
        if self.heartbeat_at is not None:
            self.heartbeat_at += seconds
        self._unanswered = deque((number, at + seconds) for number, at in self._unanswered)

    def pending_prefix(self, pages: Sequence[PageHash]) -> int:
        """Number of leading pages of a prompt that it is computing, or will compute, for jobs sent to it."""
        return max(
            (_shared(pages, each.pages) for each in islice(reversed(self.prompts.values()), MOST_SEARCHED)), default=0
        )

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that it is computing, or will compute, for jobs sent to it."""
        return sum(each.tokens for each in self.prompts.values())

    @property
    def free_tokens(self) -> float:
        """Tokens that fit into its free pages, in addition to all jobs sent to it. A lower bound: pages allocated
        for a job during its KV transfer are counted twice."""
        if self.load is None:
            return math.inf
        free = (self.load.pages_total - self.load.pages_used) * PAGE_TOKENS
        return free - self.queued_tokens - self.peer_tokens - sum(self.awaiting_prefill.values())

    @property
    def kv_address(self) -> PagesFrom:
        """Its address for a KV transfer with another worker."""
        area, format = (self.ready.area, self.ready.format) if self.ready is not None else (b"", "")
        return PagesFrom(worker=self.name, epoch=self.epoch, inbox=self.inbox, area=area, format=format)

    def __repr__(self) -> str:
        return f"{self.name} (start {self.epoch})"


class Route(NamedTuple):
    """The worker or workers for a job, with the predictions for the choice."""

    worker: WorkerHandle
    prefill: WorkerHandle | None  # the prefill worker; None: `worker` does the prefill
    expected: PredictedPlacement  # for the worker that computes the prompt
    instead: tuple[PredictedPlacement, ...] = ()  # for the other candidates


class WorkerRegistry:
    """The newest start of each worker.

    clock: returns seconds; heartbeat timeouts use it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[str, WorkerHandle] = {}
        # By worker: seconds from start to ready, of its newest start that became ready.
        self._start_s: dict[str, float] = {}
        self.index = PageIndex()
        self.latency_model = LatencyModel()
        self._assigned = 0  # number of jobs sent
        self._ready: Ready | None = None
        self.last: Ready | None = None  # limits on jobs, as of when there last was a decode worker

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._workers.values())

    @property
    def several(self) -> bool:
        """Whether there is more than one worker."""
        return len(self._workers) > 1

    @property
    def start_s(self) -> float:
        """Seconds from a worker's start until it was ready: the maximum over all workers' newest starts; 0: none has
        become ready yet."""
        return max(self._start_s.values(), default=0.0)

    def join(self, worker: WorkerHandle) -> None:
        """Add the start of a worker. Raises AssertionError if its previous start has not ended."""
        before = self._workers.get(worker.name)
        assert before is None or before.lost is not None, f"{before} has not ended, but {worker} starts"
        worker.previous_end = None if before is None else before.lost
        self._workers[worker.name] = worker
        worker.joined_at = self._clock()
        self.index.begin(worker.name)
        self._update_limits()

    def set_ready(self, worker: WorkerHandle, ready: Ready) -> str | None:
        """A worker has loaded its model: None, or why it cannot serve together with the others.

        Raises AssertionError for a worker that has ended: only another start of it can become ready.
        """
        assert worker.lost is None, f"{worker} has ended, but reports that it is ready"
        others = [other for other in self if other.ready is not None and other is not worker]
        if others and (known := others[0].ready) is not None and known.fingerprint != ready.fingerprint:
            return f"{worker.name} has loaded another model, or pages of another format, than {others[0].name}"
        if worker.ready is None:
            self._start_s[worker.name] = self._clock() - worker.joined_at
        worker.ready = ready
        self._update_limits()
        return None

    def mark_down(self, worker: WorkerHandle, reason: str) -> None:
        """A worker has ended: send it nothing more."""
        worker.ready, worker.load, worker.lost = None, None, reason
        self.index.forget(worker.name)
        self._update_limits()

    def switch_role(self, worker: WorkerHandle, role: Role) -> None:
        """Switch a worker's role (`roles.refusal` returns whether that is possible)."""
        worker.switch_role(role, self._clock())
        self._update_limits()

    def switching_s(self, worker: WorkerHandle) -> float | None:
        """Seconds since a worker's role switch started; None: no switch in progress."""
        return None if worker.switching_since is None else self._clock() - worker.switching_since

    def update_cache(self, worker: WorkerHandle, news: Cached) -> None:
        """Apply an update of a worker's prefix cache. If an update was missed, request the complete content."""
        if not self.index.take(worker.name, news):
            self.request_cache(worker)

    def request_cache(self, worker: WorkerHandle) -> None:
        """Request the complete content of a worker's prefix cache, if there are other workers to choose from."""
        if self.several:
            worker.outbox.put(Recall())

    @property
    def ready(self) -> Ready | None:
        """Limits on jobs, over all decode workers; None if there is none. The same object until it changes."""
        return self._ready

    @property
    def lost(self) -> str | None:
        """Why there is no decode worker, if none is ready or loading."""
        serving = [worker for worker in self if worker.role != "prefill"]
        if self._ready is not None or any(worker.lost is None for worker in serving):
            return None
        return next((worker.lost for worker in serving), None)

    def silent_s(self, worker: WorkerHandle) -> float:
        """Seconds since a worker's last heartbeat, or since its oldest ping without a reply."""
        return worker.silent_s(self._clock())

    def is_silent(self, worker: WorkerHandle) -> bool:
        """Whether a worker has exceeded the heartbeat timeout SILENT_S: it is stopped or down."""
        return self.silent_s(worker) > SILENT_S

    @property
    def silence(self) -> str | None:
        """Why new jobs are refused although a model is loaded: no decode worker responds."""
        silent = [self.silent_s(worker) for worker in self if worker.decodes]
        if not silent or min(silent) <= SILENT_S:
            return None
        return f"the worker has not responded for {min(silent):.0f} s"

    @property
    def trouble(self) -> str | None:
        """Why this server is not healthy although a model is loaded; None if it is."""
        steps = [worker.step_s for worker in self if worker.decodes]
        stalled = f"a step has been running for {min(steps):.0f} s" if steps and min(steps) > STALLED_S else None
        return self.silence or stalled

    def update_load(self, worker: WorkerHandle, load: Load) -> None:
        """Apply a worker's load report. The last one may arrive after the worker has ended, and is then dropped."""
        worker.load = load if worker.lost is None else None
        for step in load.timed:
            if step.number > worker.last_timed_step:
                worker.last_timed_step = step.number
                work = Work(step.prompt, step.pairs, step.rows, step.context, step.expanded)
                self.latency_model.stepped(work, step.ms / 1e3, step.tokens)

    def route(self, job: Job, of: str = "", targets: Targets = NO_TARGETS) -> Route | None:
        """The worker for a job (`placement.py`), among those that are ready and respond; None if there is none.

        of: class of the job. targets: SLO targets of the class.
        """
        able = [worker for worker in self if worker.decodes and not worker.draining]
        answering = [worker for worker in able if self.silent_s(worker) <= MOVE_S] or able
        answering.sort(key=lambda worker: worker.last_assigned)  # ties go to the least recently used worker
        if not answering:
            return None
        pages = self.index.cached(job.pages) if self.several else {}
        lenders = [worker for worker in self if self._computes_for(worker, answering)] if is_worth(job) else []
        waits_s = self.prefill_queue_s if lenders else 0.0
        candidates = [self.candidate(worker, job, pages, of, waits_s) for worker in (*answering, *lenders)]
        all = predict(len(job.tokens), candidates, self.latency_model, of, targets)
        here, there = all[: len(answering)], all[len(answering) :]
        place, computes = apart(here, there)
        if computes is None:
            others = (*here[:place], *here[place + 1 :], *there)
            return Route(answering[place], None, here[place], others)
        others = (*there[:computes], *there[computes + 1 :], *here)
        return Route(answering[place], lenders[computes], there[computes], others)

    def assign(self, route: Route, job: Job) -> None:
        """Account for a job sent by this route; a call of `prefill_done` must follow."""
        route.worker.jobs += 1
        self._assigned += 1
        route.worker.last_assigned = self._assigned
        if route.prefill is not None:
            route.prefill.jobs += 1
            route.worker.awaiting_prefill[job.id] = len(job.tokens)
        computes = route.prefill or route.worker
        tokens = len(job.tokens) - route.expected.cached_tokens
        computes.prompts[job.id] = QueuedPrompt(tokens, job.pages)
        computes.prefill_share.add(route.expected.own_s, self._clock())

    def prefill_done(self, route: Route, id: JobId) -> None:
        """The prefill of a job is complete, or was cancelled."""
        if route.prefill is not None:
            route.prefill.jobs -= 1
            del route.worker.awaiting_prefill[id]
        (route.prefill or route.worker).prompts.pop(id, None)

    @property
    def prefill_queue_s(self) -> float:
        """Maximum queueing time of prompts at the prefill workers."""
        queued = max((worker.queued_tokens for worker in self if worker.role == "prefill"), default=0)
        return queued * self.latency_model.token_s(self.latency_model.model)

    def candidate(
        self, worker: WorkerHandle, job: Job, pages: Mapping[str, int], of: str = "", waits_s: float = 0.0
    ) -> PlacementCandidate:
        """State of a worker for the choice. pages: cached leading pages of the prompt, by worker. of: the job's
        class. waits_s: `prefill_queue_s`."""
        cached = max(pages.get(worker.name, 0), worker.pending_prefix(job.pages)) * PAGE_TOKENS
        queue = worker.queued_tokens + worker.peer_tokens
        answers = 0 if worker.role == "prefill" else self._beside(worker, of, waits_s)
        room = 0 if worker.ready is None else worker.ready.pages - self.index.pages_of(worker.name)
        free = max(0, room * PAGE_TOKENS - queue)
        busy = worker.prefill_share.share(self._clock())
        return PlacementCandidate(
            worker.name, min(cached, len(job.tokens) - 1), queue, answers, free, busy, worker.free_tokens
        )

    def _beside(self, worker: WorkerHandle, of: str, waits_s: float) -> int:
        """Number of answers at a worker when a job of class `of` is decoded there."""
        writing = worker.jobs + worker.peer_jobs - len(worker.awaiting_prefill)
        if not len(worker.awaiting_prefill):
            return writing
        return beside(
            writing,
            len(worker.awaiting_prefill),
            self.latency_model.output(of) * self.latency_model.between_s(writing + 1),
            waits_s,
        )

    def _computes_for(self, worker: WorkerHandle, others: Sequence[WorkerHandle]) -> bool:
        """Whether it is a prefill worker that responds, and all of `others` can read its parcels."""
        ready = worker.ready
        return (
            worker.role == "prefill"
            and ready is not None
            and not worker.draining
            and bool(ready.area)
            and self.silent_s(worker) <= MOVE_S
            and all(other.ready is not None and other.ready.format == ready.format for other in others)
        )

    def newly_down(self) -> list[WorkerHandle]:
        """Workers that are down or do not respond, and of which the other workers have not been notified; each is
        returned once."""
        found: list[WorkerHandle] = []
        for worker in self:
            out = worker.lost is not None or (worker.ready is not None and self.silent_s(worker) > MOVE_S)
            if out and not worker.down_announced:
                found.append(worker)
            worker.down_announced = out
        return found

    def silent(self) -> list[WorkerHandle]:
        """Workers that have not responded for MOVE_S while another decode worker responds. A prefill worker may have
        answers left from its previous role."""
        if not any(self.silent_s(worker) <= MOVE_S / 2 for worker in self if worker.decodes):
            return []
        return [worker for worker in self if worker.ready is not None and self.silent_s(worker) > MOVE_S]

    def _update_limits(self) -> None:
        all = [worker.ready for worker in self if worker.decodes and worker.ready is not None]
        if not all:
            self._ready = None
            return
        length, pages = min(ready.max_model_len for ready in all), sum(ready.pages for ready in all)
        self.latency_model.step_tokens = min(ready.step_tokens for ready in all)
        self.latency_model.experts(all[0].experts_of, all[0].experts_chosen)
        ready = Ready(
            max_model_len=length,
            pages=pages,
            fingerprint=all[0].fingerprint,
            summary=all[0].summary,
            image_tokens=min(one.image_tokens for one in all),
        )
        if ready != self._ready:
            self._ready = self.last = ready


def is_worth(job: Job) -> bool:
    """Whether prefill and decode of a job may be done by two workers: it has full pages, and the answer continues
    after its first token."""
    return bool(job.pages) and not job.answer and job.sampling.max_tokens > 1


def _shared(a: Sequence[PageHash], b: Sequence[PageHash]) -> int:
    """Length of the common prefix of two lists of hashes. Hashes are chained: if two are equal, so are all before
    them."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low
