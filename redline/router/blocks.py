"""Converts a vLLM worker's KV cache events into updates of our prefix cache index.

vLLM's block hashes are private to it, but an event contains the blocks' tokens and their parent's hash: so all tokens
of the prompt are known from its start, and its pages get the same hashes as those of our jobs. A page has PAGE_TOKENS
tokens, and consists of one or several blocks; it is cached while all of them are. Two hashes of the same content (older
releases do not send salts) are one page, known by the newest complete set of blocks. A cache may evict a block from the
middle and keep the following ones, so an evicted block's content is kept for a while. Blocks with an unknown parent, or
with content other than tokens (a LoRA adapter, an image), are ignored: the index then misses pages, but has no wrong
ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redline.errors import ConfigError
from redline.messages.job import PAGE_TOKENS, PageHash
from redline.messages.kv_events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEvent,
    decode_batch,
)
from redline.messages.news import Cached

MOST_GONE = 100_000  # maximum number of evicted blocks with content kept

HashPage = Callable[[PageHash | None, tuple[int, ...], str], PageHash]
"""A page's hash from the previous page's hash (None: the first page), its PAGE_TOKENS tokens and its prompt's salt."""


@dataclass(eq=False, slots=True)
class _Block:
    before: PageHash | None  # the page before the block's own page
    tokens: tuple[int, ...]  # of the page, up to the end of this block
    salt: str
    parent: BlockHash | None
    page: PageHash | None = None  # the page that ends with this block
    # Pages that contain this block, and have only known blocks.
    pages: set[PageHash] = field(default_factory=set[PageHash])
    there: bool = True  # it is cached; False: evicted


