"""What a process that serves HTTP is made of: the API over its gateway, and the doors beside it.

Where the API is one process, that is the process which starts the workers; else each replica of the API is one.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp

from redline.api.access import is_loopback
from redline.api.app import create_app
from redline.api.budget import Connections
from redline.api.config import ApiConfig, Defaults, Limits
from redline.api.edge import Edge
from redline.api.gateway import Gateway
from redline.api.keys import SECRET
from redline.api.metrics import Metrics
from redline.api.server import Server, uvicorn_config
from redline.api.spans import Spans, open_spans
from redline.chat.generation import generation_config_of
from redline.chat.template import Style
from redline.chat.tokenizer import Tokenizer
from redline.fleet.config import ADMIN_HOST, ServeConfig

ADMIN_CONNECTIONS = 16  # of the admin routes, which the API and /metrics never take; of `budget.RESERVED_FILES`
TELL_S = 1.0  # for clients to take what they are told


class Doors(NamedTuple):
    """Where a server listens."""

    api: socket.socket
    admin: socket.socket | None  # None: there are no admin routes
    metrics: socket.socket | None  # None: /metrics is with the API alone


class Front(NamedTuple):
    """The API of this process."""

    gateway: Gateway
    edge: Edge
    server: Server
    spans: Spans | None  # to be closed in a thread, where they are asked for


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
    """The API of a deployment, which listens nowhere yet. connections: of this process.

    replica: what it is called, where there are others. secret: as in `api.keys.read_keys`. scrape: gives /metrics;
    None: the gateway's own. Raises ConfigError where the file of keys cannot be read, or spans that the environment
    asks for cannot be had.
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
        defaults=Defaults(
            **msgspec.structs.asdict(generation_config_of(Path(config.weights))), reasoning_field=config.reasoning_field
        ),
        limits=limits_of(config),
    )
    edge, spans = Edge(api, secret), open_spans()
    if spans is not None:
        edge.passages.watchers.append(spans)
    gateway = Gateway(
        tokenizer, style, metrics, api.limits, resume_s=config.resume_s, targets=config.sla, replica=replica
    )
    app = create_app(gateway, api, edge, scrape)
    server = Server(uvicorn_config(app, api.limits, config.host, config.port, tls_of(config), connections))
    return Front(gateway, edge, server, spans)


def limits_of(config: ServeConfig) -> Limits:
    """What a deployment bounds of requests and connections."""
    return Limits(**msgspec.structs.asdict(config.requests))


def tls_of(config: ServeConfig) -> tuple[str, str] | None:
    """The files of a deployment's HTTPS; None: it is HTTP."""
    return None if config.tls_cert is None or config.tls_key is None else (config.tls_cert, config.tls_key)


Beside = tuple[Server, "asyncio.Task[None]"]
"""A server beside the API, and the task that serves."""


def serve_beside(
    config: ServeConfig,
    doors: Doors,
    admin: Callable[[ApiConfig], ASGIApp],
    scrape: Callable[[ApiConfig], ASGIApp],
    connections: Connections,
) -> list[Beside]:
    """The admin routes and /metrics on ports of their own, where the deployment has these: each app is made for how it
    presents itself. connections: of this process; the admin routes have ADMIN_CONNECTIONS beside them. Raises
    ConfigError where the admin routes' file of keys cannot be read."""
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
    """End a server; a client that has not read its last answer within TELL_S seconds is not waited for."""
    server.should_exit = True
    await asyncio.wait({serving}, timeout=TELL_S)
    server.abort()
    await asyncio.wait({serving})
