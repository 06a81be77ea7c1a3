"""Routes for the server's operator, on a separate port and with separate keys: status, shutdown, keys, workers."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from redline.api.app import ErrorMiddleware
from redline.api.auth.auth_state import AuthState
from redline.api.body import ResponseBody
from redline.api.config import ApiConfig, KeyLimits
from redline.api.errors import Refusal
from redline.api.gateway.gateway import Gateway
from redline.api.handlers import json_response
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.profile import Profiler
from redline.api.telemetry.request_traces import MOST_JOBS
from redline.messages.base import Record
from redline.messages.news import Load, Role
from redline.router.worker_registry import WorkerHandle, WorkerRegistry

MOST_BODY_BYTES = 1024  # of the body of an admin request


class RequestTraceStatus(ResponseBody):
    """The body of /admin/requests/ID."""

    request: str
    jobs: list[dict[str, Any]]


class DrainStarted(ResponseBody):
    """The body of /admin/drain."""

    status: Literal["draining"]
    drain_s: float


class WorkerReplacement(ResponseBody):
    """The body of /admin/workers/NAME/replace."""

    status: str
    worker: str
    drain_s: float


class WorkerRole(ResponseBody):
    """The body of /admin/workers/NAME/role."""

    worker: str
    role: Role


class ReloadResult(ResponseBody):
    """The body of /admin/reload."""

    message: str


class AdminWorker(ResponseBody, kw_only=True):
    """A worker in /admin/status."""

    role: Role
    turning_s: float | None
    epoch: int
    pid: int | None
    at: str | None
    ready: bool
    lost: str | None
    lost_before: str | None
    draining: bool
    silent_s: float
    jobs: int
    load: Load | None


class QueueStatus(ResponseBody, kw_only=True):
    """The queue in /admin/status."""

    jobs: int
    tokens: int
    tokens_per_s: float
    retry_s: float


class KeyStatus(ResponseBody, kw_only=True):
    """A key name in /admin/status: its usage, and what is left of each limit that refills."""

    sla: str
    running: int
    requests: int
    tokens: int
    limits: KeyLimits
    left: dict[str, float]


class ServerStatus(ResponseBody, kw_only=True):
    """The body of /admin/status. sla: attainment by class. steer: status of the automatic role switching."""

    ready: bool
    draining: str | None
    trouble: str | None
    queue: QueueStatus
    running: int
    workers: dict[str, AdminWorker]
    sla: dict[str, Any]
    keys: dict[str, KeyStatus]
    steer: Mapping[str, Any] | UnsetType | None = UNSET


class _Role(Record, frozen=True):
    """The body of /admin/workers/NAME/role."""

    role: Role


def _nobody(name: str, *_: Role) -> NoReturn:
    raise KeyError(name)


class Desk(Protocol):
    """The operations that the admin routes call."""

    drain_s: float  # seconds for running requests to complete at shutdown

    async def status(self) -> ServerStatus | dict[str, Any]:
        """The queue, the workers and the keys; with several replicas a dict with more fields."""
        ...

    async def request(self, id: str) -> list[dict[str, Any]]:
        """Traces of the jobs of a request, as JSON; empty if the id is unknown."""
        ...

    async def reload(self) -> str:
        """Reload the keys file; returns a message with the outcome."""
        ...

    def drain(self) -> None:
        """Start the shutdown."""
        ...

    def replace(self, name: str) -> tuple[str | None, str]:
        """Drain and restart a worker. Returns its new status, or None and the reason why it cannot be replaced.
        Raises KeyError with the known names if there is no worker of that name."""
        ...

    async def profile(self, seconds: float) -> bytes:
        """A trace of the next `seconds`, gzipped. Raises Refusal."""
        ...

    def turn(self, name: str, role: Role) -> str | None:
        """Switch the role of a worker. Returns None, or the reason why it cannot switch. Raises KeyError with the
        known names if there is no worker of that name."""
        ...


def create_admin_app(
    gateway: Gateway,
    edge: AuthState,
    config: ApiConfig,
    drain: Callable[[], None],
    replace: Callable[[str], tuple[str | None, str]] = _nobody,
    turn: Callable[[str, Role], str | None] = _nobody,
    steering: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> ASGIApp:
    """The admin routes of a server whose API is this process. edge: of that server.

    config: of these routes, with their own keys_file. drain: starts the shutdown. replace: replaces the worker of a
    name; returns its new status, or None and the reason why not. turn: switches the role of the worker of a name;
    returns the reason why not, or None. Both raise KeyError if there is no worker of that name. steering: status of the
    automatic role switching; None: it is off. Raises ConfigError if the keys file cannot be read or is empty.
    """
    return create_desk_app(_OneProcess(gateway, edge, drain, replace, turn, steering), config, gateway.metrics)


def create_desk_app(desk: Desk, config: ApiConfig, metrics: Metrics) -> ASGIApp:
    """The admin routes. config, ConfigError: as in `create_admin_app`. metrics: counts these routes' requests."""
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
    return ErrorMiddleware(Router(routes, redirect_slashes=False), AuthState(config), config, metrics)


