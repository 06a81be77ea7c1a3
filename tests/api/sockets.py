"""A server with timers on a fake clock, and clients that exchange raw bytes with it, all in one event loop."""

import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from redline.api.config import Limits
from redline.api.http.budget import Connections
from redline.api.http.server import Server, uvicorn_config
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

ASYNCIO = "asyncio", {"use_uvloop": False}  # its timers can be driven by a fake clock
UVLOOP = "asyncio", {"use_uvloop": True}  # the event loop that `redline serve` uses
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Hello:
    """Reads each whole request, and answers "hello"; at /held only once `gate` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0
        self.left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            self.left += 1
            return
        if scope["path"] == "/held":
            left = asyncio.ensure_future(receive())  # returns when the client has disconnected
            opened = asyncio.create_task(self.gate.wait())
            await asyncio.wait({left, opened}, return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
            opened.cancel()
            if left.done():
                self.left += 1
                return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def serving(
    app: Any,
    limits: Limits,
    clock: FakeClock,
    tls: tuple[str, str] | None = None,
    connections: Connections | None = None,
) -> AsyncIterator[tuple[int, Server]]:
    """A port, and the server that listens on it. clock: drives the loop if it is asyncio's own."""
    server = Server(uvicorn_config(app, limits, "127.0.0.1", 0, tls, connections))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        try:
            yield listener.getsockname()[1], server
        finally:
            server.should_exit = True
            server.abort()
            while not task.done():
                clock.advance(0.1)
                await turns()
            await task


class Client:
    """A connection over which a test sends and receives bytes; with `context` over TLS, once `shake` has returned."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None, receive_bytes: int | None = None) -> None:
        """receive_bytes: size of the kernel's receive buffer. Default: the system's."""
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.got = b""
        self.ended = False  # the server has closed, or reset, the connection
        self.was_told = False  # a TLS close_notify has arrived
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = None if context is None else context.wrap_bio(self._in, self._out, server_hostname="localhost")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def shake(self) -> None:
        """Do the TLS handshake."""
        assert self._tls is not None
        shaken = False
        while not shaken:
            try:
                self._tls.do_handshake()
                shaken = True
            except ssl.SSLWantReadError:
                pass
            self.flush()
            if not shaken:
                await eventually(self._receive)
                assert not self.ended, "the server has closed the connection"

    def say(self, data: bytes) -> "Client":
        if self._tls is None:
            self.socket.sendall(data)
        else:
            self._tls.write(data)
            self.flush()
        return self

    def flush(self) -> None:
        if data := self._out.read():
            self.socket.sendall(data)

    def notify(self) -> None:
        """Send TLS's close_notify."""
        assert self._tls is not None
        with suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        self.flush()

    def end(self) -> "Client":
        """Close the sending side, and still read."""
        self.socket.shutdown(socket.SHUT_WR)
        return self

    def look(self) -> bytes:
        """All bytes received so far."""
        while not self.ended and self._receive():
            pass
        while self._tls is not None:
            try:
                part = self._tls.read(1 << 16)
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            if not part:
                self.was_told = True
                break
            self.got += part
        return self.got

    async def until(self, text: bytes) -> bytes:
        """All bytes received, once `text` is among them."""
        searched = 0

        def found() -> bool:
            nonlocal searched
            start, searched = max(0, searched - len(text)), len(self.look())
            return self.got.find(text, start) >= 0

        await eventually(lambda: found() or self.ended)
        assert text in self.got, self.got
        return self.got

    async def rest(self) -> bytes:
        """All bytes received, once the server has ended the connection."""
        await eventually(lambda: self.look() == self.got and self.ended)
        return self.got

    def _receive(self) -> bool:
        """Whether anything arrived, the end of the connection included."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        self.ended = not data
        if self._tls is None:
            self.got += data
        else:
            self._in.write(data)
        return True


def error_of(answered: bytes) -> tuple[int, str]:
    """Status and code of an answer that is an error in OpenAI's shape."""
    head, _, body = answered.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


def certificate(folder: Path) -> tuple[tuple[str, str], ssl.SSLContext]:
    """The files of a certificate for localhost and of its key, and the SSL context of a client that trusts it."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, *names, "-out", cert, "-keyout", key], check=True, capture_output=True)
    return (cert, key), ssl.create_default_context(cafile=cert)
