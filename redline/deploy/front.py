"""The parts of a process that serves HTTP: the API over its gateway, and the servers on the admin and metrics ports.

If the API is one process, it also starts the workers; otherwise each API replica is such a process.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp

from redline.api.app import create_app
from redline.api.auth.access import is_loopback
from redline.api.auth.auth_state import AuthState
from redline.api.auth.keys import SECRET
from redline.api.config import ApiConfig, Defaults, Limits
from redline.api.gateway.gateway import Gateway
from redline.api.http.budget import Connections
from redline.api.http.server import Server, uvicorn_config
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.spans import RequestSpans, open_spans
from redline.chat.generation import generation_config_of
from redline.chat.template import Style
from redline.chat.tokenizer import Tokenizer
from redline.deploy.config import ADMIN_HOST, ServeConfig
from redline.media.rules import ImageRules
from redline.media.video import reads_videos

ADMIN_CONNECTIONS = 16  # reserved for the admin routes, unavailable to API and /metrics; in `budget.RESERVED_FILES`
TELL_S = 1.0  # for clients to read their last response


class Doors(NamedTuple):
    """The listening sockets of a server."""

    api: socket.socket
    admin: socket.socket | None  # None: there are no admin routes
    metrics: socket.socket | None  # None: /metrics is on the API's port only


class Front(NamedTuple):
    """The API of this process."""

    gateway: Gateway
    edge: AuthState
    server: Server
    spans: RequestSpans | None  # exporter of OpenTelemetry spans, to be closed in a thread; None: spans are off


def open_front(
    config: ServeConfig,
    tokenizer: Tokenizer,
    style: Style,
    metrics: Metrics,
    connections: Connections,
    *,
    replica: str = "",
    secret: bytes = SECRET,
    scrape: Callable[[], Awaitable[bytes]] | None = None,
) -> Front:
    """The API of a deployment, which does not listen yet. connections: the connection limit of this process.

    replica: the name of this API replica, if there are several. secret: as in `auth.keys.read_keys`. scrape: returns
    the text of /metrics; None: the gateway's own metrics. Raises ConfigError if the keys file cannot be read, or the
    environment enables spans that cannot be exported.
    """
    api = ApiConfig(
        served_model_names=config.names,
        keys_file=config.keys_file,
        per_key=config.per_key,
        sla=config.sla,
        cors_origins=config.cors_origins,
        page=config.page,
        responses_file=config.responses_file,
        json_lines=config.access_log == "json",
        drain_s=config.drain_s,
        local=config.unix_socket is None and is_loopback(config.host),
        defaults=Defaults(sampling=generation_config_of(Path(config.weights)), reasoning_field=config.reasoning_field),
        limits=limits_of(config),
    )
    edge, spans = AuthState(api, secret), open_spans()
    if spans is not None:
        edge.passages.watchers.append(spans)
    gateway = Gateway(
        tokenizer,
        style,
        metrics,
        api.limits,
        resume_s=config.resume_s,
        targets=config.sla,
        replica=replica,
        rules=ImageRules.of_model(config.weights),
    )
    app = create_app(gateway, api, edge, scrape)
    server = Server(uvicorn_config(app, api.limits, config.host, config.port, tls_of(config), connections))
    return Front(gateway, edge, server, spans)


def limits_of(config: ServeConfig) -> Limits:
    """The limits of requests and connections of a deployment. A model that reads images takes larger bodies."""
    limits = Limits(**msgspec.structs.asdict(config.requests))
    if not limits.images or ImageRules.of_model(config.weights) is None:
        return msgspec.structs.replace(limits, images=0)
    if not reads_videos():
        limits = msgspec.structs.replace(limits, video_frames=0)
    return msgspec.structs.replace(limits, body_bytes=4 * limits.body_bytes, bodies_bytes=2 * limits.bodies_bytes)


def tls_of(config: ServeConfig) -> tuple[str, str] | None:
    """Certificate and key files for HTTPS; None: plain HTTP."""
    return None if config.tls_cert is None or config.tls_key is None else (config.tls_cert, config.tls_key)


Beside = tuple[Server, "asyncio.Task[None]"]
"""An auxiliary server (admin or metrics), and the task that runs it."""


def serve_beside(
    config: ServeConfig,
    doors: Doors,
    admin: Callable[[ApiConfig], ASGIApp],
    scrape: Callable[[ApiConfig], ASGIApp],
    connections: Connections,
) -> list[Beside]:
    """Serve the admin routes and /metrics on their own ports, if the deployment has them.

    admin, scrape: make the app from its ApiConfig. connections: the connection limit of this process; the admin routes
    have ADMIN_CONNECTIONS in addition. Raises ConfigError if the admin keys file cannot be read.
    """
    found: list[Beside] = []
    if doors.admin is not None:
        own = ApiConfig(served_model_names=config.names, keys_file=config.admin_keys_file)
        reserve = Connections(Limits(connections=ADMIN_CONNECTIONS))
        server = Server(uvicorn_config(admin(own), own.limits, ADMIN_HOST, 0, tls_of(config), reserve))
        found.append((server, asyncio.create_task(server.serve(sockets=[doors.admin]))))
    if doors.metrics is not None:
        own = ApiConfig(served_model_names=config.names, local=is_loopback(config.host))
        server = Server(uvicorn_config(scrape(own), own.limits, config.host, 0, connections=connections))
        found.append((server, asyncio.create_task(server.serve(sockets=[doors.metrics]))))
    return found


async def end(server: Server, serving: "asyncio.Task[None]") -> None:
    """Shut a server down; clients get TELL_S seconds to read their last response, then connections are aborted."""
    server.should_exit = True
    await asyncio.wait({serving}, timeout=TELL_S)
    server.abort()
    await asyncio.wait({serving})
