"""Pages in the host's memory, by their hash, in slots of one page each: who has a slot, and who gives it up next.

Memory is taken from the system a slab at a time, as it is needed, or at once where several ranks read it. On a GPU it
is pinned: copies from memory that is not make a tenth of the speed, and hold up who asks for them. Pinning takes longer
than to copy what lies there, and a step that is launched meanwhile waits. So it is done while no step runs, all of it,
and only where little is left beside steps (`Slots.short`). One thread at a time may use what is here, but for
`Slots.slab`.
"""

import contextlib
import ctypes
import logging
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from redline.wire.job import PageHash

Memory = Callable[[int], Tensor]
"""Gives so many bytes of the host, uint8."""

SLAB_BYTES = 64 << 20  # at least one slot; pinning takes tens of milliseconds for so much
AHEAD_BYTES = 512 << 20  # of pinned memory, made before it is needed though steps run: that waits, if it is less

_log = logging.getLogger(__name__)


class Entry:
    """A page in memory. It stays while it comes, is wanted, or is written to the disk.

    checksum: None: it is not sealed yet. sum: where its seal is once its copy has ended: a place of these, int64; None:
    nobody has added it up. coming: the end of its copy, while a GPU may still write it; None: it is here. readings:
    that want it.
    """

    __slots__ = ("checksum", "coming", "flags", "readings", "slot", "sum", "writing")

    def __init__(self, slot: int, flags: int, checksum: int | None) -> None:
        self.slot = slot
        self.flags = flags
        self.checksum = checksum
        self.sum: tuple[Tensor, int] | None = None
        self.coming: torch.cuda.Event | None = None
        self.readings = 0
        self.writing = False

    @property
    def stays(self) -> bool:
        """Whether its slot cannot be given up."""
        return self.readings > 0 or self.writing or self.coming is not None


class HostPages:
    """The pages that have a slot, least lately used first: `clean` are those that the disk has too, `dirty` the others.

    A slot that was taken and has no page yet belongs to who fills it.
    """

    def __init__(self, page_bytes: int, most_bytes: int, *, pinned: bool, memory: Memory | None = None) -> None:
        """memory: as `Slots` has it."""
        self.clean: OrderedDict[PageHash, Entry] = OrderedDict()
        self.dirty: OrderedDict[PageHash, Entry] = OrderedDict()
        self.slots = Slots(page_bytes, most_bytes, pinned=pinned, memory=memory)
        self._filling: set[int] = set()

    def __len__(self) -> int:
        return len(self.clean) + len(self.dirty)

    def __iter__(self) -> Iterator[Entry]:
        yield from self.clean.values()
        yield from self.dirty.values()

    def find(self, hash: PageHash) -> Entry | None:
        """The page of that name."""
        return self.clean.get(hash) or self.dirty.get(hash)

    def touch(self, hash: PageHash) -> None:
        """The page of that name, where there is one, is used."""
        for entries in (self.clean, self.dirty):
            if hash in entries:
                entries.move_to_end(hash)

    def drop(self, hash: PageHash) -> None:
        """The page of that name is given up. Raises KeyError where there is none."""
        entry = self.clean.pop(hash, None) or self.dirty.pop(hash)
        self.slots.give(entry.slot)

    def take(self) -> tuple[int | None, Literal["clean", "dirty", None]]:
        """A slot to fill, and which page was given up for it: what was least lately used, and first what is clean.
        No slot where all pages stay."""
        slot = self.slots.take()
        given_up: Literal["clean", "dirty", None] = None
        if slot is None:
            hash = next((hash for hash, entry in self.clean.items() if not entry.stays), None)
            given_up = "clean"
            if hash is None:
                hash = next((hash for hash, entry in self.dirty.items() if not entry.stays), None)
                given_up = "dirty"
            if hash is None:
                return None, None
            self.drop(hash)
            slot = self.slots.take()
        if slot is not None:
            self._filling.add(slot)
        return slot, given_up

    def put(self, hash: PageHash, slot: int, flags: int, checksum: int | None = None, *, clean: bool = False) -> Entry:
        """A slot that was taken is filled with the page of that name, of which there is no other."""
        self._filling.remove(slot)
        entry = Entry(slot, flags, checksum)
        (self.clean if clean else self.dirty)[hash] = entry
        return entry

    def give_back(self, slot: int) -> None:
        """A slot that was taken is not filled."""
        self._filling.remove(slot)
        self.slots.give(slot)

    def written(self, hash: PageHash) -> None:
        """The disk has a dirty page too."""
        self.clean[hash] = self.dirty.pop(hash)

    def unwritten(self, hash: PageHash) -> None:
        """The disk has a page no more; it is the first to be given up."""
        if hash in self.clean:
            self.dirty[hash] = self.clean.pop(hash)
            self.dirty.move_to_end(hash, last=False)

    def check(self) -> None:
        """Raises AssertionError unless every slot is one page's, being filled, or free."""
        held = [entry.slot for entry in self]
        assert len(set(held)) == len(held), "two pages have the same slot"
        assert not self.clean.keys() & self.dirty.keys(), "a page is in memory twice"
        assert not set(held) & self._filling, "a slot is filled while a page has it"
        self.slots.check({*held, *self._filling})


