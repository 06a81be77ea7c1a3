"""Stop strings in a stream: the text that may be sent now, and whether a stop string was found.

Text is held back while it could still become a stop string, so no part of one is ever sent. One automaton (Aho and
Corasick, 1975) searches all strings at once, so the cost per character does not depend on their number or length.
"""

from functools import lru_cache
from typing import NamedTuple


class StopStrings:
    """Finds the first of several strings in a text that arrives in pieces. `found` is None until one is found.

    While `looks` is False, a string that ends there is ignored; a string that begins there can be found if it ends
    later.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._search = _search_for(tuple(stop for stop in stops if stop))
        self._node = 0  # the longest suffix of the text so far that is a prefix of a stop string
        self._held = ""  # that suffix
        self.found: str | None = None
        self.looks = True

    @property
    def none(self) -> bool:
        """Whether there are no stop strings, so that every text is sent as it arrives."""
        return not self._search.stops

    def push(self, text: str) -> str:
        """Add text, and return the text that can be sent now. Once a stop string is found, the text ends before it.

        If this text completes several, `found` is the one that begins first; among those, the one listed first. After
        it, the result is always empty.
        """
        if self.found is not None:
            return ""
        if not self._node and self._search.first.isdisjoint(text):
            return text
        _, _, children, fallback, ends, depth = self._search
        node = self._node
        best: tuple[int, int] | None = None  # (start, index of the stop string)
        for read, character in enumerate(text, start=len(self._held) + 1):
            while node and character not in children[node]:
                node = fallback[node]
            node = children[node].get(character, 0)
            if self.looks and (end := ends[node]) is not None:
                match = (read - end.length, end.place)
                best = match if best is None else min(best, match)
        text = self._held + text
        if best is not None:
            begin, place = best
            self.found = self._search.stops[place]
            self._held = ""
            return text[:begin]
        shown = len(text) - depth[node]
        self._node, self._held = node, text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """No more text follows, so the held-back text is plain text."""
        held, self._held, self._node = self._held, "", 0
        return held


class _End(NamedTuple):
    """A stop string that ends at a node."""

    length: int
    place: int


class _Search(NamedTuple):
    """The automaton. A node is a prefix of a stop string; node 0 is the empty prefix."""

    stops: tuple[str, ...]
    first: frozenset[str]  # the first characters of all stop strings
    children: list[dict[str, int]]
    fallback: list[int]  # the longest proper suffix of a node that is a node
    ends: list[_End | None]  # the longest stop string that is a suffix of the node
    depth: list[int]  # the node's length


@lru_cache(maxsize=8)  # the choices of a request share one; the longest stop strings take 1 ms to build
def _search_for(stops: tuple[str, ...]) -> _Search:
    search = _Search(stops, frozenset(stop[0] for stop in stops), [{}], [0], [None], [0])
    _, _, children, fallback, ends, depth = search
    for place, stop in enumerate(stops):
        node = 0
        for character in stop:
            if character not in children[node]:
                children[node][character] = len(children)
                children.append({})
                fallback.append(0)
                ends.append(None)
                depth.append(depth[node] + 1)
            node = children[node][character]
        ends[node] = ends[node] or _End(len(stop), place)
    level = list(children[0].values())
    while level:
        deeper: list[int] = []
        for node in level:
            ends[node] = ends[node] or ends[fallback[node]]
            for character, child in children[node].items():
                behind = fallback[node]
                while behind and character not in children[behind]:
                    behind = fallback[behind]
                fallback[child] = children[behind].get(character, 0)
                deeper.append(child)
        level = deeper
    return search
