"""Has the system fetch the files of a checkpoint before they are read, so that a disk and a layout work side by side.

What is mapped is fetched where it is touched, by the one thread that touches it: a disk that could read many places at
once then waits for one. What is advised lies in the page cache, which gives way, and not in this process's memory.
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

AHEAD_BYTES = 256 << 20  # of tensors, between what is handed out and what is advised
PIECE_BYTES = 128 << 10  # of one advice: of more, Linux fetches no more than a device is set to read ahead


class Ahead:
    """A thread that advises. Tell it what was handed out, and close it."""

    def __init__(self, places: Iterable[tuple[Path, int, int]], part: int = 0, parts: int = 1) -> None:
        """places: (file, first byte, byte behind the last) of each tensor, about in the order in which they are handed
        out. part, parts: of each tensor this process sees to such a part; others, that read it too, see to theirs."""
        self._places = places
        self._part, self._parts = part, parts
        self._handed_out = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
        if hasattr(os, "posix_fadvise"):
            self._thread.start()

    def handed_out(self, count: int) -> None:
        """So many bytes of tensors more."""
        with self._changed:
            self._handed_out += count
            self._changed.notify()

    def close(self) -> None:
        """Ends it; what was advised is still fetched."""
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
            pass  # it was advice: whoever reads the file finds what is wrong with it, and says so
        finally:
            for file in files.values():
                os.close(file)

    def _wait_for(self, position: int) -> bool:
        """Returns once the tensor at this place of the order is near: True, or False where it is closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or position < self._handed_out + AHEAD_BYTES)
            return not self._closed
