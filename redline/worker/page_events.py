"""KV cache events of a worker's prefix cache (blocks stored and removed), in vLLM's format, for external routers.

One batch is published after each step that has changed the cache. A worker publishes AllBlocksCleared when it starts,
since its sequence numbers start again, and when it ends. Pages with images are not published: their hashes depend on
the images, which the format cannot contain.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from redline import clock
from redline.messages.job import PAGE_TOKENS
from redline.messages.kv_events import (
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheSalt,
    KvBatch,
    KvEvent,
    encode_batch,
)
from redline.scheduler.prefix_cache import Changed
from redline.worker.service import Service


class Says(Protocol):
    """A publisher of batches."""

    def send(self, batch: bytes) -> None:
        """Publish one batch."""
        ...

    def close(self) -> None:
        """Close the publisher after the last batch."""
        ...


class PageEvents(Service):
    """Publishes changes of the prefix cache. Only the loop's thread may use it."""

    def __init__(
        self, changes: Callable[[], Sequence[Changed]], says: Says, number: int, clock: Callable[[], float] = clock.now
    ) -> None:
        """number: index of the worker in the deployment, from 0. clock: returns seconds since 1970."""
        self._changes, self._says, self._number, self._clock = changes, says, number, clock
        self._say([AllBlocksCleared()])

    def work(self) -> None:
        if changes := self._changes():
            self._say(events_of(changes))

    def stop(self) -> None:
        """Publishes that all blocks are cleared, and closes the publisher."""
        self._say([AllBlocksCleared()])
        self._says.close()

    def _say(self, events: Sequence[KvEvent]) -> None:
        self._says.send(encode_batch(KvBatch(self._clock(), events, self._number)))


def events_of(changes: Sequence[Changed]) -> list[KvEvent]:
    """The events for a sequence of changes: stored pages that continue one another become one event, and so do
    consecutive removed pages. If a cache salt restricts the sharing of a prompt's pages, the first block has a hash of
    the salt."""
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
