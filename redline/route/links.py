"""The workers as one replica of the API sees them, and which of them takes a job.

A worker has a name, and an epoch that grows with each start. A `Link` is one start of one worker: its messages come
through an inbox of their own, so what an earlier start still says reaches nobody. State lives in `Links`; who is chosen
is a function of what they have said (`choose.py`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from redline.route.choose import NO_TARGETS, Candidate, Predicted, apart, beside, predict
from redline.route.index import PageIndex
from redline.route.pace import Busy, Pace
from redline.tune.pairs import Work
from redline.tune.targets import Targets
from redline.wire.channel import Outbox
from redline.wire.job import PAGE_TOKENS, Job, JobId, PageHash, PagesFrom
from redline.wire.news import Beat, Cached, Knock, Load, Ready, Recall, Role, TakeRole

SILENT_S = 5.0  # without a beat (one comes every pulse.BEAT_S) for so long, a worker is stopped or gone
MOVE_S = 1.0  # of silence, after which its answers go on elsewhere, where somebody has been heard of meanwhile
STALLED_S = 60.0  # in one step for so long: there may be good reasons, but no new request should come here meanwhile
COMING = 64  # jobs of a worker, the newest, that are looked at for pages that it is about to have


class Coming(NamedTuple):
    """A job whose prompt a worker has not computed yet."""

    tokens: int  # that it has to compute
    pages: tuple[PageHash, ...]


class Link:
    """One start of one worker. `ready` is None until it can take jobs; `lost` is why it has ended, once it has."""

    def __init__(
        self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "", at: str | None = None
    ) -> None:
        """inbox: the address that it reads, for other workers. at: its machine, where that is another than this."""
        self.name = name
        self.inbox = inbox
        self.at = at
        self.gone = False  # others have been told that nothing is to be expected of it
        self.role: Role = role  # what it is sent from now on goes by it
        self.turning: float | None = None  # since when it changes to its role; None: it is wholly in it
        self.told: Role = role  # what its loop has heard of last
        self.epoch = epoch
        self.outbox = outbox
        self.ready: Ready | None = None
        self.lost: str | None = None
        self.before: str | None = None  # why the worker's start before this one has ended
        self.draining = False  # it is sent nothing new, since it is to be replaced
        self.pid: int | None = None  # of its process, where that is on this host
        self.load: Load | None = None  # its newest counters
        self.jobs = 0  # that it has been sent and that have not ended
        self.awaiting: dict[JobId, int] = {}  # of these, whose prompts others compute: tokens of the prompt
        self.given = 0  # which of all jobs it has been sent last; 0: none
        self.jobs_of_others = 0  # `jobs` of other replicas of the API
        self.tokens_of_others = 0  # of the prompts in their `coming`
        self.coming: dict[JobId, Coming] = {}  # those whose prompts it computes, until their first token
        self.computing = Busy()  # prompts that it has been sent
        self.timed = 0  # the newest of its steps that `pace` has taken in
        self.joined_at = 0.0  # when it was started
        self.beats = 0
        self.beat_at: float | None = None  # None: it has no heart
        self.turn_s = 0.0
        self._last_turn_s = 0.0  # as the beat before said: what was told since may not have been taken in by this one
        self._knocks = 0
        self._unanswered: deque[tuple[int, float]] = deque()  # knocks, and when they were sent

    @property
    def answers(self) -> bool:
        """Whether it can be sent jobs whose answers it gives."""
        return self.ready is not None and self.role != "prefill"

    def turn(self, role: Role, now: float) -> None:
        """It has another role from now on. What it has begun in the one before is its caller's to end or to move."""
        self.role, self.turning = role, now
        self.outbox.put(TakeRole(role=role))

    def heard(self, beat: Beat, now: float) -> None:
        """Take in that it lives."""
        self.beats += 1
        self._last_turn_s = self.turn_s
        self.beat_at, self.turn_s = now, beat.turn_s
        while self._unanswered and self._unanswered[0][0] <= beat.knock:
            self._unanswered.popleft()

    @property
    def busy(self) -> bool:
        """Whether it has jobs, or has not answered since it had some."""
        of_its_own = self.load is not None and bool(self.load.running or self.load.waiting)
        return bool(self.jobs or self._unanswered or of_its_own)

    def knock(self, now: float, replica: str = "") -> None:
        """Have it say with a beat that it hears. replica: of the API, that knocks."""
        self._knocks += 1
        self._unanswered.append((self._knocks, now))
        self.outbox.put(Knock(number=self._knocks, replica=replica))

    def silent_s(self, now: float) -> float:
        """For how long nothing has been heard of it, or nothing of what it was told; a step that runs is no silence."""
        beat_s = 0.0 if self.beat_at is None else now - self.beat_at
        knock_s = now - self._unanswered[0][1] if self._unanswered else 0.0
        return max(beat_s, knock_s - max(self.turn_s, self._last_turn_s))

    def forgive(self, seconds: float) -> None:
        """Who listens was held up for so long, and has heard nobody meanwhile."""
        if self.beat_at is not None:
            self.beat_at += seconds
        self._unanswered = deque((number, at + seconds) for number, at in self._unanswered)

    def about_to_have(self, pages: Sequence[PageHash]) -> int:
        """How many of a prompt's first pages it is computing, or will, for jobs that it has been sent."""
        return max((_shared(pages, each.pages) for each in islice(reversed(self.coming.values()), COMING)), default=0)

    @property
    def coming_tokens(self) -> int:
        """Of the prompts that it computes, or will, for jobs that it has been sent."""
        return sum(each.tokens for each in self.coming.values())

    @property
    def room(self) -> float:
        """Tokens whose pages it can have now, beside those of all jobs that it has been sent. Pages that a job has
        while its prompt is on the way count twice: it has room for at least so many."""
        if self.load is None:
            return math.inf
        free = (self.load.pages_total - self.load.pages_used) * PAGE_TOKENS
        return free - self.coming_tokens - self.tokens_of_others - sum(self.awaiting.values())

    @property
    def awaited(self) -> int:
        """Its jobs whose prompts others compute."""
        return len(self.awaiting)

    @property
    def as_other(self) -> PagesFrom:
        """What another worker has to know of it for a handoff."""
        area, format = (self.ready.area, self.ready.format) if self.ready is not None else (b"", "")
        return PagesFrom(worker=self.name, epoch=self.epoch, inbox=self.inbox, area=area, format=format)

    def __repr__(self) -> str:
        return f"{self.name} (start {self.epoch})"


