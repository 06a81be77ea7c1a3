"""TLS between a socket and the HTTP protocol above it.

The event loop's own TLS shows a connection only when its handshake is done, so that nothing bounds or counts
connections before; and it closes a connection whose client sends nothing more, though an answer is owed. This one tells
of the connection when it is accepted, and goes on writing to a client that has ended its side, with TLS's close_notify
or without. Encryption is OpenSSL's, through `ssl.SSLObject`.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from typing import Any, Protocol

READ_BYTES = 256 << 10  # of what a client has sent that are given to the protocol above at once

log = logging.getLogger("redline.api")


class Above(Protocol):
    """The protocol above TLS: an asyncio protocol, which is told of its connection before the handshake as well."""

    def accepted(self, transport: asyncio.Transport) -> None:
        """A connection was accepted, which is encrypted: nothing is written to it before `connection_made`."""
        ...

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The handshake is done."""
        ...

    def data_received(self, data: bytes) -> None:
        """The client has sent `data`."""
        ...

    def eof_received(self) -> bool:
        """The client sends nothing more: whether the connection stays open for an answer."""
        ...

    def pause_writing(self) -> None:
        """More is written than the client takes."""
        ...

    def resume_writing(self) -> None:
        """The client has taken most of what was written."""
        ...

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended, whether the handshake was done or not."""
        ...


class Tls(asyncio.Transport, asyncio.Protocol):
    """The server's side of one connection: a protocol to the socket's transport, a transport to the protocol above."""

    def __init__(self, context: ssl.SSLContext, above: Above) -> None:
        super().__init__()
        self._context = context
        self._above = above
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._below: asyncio.Transport
        self._shaken = False  # the handshake is done
        self._paused = False  # the protocol above reads nothing for now
        self._at_end = False  # the socket gives nothing more
        self._ended = False  # the client sends nothing more, and the protocol above knows
        self._stays = False  # nevertheless the connection stays open
        self._closing = False

    # -- to the socket's transport, a protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Tell of the connection before its handshake."""
        self._below = transport
        self._above.accepted(transport)

    def data_received(self, data: bytes) -> None:
        """Decrypt what has come."""
        if self._ended:  # what follows a close_notify is ignored
            return
        self._received.write(data)
        self._go_on()

    def eof_received(self) -> bool:
        """The socket gives nothing more: whether the connection stays open."""
        self._at_end = (
            True  # OpenSSL is not told: it takes an end without close_notify for an error, and writes no more
        )
        self._go_on()
        return self._stays or self._paused  # a protocol that reads nothing for now is told later

    def pause_writing(self) -> None:
        """Pass it on; during the handshake nobody writes."""
        if self._shaken:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        if self._shaken:
            self._above.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on, whether the handshake was done or not."""
        self._closing = True
        self._above.connection_lost(exc)

    def _go_on(self) -> None:
        """Take in what was received, as far as the protocol above reads."""
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
                self._send()
                self._above.connection_made(self)
            while not (self._paused or self._ended or self._closing):
                data = self._read()
                self._send()  # TLS itself may have an answer, as to an update of its keys
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
            self._send()  # an alert, which says why
            self._below.close()

    def _read(self) -> bytes:
        """What the client has sent; empty where nothing more is there yet, or, with `_ended`, will be."""
        parts: list[bytes] = []
        size = 0
        while size < READ_BYTES:
            try:
                part = self._tls.read(READ_BYTES - size)
            except ssl.SSLWantReadError:
                self._ended = self._at_end and not parts  # with parts, the next call tells
                break
            except ssl.SSLZeroReturnError:  # where the server has ended its side as well
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
        """True: TLS and TCP both have an end for each direction."""
        return True

    def write_eof(self) -> None:
        """Send nothing more, and say so; what the client sends is still read."""
        self._notify()
        self._below.write_eof()

    def close(self) -> None:
        """Close once all that was written is sent."""
        if not self._closing:
            self._notify()
            self._closing = True
            self._below.close()

    def abort(self) -> None:
        """Close now."""
        self._closing = True
        self._below.abort()

    def is_closing(self) -> bool:
        """Whether nothing is written any more."""
        return self._closing or self._below.is_closing()

    def pause_reading(self) -> None:
        """Give nothing to the protocol above, and take nothing from the socket, until `resume_reading`."""
        self._paused = True
        self._below.pause_reading()

    def resume_reading(self) -> None:
        """Give to the protocol above again, first what had come before."""
        if self._paused:
            self._paused = False
            self._below.resume_reading()
            asyncio.get_running_loop().call_soon(self._go_on_later)  # what was received before waits here

    def is_reading(self) -> bool:
        """Whether what comes is given to the protocol above."""
        return not self._paused and self._below.is_reading()

    def get_write_buffer_size(self) -> int:
        """Bytes, encrypted, that the socket's transport has not sent yet."""
        return self._below.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Those of the socket's transport, low and high."""
        return self._below.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set those of the socket's transport."""
        self._below.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`sslcontext`, `ssl_object`, and what the socket's transport knows."""
        if name == "sslcontext":
            return self._context
        return self._tls if name == "ssl_object" else self._below.get_extra_info(name, default)

    def _go_on_later(self) -> None:
        if not self._closing:
            self._go_on()

    def _notify(self) -> None:
        """Send TLS's close_notify: an answer that ends here was not cut off."""
        with suppress(ssl.SSLError):  # it does not wait for the client's
            self._tls.unwrap()
        self._send()


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """The settings of TLS with a certificate, with its chain, and its key, which are PEM files.

    Raises OSError, of which ssl.SSLError is one, where they cannot be read or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, password=lambda: "")  # a key with a password is refused, and not asked for
    return context
