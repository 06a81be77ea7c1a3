"""Pages in files, by their hash, within a bound. What is there survives a restart, and a kill at any byte.

A file is a head, which says whose pages it holds, and records that are only ever appended: a head of its own, with the
page's name, what is known of it and the checksum of its bytes, and the bytes. A record counts once all of it is there,
so a kill or a full disk costs the newest one. The index is in memory, and read again from the records' heads at the
start. The file whose pages were least lately used is removed when another is begun and there would be too many bytes,
or when the file system is full. A file is open only while it is read or written, so the process needs two descriptors,
that of the folder and that of its lock, however many files there are.

Files are opened and removed in the folder that was locked, by its descriptor, whatever has its path by now: where that
was removed, moved or replaced, or its lock file was removed, another process may have the path, and its files are left
alone. The pages are forgotten then, and the path is locked again before the next one is written.

Nothing is synced: what a power cut takes away does not have its checksum. One thread at a time may use it.
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

from redline.wire.job import PageHash

FILE_BYTES = 64 << 20  # of a file, where that is four pages or more
LEAST_FILES = 8  # that the bound is shared out among: one of them is removed at a time
LOCK = ".lock"  # the file in the folder whose lock keeps the folder to one process
LOCK_S = 5.0  # that opening the folder waits for a process that ends to let go of it
MOST_PAGES = 1 << 20  # in the index, of some 300 bytes each
MAGIC = b"redpages"
VERSION = 1

_FILE = struct.Struct("<8sII")  # magic, version, bytes of the name behind
_RECORD = struct.Struct("<16sQQI")  # hash, bytes, checksum, flags
_DIGEST = 8  # bytes, of everything in a head before it
_GONE = 1 << 31  # a flag: its bytes were found to be wrong
_FULL = errno.ENOSPC, errno.EDQUOT
_NAME = re.compile(r"(\d{10})\.pages")

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a page's bytes are, and what they should be."""

    file: int
    offset: int  # of its record
    checksum: int
    flags: int


class Held(Protocol):
    """A folder that is kept to this process."""

    def release(self) -> object:
        """Lets it go."""
        ...


# Keeps a folder, which exists, to this process by a lock on a file in it: the folder, the file, and the seconds to wait
# for another process to let go of it.
Hold = Callable[[Path, Path, float], Held]


class _Folder(NamedTuple):
    """A folder that this process has locked."""

    descriptor: int
    held: Held
    lock: os.stat_result | None  # of its lock file; None: the file system has no locks


class _File:
    __slots__ = ("end", "hashes", "used")

    def __init__(self, end: int, used: int) -> None:
        self.end = end  # bytes that are written
        self.used = used  # ns, of the clock of files: when a page of it was last used
        self.hashes: list[PageHash] = []


