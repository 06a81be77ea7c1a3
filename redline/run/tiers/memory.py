"""KV offload to host memory: pages by hash, in slots of one page each, with LRU eviction.

Memory is allocated one slab at a time, as it is needed, or all at once if several ranks read it. For a GPU it is
pinned: copies from unpinned memory reach a tenth of the speed, and block the caller. Pinning takes longer than copying
the same memory, and delays any step launched during that time. So memory is pinned while no step runs, all of it, and
during steps only if little is left (`HostSlots.short`). Only one thread at a time may use this module, except for
`HostSlots.slab`.
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

from redline.messages.job import PageHash

Memory = Callable[[int], Tensor]
"""Allocates that many bytes of host memory, uint8."""

SLAB_BYTES = 64 << 20  # bytes per slab, at least one slot; pinning that much takes tens of milliseconds
AHEAD_BYTES = 512 << 20  # bytes of free pinned memory below which more is pinned even while steps run: they wait for it

_log = logging.getLogger(__name__)


class HostPage:
    """A page in memory. It cannot be evicted while it is copied in, is wanted by a read, or is written to disk.

    checksum: None until it is computed. sum: (int64 tensor, index) of the checksum that a GPU computes with the copy;
    None: no GPU computes it. coming: event at the end of its copy, while a GPU may still write it; None: the copy is
    done. readings: number of reads that want it.
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
        """Whether the page cannot be evicted."""
        return self.readings > 0 or self.writing or self.coming is not None


class HostPages:
    """The pages with a slot, least recently used first: `clean` pages are on disk too, `dirty` pages are not.

    A slot that was taken and has no page yet belongs to the caller that fills it.
    """

    def __init__(self, page_bytes: int, most_bytes: int, *, pinned: bool, memory: Memory | None = None) -> None:
        """memory: as in `HostSlots`."""
        self.clean: OrderedDict[PageHash, HostPage] = OrderedDict()
        self.dirty: OrderedDict[PageHash, HostPage] = OrderedDict()
        self.slots = HostSlots(page_bytes, most_bytes, pinned=pinned, memory=memory)
        self._filling: set[int] = set()

    def __len__(self) -> int:
        return len(self.clean) + len(self.dirty)

    def __iter__(self) -> Iterator[HostPage]:
        yield from self.clean.values()
        yield from self.dirty.values()

    def find(self, hash: PageHash) -> HostPage | None:
        """The page with that hash."""
        return self.clean.get(hash) or self.dirty.get(hash)

    def touch(self, hash: PageHash) -> None:
        """Marks the page with that hash, if there is one, as most recently used."""
        for entries in (self.clean, self.dirty):
            if hash in entries:
                entries.move_to_end(hash)

    def drop(self, hash: PageHash) -> None:
        """Evicts the page with that hash. Raises KeyError if there is none."""
        entry = self.clean.pop(hash, None) or self.dirty.pop(hash)
        self.slots.give(entry.slot)

    def take(self) -> tuple[int | None, Literal["clean", "dirty", None]]:
        """A slot to fill, and the kind of page that was evicted for it: the least recently used one, clean pages
        first. No slot if no page can be evicted."""
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

    def put(
        self, hash: PageHash, slot: int, flags: int, checksum: int | None = None, *, clean: bool = False
    ) -> HostPage:
        """Assigns a taken slot to the page with that hash, of which there must be no other."""
        self._filling.remove(slot)
        entry = HostPage(slot, flags, checksum)
        (self.clean if clean else self.dirty)[hash] = entry
        return entry

    def give_back(self, slot: int) -> None:
        """Returns a taken slot without filling it."""
        self._filling.remove(slot)
        self.slots.give(slot)

    def written(self, hash: PageHash) -> None:
        """Marks a dirty page as written to disk."""
        self.clean[hash] = self.dirty.pop(hash)

    def unwritten(self, hash: PageHash) -> None:
        """Marks a page as no longer on disk; it becomes the first dirty page to evict."""
        if hash in self.clean:
            self.dirty[hash] = self.clean.pop(hash)
            self.dirty.move_to_end(hash, last=False)

    def check(self) -> None:
        """Raises AssertionError unless every slot is free, being filled, or holds exactly one page."""
        held = [entry.slot for entry in self]
        assert len(set(held)) == len(held), "two pages have the same slot"
        assert not self.clean.keys() & self.dirty.keys(), "a page is in memory twice"
        assert not set(held) & self._filling, "a slot is filled while a page has it"
        self.slots.check({*held, *self._filling})


