"""A client that violates HTTP: it sends the bytes it is given, at any speed, and reads only as much as requested.

No HTTP library would send these requests. One connection carries one request.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Literal, NamedTuple

from redline import clock

HOST = "127.0.0.1"
READ_BYTES = 1 << 16

Outcome = Literal["answered", "closed", "unanswered", "left"]


class Reply(NamedTuple):
    """The outcome of a request. status: 0 if none arrived. body: without headers, and with chunks joined.

    seconds: from before the connection to the end. whole: the answer ended at its announced end.
    """

    outcome: Outcome
    status: int
    body: bytes
    seconds: float
    whole: bool = False

    @property
    def kind(self) -> str:
        """For counting: the status, or the outcome if there is none."""
        return str(self.status) if self.status else self.outcome


def head(method: str, path: str, length: int | None, more: Iterable[tuple[str, str]] = ()) -> bytes:
    """Request line and headers of a request. length: the Content-Length, in bytes; None: no such header.

    The server is asked to close after its answer. `more` replaces the usual headers of the same names.
    """
    fields = {"Host": HOST, "Connection": "close", "Content-Type": "application/json"}
    if length is not None:
        fields["Content-Length"] = str(length)
    fields |= dict(more)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def post(path: str, body: bytes, more: Iterable[tuple[str, str]] = ()) -> bytes:
    """A complete POST request with its Content-Length. more: headers that are added, or replace the usual ones."""
    return head("POST", path, len(body), more) + body


def get(path: str, more: Iterable[tuple[str, str]] = ()) -> bytes:
    """A complete GET request without a body. more: headers that are added, or replace the usual ones."""
    return head("GET", path, None, more)


async def connect(port: int, receive_bytes: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a connection to 127.0.0.1. Raises OSError if the port has no listener.

    receive_bytes: the size of the socket's receive buffer; with a small one the server soon notices that a client does
    not read. None: the system's default.
    """
    link = socket.socket()
    link.setblocking(False)
    if receive_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(link, (HOST, port))
    except BaseException:
        link.close()
        raise
    return await asyncio.open_connection(sock=link, limit=READ_BYTES)


@asynccontextmanager
async def connection(
    port: int, receive_bytes: int | None = None
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection from `connect`, which is aborted on exit. Raises OSError if it cannot be opened."""
    reader, writer = await connect(port, receive_bytes)
    try:
        yield reader, writer
    finally:
        await hang_up(writer)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Aborts the connection at once; bytes waiting to be sent are dropped."""
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


async def ask(
    port: int,
    request: bytes,
    *,
    limit_s: float = 60.0,
    leave_s: float | None = None,
    pause_s: float = 0.0,
    pieces: int = 1,
    keep: int = 8 << 20,
) -> Reply:
    """Sends a request and reads its answer until the server closes; `keep` bytes of it are kept.

    limit_s: seconds after which the request counts as unanswered. leave_s: seconds after which the client disconnects.
    pause_s: seconds between two reads, and between two of the `pieces` in which the request is sent. A connection that
    is refused or breaks has the outcome "closed" and raises nothing.
    """
    began = clock.perf_counter()
    answer = bytearray()
    most = limit_s if leave_s is None else min(leave_s, limit_s)
    outcome: Outcome = "answered"
    try:
        async with asyncio.timeout(most), connection(port) as (reader, writer):
            sending = asyncio.create_task(_send(writer, request, pieces, pause_s))
            try:
                with suppress(ConnectionError):  # there may be an answer nevertheless
                    while part := await reader.read(READ_BYTES):
                        answer += part[: max(0, keep - len(answer))]
                        if pause_s:
                            await asyncio.sleep(pause_s)
            finally:
                sending.cancel()
                with suppress(ConnectionError, asyncio.CancelledError):
                    await sending
    except TimeoutError:
        outcome = "unanswered" if leave_s is None or leave_s >= limit_s else "left"
    except OSError:
        outcome = "closed"
    top, found, body = bytes(answer).partition(b"\r\n\r\n")
    status = int(top.split(b" ", 2)[1]) if found and top.startswith(b"HTTP/1.1 ") else 0
    if outcome == "answered" and not status:
        outcome = "closed"
    length = _declared(top)
    chunked = b"transfer-encoding: chunked" in top.lower()
    whole = body.endswith(b"0\r\n\r\n") if chunked else length is not None and len(body) == length
    seconds = clock.perf_counter() - began
    return Reply(outcome, status if outcome == "answered" else 0, _joined(body) if chunked else body, seconds, whole)


async def _send(writer: asyncio.StreamWriter, request: bytes, pieces: int, pause_s: float) -> None:
    size = -(-len(request) // pieces)
    with suppress(ConnectionError):
        for start in range(0, len(request), size):
            writer.write(request[start : start + size])
            await writer.drain()
            if pieces > 1:
                await asyncio.sleep(pause_s)


def _declared(top: bytes) -> int | None:
    for line in top.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return None


def _joined(body: bytes) -> bytes:
    """The part of a chunked body received so far, without its framing."""
    parts: list[bytes] = []
    at = 0
    while (end := body.find(b"\r\n", at)) >= 0:
        try:
            count = int(body[at:end], 16)
        except ValueError:
            break
        if count == 0:
            break
        parts.append(body[end + 2 : end + 2 + count])
        at = end + 2 + count + 2
    return b"".join(parts)
