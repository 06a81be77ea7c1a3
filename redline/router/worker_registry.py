"""The workers as one replica of the API sees them, and the choice of the worker for a job.

A worker has a name, and an epoch that increases with each start. A `WorkerHandle` is one start of one worker: each
start has its own inbox, so late messages of an earlier start are not received. `WorkerRegistry` holds the state; the
choice is a pure function of it (`choose.py`).
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
from redline.router.choose import NO_TARGETS, Candidate, Predicted, apart, beside, predict
from redline.router.index import PageIndex
from redline.router.pace import Busy, Pace

# Timeout: without a heartbeat (sent every pulse.BEAT_S) for this long, a worker is taken as stopped or down.
SILENT_S = 5.0
MOVE_S = 1.0  # timeout after which a worker's answers are resumed on others, if another worker responds
STALLED_S = 60.0  # maximum time of one step; a longer one may be legitimate, but no new requests should be sent here
COMING = 64  # newest jobs of a worker that are searched for pages that it is about to have


class Coming(NamedTuple):
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
        self.gone = False  # the other workers have been notified that it is down
        self.role: Role = role  # the role by which new jobs are sent to it
        self.turning: float | None = None  # time at which its role switch started; None: no switch in progress
        self.told: Role = role  # the newest role that its loop has confirmed
        self.epoch = epoch
        self.outbox = outbox
        self.ready: Ready | None = None
        self.lost: str | None = None
        self.before: str | None = None  # why the worker's previous start ended
        self.draining = False  # it gets no new jobs, because it is about to be replaced
        self.pid: int | None = None  # of its process, if that is on this host
        self.load: Load | None = None  # its newest gauges and counters
        self.jobs = 0  # unfinished jobs sent to it
        self.awaiting: dict[JobId, int] = {}  # of these, jobs in prefill on another worker: tokens of the prompt
        self.given = 0  # sequence number, among all jobs, of the last one sent to it; 0: none
        self.jobs_of_others = 0  # `jobs` of the other API replicas
        self.tokens_of_others = 0  # prompt tokens in `coming` of the other API replicas
        self.coming: dict[JobId, Coming] = {}  # jobs in prefill there, until their first token
        self.computing = Busy()  # prefill work sent to it
        self.timed = 0  # number of its newest step that was added to `pace`
        self.joined_at = 0.0  # time of its start
        self.beats = 0
        self.beat_at: float | None = None  # time of the last heartbeat; None: it sends none
        self.turn_s = 0.0
        self._last_turn_s = 0.0  # of the previous heartbeat: pings sent during that step may not have been read yet
        self._knocks = 0
        self._unanswered: deque[tuple[int, float]] = deque()  # pings without a reply: number, and time of sending

    @property
    def answers(self) -> bool:
        """Whether it accepts jobs to decode."""
        return self.ready is not None and self.role != "prefill"

    def turn(self, role: Role, now: float) -> None:
        """Set its role, and send it to the worker. The caller ends or moves the jobs of the previous role."""
        self.role, self.turning = role, now
        self.outbox.put(TakeRole(role=role))

    def heard(self, beat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        self.beats += 1
        self._last_turn_s = self.turn_s
        self.beat_at, self.turn_s = now, beat.turn_s
        while self._unanswered and self._unanswered[0][0] <= beat.knock:
            self._unanswered.popleft()

    @property
    def busy(self) -> bool:
        """Whether it has jobs, or has not replied to a ping since it had some."""
        of_its_own = self.load is not None and bool(self.load.running or self.load.waiting)
        return bool(self.jobs or self._unanswered or of_its_own)

    def knock(self, now: float, replica: str = "") -> None:
        """Send a ping, to which its next heartbeat replies. replica: the API replica that sends it."""
        self._knocks += 1
        self._unanswered.append((self._knocks, now))
        self.outbox.put(Ping(number=self._knocks, replica=replica))

    def silent_s(self, now: float) -> float:
        """Seconds since its last heartbeat, or since the oldest ping without a reply; the time of a running step
        does not count for a ping."""
        beat_s = 0.0 if self.beat_at is None else now - self.beat_at
        knock_s = now - self._unanswered[0][1] if self._unanswered else 0.0
        return max(beat_s, knock_s - max(self.turn_s, self._last_turn_s))

    def forgive(self, seconds: float) -> None:
        """The event loop stalled for `seconds`; do not count that as worker silence."""
        if self.beat_at is not None:
            self.beat_at += seconds
        self._unanswered = deque((number, at + seconds) for number, at in self._unanswered)

    def about_to_have(self, pages: Sequence[PageHash]) -> int:
        """Number of leading pages of a prompt that it is computing, or will compute, for jobs sent to it."""
        return max((_shared(pages, each.pages) for each in islice(reversed(self.coming.values()), COMING)), default=0)

    @property
    def coming_tokens(self) -> int:
        """Prompt tokens that it is computing, or will compute, for jobs sent to it."""
        return sum(each.tokens for each in self.coming.values())

    @property
    def room(self) -> float:
        """Tokens that fit into its free pages, in addition to all jobs sent to it. A lower bound: pages allocated
        for a job during its KV transfer are counted twice."""
        if self.load is None:
            return math.inf
        free = (self.load.pages_total - self.load.pages_used) * PAGE_TOKENS
        return free - self.coming_tokens - self.tokens_of_others - sum(self.awaiting.values())

    @property
    def awaited(self) -> int:
        """Number of its jobs in prefill on another worker."""
        return len(self.awaiting)

    @property
    def as_other(self) -> PagesFrom:
        """Its address for a KV transfer with another worker."""
        area, format = (self.ready.area, self.ready.format) if self.ready is not None else (b"", "")
        return PagesFrom(worker=self.name, epoch=self.epoch, inbox=self.inbox, area=area, format=format)

    def __repr__(self) -> str:
        return f"{self.name} (start {self.epoch})"


class Route(NamedTuple):
    """The worker or workers for a job, with the predictions for the choice."""

    link: WorkerHandle
    prefill: WorkerHandle | None  # the prefill worker; None: `link` does the prefill
    expected: Predicted  # for the worker that computes the prompt
    instead: tuple[Predicted, ...] = ()  # for the other candidates


class WorkerRegistry:
    """The newest start of each worker.

    clock: returns seconds; heartbeat timeouts use it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._links: dict[str, WorkerHandle] = {}
        # By worker: seconds from start to ready, of its newest start that became ready.
        self._start_s: dict[str, float] = {}
        self.index = PageIndex()
        self.pace = Pace()
        self._given = 0  # number of jobs sent
        self._ready: Ready | None = None
        self.last: Ready | None = None  # limits on jobs, as of when there last was a decode worker

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._links.values())

    @property
    def several(self) -> bool:
        """Whether there is more than one worker."""
        return len(self._links) > 1

    @property
    def start_s(self) -> float:
        """Seconds from a worker's start until it was ready: the maximum over all workers' newest starts; 0: none has
        become ready yet."""
        return max(self._start_s.values(), default=0.0)

    def join(self, link: WorkerHandle) -> None:
        """Add the start of a worker. Raises AssertionError if its previous start has not ended."""
        before = self._links.get(link.name)
        assert before is None or before.lost is not None, f"{before} has not ended, but {link} starts"
        link.before = None if before is None else before.lost
        self._links[link.name] = link
        link.joined_at = self._clock()
        self.index.begin(link.name)
        self._look()

    def speaks(self, link: WorkerHandle, ready: Ready) -> str | None:
        """A worker has loaded its model: None, or why it cannot serve together with the others.

        Raises AssertionError for a worker that has ended: only another start of it can become ready.
        """
        assert link.lost is None, f"{link} has ended, but reports that it is ready"
        others = [other for other in self if other.ready is not None and other is not link]
        if others and (known := others[0].ready) is not None and known.fingerprint != ready.fingerprint:
            return f"{link.name} has loaded another model, or pages of another format, than {others[0].name}"
        if link.ready is None:
            self._start_s[link.name] = self._clock() - link.joined_at
        link.ready = ready
        self._look()
        return None

    def lose(self, link: WorkerHandle, reason: str) -> None:
        """A worker has ended: send it nothing more."""
        link.ready, link.load, link.lost = None, None, reason
        self.index.forget(link.name)
        self._look()

    def turn(self, link: WorkerHandle, role: Role) -> None:
        """Switch a worker's role (`roles.refusal` returns whether that is possible)."""
        link.turn(role, self._clock())
        self._look()

    def turning_s(self, link: WorkerHandle) -> float | None:
        """Seconds since a worker's role switch started; None: no switch in progress."""
        return None if link.turning is None else self._clock() - link.turning

    def cached(self, link: WorkerHandle, news: Cached) -> None:
        """Apply an update of a worker's prefix cache. If an update was missed, request the complete content."""
        if not self.index.take(link.name, news):
            self.recall(link)

    def recall(self, link: WorkerHandle) -> None:
        """Request the complete content of a worker's prefix cache, if there are other workers to choose from."""
        if self.several:
            link.outbox.put(Recall())

    @property
    def ready(self) -> Ready | None:
        """Limits on jobs, over all decode workers; None if there is none. The same object until it changes."""
        return self._ready

    @property
    def lost(self) -> str | None:
        """Why there is no decode worker, if none is ready or loading."""
        serving = [link for link in self if link.role != "prefill"]
        if self._ready is not None or any(link.lost is None for link in serving):
            return None
        return next((link.lost for link in serving), None)

    def silent_s(self, link: WorkerHandle) -> float:
        """Seconds since a worker's last heartbeat, or since its oldest ping without a reply."""
        return link.silent_s(self._clock())

    def is_silent(self, link: WorkerHandle) -> bool:
        """Whether a worker has exceeded the heartbeat timeout SILENT_S: it is stopped or down."""
        return self.silent_s(link) > SILENT_S

    @property
    def silence(self) -> str | None:
        """Why new jobs are refused although a model is loaded: no decode worker responds."""
        silent = [self.silent_s(link) for link in self if link.answers]
        if not silent or min(silent) <= SILENT_S:
            return None
        return f"the worker has not responded for {min(silent):.0f} s"

    @property
    def trouble(self) -> str | None:
        """Why this server is not healthy although a model is loaded; None if it is."""
        turns = [link.turn_s for link in self if link.answers]
        stalled = f"a step has been running for {min(turns):.0f} s" if turns and min(turns) > STALLED_S else None
        return self.silence or stalled

    def loaded(self, link: WorkerHandle, load: Load) -> None:
        """Apply a worker's load report. The last one may arrive after the worker has ended, and is then dropped."""
        link.load = load if link.lost is None else None
        for step in load.timed:
            if step.number > link.timed:
                link.timed = step.number
                work = Work(step.prompt, step.pairs, step.rows, step.context, step.expanded)
                self.pace.stepped(work, step.ms / 1e3, step.tokens)

    def route(self, job: Job, of: str = "", targets: Targets = NO_TARGETS) -> Route | None:
        """The worker for a job (`choose.py`), among those that are ready and respond; None if there is none.

        of: class of the job. targets: SLO targets of the class.
        """
        able = [link for link in self if link.answers and not link.draining]
        answering = [link for link in able if self.silent_s(link) <= MOVE_S] or able
        answering.sort(key=lambda link: link.given)  # ties go to the least recently used worker
        if not answering:
            return None
        pages = self.index.cached(job.pages) if self.several else {}
        lenders = [link for link in self if self._computes_for(link, answering)] if is_worth(job) else []
        waits_s = self.prompts_wait_s if lenders else 0.0
        candidates = [self.candidate(link, job, pages, of, waits_s) for link in (*answering, *lenders)]
        all = predict(len(job.tokens), candidates, self.pace, of, targets)
        here, there = all[: len(answering)], all[len(answering) :]
        place, computes = apart(here, there)
        if computes is None:
            others = (*here[:place], *here[place + 1 :], *there)
            return Route(answering[place], None, here[place], others)
        others = (*there[:computes], *there[computes + 1 :], *here)
        return Route(answering[place], lenders[computes], there[computes], others)

    def sent(self, route: Route, job: Job) -> None:
        """Account for a job sent by this route; a call of `computed` must follow."""
        route.link.jobs += 1
        self._given += 1
        route.link.given = self._given
        if route.prefill is not None:
            route.prefill.jobs += 1
            route.link.awaiting[job.id] = len(job.tokens)
        computes = route.prefill or route.link
        tokens = len(job.tokens) - route.expected.cached_tokens
        computes.coming[job.id] = Coming(tokens, job.pages)
        computes.computing.add(route.expected.own_s, self._clock())

    def computed(self, route: Route, id: JobId) -> None:
        """The prefill of a job is complete, or was cancelled."""
        if route.prefill is not None:
            route.prefill.jobs -= 1
            del route.link.awaiting[id]
        (route.prefill or route.link).coming.pop(id, None)

    @property
    def prompts_wait_s(self) -> float:
        """Maximum queueing time of prompts at the prefill workers."""
        queued = max((link.coming_tokens for link in self if link.role == "prefill"), default=0)
        return queued * self.pace.token_s(self.pace.model)

    def candidate(
        self, link: WorkerHandle, job: Job, pages: Mapping[str, int], of: str = "", waits_s: float = 0.0
    ) -> Candidate:
        """State of a worker for the choice. pages: cached leading pages of the prompt, by worker. of: the job's
        class. waits_s: `prompts_wait_s`."""
        cached = max(pages.get(link.name, 0), link.about_to_have(job.pages)) * PAGE_TOKENS
        queue = link.coming_tokens + link.tokens_of_others
        answers = 0 if link.role == "prefill" else self._beside(link, of, waits_s)
        room = 0 if link.ready is None else link.ready.pages - self.index.pages_of(link.name)
        free = max(0, room * PAGE_TOKENS - queue)
        busy = link.computing.share(self._clock())
        return Candidate(link.name, min(cached, len(job.tokens) - 1), queue, answers, free, busy, link.room)

    def _beside(self, link: WorkerHandle, of: str, waits_s: float) -> int:
        """Number of answers at a worker when a job of class `of` is decoded there."""
        writing = link.jobs + link.jobs_of_others - link.awaited
        if not link.awaited:
            return writing
        return beside(writing, link.awaited, self.pace.output(of) * self.pace.between_s(writing + 1), waits_s)

    def _computes_for(self, link: WorkerHandle, others: Sequence[WorkerHandle]) -> bool:
        """Whether it is a prefill worker that responds, and all of `others` can read its parcels."""
        ready = link.ready
        return (
            link.role == "prefill"
            and ready is not None
            and not link.draining
            and bool(ready.area)
            and self.silent_s(link) <= MOVE_S
            and all(other.ready is not None and other.ready.format == ready.format for other in others)
        )

    def newly_gone(self) -> list[WorkerHandle]:
        """Workers that are down or do not respond, and of which the other workers have not been notified; each is
        returned once."""
        found: list[WorkerHandle] = []
        for link in self:
            out = link.lost is not None or (link.ready is not None and self.silent_s(link) > MOVE_S)
            if out and not link.gone:
                found.append(link)
            link.gone = out
        return found

    def fallen_silent(self) -> list[WorkerHandle]:
        """Workers that have not responded for MOVE_S while another decode worker responds. A prefill worker may have
        answers left from its previous role."""
        if not any(self.silent_s(link) <= MOVE_S / 2 for link in self if link.answers):
            return []
        return [link for link in self if link.ready is not None and self.silent_s(link) > MOVE_S]

    def _look(self) -> None:
        all = [link.ready for link in self if link.answers and link.ready is not None]
        if not all:
            self._ready = None
            return
        length, pages = min(ready.max_model_len for ready in all), sum(ready.pages for ready in all)
        self.pace.step_tokens = min(ready.step_tokens for ready in all)
        self.pace.experts(all[0].experts_of, all[0].experts_chosen)
        ready = Ready(max_model_len=length, pages=pages, fingerprint=all[0].fingerprint, summary=all[0].summary)
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