class HostSlots:
    """Slots in at most `most_bytes` of memory, at least one."""

    def __init__(self, slot_bytes: int, most_bytes: int, *, pinned: bool, memory: Memory | None = None) -> None:
        """memory: allocates all of it at once, uint8 [bytes]; None: it is allocated from the system, one slab at a
        time."""
        self.total = max(1, most_bytes // slot_bytes)
        # bytes to have in advance; None: nothing is allocated before it is needed
        self.ahead = AHEAD_BYTES if pinned else None
        self._slot_bytes, self._pinned = slot_bytes, pinned and memory is None
        self._per_slab = max(1, min(self.total, SLAB_BYTES // slot_bytes))
        self._slabs: list[Tensor] = []
        self._free: list[int] = []
        self._made = 0  # slots of all slabs so far
        if memory is not None:
            self._per_slab = self.total
            self._has(memory(self.total * slot_bytes).view(self.total, slot_bytes))

    @property
    def free(self) -> int:
        """Free slots, including those without memory yet."""
        return len(self._free) + self.total - self._made

    def short(self, *, busy: bool) -> bool:
        """Whether another slab should be allocated in advance. busy: whether steps run."""
        if self.ahead is None or self._made >= self.total:
            return False
        return not busy or len(self._free) * self._slot_bytes < self.ahead

    def take(self) -> int | None:
        """A free slot; None if there is none, or if the system has no more memory."""
        if not self._free:
            self.add(self.slab())
        return self._free.pop() if self._free else None

    def slab(self) -> Tensor | None:
        """Memory for the next slots, uint8 [slots, slot_bytes]; None if the allocation failed, or nothing is left to
        allocate. May run in any thread, at the same time as other calls."""
        count = min(self._per_slab, self.total - self._made)
        if count <= 0:
            return None
        try:
            with torch.inference_mode(False):  # the store's thread, which is not in inference mode, writes to it too
                if self._pinned:
                    return pinned(count * self._slot_bytes).view(count, self._slot_bytes)
                return torch.empty(count, self._slot_bytes, dtype=torch.uint8)
        except (RuntimeError, OSError) as error:  # out-of-memory errors of torch and of the system
            held = self._made * self._slot_bytes / 1e9
            _log.warning("KV offload: the host has no more memory for pages; staying at %.2f GB (%s)", held, error)
            return None

    def add(self, slab: Tensor | None) -> None:
        """Adds the slots of `slab`; None: there will be no more. A slab that another thread made in advance and that
        is not needed any more is released."""
        if slab is None:
            self.total = self._made
        elif len(slab) == min(self._per_slab, self.total - self._made):
            self._has(slab)
        elif self._pinned:
            unpin(slab)

    def give(self, slot: int) -> None:
        """Frees a slot."""
        self._free.append(slot)

    def bytes_of(self, slot: int) -> Tensor:
        """The slot's memory, uint8 [slot_bytes]."""
        slab, place = divmod(slot, self._per_slab)
        return self._slabs[slab][place]

    def check(self, held: set[int]) -> None:
        """Raises AssertionError unless every slot is either free or held."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert not held & set(self._free), f"slots {sorted(held & set(self._free))} are free and held"
        assert len(held) + len(self._free) == self._made, f"of {self._made} slots {len(held)} are held"

    def close(self) -> None:
        """Unpins the memory. No copies may use it any more."""
        if self._pinned:
            for slab in self._slabs:
                unpin(slab)

    def _has(self, slab: Tensor) -> None:
        """Adds slots, uint8 [slots, slot_bytes]."""
        self._slabs.append(slab)
        self._free.extend(range(self._made + len(slab) - 1, self._made - 1, -1))
        self._made += len(slab)


def pinned(size: int) -> Tensor:
    """New host memory, zeros, pinned until `unpin`: uint8 [size]. The pages are touched first, which involves no
    driver and delays no launch; after that, and with huge pages if the system has them, pinning takes a moment.
    Raises OSError or RuntimeError if there is too little memory."""
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system was built without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory_B = torch.frombuffer(mapped, dtype=torch.uint8)
    ctypes.memset(memory_B.data_ptr(), 0, size)  # in this thread alone, without the GIL
    runtime: Any = torch.cuda.cudart()
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(memory_B.data_ptr(), size, 0))
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            # CUDA reports the error at the next launch too: this one, rather than a step's
            torch.zeros(1, device="cuda")
        raise
    return memory_B


def unpin(memory: Tensor) -> None:
    """Unpins memory of `pinned`. The memory itself stays valid while it is referenced."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())