class Blocks:
    """The blocks of one vLLM worker. The results of `take` are passed to `PageIndex.take`, in order."""

    def __init__(self, worker: str, hash_page: HashPage) -> None:
        """worker: its name in error messages. hash_page: computes the page hashes that our jobs use, with the
        fingerprint configured for its model."""
        self._worker, self._hash_page = worker, hash_page
        self._blocks: dict[BlockHash, _Block] = {}
        # The blocks of each page; the page is cached while all of them are.
        self._pages: dict[PageHash, list[_Block]] = {}
        self._gone: dict[BlockHash, None] = {}  # evicted blocks, oldest first
        self._told = 0  # number of `Cached` updates
        self._next = 0  # number of the expected message
        self.left_out = 0  # number of ignored blocks

    def __len__(self) -> int:
        """Number of cached blocks."""
        return len(self._blocks) - len(self._gone)

    def take(self, number: int, batch: bytes) -> Cached | None:
        """Apply a message; None if nothing changes. A message with an unexpected number means that the publisher was
        restarted or that messages were missed: everything known before it is dropped.

        Raises ConfigError for a block size that cannot make up pages, and msgspec.DecodeError (or its subclass
        msgspec.ValidationError) for bytes that are not a batch; in both cases nothing is applied.
        """
        events = decode_batch(batch).events
        for event in events:
            if isinstance(event, BlockStored):
                self._check_size(event.block_size)
        whole = number != self._next or not self._told
        self._next = number + 1
        if whole:
            self._clear()
        stored: dict[PageHash, None] = {}
        removed: dict[PageHash, None] = {}
        for event in events:
            whole |= self._one(event, stored, removed)
        if not (stored or removed or whole):
            return None
        self._told += 1
        return Cached(number=self._told, stored=tuple(stored), removed=() if whole else tuple(removed), whole=whole)

    def _clear(self) -> None:
        self._blocks.clear()
        self._pages.clear()
        self._gone.clear()

    def _check_size(self, size: int) -> None:
        if size < 1 or PAGE_TOKENS % size:
            raise ConfigError(
                f"{self._worker} has blocks of {size} tokens, which do not divide a page of {PAGE_TOKENS}: start it "
                f"with --block-size {PAGE_TOKENS}, 32 or 16"
            )

    def _one(self, event: KvEvent, stored: dict[PageHash, None], removed: dict[PageHash, None]) -> bool:
        """Apply an event; True if all earlier state was cleared."""
        match event:
            case AllBlocksCleared():
                self._clear()
                stored.clear()
                removed.clear()
                return True
            case BlockStored() | BlockRemoved() if event.medium not in (None, GPU) or event.group_idx:
                pass  # an offload tier, or another KV cache group
            case BlockStored():
                for page in self._stored(event):
                    stored[page] = None
                    removed.pop(page, None)
            case BlockRemoved():
                for page in self._removed(event.block_hashes):
                    removed[page] = None
                    stored.pop(page, None)
        return False

    def _stored(self, event: BlockStored) -> list[PageHash]:
        """The pages that are complete now."""
        found: list[PageHash] = []
        parent, size = event.parent_block_hash, event.block_size
        for place, name in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[place * size : (place + 1) * size])
            extra = None if event.extra_keys is None else event.extra_keys[place : place + 1]
            salt = "" if event.lora_id is None and event.lora_name is None else None
            if salt is not None and extra and extra[0]:
                salt = _salt_of(extra[0], first=parent is None)
            block = None if salt is None else self._after(parent, tokens, salt)
            if block is None:
                self.left_out += len(event.block_hashes) - place  # the following blocks are its descendants
                break
            parent = name
            if name in self._gone:
                del self._gone[name]
                known = self._blocks[name]
                known.there = True
                found += [page for page in known.pages if self._is_whole(page)]
                if known.page is not None and known.page not in known.pages:
                    found += self._completed(known, PAGE_TOKENS // size)
            elif name not in self._blocks:
                self._blocks[name] = block
                if len(block.tokens) == PAGE_TOKENS:
                    found += self._completed(block, PAGE_TOKENS // size)
        return found

    def _completed(self, block: _Block, count: int) -> list[PageHash]:
        """A block is the last of `count` blocks of a page: that page, if all of them are cached."""
        page = block.page = self._hash_page(block.before, block.tokens, block.salt)
        parts = self._parts(block)
        if len(parts) < count:  # a block is no longer known
            return []
        if page in self._pages:  # with other block hashes
            if self._is_whole(page):
                return []
            self._forget(page)
        self._pages[page] = parts
        for part in parts:
            part.pages.add(page)
        return [page] if self._is_whole(page) else []

    def _is_whole(self, page: PageHash) -> bool:
        return all(part.there for part in self._pages[page])

    def _after(self, parent: BlockHash | None, tokens: tuple[int, ...], salt: str) -> _Block | None:
        if parent is None:
            return _Block(None, tokens, salt, None)
        if (last := self._blocks.get(parent)) is None:
            return None
        if last.page is not None:
            return _Block(last.page, tokens, last.salt, parent)
        if len(last.tokens) + len(tokens) > PAGE_TOKENS:  # the block sizes differ
            return None
        return _Block(last.before, last.tokens + tokens, last.salt, parent)

    def _parts(self, block: _Block) -> list[_Block]:
        """The known blocks of the page that ends with a block, last block first."""
        parts = [block]
        while block.parent is not None and (parent := self._blocks.get(block.parent)) and parent.page is None:
            parts.append(block := parent)
        return parts

    def _removed(self, names: Sequence[BlockHash]) -> list[PageHash]:
        """The pages that are no longer complete."""
        found: list[PageHash] = []
        for name in names:
            block = self._blocks.get(name)
            if block is not None and block.there:
                found += [page for page in block.pages if self._is_whole(page)]
                block.there = False
                self._gone[name] = None
        while len(self._gone) > MOST_GONE:
            name = next(iter(self._gone))
            del self._gone[name]
            for page in tuple(self._blocks.pop(name).pages):
                self._forget(page)
        return found

    def _forget(self, page: PageHash) -> None:
        """Drop the list of a page's blocks."""
        for part in self._pages.pop(page):
            part.pages.discard(page)


def _salt_of(keys: Any, *, first: bool) -> str | None:
    """The salt in a block's extra keys; None if the keys are anything else. first: the block begins a prompt."""
    if not (first and isinstance(keys, list) and len(cast("list[Any]", keys)) == 1):
        return None
    key = cast("list[Any]", keys)[0]
    if isinstance(key, dict):
        said = cast("dict[str, Any]", key)
        key = said.get("salt") if said.get("type") == "cache_salt" else None
    return key if isinstance(key, str) else None
