"""The web page at /: chats and a view of the engine, as static files.

The page loads nothing from other servers, and its content security policy allows only these files to run. The files are
the same for everyone and need no key; every request of the page needs one if keys are configured.
"""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from redline import clock
from redline.api.auth.auth_state import AuthState
from redline.api.gateway.gateway import Gateway
from redline.errors import RequestError

FOLDER = files("redline.api") / "page"
SCRIPTS = ("page", "charts", "colours", "engine", "images", "markdown", "server", "store")
FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidated each time, which transfers no body if the tag matches
}
EVERY_S = 1.0  # seconds between two events of the engine view


def page_routes() -> list[Route]:
    """A route for each file."""
    return [Route(path, _File(name, kind), methods=["GET"]) for path, (name, kind) in FILES.items()]


class _File:
    """An ASGI app that serves one file, or 304 if the client has it already."""

    def __init__(self, name: str, kind: str) -> None:
        self._kind = kind
        self._data = (FOLDER / name).read_bytes()
        self._tag = f'"{hashlib.sha256(self._data).hexdigest()[:32]}"'

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers = {**HEADERS, "etag": self._tag}
        if Request(scope).headers.get("if-none-match") == self._tag:
            await Response(status_code=304, headers=headers)(scope, receive, send)
            return
        await Response(self._data, media_type=self._kind, headers=headers)(scope, receive, send)


class EngineView:
    """The engine data for the page, as an event stream with one event per second."""

    def __init__(self, gateway: Gateway, edge: AuthState) -> None:
        self._gateway, self._edge = gateway, edge

    async def stream(self, request: Request) -> Response:
        """`GET /engine`: an event per second until the client disconnects or the server drains. ?events=N: N events
        only.

        Raises RequestError if N is not a number from 1.
        """
        said = request.query_params.get("events")
        if said is not None and not (said.isascii() and said.isdigit() and int(said[:9]) > 0 and len(said) < 10):
            raise RequestError("events is not a number from 1 to 999999999", "events")
        events = self._events(None if said is None else int(said))
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _events(self, most: int | None) -> AsyncIterator[bytes]:
        for number in itertools.count(1):
            yield b"data: " + msgspec.json.encode(self.now()) + b"\n\n"
            if number == most:
                return
            await asyncio.sleep(EVERY_S)
            if self._edge.draining is not None:
                return

    def now(self) -> dict[str, Any]:
        """The queue, the running requests, and each worker's load and pages, without names of keys and processes."""
        gateway, links, others = self._gateway, self._gateway.workers, self._gateway.peers
        return {
            "at": round(clock.now(), 3),  # Unix seconds, by which the page turns counters into rates
            "ready": gateway.ready is not None and links.trouble is None,
            "trouble": links.lost or links.trouble,
            "queue": {
                "jobs": gateway.requests.waiting + others.waiting,
                "tokens": gateway.requests.waiting_tokens + others.waiting_tokens,
            },
            "running": gateway.requests.running + others.running,
            "workers": [
                {
                    "name": link.name,
                    "role": link.role,
                    "ready": link.ready is not None and not link.lost,
                    "read_bytes_per_s": 0.0 if link.ready is None else link.ready.read_bytes_per_s,
                    "load": None if link.load is None else msgspec.to_builtins(link.load),
                }
                for link in links
            ],
        }
