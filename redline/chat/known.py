"""Texts that were encoded before: agents send a whole conversation again with each turn, and most of it is the same.

A long text is cut where no token can lie across the cut, so the ids of its parts, joined, are the ids of the whole, and
a text that only begins as another one did shares the parts of that beginning.
"""

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from threading import Lock

PART_CHARS = 4096  # a part ends at the first safe cut behind so many: encoding one takes a third of a millisecond
LEAST_CHARS = 512  # of a part that is kept: looking up a shorter one saves little
_ENTRY_BYTES = 300  # of one entry besides its text and ids: the objects that hold them

# Kimi's expression (tokenizer.SPLIT) matches newlines only as the end of a match, and as many as there are, so behind
# them another match begins. A letter ends a word before a space, and a space opens a word if a letter follows it.
_SAFE_CUT = re.compile(r"\n(?=[!-~])|[A-Za-z](?= [A-Za-z])")


def parts(text: str) -> Iterator[str]:
    """A text in parts of PART_CHARS or more characters, the last perhaps of fewer; where it is cut, tokens end."""
    start = 0
    while len(text) - start > PART_CHARS and (cut := _SAFE_CUT.search(text, start + PART_CHARS)) is not None:
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


class KnownTexts:
    """The ids of texts by salt, those that were asked for last. Safe to share between threads.

    Tenants with different salts share nothing, so that no time tells one what another has sent.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of texts and ids together; 0 keeps none."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """What is kept, in bytes."""
        return self._bytes

    def ids(self, salt: str, text: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
        """The ids of a text, by `encode` where they are not known."""
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
