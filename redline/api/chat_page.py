"""The page at /: chats and a view of the engine, in files that are served as they are.

The page loads nothing from elsewhere, and its policy lets it run nothing that is not one of these files. They are the
same for everybody and need no key; every request that the page makes needs one where keys are set.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from redline.api.edge import Edge
from redline.api.gateway import Gateway

FOLDER = files("redline.api") / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/markdown.js": ("markdown.js", "text/javascript"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for anew each time, which costs no byte where the tag is the same
}
EVERY_S = 1.0  # between two views of the engine


def page_routes() -> list[Route]:
    """A route for each file."""
    return [Route(path, _File(name, kind)) for path, (name, kind) in FILES.items()]


class _File:
    def __init__(self, name: str, kind: str) -> None:
        self._kind = kind
        self._data = (FOLDER / name).read_bytes()
        self._tag = f'"{hashlib.sha256(self._data).hexdigest()[:32]}"'

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {**HEADERS, "etag": self._tag}
        if Request(scope).headers.get("if-none-match") == self._tag:
            await Response(status_code=304, headers=headers)(scope, receive, send)
            return
        await Response(self._data, media_type=self._kind, headers=headers)(scope, receive, send)


class EngineView:
    """What the page shows of the engine, each second, as one stream of events."""

    def __init__(self, gateway: Gateway, edge: Edge) -> None:
        self._gateway, self._edge = gateway, edge

    async def stream(self, request: Request) -> Response:
        """`GET /engine`: an event each second until the client leaves or the server drains."""
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _events(self) -> AsyncIterator[bytes]:
        while self._edge.draining is None:
            yield b"data: " + msgspec.json.encode(self.now()) + b"\n\n"
            await asyncio.sleep(EVERY_S)

    def now(self) -> dict[str, Any]:
        """The queue, what runs, and each worker's rows and pages. Names of keys and processes are not told."""
        gateway, links = self._gateway, self._gateway.links
        jobs, tokens = gateway.waiting
        return {
            "ready": gateway.ready is not None and links.trouble is None,
            "trouble": links.lost or links.trouble,
            "queue": {"jobs": jobs, "tokens": tokens},
            "running": gateway.running,
            "workers": [
                {
                    "name": link.name,
                    "role": link.role,
                    "ready": link.ready is not None and not link.lost,
                    "load": None if link.load is None else msgspec.to_builtins(link.load),
                }
                for link in links
            ],
        }
