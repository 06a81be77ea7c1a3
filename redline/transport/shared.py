"""The transport `shared`, between processes of one host: an area is a file in shared memory, which its peers map
read-only.

Only this user may access the folder (mode 0700) and the files. After a peer's process has died, its bytes can still be
read until its file is deleted, so a successful read does not show that the area's owner is alive.
"""

import ctypes
import mmap
import os
import secrets
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from weakref import WeakSet

import msgspec
import numpy as np

from redline import clock
from redline.errors import ConfigError
from redline.transport.base import AreaDescriptor, MemoryRange, Target, TransferFailed, address_of, heard, inside

INLINE = 1 << 17  # bytes; up to this size the caller's thread copies: about 10 us, the time to wake a thread
PIECE = 1 << 20  # bytes that are copied between two checks for cancellation: about 0.1 ms


class _SharedDescriptor(AreaDescriptor, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str  # the file's name in the folder
    size: int


_KIND = "redline-shared-1"


class SharedArea:
    """A file of shared memory that this process writes to."""

    def __init__(self, folder: Path, size: int) -> None:
        """Raises ConfigError if the folder's file system has no room for it."""
        self._path = folder / f"parcels-{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # reserve now: a write to a mapped page without space raises SIGBUS
            mapped = mmap.mmap(file, size)
        except (OSError, ValueError) as error:
            self._path.unlink()
            raise ConfigError(f"transport: {folder} has no room for an area of {size:,} bytes ({error})") from error
        finally:
            os.close(file)
        held = (ctypes.c_char * size).from_buffer(mapped)
        self.memory = MemoryRange(ctypes.addressof(held), size, owner=held)
        self.told = msgspec.msgpack.encode(_SharedDescriptor(_KIND, self._path.name, size))

    def close(self) -> None:
        """As `Area.close`: unlinks the file; peers that have it mapped read its last content."""
        self._path.unlink(missing_ok=True)


class SharedLanding:
    """The target of reads; host memory needs no registration here."""

    def close(self) -> None:
        """Does nothing."""


class SharedRead:
    """A copy; above `INLINE` bytes it is made by the transport's thread."""

    def __init__(self, peer: "SharedPeer", source: int, into: Target, count: int, seconds: float) -> None:
        self._peer, self._source, self._count = peer, source, count
        self._into, self._held = address_of(into, count)
        self._seconds, self._until = seconds, clock.monotonic() + seconds
        self._stopped = False
        self._whole = False
        self._failed: str | None = None
        self._copying: Future[None] | None = None
        if count <= INLINE:
            self._copy()
        else:
            peer.readings.add(self)
            self._copying = peer.copier.submit(self._copy)

    def done(self) -> bool:
        """As `RemoteRead.done`."""
        if self._failed is not None:
            raise TransferFailed(self._failed)
        if self._copying is None or self._copying.done():
            self._end()
            return True
        if clock.monotonic() >= self._until:
            self._give_up(f"the read timed out after {self._seconds:g} s")
            return self.done()
        return False

    def cancel(self) -> None:
        """As `RemoteRead.cancel`: returns after at most `PIECE` further bytes, at once if the copy has not begun."""
        self._give_up("the read was cancelled")

    def _give_up(self, reason: str) -> None:
        self._stopped = True
        if self._copying is not None and not self._copying.cancel():
            self._copying.result()
        if not self._whole and self._failed is None:
            self._failed = reason
        self._end()

    def _copy(self) -> None:
        for first in range(0, self._count, PIECE):
            if self._stopped:
                return
            ctypes.memmove(self._into + first, self._source + first, min(PIECE, self._count - first))
        self._whole = True

    def _end(self) -> None:
        self._held = self._copying = None
        self._peer.readings.discard(self)


class SharedPeer:
    """A connection to an area of another process: its file, mapped read-only."""

    def __init__(self, path: Path, size: int, copier: ThreadPoolExecutor) -> None:
        """Raises TransferFailed if the file does not exist, or does not match its descriptor."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransferFailed(f"the peer's memory file cannot be opened: {error.strerror}") from error
        try:
            facts = os.fstat(file)
            ours = facts.st_uid == os.geteuid() and stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077
            if not ours or facts.st_size != size or not size:
                raise TransferFailed("the peer's memory file does not match its descriptor")
            mapped = mmap.mmap(file, size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._view = np.frombuffer(mapped, np.uint8)  # its deletion ends the mapping
        self.size = size
        self.readings: set[SharedRead] = set()
        self.copier = copier
        self._open = True

    def read(self, source_offset: int, into: Target, count: int, seconds: float) -> SharedRead:
        """As `Peer.read`."""
        inside(source_offset, count, self.size)
        assert self._open, "the peer is closed"
        return SharedRead(self, self._view.ctypes.data + source_offset, into, count, seconds)

    def close(self) -> None:
        """As `Peer.close`."""
        self._open = False
        for reading in tuple(self.readings):
            reading.cancel()
        self._view = np.empty(0, np.uint8)


class SharedTransport:
    """Areas and peers of one user on one host.

    folder: the same for all processes that connect to each other, best on a file system in memory (/dev/shm). It is
    created if it is missing. Raises ConfigError if it belongs to another user, or other users may access it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.lstat()
        except OSError as error:
            raise ConfigError(f"transport: {folder} cannot be created ({error.strerror})") from error
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise ConfigError(f"transport: {folder} must be a folder that only this user may access (chmod 700)")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="transport")  # its thread starts with the first copy
        self._areas: list[SharedArea] = []
        self._peers: WeakSet[SharedPeer] = WeakSet()

    def area(self, memory: MemoryRange | int) -> SharedArea:
        """As `Transport.area`: only of new memory."""
        if not isinstance(memory, int):
            raise ConfigError("transport: `shared` allocates the memory of an area itself: pass its size")
        area = SharedArea(self._folder, memory)
        self._areas.append(area)
        return area

    def landing(self, memory: MemoryRange) -> SharedLanding:
        """As `Transport.landing`: any host memory."""
        if memory.device is not None:
            raise ConfigError("transport: `shared` copies host memory only, and this is GPU memory")
        return SharedLanding()

    def connect(self, told: bytes) -> SharedPeer:
        """As `Transport.connect`."""
        facts = heard(told, _SharedDescriptor, _KIND, "shared")
        if not facts.name or "/" in facts.name or facts.name in (".", ".."):
            raise TransferFailed("the peer's descriptor names no file of the transport `shared`")
        peer = SharedPeer(self._folder / facts.name, facts.size, self._copier)
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        """As `Transport.close`."""
        for made in (*self._peers, *self._areas):
            made.close()
        self._copier.shutdown()
