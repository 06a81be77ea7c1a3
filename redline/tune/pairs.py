"""What a piece of a prompt computes, counted: apart from the fit of steps, which needs numpy."""

from redline.wire.job import PAGE_TOKENS


def pairs_of(before: float, tokens: float) -> float:
    """Prompt tokens times positions that each attends to, of `tokens` behind `before` others of their prompt."""
    return tokens * (before + (tokens + 1) / 2)


def expanded_of(before: int, tokens: int) -> int:
    """Positions whose keys and values are expanded for `tokens` behind `before` others: all pages up to the last."""
    return -(-(before + tokens) // PAGE_TOKENS) * PAGE_TOKENS