class Route(NamedTuple):
    """Who takes a job, and why."""

    link: Link
    prefill: Link | None  # who computes its prompt, where that is another worker
    expected: Predicted  # of whoever computes the prompt
    instead: tuple[Predicted, ...] = ()  # of the others that could have


class Links:
    """The newest start of each worker.

    clock: tells seconds, by which silence is measured.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._start_s: dict[str, float] = {}  # of each worker's newest start that became ready
        self.index = PageIndex()
        self.pace = Pace()
        self._given = 0  # jobs
        self._ready: Ready | None = None
        self.last: Ready | None = None  # what jobs could be like when there last was a worker that answers

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    @property
    def several(self) -> bool:
        """Whether there is more than one worker."""
        return len(self._links) > 1

    @property
    def start_s(self) -> float:
        """Seconds from a worker's start until it could take jobs: the longest of all workers' newest. 0: none has been
        seen to start."""
        return max(self._start_s.values(), default=0.0)

    def join(self, link: Link) -> None:
        """A worker has been started. Raises AssertionError where its last start has not been lost."""
        before = self._links.get(link.name)
        assert before is None or before.lost is not None, f"{before} has not ended, and {link} begins"
        link.before = None if before is None else before.lost
        self._links[link.name] = link
        link.joined_at = self._clock()
        self.index.begin(link.name)
        self._look()

    def speaks(self, link: Link, ready: Ready) -> str | None:
        """A worker has loaded its model: None, or why it cannot be among the others.

        Raises AssertionError for one that has been lost: it would be another start.
        """
        assert link.lost is None, f"{link} is lost, and says that it is ready"
        others = [other for other in self if other.ready is not None and other is not link]
        if others and (known := others[0].ready) is not None and known.fingerprint != ready.fingerprint:
            return f"{link.name} has loaded another model, or pages of another format, than {others[0].name}"
        if link.ready is None:
            self._start_s[link.name] = self._clock() - link.joined_at
        link.ready = ready
        self._look()
        return None

    def lose(self, link: Link, reason: str) -> None:
        """A worker has ended: nothing more is sent to it."""
        link.ready, link.load, link.lost = None, None, reason
        self.index.forget(link.name)
        self._look()

    def turn(self, link: Link, role: Role) -> None:
        """A worker has another role from now on (`roles.refusal` says whether it can)."""
        link.turn(role, self._clock())
        self._look()

    def turning_s(self, link: Link) -> float | None:
        """For how long a worker has been changing its role; None: it is wholly in it."""
        return None if link.turning is None else self._clock() - link.turning

    def cached(self, link: Link, news: Cached) -> None:
        """Take in what a worker tells of its prefix cache. Where something was missed, it is asked for all of it."""
        if not self.index.take(link.name, news):
            self.recall(link)

    def recall(self, link: Link) -> None:
        """Ask a worker for all of its prefix cache, where others could be chosen."""
        if self.several:
            link.outbox.put(Recall())

    @property
    def ready(self) -> Ready | None:
        """What jobs may be like: of any worker that answers; None where there is none. One object until it changes."""
        return self._ready

    @property
    def lost(self) -> str | None:
        """Why there is no worker, where none answers and none that would is loading."""
        serving = [link for link in self if link.role != "prefill"]
        if self._ready is not None or any(link.lost is None for link in serving):
            return None
        return next((link.lost for link in serving), None)

    def silent_s(self, link: Link) -> float:
        """For how long nothing has been heard of a worker that has a heart."""
        return link.silent_s(self._clock())

    def is_silent(self, link: Link) -> bool:
        """Whether nothing has been heard of a worker for so long that it is stopped or gone."""
        return self.silent_s(link) > SILENT_S

    @property
    def silence(self) -> str | None:
        """Why new jobs are refused though a model is loaded: none of its workers is heard of."""
        silent = [self.silent_s(link) for link in self if link.answers]
        if not silent or min(silent) <= SILENT_S:
            return None
        return f"the worker has not been heard of for {min(silent):.0f} s"

    @property
    def trouble(self) -> str | None:
        """Why nobody should be sent here, though a model is loaded; None: it works."""
        turns = [link.turn_s for link in self if link.answers]
        stalled = f"a step has been running for {min(turns):.0f} s" if turns and min(turns) > STALLED_S else None
        return self.silence or stalled

    def loaded(self, link: Link, load: Load) -> None:
        """Take in what a worker tells of itself; its last word may come once it is lost, and has no pages any more."""
        link.load = load if link.lost is None else None
        for step in load.timed:
            if step.number > link.timed:
                link.timed = step.number
                work = Work(step.prompt, step.pairs, step.rows, step.context, step.expanded)
                self.pace.stepped(work, step.ms / 1e3, step.tokens)

    def route(self, job: Job, of: str = "", targets: Targets = NO_TARGETS) -> Route | None:
        """Who takes a job, of those that can and are heard of (`choose.py`); None where there is nobody.

        of: its class. targets: what that is promised.
        """
        able = [link for link in self if link.answers and not link.draining]
        answering = [link for link in able if self.silent_s(link) <= MOVE_S] or able
        answering.sort(key=lambda link: link.given)  # of several alike the one whose last job is the oldest
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
        """A job goes this way; `computed` has to follow."""
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
        """The prompt of a job is computed, or will not be."""
        if route.prefill is not None:
            route.prefill.jobs -= 1
            del route.link.awaiting[id]
        (route.prefill or route.link).coming.pop(id, None)

    @property
    def prompts_wait_s(self) -> float:
        """How long prompts wait at most, at those that compute them for others."""
        queued = max((link.coming_tokens for link in self if link.role == "prefill"), default=0)
        return queued * self.pace.token_s(self.pace.model)

    def candidate(
        self, link: Link, job: Job, pages: Mapping[str, int], of: str = "", waits_s: float = 0.0
    ) -> Candidate:
        """What is known of a worker. pages: that each has cached of the prompt, by name. of: the job's class. waits_s:
        `prompts_wait_s`."""
        cached = max(pages.get(link.name, 0), link.about_to_have(job.pages)) * PAGE_TOKENS
        queue = link.coming_tokens + link.tokens_of_others
        answers = 0 if link.role == "prefill" else self._beside(link, of, waits_s)
        room = 0 if link.ready is None else link.ready.pages - self.index.pages_of(link.name)
        free = max(0, room * PAGE_TOKENS - queue)
        busy = link.computing.share(self._clock())
        return Candidate(link.name, min(cached, len(job.tokens) - 1), queue, answers, free, busy, link.room)

    def _beside(self, link: Link, of: str, waits_s: float) -> int:
        """Answers at a worker, as of when a job of a class is answered there."""
        writing = link.jobs + link.jobs_of_others - link.awaited
        if not link.awaited:
            return writing
        return beside(writing, link.awaited, self.pace.output(of) * self.pace.between_s(writing + 1), waits_s)

    def _computes_for(self, link: Link, others: Sequence[Link]) -> bool:
        """Whether it computes prompts for others, is heard of, and all of them can read its parcels."""
        ready = link.ready
        return (
            link.role == "prefill"
            and ready is not None
            and not link.draining
            and bool(ready.area)
            and self.silent_s(link) <= MOVE_S
            and all(other.ready is not None and other.ready.format == ready.format for other in others)
        )

    def newly_gone(self) -> list[Link]:
        """Workers that have been lost or fallen silent and of which the others have not been told; each once."""
        found: list[Link] = []
        for link in self:
            out = link.lost is not None or (link.ready is not None and self.silent_s(link) > MOVE_S)
            if out and not link.gone:
                found.append(link)
            link.gone = out
        return found

    def fallen_silent(self) -> list[Link]:
        """Workers of which nothing has been heard for MOVE_S while another that answers is heard of. One that computes
        prompts may have answers left from the role that it had before."""
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
    """Whether a prompt may be computed by one worker and its answer by another: it has pages, and the answer goes on
    behind its first token."""
    return bool(job.pages) and not job.answer and job.sampling.max_tokens > 1


def _shared(a: Sequence[PageHash], b: Sequence[PageHash]) -> int:
    """How many hashes two prompts begin with together. A hash chains over those before it: where two are equal, so are
    all before."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low
