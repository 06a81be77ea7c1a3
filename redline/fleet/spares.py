"""Which workers are started and ended as the traffic asks: `tune.count` says how many are to run, here is who.

A worker whose start has failed is left out for a while, the longer the more often: what has its GPUs may go again. One
is started or ended at a time, and none ends while another does. Who ends is the one with least to end, of those whose
role is to have fewer; of workers on other machines the last, since a set of pods loses its last one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redline.fleet.supervisor import Seat
from redline.route.links import Link, Links
from redline.route.roles import can_answer
from redline.tune.count import Count, Limits, Look, choose_count, forgotten
from redline.wire.news import Role

MOST = 1 << 16  # workers, where nobody starts any: an autoscaler has bounds of its own
AGAIN_S, LONGEST_S = 60.0, 3600.0  # before a worker is tried again whose start has failed, doubled each time; at most


class Crew(Protocol):
    """Who gives workers roles, starts and ends them (`Supervisor`). Each says why not, or None; they raise KeyError
    where there is no worker of that name."""

    @property
    def seats(self) -> Sequence[Seat]:
        """All workers of the deployment."""
        ...

    def turn(self, name: str, role: Role) -> str | None:
        """Have a worker take another role."""
        ...

    def want(self, name: str, role: Role) -> str | None:
        """Have an idle worker run."""
        ...

    def spare(self, name: str) -> str | None:
        """Have a worker run no more, its answers going on."""
        ...


class Spares:
    """What looks have said of how many workers are to run, and who is started or ended for it."""

    def __init__(self, crew: Crew, links: Links, spare_s: float, clock: Callable[[], float]) -> None:
        """spare_s: as in `tune.count.Limits`."""
        self._crew = crew
        self._links = links
        self._spare_s = spare_s
        self._clock = clock
        self._looks: list[Look] = []
        self._started: set[str] = set()  # of which it is not known yet whether their start has failed
        self._fails: dict[str, int] = {}  # of each worker, in a row
        self._until: dict[str, float] = {}  # when it may be tried again

    @property
    def any(self) -> bool:
        """Whether a worker of the deployment runs only while it is wanted."""
        return any(seat.spare for seat in self._crew.seats)

    @property
    def running(self) -> Sequence[Seat]:
        """Workers that run, or are being started."""
        return [seat for seat in self._crew.seats if seat.state in ("starting", "ready")]

    @property
    def limits(self) -> Limits:
        """As things are now. Where no worker is ever started or ended, as if each were: so many are wanted."""
        seats = self._crew.seats
        could = [seat for seat in seats if seat.state != "given up" and not self._left_out(seat)]
        least = sum(not seat.spare for seat in seats) if self.any else 1
        most = max(least, len(could)) if self.any else MOST
        return Limits(least, most, self._spare_s, self._links.start_s)

    def saw(self, workers: int) -> None:
        """A look wants so many."""
        now = self._clock()
        self._looks.append(Look(now, workers))
        del self._looks[: forgotten(self._looks, self.limits.kept_s, now)]

    def count(self) -> Count:
        """How many are to run now."""
        self._judge()
        return choose_count(self._looks, len(self.running), self.limits, self._clock())

    def start(self, role: Role) -> tuple[str | None, str]:
        """One more is started: (its name, or None, and why not)."""
        idle = [seat for seat in self._crew.seats if seat.state == "idle" and not self._left_out(seat)]
        if not idle:
            return None, "no other is left that could be started"
        name = idle[0].name
        if (why_not := self._crew.want(name, role)) is not None:
            return None, why_not
        self._started.add(name)
        return name, ""

    def end(self, fewer_prompts: bool) -> tuple[str | None, str]:
        """One that is ready ends what it has begun, and then runs no more: (its name, or None, and why not).

        fewer_prompts: whether one less is to compute prompts for others.
        """
        ending = next((seat.name for seat in self._crew.seats if seat.state == "ending"), None)
        if ending is not None:
            return None, f"{ending} ends already"
        links = {link.name: link for link in self._links}
        ready = [seat.name for seat in self._crew.seats if seat.spare and seat.state == "ready"]
        may = [links[name] for name in ready if self._may_go(links[name])]
        if not may:
            return None, "of those that need not run none can be spared yet"
        places = {name: place for place, name in enumerate(ready)}

        def cost(link: Link) -> tuple[bool, int, int]:
            return (link.role == "prefill") != fewer_prompts, link.jobs if link.at is None else 0, -places[link.name]

        name = min(may, key=cost).name
        why_not = self._crew.spare(name)
        return (None, why_not) if why_not is not None else (name, "")

    def told(self) -> dict[str, Any]:
        """As JSON: how many workers are in which state, and why the last start of some has failed."""
        limits, seats = self.limits, self._crew.seats
        return {
            "least": limits.least,
            "most": len(seats),
            "wanted": self.count().workers,
            "states": dict(Counter(seat.state for seat in seats)),
            "failed": {seat.name: seat.failed for seat in seats if seat.failed is not None},
        }

    def _may_go(self, link: Link) -> bool:
        """Whether another worker answers that is heard of, and nothing is under way with this one."""
        others = [other for other in self._links if other is not link and can_answer(self._links, other)]
        return bool(others) and link.turning is None and not link.draining

    def _judge(self) -> None:
        """Take in what has become of starts."""
        for seat in self._crew.seats:
            if seat.name not in self._started or seat.state == "starting":
                continue
            self._started.discard(seat.name)
            if seat.failed is None:
                self._fails.pop(seat.name, None)
                continue
            fails = self._fails[seat.name] = self._fails.get(seat.name, 0) + 1
            self._until[seat.name] = self._clock() + min(AGAIN_S * 2 ** (fails - 1), LONGEST_S)

    def _left_out(self, seat: Seat) -> bool:
        return self._until.get(seat.name, 0.0) > self._clock() and seat.state == "idle"
