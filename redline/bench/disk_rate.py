"""Read rate of files from their disk, with plain reads: the baseline for the loading time of a checkpoint."""

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from redline import clock
from redline.errors import ConfigError
from redline.messages.base import Record

BLOCK = 8 << 20  # bytes per plain read
THREADS = 1, 4, 8  # thread counts of plain reads


class Read(Record, frozen=True):
    """A plain read.

    disk_share: share of the bytes that came from a disk; None if the system does not report it.
    """

    threads: int
    gb_per_s: float
    disk_share: float | None


class FilePart(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: Path
    start: int
    stop: int


def from_disk() -> int | None:
    """Bytes that the system has read from disk for this process, including readahead; None if it does not report it."""
    try:
        return int(Path("/proc/self/io").read_text().split("\nread_bytes:")[1].split()[0])
    except OSError:
        return None


def forget(files: Sequence[Path]) -> None:
    """Evicts files from the page cache: their clean pages that no process has mapped."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: Sequence[Path], threads: int) -> Read:
    """Reads all bytes of the files in order. Raises the errors of `read_parts`."""
    return read_parts([FilePart(path, 0, path.stat().st_size) for path in files], threads)


def read_parts(parts: Sequence[FilePart], threads: int) -> Read:
    """Reads the bytes of the parts in order, in blocks of BLOCK bytes that `threads` threads take in turn.

    Raises OSError if a file cannot be read, and ConfigError if a file has become shorter.
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
        raise ConfigError(
            f"{parts[0].file.parent}: {done:,} of {whole:,} bytes were read; the files must not change during the run"
        )
    share = None if disk is None or now is None else round((now - disk) / whole, 3)
    return Read(threads=threads, gb_per_s=round(whole / seconds / 1e9, 3), disk_share=share)
