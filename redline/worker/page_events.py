"""What comes into a worker's prefix cache and leaves it, told as vLLM tells it, to routers that know that format.

After each step that has changed the cache goes one batch. A start begins with all blocks cleared, since its numbers
begin anew, and ends so. A page of images is not told: its name depends on them, and the format has no bytes of them.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from redline import clock
from redline.plan.prefix import Changed
from redline.wire.job import PAGE_TOKENS
from redline.wire.kv_events import (
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheSalt,
    KvBatch,
    KvEvent,
    encode_batch,
)


class Says(Protocol):
    """Where batches go."""

    def send(self, batch: bytes) -> None:
        """Say one."""
        ...

    def close(self) -> None:
        """There are no more."""
        ...


class PageEvents:
    """Tells what changes. The loop's thread uses it."""

    def __init__(self, says: Says, number: int, clock: Callable[[], float] = clock.now) -> None:
        """number: the worker's among those of the deployment, from 0 on. clock: tells seconds since 1970."""
        self._says, self._number, self._clock = says, number, clock
        self._say([AllBlocksCleared()])

    def tell(self, changes: Sequence[Changed]) -> None:
        """The cache has changed, in this order."""
        if changes:
            self._say(events_of(changes))

    def close(self) -> None:
        """Nothing is cached any more."""
        self._say([AllBlocksCleared()])
        self._says.close()

    def _say(self, events: Sequence[KvEvent]) -> None:
        self._says.send(encode_batch(KvBatch(self._clock(), events, self._number)))


def events_of(changes: Sequence[Changed]) -> list[KvEvent]:
    """The events of some changes, in order: pages that continue one another are one event, and so are pages that go
    together. Where a salt names who shares a prompt's pages, its first block has a hash of it."""
    events: list[KvEvent] = []
    stored: list[Changed] = []
    removed: list[Changed] = []

    def end() -> None:
        if stored:
            events.append(_stored(stored))
            stored.clear()
        if removed:
            events.append(BlockRemoved(block_hashes=[page.hash for page in removed], medium=GPU))
            removed.clear()

    for page in changes:
        goes_on = bool(stored) and page.previous == stored[-1].hash if page.there else bool(removed)
        if not goes_on:
            end()
        (stored if page.there else removed).append(page)
    end()
    return events


def _stored(pages: Sequence[Changed]) -> BlockStored:
    first = pages[0]
    salted = first.previous is None and bool(first.salt)
    said = blake2b(first.salt.encode(), digest_size=16).hexdigest()
    return BlockStored(
        block_hashes=[page.hash for page in pages],
        parent_block_hash=first.previous,
        token_ids=[token for page in pages for token in page.tokens],
        block_size=PAGE_TOKENS,
        medium=GPU,
        extra_keys=[[CacheSalt(said)], *[None] * (len(pages) - 1)] if salted else None,
    )
