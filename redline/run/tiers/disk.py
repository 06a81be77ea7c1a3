"""Pages in files, by their hash, within a bound. What is there survives a restart, and a kill at any byte.

A file is a head, which says whose pages it holds, and records that are only ever appended: a head of its own, with the
page's name, what is known of it and the checksum of its bytes, and the bytes. A record counts once all of it is there,
so a kill or a full disk costs the newest one. The index is in memory, and read again from the records' heads at the
start. The file whose pages were least lately used is removed when another is begun and there would be too many bytes.

Nothing is synced: what a power cut takes away does not have its checksum. One thread at a time may use it.
"""

import contextlib
import errno
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
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
    __slots__ = ("descriptor", "end", "hashes", "used")

    def __init__(self, descriptor: int, end: int, used: int) -> None:
        self.descriptor = descriptor
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
        self._folder, self._name, self._page_bytes = folder, name.encode(), page_bytes
        self._record_bytes = _RECORD.size + _DIGEST + page_bytes
        head = _FILE.size + len(self._name) + _DIGEST
        self._file_bytes = max(
            head + self._record_bytes, min(max(FILE_BYTES, 4 * page_bytes), most_bytes // LEAST_FILES)
        )
        self._files: dict[int, _File] = {}
        self._current: int | None = None  # the file that is being written
        self.removed: Callable[[Sequence[PageHash]], object] | None = None  # told of pages that have left, with a file
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o777 != 0o700:
            folder.chmod(0o700)
        self._held = hold(folder)

    def __len__(self) -> int:
        return len(self.places)

    def load(self) -> Iterator[int]:
        """Reads the index, newest files first, and yields how many pages each file had. Files that are no use (of
        another name, without a whole page, beyond the bound) are removed."""
        found: list[tuple[int, int, Path]] = []
        for path in self._folder.iterdir():
            if (match := _NAME.fullmatch(path.name)) is not None and path.is_file() and not path.is_symlink():
                found.append((path.stat().st_mtime_ns, int(match[1]), path))
        others = 0
        for used, number, path in sorted(found, reverse=True):
            size = path.stat().st_size
            if self.bytes + size > self.most_bytes or len(self.places) >= MOST_PAGES:
                _unlink(path)
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:  # it may be there to be read
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            start = self._read_head(descriptor)
            if start is None:
                others += 1
            count = 0 if start is None else self._read_records(descriptor, number, start, used)
            if not count:
                os.close(descriptor)
                _unlink(path)
                continue
            yield count
        if others:
            _log.warning("%s: %d files hold pages of another model, or are none: removed", self._folder, others)

    def write(self, hash: PageHash, page: memoryview, checksum: int, flags: int) -> Place:
        """Appends a page; a page of that name before it counts no more. flags: below 2^31. Raises OSError; what was
        there stays."""
        number, file = self._room()
        head = _sealed(_RECORD.pack(hash, len(page), checksum, flags))
        try:
            written = os.pwritev(file.descriptor, [head, page], file.end)
            if written != len(head) + len(page):
                raise OSError(errno.ENOSPC, "the disk took a part of a page", str(self._path(number)))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.descriptor, file.end)
            raise
        self.drop(hash)
        place = self.places[hash] = Place(number, file.end, checksum, flags)
        file.hashes.append(hash)
        file.end += written
        self.bytes += written
        return place

    def read(self, place: Place, into: memoryview) -> bool:
        """Reads a page's bytes, as they are; False where they are not all there. Raises OSError."""
        file = self._files.get(place.file)
        if file is None:
            return False
        start = place.offset + _RECORD.size + _DIGEST
        return os.preadv(file.descriptor, [into], start) == len(into)

    def use(self, places: set[int], now_ns: int) -> None:
        """Pages of these files have been used. now_ns: of the clock of files; it outlives a restart."""
        for number in places:
            if (file := self._files.get(number)) is not None:
                file.used = now_ns
                with contextlib.suppress(OSError):
                    os.utime(file.descriptor, ns=(now_ns, now_ns))

    def spoil(self, hash: PageHash) -> None:
        """A page's bytes are wrong: it counts no more, nor after a restart."""
        place = self.places.pop(hash, None)
        file = self._files.get(place.file) if place is not None else None
        if place is not None and file is not None:
            head = _sealed(_RECORD.pack(hash, self._page_bytes, place.checksum, place.flags | _GONE))
            with contextlib.suppress(OSError):
                os.pwrite(file.descriptor, head, place.offset)

    def drop(self, hash: PageHash) -> None:
        """A page counts no more, until a restart at least."""
        self.places.pop(hash, None)

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()
        self.places.clear()
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

    def _room(self) -> tuple[int, _File]:
        """The file to append a page to."""
        current = self._current
        if current is not None and self._files[current].end + self._record_bytes <= self._file_bytes:
            return current, self._files[current]
        self._current = None
        while self._files and (self.bytes + self._file_bytes > self.most_bytes or len(self.places) >= MOST_PAGES):
            self._remove(min(self._files, key=lambda number: (self._files[number].used, number)))
        number = max(self._files, default=0) + 1
        while self._path(number).exists():
            number += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path(number), flags, 0o600)
        head = _sealed(_FILE.pack(MAGIC, VERSION, len(self._name)) + self._name)
        try:
            if os.pwrite(descriptor, head, 0) != len(head):
                raise OSError(errno.ENOSPC, "the disk took a part of a file's head", str(self._path(number)))
            used = os.fstat(descriptor).st_mtime_ns
        except OSError:
            os.close(descriptor)
            _unlink(self._path(number))
            raise
        file = self._files[number] = _File(descriptor, len(head), used)
        self.bytes += file.end
        self._current = number
        return number, file

    def _remove(self, number: int) -> None:
        file = self._files.pop(number)
        left = [hash for hash in file.hashes if hash in self.places and self.places[hash].file == number]
        for hash in dict.fromkeys(left):
            del self.places[hash]
        if self.removed is not None:
            self.removed(left)
        self.bytes -= file.end
        os.close(file.descriptor)
        _unlink(self._path(number))

    def _read_head(self, descriptor: int) -> int | None:
        """Where the records of a file begin; None where they are not of this name."""
        head = _sealed(_FILE.pack(MAGIC, VERSION, len(self._name)) + self._name)
        return len(head) if os.pread(descriptor, len(head), 0) == head else None

    def _read_records(self, descriptor: int, number: int, start: int, used: int) -> int:
        """Takes in a file's whole records; how many there are. What lies behind the last is cut off."""
        size, file = os.fstat(descriptor).st_size, _File(descriptor, start, used)
        while file.end + self._record_bytes <= size:
            head = os.pread(descriptor, _RECORD.size + _DIGEST, file.end)
            if head != _sealed(head[:-_DIGEST]):
                break
            hash, count, checksum, flags = _RECORD.unpack(head[:-_DIGEST])
            if count != self._page_bytes:
                break
            there = self.places.get(PageHash(hash))
            if not flags & _GONE and (there is None or there.file <= number):
                self.places[PageHash(hash)] = Place(number, file.end, checksum, flags)
                file.hashes.append(PageHash(hash))
            file.end += self._record_bytes
        if file.hashes:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, file.end)
            self._files[number] = file
            self.bytes += file.end
        return len(file.hashes)


def _sealed(head: bytes) -> bytes:
    return head + blake2b(head, digest_size=_DIGEST).digest()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # where nothing can be written nothing can be removed
        path.unlink()
