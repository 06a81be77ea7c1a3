"""A cache of tokenized texts: agents send the whole conversation with each turn, and most of it is unchanged.

A long text is split at positions that no token can span, so the concatenated ids of its parts are the ids of the whole,
and a text with the same beginning as an earlier one shares the parts of that beginning.
"""

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from threading import Lock

PART_CHARS = 4096  # a part ends at the first safe cut after this; encoding one takes a third of a millisecond
LEAST_CHARS = 512  # minimum length of a cached part: looking up a shorter one saves little
_ENTRY_BYTES = 300  # memory of an entry in addition to its text and ids: Python objects

# Kimi's expression (tokenizer.SPLIT) matches newlines only at the end of a match, and greedily, so another match begins
# after them. A letter ends a word before a space, and a space opens a word if a letter follows it.
_SAFE_CUT = re.compile(r"\n(?=[!-~])|[A-Za-z](?= [A-Za-z])")


def parts(text: str) -> Iterator[str]:
    """Split a text into parts of at least PART_CHARS characters (the last may be shorter) at token boundaries."""
    start = 0
    while len(text) - start > PART_CHARS and (cut := _SAFE_CUT.search(text, start + PART_CHARS)) is not None:
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


class KnownTexts:
    """An LRU cache of the token ids of texts, by salt. Thread-safe.

    Tenants with different salts share no entries, so that response times reveal nothing about other tenants' texts.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: capacity, texts and ids together; 0 disables the cache."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """The current size of the cache in bytes."""
        return self._bytes

    def ids(self, salt: str, text: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
        """The ids of a text, from the cache or else from `encode`."""
        if len(text) < LEAST_CHARS:
            return encode(text)
        key = (salt, text)
        with self._lock:
            if (known := self._ids.get(key)) is not None:
                self._ids.move_to_end(key)
                return known
        ids = encode(text)
        size = _size(key, len(ids))
        with self._lock:
            if key not in self._ids and size <= self._most_bytes:
                self._ids[key] = array("I", ids)
                self._bytes += size
                while self._bytes > self._most_bytes:
                    oldest, its = self._ids.popitem(last=False)
                    self._bytes -= _size(oldest, len(its))
        return ids


def _size(key: tuple[str, str], ids: int) -> int:
    salt, text = key
    return sys.getsizeof(salt) + sys.getsizeof(text) + 4 * ids + _ENTRY_BYTES
