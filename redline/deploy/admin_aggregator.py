"""The admin routes and /metrics of a server with several API replicas: every replica is queried, and their answers are
merged into one."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from redline import clock
from redline.api.admin import worker_of
from redline.api.errors import Refusal
from redline.api.telemetry.metrics import EXPOSED_S
from redline.api.telemetry.metrics_aggregator import MetricsAggregator, packed
from redline.deploy.fleet import Fleet, ReplicaStart
from redline.messages.news import Role
from redline.messages.replicas import ReplicaQuery, ReplicaReply

SUPERVISOR = "supervisor"  # replica name under which the supervisor's own metrics are merged


class AdminAggregator:
    """`api.admin.Desk` for a server with several API replicas, and its /metrics. drain: begins to shut the server down.
    replace, turn: as in `Supervisor`."""

    def __init__(
        self,
        fleet: Fleet,
        drain_s: float,
        drain: Callable[[], None],
        replace: Callable[[str], tuple[str | None, str]],
        turn: Callable[[str, Role], str | None],
    ) -> None:
        self.drain = drain
        self.drain_s = drain_s
        self._fleet = fleet
        self._replace = replace
        self._turn = turn
        self._summed = MetricsAggregator()
        self._scraping: asyncio.Task[bytes] | None = None
        self._exposed: tuple[float, bytes] = (float("-inf"), b"")
        self._tasks: set[asyncio.Task[None]] = set()

    async def status(self) -> dict[str, Any]:
        """As `api.admin.status_of`, merged over all replicas, with the numbers of each replica under "replicas"."""
        fleet, links = self._fleet, self._fleet.workers
        told = [
            (start, None if said is None else msgspec.json.decode(said)) for start, said in await self._ask("status")
        ]
        answers: list[dict[str, Any]] = [said for _, said in told if said is not None]
        trouble = links.lost or links.trouble
        return {
            "ready": trouble is None and fleet.draining is None and any(said["ready"] for said in answers),
            "draining": fleet.draining,
            "trouble": trouble,
            "queue": {
                "jobs": sum(said["queue"]["jobs"] for said in answers),
                "tokens": sum(said["queue"]["tokens"] for said in answers),
                "tokens_per_s": round(sum(said["queue"]["tokens_per_s"] for said in answers), 1),
                "retry_s": max((said["queue"]["retry_s"] for said in answers), default=1.0),
            },
            "running": sum(said["running"] for said in answers),
            "workers": {
                link.name: replace(worker_of(links, link), jobs=sum(_jobs(said, link.name) for said in answers))
                for link in links
            },
            "sla": _promises(answers),
            "steer": None,
            "keys": _keys(answers),
            "replicas": {
                start.of: {
                    "epoch": start.epoch,
                    "pid": start.pid,
                    "ready": said is not None and said["ready"],
                    "lost_before": fleet.ended.get(start.of),
                    "connections": start.open,
                    "running": None if said is None else said["running"],
                    "queue": None if said is None else said["queue"],
                }
                for start, said in told
            },
        }

    async def request(self, id: str) -> list[dict[str, Any]]:
        """The trace of each job of a request, with the replica that handled it."""
        told = [
            (start.of, msgspec.json.decode(said)) for start, said in await self._ask("request", id) if said is not None
        ]
        return [{"replica": of, **job} for of, jobs in told for job in jobs]

    async def reload(self) -> str:
        """Have every replica read the keys file again. Returns their distinct results, joined."""
        said = [b"a replica does not answer" if said is None else said for _, said in await self._ask("reload")]
        return "; ".join(each.decode() for each in dict.fromkeys(said))

    def reload_soon(self) -> None:
        """As `reload`, for callers that cannot await."""
        self._keep(asyncio.create_task(self._reload()))

    def replace(self, name: str) -> tuple[str | None, str]:
        """Restart a worker once its answers have ended. Returns what it does now, or None and the reason for a refusal.
        Raises KeyError with the known names if there is no worker of that name."""
        try:
            return self._replace(name)
        except KeyError:
            raise KeyError(self._known) from None

    def turn(self, name: str, role: Role) -> str | None:
        """Switch the role of a worker. Returns the reason for a refusal, or None. Raises KeyError with the known names
        if there is no worker of that name."""
        try:
            return self._turn(name, role)
        except KeyError:
            raise KeyError(self._known) from None

    @property
    def _known(self) -> str:
        return ", ".join(link.name for link in self._fleet.workers)

    async def profile(self, seconds: float) -> bytes:
        """Raises Refusal: only a process that has the API and receives all workers' messages can record a profile."""
        raise Refusal(409, "a profile needs a server with one API process; set api_replicas = 1 for it", "replicas")

    async def scrape(self) -> bytes:
        """/metrics of the server, at most EXPOSED_S seconds old."""
        at, text = self._exposed
        if clock.monotonic() - at < EXPOSED_S:
            return text
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.create_task(self._scrape())
        return await asyncio.shield(self._scraping)

    def ended(self, of: str) -> None:
        """A replica's start has ended; its counters stay in the sums."""
        self._summed.ended(of)

    def answer(self, start: ReplicaStart, ask: ReplicaQuery) -> None:
        """Answer a replica's query."""
        self._keep(asyncio.create_task(self._told(start, ask)))

    async def _told(self, start: ReplicaStart, ask: ReplicaQuery) -> None:
        assert ask.what == "metrics", f"no replica asks for {ask.what}"
        text = await self.scrape()
        if start.name in self._fleet.replicas:  # the replica may have ended while metrics were collected
            start.outbox.put(ReplicaReply(number=ask.number, body=text))

    async def _reload(self) -> None:
        await self.reload()

    async def _scrape(self) -> bytes:
        self._summed.told(SUPERVISOR, packed(self._fleet.metrics.registry))
        for start, said in await self._ask("metrics"):
            if said is not None and start.name in self._fleet.replicas:
                self._summed.told(start.of, said)
        text = self._summed.expose()
        self._exposed = clock.monotonic(), text
        return text

    async def _ask(
        self, what: Literal["metrics", "status", "request", "reload"], about: str = ""
    ) -> list[tuple[ReplicaStart, bytes | None]]:
        """Query each replica that serves. An answer is None if it did not arrive in time."""
        starts = [start for start in self._fleet.replicas.values() if start.use is not None]
        ask = self._fleet.questions.ask
        return list(
            zip(starts, await asyncio.gather(*(ask(start.outbox, what, about) for start in starts)), strict=True)
        )

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _jobs(said: dict[str, Any], worker: str) -> int:
    return said["workers"][worker]["jobs"] if worker in said["workers"] else 0


def _promises(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """SLO targets by class, with the attainment counts summed over all replicas that serve now."""
    found: dict[str, Any] = {}
    for said in answers:
        for name, here in said["sla"].items():
            if name not in found:
                found[name] = here
                continue
            for counts, more in ((found[name], here), (found[name]["last_minute"], here["last_minute"])):
                for count in ("requests", "ttft_met", "itl_met", "both_met"):
                    counts[count] += more[count]
    return found


def _keys(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Usage of each key name summed over all replicas; what is left of each limit is the minimum that any reports."""
    found: dict[str, Any] = {}
    for said in answers:
        for name, here in said["keys"].items():
            so_far = found.setdefault(name, {**here, "running": 0, "requests": 0, "tokens": 0})
            for count in ("running", "requests", "tokens"):
                so_far[count] += here[count]
            so_far["left"] = {limit: min(so_far["left"].get(limit, left), left) for limit, left in here["left"].items()}
    return found
