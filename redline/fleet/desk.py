"""What an operator and a scraper are told of a server whose API is several processes: every replica is asked, and what
they say becomes one answer."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from redline import clock
from redline.api.admin import worker_of
from redline.api.errors import Refusal
from redline.api.metrics import EXPOSED_S
from redline.api.summed import Summed, packed
from redline.fleet.fleet import Fleet, ReplicaStart
from redline.wire.news import Role
from redline.wire.replicas import Ask, Told

SUPERVISOR = "supervisor"  # in the place of a replica's name


class FleetDesk:
    """`api.admin.Desk` over a fleet, and its /metrics. drain: begins the server's end. replace, turn: as in
    `Supervisor`."""

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
        self._summed = Summed()
        self._scraping: asyncio.Task[bytes] | None = None
        self._exposed: tuple[float, bytes] = (float("-inf"), b"")
        self._tasks: set[asyncio.Task[None]] = set()

    async def status(self) -> dict[str, Any]:
        """As `api.admin.status_of`, of all replicas together, and what each has for itself."""
        fleet, links = self._fleet, self._fleet.links
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
                link.name: {**worker_of(links, link), "jobs": sum(_jobs(said, link.name) for said in answers)}
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
        """What became of each job of a request, and which replica had it."""
        told = [
            (start.of, msgspec.json.decode(said)) for start, said in await self._ask("request", id) if said is not None
        ]
        return [{"replica": of, **job} for of, jobs in told for job in jobs]

    async def reload(self) -> str:
        """Have every replica read the file of keys again: what they say of it."""
        said = [b"a replica does not answer" if said is None else said for _, said in await self._ask("reload")]
        return "; ".join(each.decode() for each in dict.fromkeys(said))

    def reload_soon(self) -> None:
        """As `reload`, for whoever cannot wait."""
        self._keep(asyncio.create_task(self._reload()))

    def replace(self, name: str) -> tuple[str | None, str]:
        """What a worker of that name does now that is to be started again, or None and why it cannot. Raises KeyError
        with the names that there are where there is none of that name."""
        try:
            return self._replace(name)
        except KeyError:
            raise KeyError(self._known) from None

    def turn(self, name: str, role: Role) -> str | None:
        """Why a worker of that name cannot take another role. Raises KeyError with the names that there are where there
        is none of that name."""
        try:
            return self._turn(name, role)
        except KeyError:
            raise KeyError(self._known) from None

    @property
    def _known(self) -> str:
        return ", ".join(link.name for link in self._fleet.links)

    async def profile(self, seconds: float) -> bytes:
        """Raises Refusal: a trace is taken by one process, which has the API and hears the workers."""
        raise Refusal(409, "a trace is taken of a server with one process; set api_replicas = 1 for it", "replicas")

    async def scrape(self) -> bytes:
        """/metrics of the server, at most EXPOSED_S seconds old."""
        at, text = self._exposed
        if clock.monotonic() - at < EXPOSED_S:
            return text
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.create_task(self._scrape())
        return await asyncio.shield(self._scraping)

    def ended(self, of: str) -> None:
        """A replica's start has ended: what it has counted stays."""
        self._summed.ended(of)

    def answer(self, start: ReplicaStart, ask: Ask) -> None:
        """Answer what a replica asks."""
        self._keep(asyncio.create_task(self._told(start, ask)))

    async def _told(self, start: ReplicaStart, ask: Ask) -> None:
        assert ask.what == "metrics", f"no replica asks for {ask.what}"
        text = await self.scrape()
        if start.name in self._fleet.replicas:  # else it has ended meanwhile
            start.outbox.put(Told(number=ask.number, body=text))

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
        """What each replica that serves answers; None of one that does not in time."""
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
    """What requests were promised, and how many of those of all replicas that serve now have kept it."""
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
    """What each name has used at all replicas, and what is left to it as the one sees it that has seen most used."""
    found: dict[str, Any] = {}
    for said in answers:
        for name, here in said["keys"].items():
            so_far = found.setdefault(name, {**here, "running": 0, "requests": 0, "tokens": 0})
            for count in ("running", "requests", "tokens"):
                so_far[count] += here[count]
            so_far["left"] = {limit: min(so_far["left"].get(limit, left), left) for limit, left in here["left"].items()}
    return found
