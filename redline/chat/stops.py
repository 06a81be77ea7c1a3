"""Stop strings in a stream: what may be shown now, and whether one has come.

Text is held back while it could still become a stop string, so no part of one is ever shown. All strings are looked for
at once, by one automaton (Aho and Corasick, 1975), so a character costs the same however many and long they are.
"""

from functools import lru_cache
from typing import NamedTuple


class StopStrings:
    """Looks for the first of some strings in a text that comes in pieces. `found` is None until one has come.

    While `looks` is False, a string that ends is not found; one that has begun may be, where it ends later.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._search = _search_for(tuple(stop for stop in stops if stop))
        self._node = 0  # the longest end of the text so far that begins a stop string
        self._held = ""  # that end
        self.found: str | None = None
        self.looks = True

    @property
    def none(self) -> bool:
        """Whether there is no string to look for, so that every text is shown as it comes."""
        return not self._search.stops

    def push(self, text: str) -> str:
        """Take in more text: what can be shown now. Once a stop string is found, the text ends right before it.

        Of several that this text completes, `found` is the one that begins first, and of those the one named first.
        Nothing is shown after it.
        """
        if self.found is not None:
            return ""
        if not self._node and self._search.first.isdisjoint(text):
            return text
        _, _, children, fallback, ends, depth = self._search
        node = self._node
        best: tuple[int, int] | None = None  # (where it begins, its place among the stops)
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
        """No more text will come, so what was held back is only text."""
        held, self._held, self._node = self._held, "", 0
        return held


class _End(NamedTuple):
    """A stop string that ends at a node."""

    length: int
    place: int


class _Search(NamedTuple):
    """A node is a beginning of a stop string; 0 is the empty one."""

    stops: tuple[str, ...]
    first: frozenset[str]  # the characters that begin one
    children: list[dict[str, int]]
    fallback: list[int]  # the longest proper end of a node that is a node
    ends: list[_End | None]  # the longest stop string that is an end of the node
    depth: list[int]  # its length


@lru_cache(maxsize=8)  # the choices of a request share one; the longest takes 1 ms to build
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
