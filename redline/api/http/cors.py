"""CORS for web pages of origins that the operator lists: browsers may send their requests and read responses.

Pages of desktop and mobile apps and of extensions have origins with their own schemes, such as `tauri://localhost`.

Origins are matched exactly, and cookies are not used: if the server has keys, requests are authenticated by key.
"""

import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline.api.auth.access import header
from redline.errors import ConfigError

MAX_AGE_S = 600  # seconds for which a browser may cache the preflight response
ASKED_BYTES = 2048  # size of the list of header names that a page wants to send

_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[a-z0-9._\-\[\]:]+")
_NAMES = re.compile(rb"[A-Za-z0-9\-]+(\s*,\s*[A-Za-z0-9\-]+)*")
_EXPOSED = (  # headers that a page may read besides the CORS-safelisted ones
    b"x-request-id, request-id, retry-after, x-redline-warning"
)


def check_origins(origins: Sequence[str]) -> frozenset[bytes]:
    """The origins as browsers send them. Raises ConfigError for invalid ones, and for `*` and `null`, which any page
    can have."""
    for origin in origins:
        if origin == "null" or origin.startswith("file:"):
            raise ConfigError(
                f"cors_origins has {origin!r}; pages opened from files have the origin null, and so has a sandboxed "
                "frame of any web page: it would allow every page and is not supported; serve the page by HTTP and "
                "list its origin"
            )
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origins has {origin!r}; expected origins as browsers send them, such as https://chat.example, "
                "http://localhost:3000 or app://obsidian.md, in lower case and without a path; * would allow every "
                "page and is not supported"
            )
    return frozenset(origin.encode() for origin in origins)


class Cors:
    """Answers preflight requests, and marks responses as readable, for the listed origins only."""

    def __init__(self, app: ASGIApp, origins: frozenset[bytes]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; requests of other origins are passed on unchanged."""
        if scope["type"] != "http" or (origin := header(scope["headers"], b"origin")) not in self._origins:
            await self._app(scope, receive, send)
            return
        allowed = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and header(scope["headers"], b"access-control-request-method"):
            asked = header(scope["headers"], b"access-control-request-headers")
            names = asked if len(asked) <= ASKED_BYTES and _NAMES.fullmatch(asked) else b"authorization, content-type"
            allowed += [
                (b"access-control-allow-methods", b"GET, POST, DELETE"),
                (b"access-control-allow-headers", names),
                (b"access-control-max-age", b"%d" % MAX_AGE_S),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": allowed})
            await send({"type": "http.response.body", "body": b""})
            return
        allowed.append((b"access-control-expose-headers", _EXPOSED))

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *allowed]
            await send(message)

        await self._app(scope, receive, send_on)
