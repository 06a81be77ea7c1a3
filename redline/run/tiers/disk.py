"""KV offload to disk: pages in files, by hash, within a size limit. The files survive a restart, and a kill at any
byte.

A file has a header that identifies the model, and append-only records: a record header with the page's hash, its flags
and the checksum of its bytes, then the bytes. A record counts only if it is complete, so a kill or a full disk costs
the newest one. The index is in memory, and is rebuilt from the record headers at startup. The file with the least
recently used pages is removed when a new file would exceed the limit, or when the file system is full. A file is open
only while it is read or written, so the process needs two descriptors, for the folder and for its lock, however many
files there are.

Files are opened and removed relative to the descriptor of the locked folder, whatever the path refers to by now: if the
folder was removed, moved or replaced, or its lock file was removed, another process may own the path, and its files are
not touched. The pages are then dropped from the index, and the path is locked again before the next page is written.

Nothing is synced: pages damaged by a power cut fail their checksum. Only one thread at a time may use this.
"""

import contextlib
import errno
import logging
import os
import re
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol

from redline.messages.job import PageHash

FILE_BYTES = 64 << 20  # size of a file, if that is four pages or more
LEAST_FILES = 8  # files that the limit is divided into: one of them is removed at a time
LOCK = ".lock"  # lock file in the folder, which keeps the folder to one process
LOCK_S = 5.0  # seconds to wait, when opening the folder, for another process to release the lock
MOST_PAGES = 1 << 20  # entries of the index, of some 300 bytes each
MAGIC = b"redpages"
VERSION = 1

_FILE = struct.Struct("<8sII")  # magic, version, bytes of the name that follows
_RECORD = struct.Struct("<16sQQI")  # hash, bytes, checksum, flags
_DIGEST = 8  # bytes of the digest over the rest of the header
_GONE = 1 << 31  # flag of a page with wrong bytes
_FULL = errno.ENOSPC, errno.EDQUOT
_NAME = re.compile(r"(\d{10})\.pages")

_log = logging.getLogger(__name__)


class DiskPlace(NamedTuple):
    """Position of a page's bytes, and their expected checksum."""

    file: int
    offset: int  # offset of its record in the file
    checksum: int
    flags: int


class FolderLock(Protocol):
    """A lock that keeps a folder to this process."""

    def release(self) -> object:
        """Releases the lock."""
        ...


# Locks an existing folder for this process, by a lock on a file in it: the folder, the file, and the seconds to wait
# for another process to release it.
Hold = Callable[[Path, Path, float], FolderLock]


class _LockedFolder(NamedTuple):
    """A folder that this process has locked."""

    descriptor: int
    held: FolderLock
    lock: os.stat_result | None  # status of its lock file; None: the file system has no locks


class _PageFile:
    __slots__ = ("end", "hashes", "used")

    def __init__(self, end: int, used: int) -> None:
        self.end = end  # bytes written
        self.used = used  # ns, by the clock of file times: when a page of it was last used
        self.hashes: list[PageHash] = []


