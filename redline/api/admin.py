"""Routes for whoever runs the server, on a port and with keys of their own: its status, its end, its keys."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from redline.api.app import Border, json_response
from redline.api.config import ApiConfig
from redline.api.edge import Edge
from redline.api.errors import Refusal
from redline.api.gateway import Gateway
from redline.api.metrics import Metrics
from redline.api.profile import Profiler
from redline.api.stories import MOST_JOBS
from redline.route.links import Link, Links
from redline.wire.base import Record
from redline.wire.news import Role

MOST_BODY_BYTES = 1024  # of what an admin route is told


class _Role(Record, frozen=True):
    """The body of /admin/workers/NAME/role."""

    role: Role


def _nobody(name: str, *_: Role) -> NoReturn:
    raise KeyError(name)


class Desk(Protocol):
    """What the admin routes ask of whoever runs the server."""

    drain_s: float  # for running answers to end

    async def status(self) -> dict[str, Any]:
        """The queue, the workers and the keys, as JSON."""
        ...

    async def request(self, id: str) -> list[dict[str, Any]]:
        """What became of each job of a request, as JSON; none where it is not known."""
        ...

    async def reload(self) -> str:
        """Read the file of keys again: what there is to say of it."""
        ...

    def drain(self) -> None:
        """Begin the server's end."""
        ...

    def replace(self, name: str) -> tuple[str | None, str]:
        """Have a worker of that name leave and be started again: what it does now, or None and why it cannot. Raises
        KeyError with the names that there are where there is none of that name."""
        ...

    async def profile(self, seconds: float) -> bytes:
        """A trace of the next seconds, gzipped. Raises Refusal."""
        ...

    def turn(self, name: str, role: Role) -> str | None:
        """Have a worker of that name take another role: None, or why it cannot. Raises KeyError with the names that
        there are where there is none of that name."""
        ...


