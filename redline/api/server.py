"""uvicorn as we run it: uvloop and httptools, and two things that only the connection itself can do.

- A header that never ends never reaches the app, and httptools stores it as it comes. So the connection counts what it
  reads before the headers are complete, and closes past the bound.
- A token must leave when it is written. Event loops turn Nagle's delay off, but not on every way that a listening
  socket can be made; with it, a token may wait 40 ms for the client's acknowledgement of the one before.
"""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from redline.api.config import Limits

SHUTDOWN_S = 5  # for running answers, once asked to stop


def bounded_protocol(header_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol class whose request line and headers hold at most `header_bytes`, plus one read of the socket."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_bytes = 0
        _in_head = True

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            peer: socket.socket | None = transport.get_extra_info("socket")
            if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            if self._in_head and self._head_bytes > header_bytes:
                self.logger.warning("closed a connection: its headers are more than %d bytes", header_bytes)
                self.transport.close()
                return
            self._head_bytes += len(data)
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

    return BoundedProtocol


def uvicorn_config(app: ASGIApp, limits: Limits, host: str, port: int) -> uvicorn.Config:
    """What `uvicorn.Server` needs. Port 0 takes a free one."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=bounded_protocol(limits.header_bytes),
        ws="none",
        lifespan="off",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        log_level="warning",
    )
