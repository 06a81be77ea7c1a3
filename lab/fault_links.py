"""Links that stall and drop: proxies in place of a server's own sockets.

The sockets of a server and its workers are files in a folder. A `Detours` watches the folder: it renames each socket
that appears, and later connections to the old name go to a proxy, which forwards bytes until it is asked to hold them,
or to cut the connection and drop the held bytes. The server needs no changes.
"""

import asyncio
import contextlib
import os
import socket
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from redline import clock

LOOK_S = 0.002  # between two scans for new sockets: connections made before a socket was found are not proxied
CHUNK = 1 << 16
REAL = ".real"  # suffix of a socket's new name


class LinkName(NamedTuple):
    """The two ends of a link. socket: the file's name. writer: the process that has connected to it."""

    socket: str
    writer: int


class _Held:
    """Until when the bytes of a link are held, and whether its connections are to be cut."""

    def __init__(self) -> None:
        self.until = 0.0
        self.connections: set[asyncio.StreamWriter] = set()
        self.holding = 0  # bytes held now
        self.lost = 0  # held bytes dropped when the link was cut


class Detours:
    """Proxies for all sockets that appear in the folders of a folder. Use as a context manager."""

    def __init__(self, place: Path) -> None:
        """place: the folder in which servers make their folders of sockets (TMPDIR)."""
        self._place = place
        self._links: dict[LinkName, _Held] = {}
        self._servers: dict[Path, asyncio.Server] = {}
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="detours", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def links(self) -> list[LinkName]:
        """The links connected now, in the order of their names."""
        return sorted(name for name, link in list(self._links.items()) if link.connections)

    def stall(self, name: LinkName, seconds: float) -> None:
        """Hold the bytes of a link, both ways, for `seconds`; then forward all of them."""
        self._links[name].until = clock.monotonic() + seconds

    def holding(self, name: LinkName) -> int:
        """Bytes of a link that are held now, and would be lost if it were cut."""
        return self._links[name].holding

    def cut(self, name: LinkName) -> None:
        """End a link's connections. Held bytes are lost; the writer may connect again at once."""
        self._loop.call_soon_threadsafe(self._cut, name)

    def _cut(self, name: LinkName) -> None:
        link = self._links[name]
        for connection in list(link.connections):
            connection.transport.abort()
        link.until = 0.0

    @property
    def lost(self) -> int:
        """Bytes that were lost with the connections that have been cut."""
        return sum(link.lost for link in list(self._links.values()))

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._watch())
        finally:
            self._loop.close()

    async def _watch(self) -> None:
        while not self._ended.is_set():
            for path in self._sockets():
                real = path.with_name(path.name + REAL)
                with contextlib.suppress(OSError):  # it has been removed again
                    os.rename(path, real)
                    self._servers[real] = await asyncio.start_unix_server(_through(self._links, path.name, real), path)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), LOOK_S)
        for server in self._servers.values():
            server.close()
        for link in self._links.values():
            for connection in link.connections:
                connection.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1.0)

    def _sockets(self) -> list[Path]:
        """The sockets that have no proxy yet."""
        found: list[Path] = []
        with contextlib.suppress(OSError):  # a folder has been removed in between
            for folder in self._place.glob("redline-*"):
                names = {entry.name for entry in os.scandir(folder)}
                found += [folder / name for name in names if not name.endswith(REAL) and name + REAL not in names]
        return [path for path in found if path.is_socket()]


def _through(links: dict[LinkName, _Held], name: str, real: Path):
    """The handler of a connection: the proxy of one socket."""

    async def carry(link: _Held, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            link.holding += len(data)
            try:
                while (left := link.until - clock.monotonic()) > 0:
                    await asyncio.sleep(min(left, LOOK_S * 5))
                    if writer.transport.is_closing():
                        raise ConnectionAbortedError
                writer.write(data)
                await writer.drain()
            except (ConnectionError, asyncio.CancelledError):
                link.lost += len(data)
                raise
            finally:
                link.holding -= len(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        of: socket.socket = writer.get_extra_info("socket")
        pid, _, _ = struct.unpack("3i", of.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        link = links.setdefault(LinkName(name, pid), _Held())
        try:
            behind_reader, behind_writer = await asyncio.open_unix_connection(real)
        except OSError:  # the socket has no listener any more
            writer.close()
            return
        ends = {writer, behind_writer}
        link.connections |= ends
        ways = [
            asyncio.create_task(carry(link, reader, behind_writer)),
            asyncio.create_task(carry(link, behind_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        link.connections -= ends
        for end in ends:
            end.close()
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)

    return connected
