"""Counts of the work in a step. A module of its own, because the fit of step times needs numpy."""

from typing import NamedTuple

from redline.messages.job import PAGE_TOKENS


class Work(NamedTuple):
    """The work of a step, in tokens except for `rows`."""

    prompt: int = 0  # prompt tokens in this step
    pairs: float = 0.0  # prompt tokens x positions that each attends to, see `pairs_of`
    rows: int = 0  # decode rows
    context: float = 0.0  # context of all decode rows together
    expanded: int = 0  # positions with keys and values expanded for these prompt tokens, see `expanded_of`


def pairs_of(before: float, tokens: float) -> float:
    """Token-position pairs in attention of `tokens` tokens that follow `before` others of the same text."""
    return tokens * (before + (tokens + 1) / 2)


def expanded_of(before: int, tokens: int) -> int:
    """Positions that need expanded keys and values for `tokens` tokens after `before` others: all pages up to the
    last."""
    return -(-(before + tokens) // PAGE_TOKENS) * PAGE_TOKENS


def chosen_share(experts: int, chosen: int, positions: float) -> float:
    """Expected share of a layer's `experts` that `positions` positions use, if each chooses `chosen` of them
    independently: 1 - (1 - k / E)^T."""
    if not experts or positions <= 0:
        return 0.0
    return 1.0 - (1.0 - chosen / experts) ** positions
