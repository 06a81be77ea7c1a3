"""What a step computes, counted: apart from the fit of steps, which needs numpy."""

from redline.wire.job import PAGE_TOKENS


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
