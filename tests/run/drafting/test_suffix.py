"""The suffix drafter: which matches it finds, which it must not propose, and its cost."""

import random

import pytest

from redline.run.drafting.suffix import CANDIDATES, DEPTH, SHORTEST, SuffixIndex
from tests.work import lines


def of(*tokens: int, window: int = 1024) -> SuffixIndex:
    suffix = SuffixIndex(window)
    suffix.extend(tokens)
    return suffix


def test_what_followed_before_is_proposed():
    assert of(1, 2, 3, 4, 5, 9, 8, 2, 3, 4).propose(3) == ([5, 9, 8], 3)


def test_no_match_proposes_nothing():
    assert of().propose(3) == ([], 0)
    assert of(1, 2).propose(3) == ([], 0)
    assert of(*range(500)).propose(3) == ([], 0)
    assert of(1, 2, 3, 4, 7, 2, 3).propose(3) == ([], 0)  # a match of two tokens is too short


def test_no_more_than_asked_for():
    suffix = of(1, 2, 3, 4, 5, 1, 2, 3)
    assert suffix.propose(0) == ([], 0)
    assert suffix.propose(1) == ([4], 3)


def test_the_longest_match_wins_though_it_is_older():
    assert of(6, 1, 2, 3, 50, 0, 9, 1, 2, 3, 60, 0, 6, 1, 2, 3).propose(1) == ([50], 4)


def test_the_latest_of_equal_matches_wins():
    assert of(7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3).propose(2) == ([60, 9], 3)


def test_a_match_is_as_long_as_it_is_up_to_a_depth():
    text = list(range(100))
    for length in (SHORTEST, 10, DEPTH, 60):
        tokens, matched = of(*text, 500, *text[20 : 20 + length]).propose(2)
        assert tokens == text[20 + length : 22 + length]
        assert matched == min(length, DEPTH)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_repetition_goes_on(period: int):
    loop = [10 + i % period for i in range(5 * period + SHORTEST)]
    tokens, _ = of(*loop).propose(12)
    assert tokens == [10 + (len(loop) + i) % period for i in range(12)]


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 1000])
def test_pieces_are_the_same_as_all_at_once(cut: int):
    random.seed(1)
    tokens = [random.randrange(4) for _ in range(600)]
    suffix = SuffixIndex(256)
    for start in range(0, len(tokens), cut):
        suffix.extend(tokens[start : start + cut])
    assert suffix.propose(8) == of(*tokens, window=256).propose(8)
    assert suffix.propose(8) != ([], 0)


def plainly(tokens: list[int], count: int, window: int) -> tuple[list[int], int]:
    """The definition: compares every earlier position within the window."""
    tokens = tokens[-window:]
    best, longest = 0, SHORTEST - 1
    for place in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(DEPTH, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    if longest < SHORTEST:
        return [], 0
    found = tokens[best:]
    while len(found) < count:
        found.append(found[len(found) - (len(tokens) - best)])
    return found[:count], longest


def test_it_finds_what_an_exhaustive_search_finds():
    random.seed(2)
    found = 0
    for _ in range(300):
        words = [[random.randrange(1000) for _ in range(random.randrange(3, 9))] for _ in range(12)]
        tokens = [token for _ in range(random.randrange(30)) for token in random.choice(words)]
        if sum(tokens[i : i + 3] == tokens[-3:] for i in range(len(tokens))) > CANDIDATES:
            continue
        assert of(*tokens, window=64).propose(5) == plainly(tokens, 5, 64)
        found += bool(of(*tokens, window=64).propose(5)[0])
    assert found > 100


def test_what_has_left_the_window_is_forgotten_and_the_memory_does_not_grow():
    suffix = of(1, 2, 3, 4, 5, window=64)
    before = [len(table) for table in (suffix._tokens, suffix._before, suffix._heads)]
    suffix.extend(range(100, 150))
    suffix.extend([1, 2, 3])
    assert suffix.propose(2) == ([4, 5], 3)
    suffix.extend(range(200, 20_000))
    suffix.extend([1, 2, 3])
    assert suffix.propose(2) == ([], 0)
    assert [len(table) for table in (suffix._tokens, suffix._before, suffix._heads)] == before


def test_a_token_costs_the_same_however_many_stand_before_it():
    def spent(suffix: SuffixIndex) -> int:
        """Comparisons for 20 tokens of the worst text, in which every position is a candidate."""

        def work() -> None:
            for _ in range(20):
                suffix.extend([7])
                suffix.propose(4)

        return lines(work)

    short, long = SuffixIndex(), SuffixIndex()
    short.extend([7] * 300)
    long.extend([7] * 30_000)
    assert 0 < spent(long) <= spent(short)
