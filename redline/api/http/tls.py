"""TLS between a socket and the HTTP protocol above it.

The event loop's own TLS reports a connection only after its handshake, so that connections in their handshake are
neither limited nor counted; and it closes a connection whose client has half-closed it, though a response is still due.
This implementation reports the connection when it is accepted, and keeps writing to a client that has ended its side,
with or without TLS's close_notify. Encryption is OpenSSL's, through `ssl.SSLObject`.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from typing import Any, Protocol

READ_BYTES = 256 << 10  # of received data passed to the protocol above at once

log = logging.getLogger("redline.api")


class Above(Protocol):
    """The protocol above TLS: an asyncio protocol that is also notified of a connection before its handshake."""

    def accepted(self, transport: asyncio.Transport) -> None:
        """An encrypted connection was accepted: nothing may be written to it before `connection_made`."""
        ...

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The handshake is done."""
        ...

    def data_received(self, data: bytes) -> None:
        """The client has sent `data`."""
        ...

    def eof_received(self) -> bool:
        """The client sends no more data. Returns whether the connection stays open for a response."""
        ...

    def pause_writing(self) -> None:
        """Written data has exceeded what the client reads."""
        ...

    def resume_writing(self) -> None:
        """The client has read most of the written data."""
        ...

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended, whether the handshake was done or not."""
        ...


class Tls(asyncio.Transport, asyncio.Protocol):
    """Server side of one connection: a protocol for the socket's transport, and a transport for the protocol above."""

    def __init__(self, context: ssl.SSLContext, above: Above) -> None:
        super().__init__()
        self._context = context
        self._above = above
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._below: asyncio.Transport
        self._shaken = False  # the handshake is done
        self._paused = False  # the protocol above has paused reading
        self._at_end = False  # the socket has reached its end
        self._ended = False  # the client sends no more data, and the protocol above was notified
        self._stays = False  # the connection stays open nevertheless
        self._closing = False

    # -- to the socket's transport, a protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Report the connection before its handshake."""
        self._below = transport
        self._above.accepted(transport)

    def data_received(self, data: bytes) -> None:
        """Decrypt received data."""
        if self._ended:  # data after a close_notify is ignored
            return
        self._received.write(data)
        self._go_on()

    def eof_received(self) -> bool:
        """The socket has reached its end. Returns whether the connection stays open."""
        self._at_end = (
            True  # not passed to OpenSSL, which treats an end without close_notify as an error and stops writing
        )
        self._go_on()
        return self._stays or self._paused  # a protocol that has paused reading is notified later

    def pause_writing(self) -> None:
        """Forward the call; nothing is written during the handshake."""
        if self._shaken:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        """Forward the call."""
        if self._shaken:
            self._above.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward the call, whether the handshake was done or not."""
        self._closing = True
        self._above.connection_lost(exc)

    def _go_on(self) -> None:
        """Process received data, unless the protocol above has paused reading."""
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
                self._send()
                self._above.connection_made(self)
            while not (self._paused or self._ended or self._closing):
                data = self._read()
                self._send()  # TLS itself may have to respond, for example to a key update
                if data:
                    self._above.data_received(data)
                elif not self._ended:
                    return
                else:
                    self._stays = bool(self._above.eof_received())
                    if not self._stays:
                        self.close()
        except ssl.SSLWantReadError:
            self._send()
        except ssl.SSLError as error:
            log.debug("closed a connection: %s", error)
            self._closing = True
            self._send()  # an alert with the reason
            self._below.close()

    def _read(self) -> bytes:
        """Decrypted data; empty if there is none yet, or, with `_ended` set, at the end."""
        parts: list[bytes] = []
        size = 0
        while size < READ_BYTES:
            try:
                part = self._tls.read(READ_BYTES - size)
            except ssl.SSLWantReadError:
                self._ended = self._at_end and not parts  # if there are parts, the next call sets it
                break
            except ssl.SSLZeroReturnError:  # if the server has ended its side as well
                part = b""
            if not part:
                self._ended = not parts
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    def _send(self) -> None:
        if data := self._to_send.read():
            self._below.write(data)

    # -- to the protocol above, a transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, encrypted; nothing once the connection is closing."""
        rest = memoryview(data)
        if self._closing or not rest:
            return
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError as error:
            log.debug("closed a connection: %s", error)
            self.abort()
            return
        self._send()

    def can_write_eof(self) -> bool:
        """True: TLS and TCP can both close one direction."""
        return True

    def write_eof(self) -> None:
        """Close the sending direction; data from the client is still read."""
        self._notify()
        self._below.write_eof()

    def close(self) -> None:
        """Close once all written data is sent."""
        if not self._closing:
            self._notify()
            self._closing = True
            self._below.close()

    def abort(self) -> None:
        """Close now."""
        self._closing = True
        self._below.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closing, so that writes are dropped."""
        return self._closing or self._below.is_closing()

    def pause_reading(self) -> None:
        """Pass no data to the protocol above, and read none from the socket, until `resume_reading`."""
        self._paused = True
        self._below.pause_reading()

    def resume_reading(self) -> None:
        """Pass data to the protocol above again, starting with data received before."""
        if self._paused:
            self._paused = False
            self._below.resume_reading()
            asyncio.get_running_loop().call_soon(self._go_on_later)  # data received before is buffered here

    def is_reading(self) -> bool:
        """Whether received data is passed to the protocol above."""
        return not self._paused and self._below.is_reading()

    def get_write_buffer_size(self) -> int:
        """Encrypted bytes that the socket's transport has not sent yet."""
        return self._below.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Low and high limits of the socket's transport."""
        return self._below.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of the socket's transport."""
        self._below.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`sslcontext`, `ssl_object`, and the extra info of the socket's transport."""
        if name == "sslcontext":
            return self._context
        return self._tls if name == "ssl_object" else self._below.get_extra_info(name, default)

    def _go_on_later(self) -> None:
        if not self._closing:
            self._go_on()

    def _notify(self) -> None:
        """Send TLS's close_notify, so that the client can distinguish a complete response from a truncated one."""
        with suppress(ssl.SSLError):  # without waiting for the client's close_notify
            self._tls.unwrap()
        self._send()


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """A TLS context from PEM files: the certificate with its chain, and its key.

    Raises OSError, of which ssl.SSLError is a subclass, if they cannot be read or do not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, password=lambda: "")  # no prompt: a key with a password is rejected
    return context
