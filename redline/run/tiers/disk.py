"""Pages in files, by their hash, within a bound. What is there survives a restart, and a kill at any byte.

A file is a head, which says whose pages it holds, and records that are only ever appended: a head of its own, with the
page's name, what is known of it and the checksum of its bytes, and the bytes. A record counts once all of it is there,
so a kill or a full disk costs the newest one. The index is in memory, and read again from the records' heads at the
start. The file whose pages were least lately used is removed when another is begun and there would be too many bytes,
or when the file system is full. A file is open only while it is read or written, so the process needs one descriptor,
however many files there are.

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


class _File:
    __slots__ = ("end", "hashes", "used")

    def __init__(self, end: int, used: int) -> None:
        self.end = end  # bytes that are written
        self.used = used  # ns, of the clock of files: when a page of it was last used
        self.hashes: list[PageHash] = []


class DiskPages:
    """The pages of one folder. `places` is its index."""

    def __init__(self, folder: Path, name: str, page_bytes: int, most_bytes: int, hold: Callable[[Path], Held]) -> None:
        """name: whose pages they are; files of another name are removed. hold: keeps the folder, which is there by
        then, to this process. Raises OSError where the folder cannot be made or written, and what `hold` raises."""
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
        self._held: Held | None = None
        self._take_folder()

    def __len__(self) -> int:
        return len(self.places)

    def load(self) -> Iterator[int]:
        """Reads the index, newest files first, and yields how many pages each file had. Files that are no use (of
        another name, without a whole page, beyond the bound) are removed. A file that cannot be read is skipped: it
        counts towards the bound, and is removed in its turn. Raises OSError where the folder cannot be read."""
        found: list[tuple[int, int, int]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if (match := _NAME.fullmatch(entry.name)) is not None and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, int(match[1]), status.st_size))
        others = 0
        for used, number, size in sorted(found, reverse=True):
            path = self._path(number)
            if self.bytes + size > self.most_bytes or len(self.places) >= MOST_PAGES:
                _unlink(path)
                continue
            file = _File(size, used)
            try:
                with self._open(number, os.O_RDONLY) as descriptor:
                    ours = os.pread(descriptor, len(self._head), 0) == self._head
                    records, end = self._records(descriptor, number, size) if ours else ({}, 0)
            except OSError as error:
                _log.warning("%s: skipped: it cannot be read: %s", path, error.strerror or error)
                self._files[number] = file
                self.bytes += size
                continue
            others += not ours
            for hash, place in records.items():
                if (there := self.places.get(hash)) is None or there.file <= number:
                    self.places[hash] = place
                    file.hashes.append(hash)
            if not file.hashes:
                _unlink(path)
                continue
            if end < size:  # a record that was not written to its end
                with contextlib.suppress(OSError):  # the file may be there to be read
                    os.truncate(path, end)
            file.end = end
            self._files[number] = file
            self.bytes += end
            yield len(file.hashes)
        if others:
            _log.warning("%s: %d files hold pages of another model, or are none: removed", self._folder, others)

    def write(self, hash: PageHash, page: memoryview, checksum: int, flags: int) -> Place:
        """Appends a page; a page of that name before it counts no more. flags: below 2^31.

        Where the file system is full, the least lately used file is removed, and the page is written where that makes
        room. Where the folder or the file was removed, it is made again. Raises OSError, what was there stays; and what
        `hold` raises where a folder that was removed is another process's now.
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
                    os.utime(self._path(number), ns=(now_ns, now_ns), follow_symlinks=False)

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
        if self._held is not None:
            self._held.release()

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

    def _take_folder(self) -> None:
        """Makes the folder where it is missing, readable by its owner alone, and keeps it to this process."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_mode & 0o777 != 0o700:
            self._folder.chmod(0o700)
        self._held = self._hold(self._folder)

    @contextlib.contextmanager
    def _open(self, number: int, flags: int) -> Generator[int]:
        """A file's descriptor, inside. Raises OSError."""
        descriptor = os.open(self._path(number), flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _append(self, hash: PageHash, page: memoryview, checksum: int, flags: int) -> Place:
        if self._held is None:
            self._take_folder()
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
        while self._path(number).exists():
            number += 1
        with self._open(number, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
            try:
                if os.pwrite(descriptor, self._head, 0) != len(self._head):
                    raise OSError(errno.ENOSPC, "the disk took a part of a file's head", str(self._path(number)))
                used = os.fstat(descriptor).st_mtime_ns
            except OSError:
                _unlink(self._path(number))
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
        file = self._files.pop(number)
        if number == self._current:
            self._current = None
        left = [hash for hash in file.hashes if hash in self.places and self.places[hash].file == number]
        for hash in dict.fromkeys(left):
            del self.places[hash]
        if self.removed is not None:
            self.removed(left)
        self.bytes -= file.end
        _unlink(self._path(number))

    def _forget_missing(self) -> None:
        """Somebody else has removed files, or the folder: forgets their pages, and lets go of a folder that is gone."""
        missing = [number for number in self._files if not self._path(number).exists()]
        for number in missing:
            self._remove(number)
        gone = self._held is not None and not self._folder.is_dir()
        if gone:
            assert self._held is not None
            self._held.release()
            self._held = None
        what = "the folder was removed" if gone else f"{len(missing)} files were removed"
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


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # where nothing can be written nothing can be removed
        path.unlink()
