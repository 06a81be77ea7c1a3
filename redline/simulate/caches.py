"""The prefix caches of all simulated workers, in a trace's blocks: which workers have a prompt cached, and how much.

The server has a prefix cache in each worker (`scheduler/prefix_cache.py`) and an index of all in the API
(`router/index.py`), in pages of 64 tokens. Here both are one object, in a trace's blocks of 512 tokens; otherwise
simulations with hundreds of workers and a million prompts would not finish. Like the server's: a prefix cache hit ends
at the first missing block, eviction is least recently used first, and the last block of a prompt goes before the first.
Unlike the server's: pages that a running job holds only reduce the capacity, and may be evicted here while the server
keeps them; blocks of answers are not cached.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class CachedPrefix(NamedTuple):
    """The workers, as a bit mask, that have at least the first `blocks` blocks of a prompt cached."""

    blocks: int
    workers: int


class Caches:
    """The cached blocks of every worker, least recently used first."""

    def __init__(self, workers: int, blocks: int) -> None:
        """blocks: capacity of each worker."""
        self.blocks = blocks
        self._of: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]
        self._holders: dict[int, int] = {}

    def kept(self, worker: int) -> int:
        """The number of blocks that a worker has cached."""
        return len(self._of[worker])

    def depths(self, prompt: Sequence[int]) -> list[CachedPrefix]:
        """How many blocks of a prompt are cached at which workers, in ascending order; each entry's workers are a
        subset of the one before."""
        found: list[CachedPrefix] = []
        holders = self._holders
        left, number = -1, 0
        for number, block in enumerate(prompt):
            here = left & holders.get(block, 0)
            if here != left:
                if number:
                    found.append(CachedPrefix(number, left))
                left = here
                if not left:
                    return found
        if prompt:
            found.append(CachedPrefix(number + 1, left))
        return found

    def use(self, worker: int, prompt: Sequence[int], most: int) -> None:
        """Insert a prompt into a worker's cache as most recently used. most: the worker's capacity in blocks; older
        blocks are evicted."""
        own, holders, bit = self._of[worker], self._holders, 1 << worker
        for block in reversed(prompt):
            if block in own:
                own.move_to_end(block)
            else:
                own[block] = None
                holders[block] = holders.get(block, 0) | bit
        while len(own) > most:
            block, _ = own.popitem(last=False)
            if left := holders[block] & ~bit:
                holders[block] = left
            else:
                del holders[block]

    def forget(self, worker: int) -> None:
        """A worker has ended: clear its cache."""
        for block in self._of[worker]:
            if left := self._holders[block] & ~(1 << worker):
                self._holders[block] = left
            else:
                del self._holders[block]
        self._of[worker].clear()

    def check(self) -> None:
        """Raises AssertionError unless both indexes agree."""
        holders: dict[int, int] = {}
        for worker, own in enumerate(self._of):
            for block in own:
                holders[block] = holders.get(block, 0) | 1 << worker
        assert holders == self._holders, "blocks by worker and workers by block differ"