class DiskPages:
    """The pages of one folder. `places` is its index."""

    def __init__(self, folder: Path, name: str, page_bytes: int, most_bytes: int, hold: Hold) -> None:
        """name: whose pages they are; files of another name are removed. Raises OSError where the folder cannot be made
        or written, and what `hold` raises."""
        self.places: dict[PageHash, Place] = {}
        self.bytes = 0  # of all files
        self.most_bytes = most_bytes
        self._folder, self._page_bytes = folder, page_bytes
        self._record_bytes = _RECORD.size + _DIGEST + page_bytes
        self._head = _sealed(_FILE.pack(MAGIC, VERSION, len(name.encode())) + name.encode())
        self._file_bytes = max(
            len(self._head) + self._record_bytes, min(max(FILE_BYTES, 4 * page_bytes), most_bytes // LEAST_FILES)
        )
        self._files: dict[int, _File] = {}
        self._current: int | None = None  # the file that is being written
        self._full = False  # the file system has been full, which was logged
        self.removed: Callable[[Sequence[PageHash]], object] | None = None  # told of pages that have left, with a file
        self._hold = hold
        self._own: _Folder | None = self._taken(LOCK_S)  # None: it was removed, or is another process's

    def __len__(self) -> int:
        return len(self.places)

    def load(self) -> Iterator[int]:
        """Reads the index, newest files first, and yields how many pages each file had. Files that are no use (of
        another name, without a whole page, beyond the bound) are removed. A file that cannot be read is skipped: it
        counts towards the bound, and is removed in its turn. Raises OSError where the folder cannot be read."""
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
            file = _File(size, used)
            try:
                with self._open(number, os.O_RDONLY) as descriptor:
                    ours = os.pread(descriptor, len(self._head), 0) == self._head
                    records, end = self._records(descriptor, number, size) if ours else ({}, 0)
            except OSError as error:
                _log.warning("%s: skipped: it cannot be read: %s", self._path(number), error.strerror or error)
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
            if end < size:  # a record that was not written to its end
                with contextlib.suppress(OSError), self._open(number, os.O_WRONLY) as descriptor:
                    os.ftruncate(descriptor, end)  # the file may be read-only
            file.end = end
            self._files[number] = file
            self.bytes += end
            yield len(file.hashes)
        if others:
            _log.warning("%s: %d files hold pages of another model, or are none: removed", self._folder, others)

    def write(self, hash: PageHash, page: memoryview, checksum: int, flags: int) -> Place:
        """Appends a page; a page of that name before it counts no more. flags: below 2^31.

        Where the file system is full, the least lately used file is removed, and the page is written where that makes
        room. Where the folder or the file was removed, it is made again; where the folder was replaced, the pages of
        the new one are loaded. Raises OSError, what was there stays; and what `hold` raises where the folder is another
        process's by now.
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
                    "%s: the file system is full at %.3g of %.3g GB (disk_size): the oldest pages are removed",
                    *(self._folder, self.bytes / 1e9, self.most_bytes / 1e9),
                )
        return self._append(hash, page, checksum, flags)

    def read(self, place: Place, into: memoryview) -> bool:
        """Reads a page's bytes, as they are; False where they are not all there. Raises OSError."""
        if place.file not in self._files:
            return False
        try:
            with self._open(place.file, os.O_RDONLY) as descriptor:
                return os.preadv(descriptor, [into], place.offset + _RECORD.size + _DIGEST) == len(into)
        except FileNotFoundError:
            self._forget_missing()
            raise

    def use(self, places: set[int], now_ns: int) -> None:
        """Pages of these files have been used. now_ns: of the clock of files; it outlives a restart."""
        for number in places:
            if (file := self._files.get(number)) is not None:
                file.used = now_ns
                with contextlib.suppress(OSError):
                    name = self._path(number).name
                    os.utime(name, ns=(now_ns, now_ns), dir_fd=self._descriptor(), follow_symlinks=False)

    def spoil(self, hash: PageHash) -> None:
        """A page's bytes are wrong: it counts no more, nor after a restart."""
        place = self.places.pop(hash, None)
        if place is not None:
            head = _sealed(_RECORD.pack(hash, self._page_bytes, place.checksum, place.flags | _GONE))
            with contextlib.suppress(OSError), self._open(place.file, os.O_WRONLY) as descriptor:
                os.pwrite(descriptor, head, place.offset)

    def drop(self, hash: PageHash) -> None:
        """A page counts no more, until a restart at least."""
        self.places.pop(hash, None)

    def close(self) -> None:
        """Lets go of the folder."""
        self._files.clear()
        self.places.clear()
        self._let_go()

    def check(self) -> None:
        """Raises AssertionError unless the index names whole records of files that are there, within the bound."""
        assert self.bytes == sum(file.end for file in self._files.values()), "bytes are counted wrong"
        assert self.bytes <= max(self.most_bytes, self._file_bytes), (
            f"{self.bytes:,} bytes, {self.most_bytes:,} allowed"
        )
        for hash, place in self.places.items():
            file = self._files[place.file]
            assert place.offset + self._record_bytes <= file.end, "a page beyond the end of its file"
            assert hash in file.hashes, "a page that its file does not know of"

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010d}.pages"

    def _taken(self, wait_s: float) -> _Folder:
        """Makes the folder where it is missing, readable by its owner alone, and keeps it to this process."""
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
        return _Folder(descriptor, held, lock)

    def _let_go(self) -> None:
        if self._own is not None:
            self._own.held.release()
            os.close(self._own.descriptor)
            self._own = None

    def _is_ours(self) -> bool:
        """Whether the path still names the folder that was locked, by the lock file that was locked. Raises OSError."""
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
        """Of the folder. Raises FileNotFoundError where it is not this process's any more."""
        if not self._is_ours():
            raise FileNotFoundError(errno.ENOENT, "the folder was removed or replaced", str(self._folder))
        assert self._own is not None
        return self._own.descriptor

    @contextlib.contextmanager
    def _open(self, number: int, flags: int) -> Generator[int]:
        """A file's descriptor, inside. Raises OSError."""
        name = self._path(number).name
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor())
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _append(self, hash: PageHash, page: memoryview, checksum: int, flags: int) -> Place:
        if self._own is None:
            self._own = self._taken(0)
            try:
                for _ in self.load():  # another process may have written there
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
                    raise OSError(errno.ENOSPC, "the disk took a part of a page", str(self._path(number)))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, file.end)
                raise
        self.drop(hash)
        place = self.places[hash] = Place(number, file.end, checksum, flags)
        file.hashes.append(hash)
        file.end += written
        self.bytes += written
        return place

    def _room(self) -> tuple[int, _File]:
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
                    raise OSError(errno.ENOSPC, "the disk took a part of a file's head", str(self._path(number)))
                used = os.fstat(descriptor).st_mtime_ns
            except OSError:
                self._unlink(number)
                raise
        file = self._files[number] = _File(len(self._head), used)
        self.bytes += file.end
        self._current = number
        return number, file

    def _remove_one(self) -> bool:
        """Removes the file whose pages were least lately used, but not the one that is being written; whether there
        was one."""
        numbers = [number for number in self._files if number != self._current]
        if numbers:
            self._remove(min(numbers, key=lambda number: (self._files[number].used, number)))
        return bool(numbers)

    def _remove(self, number: int) -> None:
        self._forget(number)
        self._unlink(number)

    def _forget(self, number: int) -> None:
        """The pages of a file count no more."""
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
        with contextlib.suppress(OSError):  # where nothing can be written nothing can be removed
            os.unlink(self._path(number).name, dir_fd=self._descriptor())

    def _is_there(self, number: int) -> bool:
        """Whether the folder has a file of that number. Raises OSError."""
        try:
            os.stat(self._path(number).name, dir_fd=self._descriptor(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _forget_missing(self) -> None:
        """Somebody else has removed files, or the folder: forgets their pages, and lets go of a folder that is gone."""
        gone = self._own is not None and not self._is_ours()
        missing = [number for number in self._files if gone or not self._is_there(number)]
        for number in missing:
            self._forget(number)
        if gone:
            self._let_go()
            _log.warning("%s: the folder was removed or replaced while in use: its pages are forgotten", self._folder)
        elif missing:
            what = f"{len(missing)} files were removed"
            _log.warning("%s: %s while in use: their pages are forgotten", self._folder, what)

    def _records(self, descriptor: int, number: int, size: int) -> tuple[dict[PageHash, Place], int]:
        """The pages of a file's whole records, and where the last of these ends. Raises OSError."""
        records, end = dict[PageHash, Place](), len(self._head)
        while end + self._record_bytes <= size:
            head = os.pread(descriptor, _RECORD.size + _DIGEST, end)
            if head != _sealed(head[:-_DIGEST]):
                break
            hash, count, checksum, flags = _RECORD.unpack(head[:-_DIGEST])
            if count != self._page_bytes:
                break
            if not flags & _GONE:
                records[PageHash(hash)] = Place(number, end, checksum, flags)
            end += self._record_bytes
        return records, end


def _sealed(head: bytes) -> bytes:
    return head + blake2b(head, digest_size=_DIGEST).digest()
