"""Autoscaler: starts and stops workers with the traffic. `policy.worker_count` computes how many are to run;
`Autoscaler` chooses which.

After a failed start a worker is skipped for a while, with exponential backoff: another process may occupy its GPUs. One
worker is started or stopped at a time, and none is stopped while another still drains. The worker to stop is the one
with the fewest jobs, among those of the role that is to have fewer; on other machines it is the last one, since a set
of pods is scaled down from its last pod.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redline.deploy.supervisor import WorkerStatus
from redline.messages.news import Role
from redline.policy.worker_count import Count, Look, ScalingLimits, choose_count, forgotten
from redline.router.roles import can_answer
from redline.router.worker_registry import WorkerHandle, WorkerRegistry

MOST = 1 << 16  # limit on workers if Redline starts none itself: an external autoscaler has its own limits
AGAIN_S, LONGEST_S = 60.0, 3600.0  # pause before a failed start is retried, doubled with each failure; its maximum


class WorkerPool(Protocol):
    """The worker pool (`Supervisor`): switches roles, starts and stops workers. The methods return the reason for a
    refusal, or None, and raise KeyError if there is no worker of that name."""

    @property
    def seats(self) -> Sequence[WorkerStatus]:
        """All workers of the deployment."""
        ...

    def turn(self, name: str, role: Role) -> str | None:
        """Switch a worker's role."""
        ...

    def want(self, name: str, role: Role) -> str | None:
        """Start an idle worker."""
        ...

    def spare(self, name: str) -> str | None:
        """Drain and stop a worker."""
        ...


class Autoscaler:
    """Recent estimates of how many workers are needed, and the workers that are started or stopped accordingly."""

    def __init__(self, crew: WorkerPool, links: WorkerRegistry, spare_s: float, clock: Callable[[], float]) -> None:
        """spare_s: as in `policy.worker_count.ScalingLimits`."""
        self._crew = crew
        self._links = links
        self._spare_s = spare_s
        self._clock = clock
        self._looks: list[Look] = []
        self._started: set[str] = set()  # workers that were started and are neither ready nor failed yet
        self._fails: dict[str, int] = {}  # failed starts in a row, by worker
        self._until: dict[str, float] = {}  # when a worker's start may be retried

    @property
    def any(self) -> bool:
        """Whether the deployment has workers that run only on demand."""
        return any(seat.spare for seat in self._crew.seats)

    @property
    def running(self) -> Sequence[WorkerStatus]:
        """Workers that run, or are being started."""
        return [seat for seat in self._crew.seats if seat.state in ("starting", "ready")]

    @property
    def limits(self) -> ScalingLimits:
        """The present limits. If no worker runs on demand, 1 to MOST, so that the number wanted is still computed."""
        seats = self._crew.seats
        could = [seat for seat in seats if seat.state != "given up" and not self._left_out(seat)]
        least = sum(not seat.spare for seat in seats) if self.any else 1
        most = max(least, len(could)) if self.any else MOST
        return ScalingLimits(least, most, self._spare_s, self._links.start_s)

    def saw(self, workers: int) -> None:
        """An evaluation found that `workers` are needed."""
        now = self._clock()
        self._looks.append(Look(now, workers))
        del self._looks[: forgotten(self._looks, self.limits.kept_s, now)]

    def count(self) -> Count:
        """The number of workers that are to run now."""
        self._judge()
        return choose_count(self._looks, len(self.running), self.limits, self._clock())

    def start(self, role: Role) -> tuple[str | None, str]:
        """Start one more worker. Returns (its name, ""), or (None, the reason for a refusal)."""
        idle = [seat for seat in self._crew.seats if seat.state == "idle" and not self._left_out(seat)]
        if not idle:
            return None, "no idle worker can be started"
        name = idle[0].name
        if (why_not := self._crew.want(name, role)) is not None:
            return None, why_not
        self._started.add(name)
        return name, ""

    def end(self, fewer_prompts: bool) -> tuple[str | None, str]:
        """Drain and stop a worker that is ready. Returns (its name, ""), or (None, the reason for a refusal).

        fewer_prompts: whether the number of prefill workers is to go down.
        """
        ending = next((seat.name for seat in self._crew.seats if seat.state == "ending"), None)
        if ending is not None:
            return None, f"{ending} is still draining"
        links = {link.name: link for link in self._links}
        ready = [seat.name for seat in self._crew.seats if seat.spare and seat.state == "ready"]
        may = [links[name] for name in ready if self._may_go(links[name])]
        if not may:
            return None, "no worker that runs on demand can be stopped yet"
        places = {name: place for place, name in enumerate(ready)}

        def cost(link: WorkerHandle) -> tuple[bool, int, int]:
            return (link.role == "prefill") != fewer_prompts, link.jobs if link.at is None else 0, -places[link.name]

        name = min(may, key=cost).name
        why_not = self._crew.spare(name)
        return (None, why_not) if why_not is not None else (name, "")

    def told(self) -> dict[str, Any]:
        """As JSON: the number of workers in each state, and the reasons of failed starts."""
        limits, seats = self.limits, self._crew.seats
        return {
            "least": limits.least,
            "most": len(seats),
            "wanted": self.count().workers,
            "states": dict(Counter(seat.state for seat in seats)),
            "failed": {seat.name: seat.failed for seat in seats if seat.failed is not None},
        }

    def _may_go(self, link: WorkerHandle) -> bool:
        """Whether another live worker can answer, and this one is not switching roles or draining."""
        others = [other for other in self._links if other is not link and can_answer(self._links, other)]
        return bool(others) and link.switching_since is None and not link.draining

    def _judge(self) -> None:
        """Record which starts have succeeded or failed."""
        for seat in self._crew.seats:
            if seat.name not in self._started or seat.state == "starting":
                continue
            self._started.discard(seat.name)
            if seat.failed is None:
                self._fails.pop(seat.name, None)
                continue
            fails = self._fails[seat.name] = self._fails.get(seat.name, 0) + 1
            self._until[seat.name] = self._clock() + min(AGAIN_S * 2 ** (fails - 1), LONGEST_S)

    def _left_out(self, seat: WorkerStatus) -> bool:
        return self._until.get(seat.name, 0.0) > self._clock() and seat.state == "idle"
