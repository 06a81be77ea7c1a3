"""What a step computes, counted: apart from the fit of steps, which needs numpy."""

from typing import NamedTuple

from redline.wire.job import PAGE_TOKENS


class Work(NamedTuple):
    """What a step computes. Counts of tokens, but for rows."""

    prompt: int = 0  # of prompts, in this step
    pairs: float = 0.0  # prompt tokens x positions that each attends to, see `pairs_of`
    rows: int = 0  # that decode
    context: float = 0.0  # of all these rows together
    expanded: int = 0  # positions whose keys and values are made anew for these tokens, see `expanded_of`


def pairs_of(before: float, tokens: float) -> float:
    """Tokens times positions that each attends to, of `tokens` behind `before` others of their text."""
    return tokens * (before + (tokens + 1) / 2)


def expanded_of(before: int, tokens: int) -> int:
    """Positions whose keys and values are expanded for `tokens` behind `before` others: all pages up to the last."""
    return -(-(before + tokens) // PAGE_TOKENS) * PAGE_TOKENS


def chosen_share(experts: int, chosen: int, positions: float) -> float:
    """Of a layer's `experts`, those that so many positions choose, `chosen` each and on its own: 1 - (1 - k / E)^T."""
    if not experts or positions <= 0:
        return 0.0
    return 1.0 - (1.0 - chosen / experts) ** positions
