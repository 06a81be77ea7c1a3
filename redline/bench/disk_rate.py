"""How fast files are read from their disk, by plain reads: what a load of a checkpoint is compared with."""

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from redline import clock
from redline.errors import ConfigError
from redline.wire.base import Record

BLOCK = 8 << 20  # bytes of one plain read
THREADS = 1, 4, 8  # of plain reads


class Read(Record, frozen=True):
    """A plain read.

    disk_share: of the bytes, fetched from a disk; None if the system does not report it.
    """

    threads: int
    gb_per_s: float
    disk_share: float | None


class Part(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: Path
    start: int
    stop: int


def from_disk() -> int | None:
    """Bytes that the system has fetched from a disk for this process, read ahead or not; None where it does not say."""
    try:
        return int(Path("/proc/self/io").read_text().split("\nread_bytes:")[1].split()[0])
    except OSError:
        return None


def forget(files: Sequence[Path]) -> None:
    """Takes files out of the page cache: clean pages that nobody has mapped."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: Sequence[Path], threads: int) -> Read:
    """All bytes of the files in order. Raises as `read_parts`."""
    return read_parts([Part(path, 0, path.stat().st_size) for path in files], threads)


def read_parts(parts: Sequence[Part], threads: int) -> Read:
    """The bytes of the parts in order, in blocks of BLOCK that `threads` threads take in turn.

    Raises OSError if a file cannot be read, and ConfigError if one is shorter than it was.
    """
    places = [(path, at, min(BLOCK, stop - at)) for path, start, stop in parts for at in range(start, stop, BLOCK)]
    whole, waiting, taking = sum(part.stop - part.start for part in parts), iter(places), threading.Lock()

    def work() -> int:
        block, done = bytearray(BLOCK), 0
        while True:
            with taking:
                place = next(waiting, None)
            if place is None:
                return done
            path, at, count = place
            done += os.preadv(opened[path], [memoryview(block)[:count]], at)

    files = {part.file for part in parts}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(threads) as pool:
        opened = {path: stack.enter_context(path.open("rb", buffering=0)).fileno() for path in files}
        disk, began = from_disk(), clock.perf_counter()
        done = sum(future.result() for future in [pool.submit(work) for _ in range(threads)])
        seconds, now = clock.perf_counter() - began, from_disk()
    if done != whole:
        raise ConfigError(f"{parts[0].file.parent}: {done:,} of {whole:,} bytes were read; leave the files as they are")
    share = None if disk is None or now is None else round((now - disk) / whole, 3)
    return Read(threads=threads, gb_per_s=round(whole / seconds / 1e9, 3), disk_share=share)
