"""What a vLLM worker tells of its prefix cache, as the news that our index takes in.

Its hashes are its own; but a block comes with its tokens and its parent's hash, so its prompt is known from the first
token on, and its pages get the names that our jobs give them. A page has PAGE_TOKENS tokens, a block as many or a part
of it: so many blocks are one page, which is there while all of them are. Two names of the same content (older releases
do not tell of salts) are one page, known by the newest that was whole. A cache may forget a block from the middle and
go on behind it, so what a block was is known for a while after it has gone. What hangs on a block that is not known, or
whose content is not tokens alone (an adapter, an image), is left out: too little is known then, and nothing wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redline.errors import ConfigError
from redline.wire.job import PAGE_TOKENS, PageHash
from redline.wire.kv_events import GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent, decode_batch
from redline.wire.news import Cached

MOST_GONE = 100_000  # blocks that have gone, of which is known what they were

HashPage = Callable[[PageHash | None, tuple[int, ...], str], PageHash]
"""A page's name from that of the page before it (None: the first), its PAGE_TOKENS tokens and its prompt's salt."""


@dataclass(eq=False, slots=True)
class _Block:
    before: PageHash | None  # the page before the one that it is in
    tokens: tuple[int, ...]  # of that page, up to its own end
    salt: str
    parent: BlockHash | None
    page: PageHash | None = None  # that it completes
    pages: set[PageHash] = field(default_factory=set[PageHash])  # that it is a part of, of which all parts are known
    there: bool = True


class Blocks:
    """One vLLM worker's blocks. What `take` gives is for `PageIndex.take`, in order."""

    def __init__(self, worker: str, hash_page: HashPage) -> None:
        """worker: as errors call it. hash_page: as our jobs' pages are named, with the fingerprint that stands for its
        model."""
        self._worker, self._hash_page = worker, hash_page
        self._blocks: dict[BlockHash, _Block] = {}
        self._pages: dict[PageHash, list[_Block]] = {}  # what they are made of; one is there while all of these are
        self._gone: dict[BlockHash, None] = {}  # the oldest first
        self._told = 0  # how often
        self._next = 0  # the number of the message that is expected
        self.left_out = 0  # blocks, of which nothing could be known

    def __len__(self) -> int:
        """How many blocks the worker has."""
        return len(self._blocks) - len(self._gone)

    def take(self, number: int, batch: bytes) -> Cached | None:
        """Takes in a message; None where nothing changes. One that is not the next belongs to another start, or others
        were missed: then nothing that was known before it is.

        Raises ConfigError for blocks of a size of which pages cannot be made, and msgspec.DecodeError (of which
        msgspec.ValidationError is one) for bytes that are no batch; then nothing of it is taken in.
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
                f"{self._worker} has blocks of {size} tokens, of which no pages of {PAGE_TOKENS} can be made: start it "
                f"with --block-size {PAGE_TOKENS}, 32 or 16"
            )

    def _one(self, event: KvEvent, stored: dict[PageHash, None], removed: dict[PageHash, None]) -> bool:
        """Takes in an event; True where nothing is left of what was before."""
        match event:
            case AllBlocksCleared():
                self._clear()
                stored.clear()
                removed.clear()
                return True
            case BlockStored() | BlockRemoved() if event.medium not in (None, GPU) or event.group_idx:
                pass  # what lies below the cache, or what another kind of layer keeps
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
        """The pages that are whole now."""
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
                self.left_out += len(event.block_hashes) - place  # those behind hang on it
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
        """A block is the last of `count` that make a page: that page, if it is whole."""
        page = block.page = self._hash_page(block.before, block.tokens, block.salt)
        parts = self._parts(block)
        if len(parts) < count:  # of one nothing is known any more
            return []
        if page in self._pages:  # by other names
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
        if len(last.tokens) + len(tokens) > PAGE_TOKENS:  # their sizes differ
            return None
        return _Block(last.before, last.tokens + tokens, last.salt, parent)

    def _parts(self, block: _Block) -> list[_Block]:
        """The blocks of the page that a block completes, as far as they are known, itself first."""
        parts = [block]
        while block.parent is not None and (parent := self._blocks.get(block.parent)) and parent.page is None:
            parts.append(block := parent)
        return parts

    def _removed(self, names: Sequence[BlockHash]) -> list[PageHash]:
        """The pages that are whole no more."""
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
        """What a page is made of."""
        for part in self._pages.pop(page):
            part.pages.discard(page)


def _salt_of(keys: Any, *, first: bool) -> str | None:
    """The salt that a block's keys are; None where they are anything else. first: it begins a prompt."""
    if not (first and isinstance(keys, list) and len(cast("list[Any]", keys)) == 1):
        return None
    key = cast("list[Any]", keys)[0]
    if isinstance(key, dict):
        said = cast("dict[str, Any]", key)
        key = said.get("salt") if said.get("type") == "cache_salt" else None
    return key if isinstance(key, str) else None
