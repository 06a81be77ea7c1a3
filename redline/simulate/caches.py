"""What all played workers have cached, in blocks of a trace: which worker a prompt is cached at, and how far.

The product keeps a cache in each worker (`plan/prefix.py`) and an index of all in the API (`route/index.py`), in pages
of 64 tokens. Here both are one object, in a trace's blocks of 512: hundreds of workers and a million prompts would not
end otherwise. The same: a prompt is cached as far as its first missing block, the least recently used block goes first,
and of a prompt the last before the first. Not the same: pages that a running job holds count by their number, and may
be forgotten where the product keeps them; blocks of answers are not kept.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Depth(NamedTuple):
    """The workers, as bits, that have the first `blocks` blocks of a prompt; those that have more are not left out."""

    blocks: int
    workers: int


class Caches:
    """The blocks of every worker, least recently used first."""

    def __init__(self, workers: int, blocks: int) -> None:
        """blocks: that each worker can hold."""
        self.blocks = blocks
        self._of: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]
        self._holders: dict[int, int] = {}

    def kept(self, worker: int) -> int:
        """How many blocks a worker has."""
        return len(self._of[worker])

    def depths(self, prompt: Sequence[int]) -> list[Depth]:
        """How much of a prompt is cached where, the least first: each entry's workers are among those before it."""
        found: list[Depth] = []
        holders = self._holders
        left, number = -1, 0
        for number, block in enumerate(prompt):
            here = left & holders.get(block, 0)
            if here != left:
                if number:
                    found.append(Depth(number, left))
                left = here
                if not left:
                    return found
        if prompt:
            found.append(Depth(number + 1, left))
        return found

    def use(self, worker: int, prompt: Sequence[int], most: int) -> None:
        """A worker has a prompt from now on, whose blocks it has used last. most: blocks that it has room for."""
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
        """A worker has ended, and has nothing any more."""
        for block in self._of[worker]:
            if left := self._holders[block] & ~(1 << worker):
                self._holders[block] = left
            else:
                del self._holders[block]
        self._of[worker].clear()

    def check(self) -> None:
        """Raises AssertionError unless both books say the same."""
        holders: dict[int, int] = {}
        for worker, own in enumerate(self._of):
            for block in own:
                holders[block] = holders.get(block, 0) | 1 << worker
        assert holders == self._holders, "blocks by worker and workers by block differ"
