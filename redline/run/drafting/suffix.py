"""Suffix matching, a drafter at no cost: proposes the tokens that followed an earlier occurrence of the latest tokens.

This one runs on the host; captured steps match on the device (`kernels/cuda/step/suffix_match.py`).

The last WINDOW tokens of prompt and output are in a ring buffer. Their trigrams hash into a table of heads, and each
position points to the one before it with the same hash, as in LZ77: appending is O(1), and a collision is harmless,
since a match is compared token by token before it counts. About 0.4 MB per job.
"""

from array import array
from collections.abc import Sequence

from redline.kernels.cuda.step.suffix_match import DEPTH, SHORTEST, WINDOW

CANDIDATES = 16  # earlier positions to compare, latest first


class SuffixIndex:
    """The latest tokens of one job, with an index of their earlier occurrences."""

    def __init__(self, window: int = WINDOW) -> None:
        """window: number of tokens kept, a power of two."""
        assert window & (window - 1) == 0, f"a window of {window} is not a power of two"
        self._mask = window - 1
        self._tokens = array("i", bytes(4 * window))
        self._before = array("i", bytes(4 * window))  # the previous position with the same hash, plus 1; 0: none
        self._heads = array("i", bytes(4 * window))  # the latest position of each hash, plus 1; 0: none
        self._count = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends the job's new tokens, of prompt or output; ids must be below 2^31."""
        skipped = max(0, len(tokens) - self._mask - 1)
        self._count += skipped
        ring, before, heads, mask = self._tokens, self._before, self._heads, self._mask
        place = self._count
        for token in tokens[skipped:]:
            ring[place & mask] = token
            if place >= SHORTEST - 1:
                first, second = ring[(place - 2) & mask], ring[(place - 1) & mask]
                spread = (first * 0x9E3779B1 ^ second * 0x85EBCA77 ^ token * 0xC2B2AE3D) & 0xFFFFFFFF
                cell = (spread ^ spread >> 15) & mask
                before[place & mask] = heads[cell]
                heads[cell] = place + 1
            place += 1
        self._count = place

    def propose(self, count: int) -> tuple[list[int], int]:
        """(up to `count` tokens that followed the longest match, the match's length in tokens).

        Of several matches of equal length, the latest counts. ([], 0) if fewer than SHORTEST tokens match. A match that
        reaches into its own continuation is a repetition, and is continued as one.
        """
        ring, before, mask, end = self._tokens, self._before, self._mask, self._count
        if end <= SHORTEST or count <= 0:
            return [], 0
        oldest = max(0, end - mask - 1)
        best, longest = 0, SHORTEST - 1
        place = before[(end - 1) & mask]  # the tokens before `place` match; the token at `place` followed them
        for _ in range(CANDIDATES):
            if place <= oldest:
                break
            length, most = 0, min(DEPTH, place - oldest)
            while length < most and ring[(place - 1 - length) & mask] == ring[(end - 1 - length) & mask]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == DEPTH:
                    break
            place = before[(place - 1) & mask]
        if longest < SHORTEST:
            return [], 0
        found: list[int] = []
        for i in range(best, best + count):
            found.append(ring[i & mask] if i < end else found[i - end])
        return found, longest
