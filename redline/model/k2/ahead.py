"""Prefetches a checkpoint's files into the page cache, so that disk reads overlap with laying out the weights.

A memory-mapped page is read when the one loading thread touches it, so a disk that could serve many reads at a time
serves one. Advised pages (posix_fadvise) are in the page cache, which the kernel can reclaim, and not in this
process's memory.
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

AHEAD_BYTES = 256 << 20  # bytes of tensors that are advised ahead of the last tensor handed out
PIECE_BYTES = 128 << 10  # bytes per posix_fadvise call: of a larger range Linux reads only the device's read-ahead size


class Ahead:
    """A thread that prefetches. Call `handed_out` as tensors are handed out, and `close` at the end."""

    def __init__(self, places: Iterable[tuple[Path, int, int]], part: int = 0, parts: int = 1) -> None:
        """places: (file, first byte, last byte + 1) of each tensor, roughly in the order in which they are handed out.

        part, parts: this process prefetches part `part` of `parts` of each tensor; the other processes that read the
        same checkpoint prefetch the other parts."""
        self._places = places
        self._part, self._parts = part, parts
        self._handed_out = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
        if hasattr(os, "posix_fadvise"):
            self._thread.start()

    def handed_out(self, count: int) -> None:
        """Adds `count` bytes to the tensors handed out so far."""
        with self._changed:
            self._handed_out += count
            self._changed.notify()

    def close(self) -> None:
        """Stops the thread; ranges that are already advised are still read."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        files: dict[Path, int] = {}
        position = 0
        try:
            for path, start, stop in self._places:
                if not self._wait_for(position):
                    return
                if path not in files:
                    files[path] = os.open(path, os.O_RDONLY)
                size = stop - start
                end = start + size * (self._part + 1) // self._parts
                for first in range(start + size * self._part // self._parts, end, PIECE_BYTES):
                    count = min(PIECE_BYTES, end - first)
                    os.posix_fadvise(files[path], first, count, os.POSIX_FADV_WILLNEED)
                position += size
        except OSError:
            pass  # prefetching is optional: the reader of the file reports the error
        finally:
            for file in files.values():
                os.close(file)

    def _wait_for(self, position: int) -> bool:
        """Waits until the tensor at byte `position` of the order is to be prefetched. False if closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or position < self._handed_out + AHEAD_BYTES)
            return not self._closed
