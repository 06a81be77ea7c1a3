"""Pages of other origins that the operator has named: the browser is told that they may ask here, and read the answers.

Pages of desktop and mobile apps and of extensions have origins of schemes of their own, such as `tauri://localhost`.

No origin is let in but by its name, and no cookie counts: who a request is from, its key says, where there are keys.
"""

import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline.api.access import header
from redline.errors import ConfigError

MAX_AGE_S = 600  # in which a browser need not ask again
ASKED_BYTES = 2048  # of header names that a page wants to send

_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[a-z0-9._\-\[\]:]+")
_NAMES = re.compile(rb"[A-Za-z0-9\-]+(\s*,\s*[A-Za-z0-9\-]+)*")
_EXPOSED = (  # what a page may read besides the few headers that it always may
    b"x-request-id, request-id, retry-after, x-redline-warning"
)


def check_origins(origins: Sequence[str]) -> frozenset[bytes]:
    """The origins as browsers send them. Raises ConfigError for what is none, and for `*` and `null`, which every page
    can have."""
    for origin in origins:
        if origin == "null" or origin.startswith("file:"):
            raise ConfigError(
                f"cors_origins has {origin!r}; pages of files have the origin null, and so has a sandboxed frame of "
                "any web page: it would let every page in and is not served; serve the page by HTTP and name its origin"
            )
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origins has {origin!r}; expected origins as browsers send them, such as https://chat.example, "
                "http://localhost:3000 or app://obsidian.md, in lower case and without a path; * would let every page "
                "in and is not served"
            )
    return frozenset(origin.encode() for origin in origins)


class Cors:
    """Answers the browser's question before a request, and marks answers as readable, for these origins alone."""

    def __init__(self, app: ASGIApp, origins: frozenset[bytes]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; those from elsewhere go on unchanged."""
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
