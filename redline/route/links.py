"""The workers as one replica of the API sees them, and which of them takes a job.

A worker has a name, and an epoch that grows with each start. A `Link` is one start of one worker: its messages come
through an inbox of their own, so what an earlier start still says reaches nobody. State lives in `Links`; who is chosen
is a function of what they have said.
"""

from collections import deque
from collections.abc import Callable, Iterator

from redline.wire.channel import Outbox
from redline.wire.job import PagesFrom
from redline.wire.news import Beat, Knock, Load, Ready, Role

SILENT_S = 5.0  # without a beat (one comes every pulse.BEAT_S) for so long, a worker is stopped or gone
MOVE_S = 1.0  # of silence, after which its answers go on elsewhere, where somebody has been heard of meanwhile
STALLED_S = 60.0  # in one step for so long: there may be good reasons, but no new request should come here meanwhile


class Link:
    """One start of one worker. `ready` is None until it can take jobs; `lost` is why it has ended, once it has."""

    def __init__(self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "") -> None:
        """inbox: the address that it reads, for other workers."""
        self.name = name
        self.inbox = inbox
        self.gone = False  # others have been told that nothing is to be expected of it
        self.role: Role = role
        self.epoch = epoch
        self.outbox = outbox
        self.ready: Ready | None = None
        self.lost: str | None = None
        self.before: str | None = None  # why the worker's start before this one has ended
        self.draining = False  # it is sent nothing new, since it is to be replaced
        self.pid: int | None = None  # of its process, where that is on this host
        self.load: Load | None = None  # its newest counters
        self.jobs = 0  # that it has been sent and that have not ended
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

    def knock(self, now: float) -> None:
        """Have it say with a beat that it hears."""
        self._knocks += 1
        self._unanswered.append((self._knocks, now))
        self.outbox.put(Knock(number=self._knocks))

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

    @property
    def as_other(self) -> PagesFrom:
        """What another worker has to know of it for a handoff."""
        area, format = (self.ready.area, self.ready.format) if self.ready is not None else (b"", "")
        return PagesFrom(worker=self.name, epoch=self.epoch, inbox=self.inbox, area=area, format=format)

    def __repr__(self) -> str:
        return f"{self.name} (start {self.epoch})"


class Links:
    """The newest start of each worker.

    clock: tells seconds, by which silence is measured.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._ready: Ready | None = None
        self.last: Ready | None = None  # what jobs could be like when there last was a worker that answers

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def join(self, link: Link) -> None:
        """A worker has been started. Raises AssertionError where its last start has not been lost."""
        before = self._links.get(link.name)
        assert before is None or before.lost is not None, f"{before} has not ended, and {link} begins"
        link.before = None if before is None else before.lost
        self._links[link.name] = link
        self._look()

    def speaks(self, link: Link, ready: Ready) -> str | None:
        """A worker has loaded its model: None, or why it cannot be among the others.

        Raises AssertionError for one that has been lost: it would be another start.
        """
        assert link.lost is None, f"{link} is lost, and says that it is ready"
        others = [other for other in self if other.ready is not None and other is not link]
        if others and (known := others[0].ready) is not None and known.fingerprint != ready.fingerprint:
            return f"{link.name} has loaded another model, or pages of another format, than {others[0].name}"
        link.ready = ready
        self._look()
        return None

    def lose(self, link: Link, reason: str) -> None:
        """A worker has ended: nothing more is sent to it."""
        link.ready, link.lost = None, reason
        self._look()

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

    def pick(self, role: Role = "decode") -> Link | None:
        """The worker that has least to do of those that can play a role and are heard of; None where there is none."""
        able = [link for link in self if link.ready is not None and link.role in (role, "both") and not link.draining]
        heard = [link for link in able if self.silent_s(link) <= MOVE_S] or able
        return min(heard, key=lambda link: link.jobs, default=None)

    def pick_prefill(self, link: Link) -> Link | None:
        """Who computes a prompt for a worker: the one with least to do of those that do so, are heard of, and whose
        parcels it can read; None where there is none."""
        ready = link.ready
        able = [
            other
            for other in self
            if other.role == "prefill"
            and other.ready is not None
            and not other.draining
            and other.ready.area
            and ready is not None
            and other.ready.format == ready.format
            and self.silent_s(other) <= MOVE_S
        ]
        return min(able, key=lambda other: other.jobs, default=None)

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
        """Workers that answer, and of which nothing has been heard for MOVE_S while another is heard of."""
        answering = [link for link in self if link.answers]
        if not any(self.silent_s(link) <= MOVE_S / 2 for link in answering):
            return []
        return [link for link in answering if self.silent_s(link) > MOVE_S]

    def _look(self) -> None:
        all = [link.ready for link in self if link.answers and link.ready is not None]
        if not all:
            self._ready = None
            return
        length, pages = min(ready.max_model_len for ready in all), sum(ready.pages for ready in all)
        ready = Ready(max_model_len=length, pages=pages, fingerprint=all[0].fingerprint, summary=all[0].summary)
        if ready != self._ready:
            self._ready = self.last = ready