class DiskPages:
    """The pages in one folder. `places` is the index."""

    def __init__(self, folder: Path, name: str, page_bytes: int, most_bytes: int, hold: Hold) -> None:
        """name: identifies the model and page format; files with another name are removed. Raises OSError if the
        folder cannot be made or written, and the errors of `hold`."""
        self.places: dict[PageHash, DiskPlace] = {}
        self.bytes = 0  # bytes of all files
        self.most_bytes = most_bytes
        self._folder, self._page_bytes = folder, page_bytes
        self._record_bytes = _RECORD.size + _DIGEST + page_bytes
        self._head = _sealed(_FILE.pack(MAGIC, VERSION, len(name.encode())) + name.encode())
        self._file_bytes = max(
            len(self._head) + self._record_bytes, min(max(FILE_BYTES, 4 * page_bytes), most_bytes // LEAST_FILES)
        )
        self._files: dict[int, _PageFile] = {}
        self._current: int | None = None  # the file being appended to
        self._full = False  # the full file system has been logged
        self.removed: Callable[[Sequence[PageHash]], object] | None = None  # called with the pages of a removed file
        self._hold = hold
        self._own: _LockedFolder | None = self._taken(
            LOCK_S
        )  # None: the folder was removed, or belongs to another process

    def __len__(self) -> int:
        return len(self.places)

    def load(self) -> Iterator[int]:
        """Reads the index, newest files first, and yields the number of pages of each file. Useless files (of
        another name, without a complete page, above the limit) are removed. A file that cannot be read is skipped:
        it counts towards the limit, and is removed like any other. Raises OSError if the folder cannot be read."""
        found: list[tuple[int, int, int]] = []
        with os.scandir(self._descriptor()) as entries:
            for entry in entries:
                if (match := _NAME.fullmatch(entry.name)) is not None and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, int(match[1]), status.st_size))
        others = 0
        for used, number, size in sorted(found, reverse=True):
            if self.bytes + size > self.most_bytes or len(self.places) >= MOST_PAGES:
                self._unlink(number)
                continue
            file = _PageFile(size, used)
            try:
                with self._open(number, os.O_RDONLY) as descriptor:
                    ours = os.pread(descriptor, len(self._head), 0) == self._head
                    records, end = self._records(descriptor, number, size) if ours else ({}, 0)
            except OSError as error:
                _log.warning("%s: cannot be read, skipped: %s", self._path(number), error.strerror or error)
                self._files[number] = file
                self.bytes += size
                continue
            others += not ours
            for hash, place in records.items():
                if (there := self.places.get(hash)) is None or there.file <= number:
                    self.places[hash] = place
                    file.hashes.append(hash)
            if not file.hashes:
                self._unlink(number)
                continue
            if end < size:  # an incomplete record
                with contextlib.suppress(OSError), self._open(number, os.O_WRONLY) as descriptor:
                    os.ftruncate(descriptor, end)  # may fail: the file may be read-only
            file.end = end
            self._files[number] = file
            self.bytes += end
            yield len(file.hashes)
        if others:
            _log.warning("%s: removed %d files with pages of another model or in another format", self._folder, others)

    def write(self, hash: PageHash, page: memoryview, checksum: int, flags: int) -> DiskPlace:
        """Appends a page, which replaces an earlier page of the same hash. flags: below 2^31.

        If the file system is full, the least recently used file is removed, and the page is written if that makes room.
        If the folder or the file was removed, it is created again; if the folder was replaced, the pages of the new one
        are loaded. Raises OSError, with all stored pages unchanged, and the errors of `hold` if the folder belongs to
        another process by now.
        """
        try:
            return self._append(hash, page, checksum, flags)
        except FileNotFoundError:
            self._forget_missing()
        except OSError as error:
            if error.errno not in _FULL or not self._remove_one():
                raise
            if not self._full:
                self._full = True
                _log.warning(
                    "%s: the file system is full at %.3g of %.3g GB (disk_size): removing the oldest pages",
                    *(self._folder, self.bytes / 1e9, self.most_bytes / 1e9),
                )
        return self._append(hash, page, checksum, flags)

    def read(self, place: DiskPlace, into: memoryview) -> bool:
        """Reads a page's bytes without verifying them; False if they are incomplete. Raises OSError."""
        if place.file not in self._files:
            return False
        try:
            with self._open(place.file, os.O_RDONLY) as descriptor:
                return os.preadv(descriptor, [into], place.offset + _RECORD.size + _DIGEST) == len(into)
        except FileNotFoundError:
            self._forget_missing()
            raise

    def use(self, places: set[int], now_ns: int) -> None:
        """Marks these files as used. now_ns: by the clock of file times; kept across restarts."""
        for number in places:
            if (file := self._files.get(number)) is not None:
                file.used = now_ns
                with contextlib.suppress(OSError):
                    name = self._path(number).name
                    os.utime(name, ns=(now_ns, now_ns), dir_fd=self._descriptor(), follow_symlinks=False)

    def spoil(self, hash: PageHash) -> None:
        """Drops a page with wrong bytes, also from the file, so that it stays dropped after a restart."""
        place = self.places.pop(hash, None)
        if place is not None:
            head = _sealed(_RECORD.pack(hash, self._page_bytes, place.checksum, place.flags | _GONE))
            with contextlib.suppress(OSError), self._open(place.file, os.O_WRONLY) as descriptor:
                os.pwrite(descriptor, head, place.offset)

    def drop(self, hash: PageHash) -> None:
        """Drops a page from the index, until the next restart."""
        self.places.pop(hash, None)

    def close(self) -> None:
        """Releases the folder."""
        self._files.clear()
        self.places.clear()
        self._let_go()

    def check(self) -> None:
        """Raises AssertionError unless the index refers to complete records of existing files, within the limit."""
        assert self.bytes == sum(file.end for file in self._files.values()), "the byte count is wrong"
        assert self.bytes <= max(self.most_bytes, self._file_bytes), (
            f"{self.bytes:,} bytes, {self.most_bytes:,} allowed"
        )
        for hash, place in self.places.items():
            file = self._files[place.file]
            assert place.offset + self._record_bytes <= file.end, "a page past the end of its file"
            assert hash in file.hashes, "a page that its file does not list"

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010d}.pages"

    def _taken(self, wait_s: float) -> _LockedFolder:
        """Creates the folder if it is missing, accessible to its owner only, and locks it for this process."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_mode & 0o777 != 0o700:
            self._folder.chmod(0o700)
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            held = self._hold(self._folder, self._folder / LOCK, wait_s)
        except BaseException:
            os.close(descriptor)
            raise
        lock = None
        with contextlib.suppress(FileNotFoundError):
            lock = os.stat(LOCK, dir_fd=descriptor)
        return _LockedFolder(descriptor, held, lock)

    def _let_go(self) -> None:
        if self._own is not None:
            self._own.held.release()
            os.close(self._own.descriptor)
            self._own = None

    def _is_ours(self) -> bool:
        """Whether the path still refers to the locked folder with the locked file. Raises OSError."""
        if self._own is None:
            return False
        try:
            if not os.path.samestat(os.stat(self._folder), os.fstat(self._own.descriptor)):
                return False
            lock = self._own.lock
            return lock is None or os.path.samestat(os.stat(LOCK, dir_fd=self._own.descriptor), lock)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _descriptor(self) -> int:
        """The folder's descriptor. Raises FileNotFoundError if the folder is not this process's any more."""
        if not self._is_ours():
            raise FileNotFoundError(errno.ENOENT, "the folder was removed or replaced", str(self._folder))
        assert self._own is not None
        return self._own.descriptor

    @contextlib.contextmanager
    def _open(self, number: int, flags: int) -> Generator[int]:
        """Context manager: the file's descriptor. Raises OSError."""
        name = self._path(number).name
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor())
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _append(self, hash: PageHash, page: memoryview, checksum: int, flags: int) -> DiskPlace:
        if self._own is None:
            self._own = self._taken(0)
            try:
                for _ in self.load():  # another process may have written files
                    pass
            except OSError:
                self._let_go()
                raise
        self._descriptor()  # before anything is removed to make room
        number, file = self._room()
        head = _sealed(_RECORD.pack(hash, len(page), checksum, flags))
        with self._open(number, os.O_WRONLY) as descriptor:
            try:
                written = os.pwritev(descriptor, [head, page], file.end)
                if written != len(head) + len(page):
                    raise OSError(errno.ENOSPC, "only a part of a page was written", str(self._path(number)))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, file.end)
                raise
        self.drop(hash)
        place = self.places[hash] = DiskPlace(number, file.end, checksum, flags)
        file.hashes.append(hash)
        file.end += written
        self.bytes += written
        return place

    def _room(self) -> tuple[int, _PageFile]:
        """The file to append a page to."""
        current = self._current
        if current is not None and self._files[current].end + self._record_bytes <= self._file_bytes:
            return current, self._files[current]
        self._current = None
        while self.bytes + self._file_bytes > self.most_bytes or len(self.places) >= MOST_PAGES:
            if not self._remove_one():
                break
        number = max(self._files, default=0) + 1
        while self._is_there(number):
            number += 1
        with self._open(number, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
            try:
                if os.pwrite(descriptor, self._head, 0) != len(self._head):
                    raise OSError(errno.ENOSPC, "only a part of a file's header was written", str(self._path(number)))
                used = os.fstat(descriptor).st_mtime_ns
            except OSError:
                self._unlink(number)
                raise
        file = self._files[number] = _PageFile(len(self._head), used)
        self.bytes += file.end
        self._current = number
        return number, file

    def _remove_one(self) -> bool:
        """Removes the least recently used file, except the one being appended to. Returns whether there was one."""
        numbers = [number for number in self._files if number != self._current]
        if numbers:
            self._remove(min(numbers, key=lambda number: (self._files[number].used, number)))
        return bool(numbers)

    def _remove(self, number: int) -> None:
        self._forget(number)
        self._unlink(number)

    def _forget(self, number: int) -> None:
        """Drops the pages of a file from the index."""
        file = self._files.pop(number)
        if number == self._current:
            self._current = None
        left = [hash for hash in file.hashes if hash in self.places and self.places[hash].file == number]
        for hash in dict.fromkeys(left):
            del self.places[hash]
        if self.removed is not None:
            self.removed(left)
        self.bytes -= file.end

    def _unlink(self, number: int) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written allows no removal either
            os.unlink(self._path(number).name, dir_fd=self._descriptor())

    def _is_there(self, number: int) -> bool:
        """Whether the folder has the file with this number. Raises OSError."""
        try:
            os.stat(self._path(number).name, dir_fd=self._descriptor(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _forget_missing(self) -> None:
        """Handles files or a folder removed by others: drops their pages, and releases a removed folder."""
        gone = self._own is not None and not self._is_ours()
        missing = [number for number in self._files if gone or not self._is_there(number)]
        for number in missing:
            self._forget(number)
        if gone:
            self._let_go()
            _log.warning("%s: the folder was removed or replaced while in use: its pages are dropped", self._folder)
        elif missing:
            what = f"{len(missing)} files were removed"
            _log.warning("%s: %s while in use: their pages are dropped", self._folder, what)

    def _records(self, descriptor: int, number: int, size: int) -> tuple[dict[PageHash, DiskPlace], int]:
        """The pages of a file's complete records, and the end of the last one. Raises OSError."""
        records, end = dict[PageHash, DiskPlace](), len(self._head)
        while end + self._record_bytes <= size:
            head = os.pread(descriptor, _RECORD.size + _DIGEST, end)
            if head != _sealed(head[:-_DIGEST]):
                break
            hash, count, checksum, flags = _RECORD.unpack(head[:-_DIGEST])
            if count != self._page_bytes:
                break
            if not flags & _GONE:
                records[PageHash(hash)] = DiskPlace(number, end, checksum, flags)
            end += self._record_bytes
        return records, end


def _sealed(head: bytes) -> bytes:
    return head + blake2b(head, digest_size=_DIGEST).digest()