class Slots:
    """At most `most_bytes`, at least one slot."""

    def __init__(self, slot_bytes: int, most_bytes: int, *, pinned: bool, memory: Memory | None = None) -> None:
        """memory: gives all of it at once, uint8 [bytes]; None: it is taken from the system, a slab at a time."""
        self.total = max(1, most_bytes // slot_bytes)
        self.ahead = AHEAD_BYTES if pinned else None  # bytes; None: nothing is made before it is needed
        self._slot_bytes, self._pinned = slot_bytes, pinned and memory is None
        self._per_slab = max(1, min(self.total, SLAB_BYTES // slot_bytes))
        self._slabs: list[Tensor] = []
        self._free: list[int] = []
        self._made = 0  # slots of the slabs that there are
        if memory is not None:
            self._per_slab = self.total
            self._has(memory(self.total * slot_bytes).view(self.total, slot_bytes))

    @property
    def free(self) -> int:
        """Slots that nobody has, those included whose memory is not there yet."""
        return len(self._free) + self.total - self._made

    def short(self, *, busy: bool) -> bool:
        """Whether another slab should be made before it is needed. busy: whether steps run."""
        if self.ahead is None or self._made >= self.total:
            return False
        return not busy or len(self._free) * self._slot_bytes < self.ahead

    def take(self) -> int | None:
        """A slot that nobody has; None where there is none, or the system gives no more memory."""
        if not self._free:
            self.add(self.slab())
        return self._free.pop() if self._free else None

    def slab(self) -> Tensor | None:
        """Memory for the next slots, uint8 [slots, slot_bytes]; None where there is none, or nothing is left to make.
        Any thread may call this, beside another."""
        count = min(self._per_slab, self.total - self._made)
        if count <= 0:
            return None
        try:
            with torch.inference_mode(False):  # the store's thread writes to it too, which is not in that mode
                if self._pinned:
                    return pinned(count * self._slot_bytes).view(count, self._slot_bytes)
                return torch.empty(count, self._slot_bytes, dtype=torch.uint8)
        except (RuntimeError, OSError) as error:  # torch's words, and the system's, for no memory
            held = self._made * self._slot_bytes / 1e9
            _log.warning("the host gives no more memory for pages: %.2f GB are held, and that is all (%s)", held, error)
            return None

    def add(self, slab: Tensor | None) -> None:
        """Slots more, of `slab`; None: there will be no more. One that was made beside another, and is of no use any
        more, is let go."""
        if slab is None:
            self.total = self._made
        elif len(slab) == min(self._per_slab, self.total - self._made):
            self._has(slab)
        elif self._pinned:
            unpin(slab)

    def give(self, slot: int) -> None:
        """The slot is nobody's."""
        self._free.append(slot)

    def bytes_of(self, slot: int) -> Tensor:
        """uint8 [slot_bytes]."""
        slab, place = divmod(slot, self._per_slab)
        return self._slabs[slab][place]

    def check(self, held: set[int]) -> None:
        """Raises AssertionError unless every slot is free or held, and none both."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert not held & set(self._free), f"slots {sorted(held & set(self._free))} are free and held"
        assert len(held) + len(self._free) == self._made, f"of {self._made} slots {len(held)} are held"

    def close(self) -> None:
        """Nobody copies from its memory or to it any more: the driver lets it go."""
        if self._pinned:
            for slab in self._slabs:
                unpin(slab)

    def _has(self, slab: Tensor) -> None:
        """Slots more, uint8 [slots, slot_bytes]."""
        self._slabs.append(slab)
        self._free.extend(range(self._made + len(slab) - 1, self._made - 1, -1))
        self._made += len(slab)


def pinned(size: int) -> Tensor:
    """New memory of the host, zeros, that the GPU's driver keeps in its place until `unpin`: uint8 [size]. It is
    written to first, which the driver has no part in and no launch waits for; in large pages, where the system has
    them, the rest takes a moment. Raises OSError or RuntimeError where there is not so much."""
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a system that was built without
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory_B = torch.frombuffer(mapped, dtype=torch.uint8)
    ctypes.memset(memory_B.data_ptr(), 0, size)  # by this thread alone, and without Python's lock
    runtime: Any = torch.cuda.cudart()
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(memory_B.data_ptr(), size, 0))
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # CUDA tells the next launch of it too: this one, and no step
        raise
    return memory_B


def unpin(memory: Tensor) -> None:
    """The driver lets go of what `pinned` gave. It stays as it is, for as long as it is used."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())