def create_admin_app(
    gateway: Gateway,
    edge: Edge,
    config: ApiConfig,
    drain: Callable[[], None],
    replace: Callable[[str], tuple[str | None, str]] = _nobody,
    turn: Callable[[str, Role], str | None] = _nobody,
    steering: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> ASGIApp:
    """The admin routes of a server whose API is this process. edge: of the server that they are about.

    config: of these routes, with their own keys_file. drain: begins the server's end. replace: a worker of that name;
    what it does now, or None and why it cannot. turn: a worker of that name to another role; why it cannot. Both raise
    KeyError where there is none of that name.
    steering: what is told of who changes roles by itself; None: nobody does. Raises ConfigError where the keys' file
    cannot be read or is empty.
    """
    return create_desk_app(_OneProcess(gateway, edge, drain, replace, turn, steering), config, gateway.metrics)


def create_desk_app(desk: Desk, config: ApiConfig, metrics: Metrics) -> ASGIApp:
    """The admin routes. config, ConfigError: as in `create_admin_app`. metrics: where their requests count."""
    admin = _Admin(desk)
    routes = [
        Route("/admin/status", admin.status),
        Route("/admin/requests/{id:path}", admin.request),
        Route("/admin/drain", admin.drain, methods=["POST"]),
        Route("/admin/reload", admin.reload, methods=["POST"]),
        Route("/admin/profile", admin.profile, methods=["POST"]),
        Route("/admin/workers/{name}/replace", admin.replace, methods=["POST"]),
        Route("/admin/workers/{name}/role", admin.role, methods=["POST"]),
    ]
    return Border(Router(routes, redirect_slashes=False), Edge(config), config, metrics)


class _Admin:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def status(self, request: Request) -> Response:
        """The queue, each worker's rows and pages, and what each name has used and may still use."""
        return json_response(await self._desk.status())

    async def request(self, request: Request) -> Response:
        """Who got the jobs of a request, why, what was expected of it and what came. Raises Refusal (404)."""
        id = request.path_params["id"]
        jobs = await self._desk.request(id)
        if not jobs:
            known = f"the last {MOST_JOBS:,} jobs are kept, and none from before the start"
            raise Refusal(404, f"nothing is known of request {id}: {known}", "not_found")
        return json_response({"request": id, "jobs": jobs})

    async def drain(self, request: Request) -> Response:
        """Take no new requests, let running answers end within drain_s, and end the server."""
        self._desk.drain()
        return json_response({"status": "draining", "drain_s": self._desk.drain_s})

    async def replace(self, request: Request) -> Response:
        """Let a worker end its answers within drain_s, have another go on with the rest, and start it again; start one
        that was given up. Raises Refusal (404, 409)."""
        name = request.path_params["name"]
        try:
            status, why_not = self._desk.replace(name)
        except KeyError as known:
            raise _unknown(name, known.args[0]) from None
        if status is None:
            raise Refusal(409, why_not, "conflict")
        return json_response({"status": status, "worker": name, "drain_s": self._desk.drain_s})

    async def profile(self, request: Request) -> Response:
        """A trace of the next ?seconds=, gzipped. Raises Refusal (400, 409)."""
        try:
            seconds = float(request.query_params.get("seconds", ""))
        except ValueError:
            seconds = math.nan
        return Response(await self._desk.profile(seconds), media_type="application/gzip")

    async def role(self, request: Request) -> Response:
        """Have a worker take another role: new jobs go by it at once, and `turning_s` of its status says until when it
        ends what it has begun. Raises Refusal (400, 404, 409, 413)."""
        name, body = request.path_params["name"], bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise Refusal(413, f"the body is more than {MOST_BODY_BYTES} bytes", "body_too_large")
        try:
            role = msgspec.json.decode(bytes(body), type=_Role).role
        except msgspec.MsgspecError as error:
            raise Refusal(400, f'the body is not as {{"role": "decode"}}: {error}', "invalid_body") from None
        try:
            why_not = self._desk.turn(name, role)
        except KeyError as known:
            raise _unknown(name, known.args[0]) from None
        if why_not is not None:
            raise Refusal(409, why_not, "conflict")
        return json_response({"worker": name, "role": role})

    async def reload(self, request: Request) -> Response:
        """Read the file of keys again."""
        return json_response({"message": await self._desk.reload()})


class _OneProcess:
    """The desk of a server whose API is this process."""

    def __init__(
        self,
        gateway: Gateway,
        edge: Edge,
        drain: Callable[[], None],
        replace: Callable[[str], tuple[str | None, str]],
        turn: Callable[[str, Role], str | None],
        steering: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self.drain = drain
        self.drain_s = edge.drain_s
        self._gateway = gateway
        self._edge = edge
        self._replace = replace
        self._profiler = Profiler(gateway, edge.passages)
        self._turn = turn
        self._steering = steering

    async def status(self) -> dict[str, Any]:
        return {**status_of(self._gateway, self._edge), "steer": self._steering()}

    async def request(self, id: str) -> list[dict[str, Any]]:
        return jobs_of(self._gateway, id)

    async def reload(self) -> str:
        return await self._edge.reload()

    def replace(self, name: str) -> tuple[str | None, str]:
        try:
            return self._replace(name)
        except KeyError:
            raise KeyError(self._known) from None

    def turn(self, name: str, role: Role) -> str | None:
        try:
            return self._turn(name, role)
        except KeyError:
            raise KeyError(self._known) from None

    async def profile(self, seconds: float) -> bytes:
        return await self._profiler.take(seconds)

    @property
    def _known(self) -> str:
        return ", ".join(link.name for link in self._gateway.links)


def _unknown(name: str, known: str) -> Refusal:
    return Refusal(404, f"no worker is called {name}; there are {known}", "not_found")


def jobs_of(gateway: Gateway, id: str) -> list[dict[str, Any]]:
    """What became of each job of a request, as JSON; none where it is not known."""
    return [story.told() for story in gateway.stories.of(id)]


def worker_of(links: Links, link: Link) -> dict[str, Any]:
    """One worker as `links` knows it, as JSON."""
    turning_s = links.turning_s(link)
    return {
        "role": link.role,
        "turning_s": None if turning_s is None else round(turning_s, 1),
        "epoch": link.epoch,
        "pid": link.pid,
        "at": link.at,
        "ready": link.ready is not None,
        "lost": link.lost,
        "lost_before": link.before,
        "draining": link.draining,
        "silent_s": round(links.silent_s(link), 1),
        "jobs": link.jobs,
        "load": None if link.load is None else msgspec.to_builtins(link.load),
    }


def status_of(gateway: Gateway, edge: Edge) -> dict[str, Any]:
    """The queue, the workers and the keys as this process sees them, as JSON."""
    keyring, links = edge.keyring, gateway.links
    jobs, tokens = gateway.waiting
    accounts = {} if keyring is None else keyring.accounts
    return {
        "ready": gateway.ready is not None and links.trouble is None and edge.draining is None,
        "draining": edge.draining,
        "trouble": links.lost or links.trouble,
        "queue": {
            "jobs": jobs,
            "tokens": tokens,
            "tokens_per_s": round(gateway.served_per_s, 1),
            "retry_s": round(gateway.retry_s, 1),
        },
        "running": gateway.running,
        "workers": {link.name: worker_of(links, link) for link in links},
        "sla": gateway.attainment.told(),
        "keys": {
            name: {
                "sla": account.sla,
                "running": account.running,
                "requests": account.requests,
                "tokens": account.tokens,
                "limits": msgspec.structs.asdict(account.limits),
                "left": account.left(),
            }
            for name, account in accounts.items()
        },
    }
