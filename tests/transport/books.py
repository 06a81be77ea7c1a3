"""A record in place of a GPU's driver, for the transport `peer`: host memory replaces a GPU's, and copies take several
polls.
"""

from collections import Counter
from collections.abc import Callable
from ctypes import memmove

from redline.transport.base import MemoryRange
from redline.transport.memory import host_memory


class Exported:
    """Memory that is recorded as exported until it is freed."""

    def __init__(self, book: "Book", size: int) -> None:
        self._book, self._memory = book, host_memory(size)
        self.address, self.handle = self._memory.address, b"%64d" % len(book.exported)
        book.exported[self.handle] = self._memory

    def free(self) -> None:
        self._book.freed_while_mapped |= self._book.mapped[self.handle] > 0
        self._book.gone.add(self.handle)


class Book:
    """The exports, mappings and copies of the GPUs of one host.

    polls: the number of polls before a copy is complete. refuse: the error of mappings. fail: the error of copies.
    """

    def __init__(self, polls: int = 0) -> None:
        self.exported: dict[bytes, MemoryRange] = {}
        self.gone: set[bytes] = set()
        self.mapped: Counter[bytes] = Counter()
        self.freed_while_mapped = False
        self.polls = polls
        self.refuse: str | None = None
        self.fail: str | None = None
        self.change: Callable[[int, int], None] | None = None  # called with each completed copy

    def gpu(self) -> "BookGpu":
        return BookGpu(self)


class BookGpu:
    """One of the GPUs, with the interface of `transport.peer.GpuDriver`."""

    device = None

    def __init__(self, book: Book) -> None:
        self._book = book

    def export(self, size: int) -> Exported:
        if size > 1 << 40:
            raise RuntimeError("CUDA driver error 2: out of memory")
        return Exported(self._book, size)

    def map(self, handle: bytes) -> int:
        if self._book.refuse is not None:
            raise RuntimeError(self._book.refuse)
        if handle in self._book.gone or handle not in self._book.exported:
            raise RuntimeError("CUDA driver error 1: invalid argument")
        self._book.mapped[handle] += 1
        return self._book.exported[handle].address

    def unmap(self, address: int) -> None:
        (handle,) = [handle for handle, memory in self._book.exported.items() if memory.address == address]
        self._book.mapped[handle] -= 1

    def copy(self, into: int, source: int, count: int) -> Callable[[], bool]:
        if self._book.fail is not None:
            raise RuntimeError(self._book.fail)
        left = [self._book.polls, 1]

        def ended() -> bool:
            if self._book.fail is not None:
                raise RuntimeError(self._book.fail)
            if left[0]:
                left[0] -= 1
                return False
            if left[1]:
                memmove(into, source, count)
                if self._book.change is not None:
                    self._book.change(into, count)
                left[1] = 0
            return True

        return ended