class _Admin:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def status(self, request: Request) -> Response:
        """The queue, each worker's load and pages, and the usage and remaining quota of each key name."""
        return json_response(await self._desk.status())

    async def request(self, request: Request) -> Response:
        """Traces of the jobs of a request: their workers, why, predictions and measurements. Raises Refusal (404)."""
        id = request.path_params["id"]
        jobs = await self._desk.request(id)
        if not jobs:
            known = f"only the last {MOST_JOBS:,} jobs since the start are kept"
            raise Refusal(404, f"no trace of request {id}: {known}", "not_found")
        return json_response(RequestTraceStatus(id, jobs))

    async def drain(self, request: Request) -> Response:
        """Stop accepting requests, let running ones complete within drain_s, and shut the server down."""
        self._desk.drain()
        return json_response(DrainStarted("draining", self._desk.drain_s))

    async def replace(self, request: Request) -> Response:
        """Let a worker complete its answers within drain_s, requeue the rest, and restart the worker; a worker that
        was given up is started again. Raises Refusal (404, 409)."""
        name = request.path_params["name"]
        try:
            status, why_not = self._desk.replace(name)
        except KeyError as known:
            raise _unknown(name, known.args[0]) from None
        if status is None:
            raise Refusal(409, why_not, "conflict")
        return json_response(WorkerReplacement(status, name, self._desk.drain_s))

    async def profile(self, request: Request) -> Response:
        """A trace of the next ?seconds=, gzipped. Raises Refusal (400, 409)."""
        try:
            seconds = float(request.query_params.get("seconds", ""))
        except ValueError:
            seconds = math.nan
        return Response(await self._desk.profile(seconds), media_type="application/gzip")

    async def role(self, request: Request) -> Response:
        """Switch the role of a worker: new jobs are routed by the new role at once, and `turning_s` in its status is
        set until jobs of the old role have ended. Raises Refusal (400, 404, 409, 413)."""
        name, body = request.path_params["name"], bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise Refusal(413, f"the body is more than {MOST_BODY_BYTES} bytes", "body_too_large")
        try:
            role = msgspec.json.decode(bytes(body), type=_Role).role
        except msgspec.MsgspecError as error:
            raise Refusal(400, f'expected a body such as {{"role": "decode"}}: {error}', "invalid_body") from None
        try:
            why_not = self._desk.turn(name, role)
        except KeyError as known:
            raise _unknown(name, known.args[0]) from None
        if why_not is not None:
            raise Refusal(409, why_not, "conflict")
        return json_response(WorkerRole(name, role))

    async def reload(self, request: Request) -> Response:
        """Reload the keys file."""
        return json_response(ReloadResult(await self._desk.reload()))


class _OneProcess:
    """Admin operations of a server whose API is this process."""

    def __init__(
        self,
        gateway: Gateway,
        edge: AuthState,
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

    async def status(self) -> ServerStatus:
        return msgspec.structs.replace(status_of(self._gateway, self._edge), steer=self._steering())

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
        return ", ".join(link.name for link in self._gateway.workers)


def _unknown(name: str, known: str) -> Refusal:
    return Refusal(404, f"there is no worker {name}; the workers are {known}", "not_found")


def jobs_of(gateway: Gateway, id: str) -> list[dict[str, Any]]:
    """Traces of the jobs of a request, as JSON; empty if the id is unknown."""
    return [story.told() for story in gateway.traces.of(id)]


def worker_of(links: WorkerRegistry, link: WorkerHandle) -> AdminWorker:
    """A worker's status in `links`."""
    turning_s = links.switching_s(link)
    return AdminWorker(
        role=link.role,
        turning_s=None if turning_s is None else round(turning_s, 1),
        epoch=link.epoch,
        pid=link.pid,
        at=link.at,
        ready=link.ready is not None,
        lost=link.lost,
        lost_before=link.previous_end,
        draining=link.draining,
        silent_s=round(links.silent_s(link), 1),
        jobs=link.jobs,
        load=link.load,
    )


def status_of(gateway: Gateway, edge: AuthState) -> ServerStatus:
    """The queue, the workers and the keys as seen by this process."""
    keyring, links = edge.keyring, gateway.workers
    accounts = {} if keyring is None else keyring.accounts
    return ServerStatus(
        ready=gateway.ready is not None and links.trouble is None and edge.draining is None,
        draining=edge.draining,
        trouble=links.lost or links.trouble,
        queue=QueueStatus(
            jobs=gateway.requests.waiting,
            tokens=gateway.requests.waiting_tokens,
            tokens_per_s=round(gateway.admission.served_per_s, 1),
            retry_s=round(gateway.admission.retry_s, 1),
        ),
        running=gateway.requests.running,
        workers={link.name: worker_of(links, link) for link in links},
        sla=gateway.attainment.told(),
        keys={
            name: KeyStatus(
                sla=account.sla,
                running=account.running,
                requests=account.requests,
                tokens=account.tokens,
                limits=account.limits,
                left=account.left(),
            )
            for name, account in accounts.items()
        },
    )
