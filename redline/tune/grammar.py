"""What following a grammar may cost: bounds of each step, which llguidance counts, and a budget of time for an answer.

The bounds are counts, so every rank of a worker meets them at the same token. What a slow machine or a kind of grammar
that nobody has thought of makes of them is for the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

NOT_TOLD = "<non-verbose/>"  # stands in an error for the parser's state, which has the client's text
STEP_ITEMS = 15_000  # Earley items of a mask, 60 ms at most; schemas take 200 to 5,000, 400 optional properties 12,000
LEXER_STATES = 20_000  # of one matcher, 1 to 2 kB each; JSON schemas take up to 2,000
LONGEST_S = 0.25  # of one step: four times what the bound on items lets a mask take, since machines stop for moments
EACH_S = 0.006  # of a step, in the mean over an answer: nearly four times what the slowest strings take (1.6 ms; JSON
# schemas take 0.02 to 0.1), since machines differ by as much
AHEAD_S = 0.5  # that an answer may be ahead of that mean


def parser_limits() -> LLParserLimits:
    """The bounds with which every grammar is compiled, where it is tried and where it is used."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=STEP_ITEMS, max_items_in_row=STEP_ITEMS, max_lexer_states=LEXER_STATES, verbose_errors=False
    )


class Budget:
    """Time that one answer's grammar may still take, in seconds of the processor."""

    def __init__(self) -> None:
        self._left_s = AHEAD_S

    def spend(self, seconds: float, steps: int = 1) -> str | None:
        """Takes in what so many steps, one mask or one token each, took together: why that is too much, or None."""
        self._left_s = min(AHEAD_S, self._left_s + EACH_S * steps) - seconds
        if seconds > LONGEST_S * max(1, steps):
            return f"one token took {seconds * 1e3:.0f} ms to follow; at most {LONGEST_S * 1e3:.0f} ms are allowed"
        if self._left_s < 0:
            return f"its tokens take more than {EACH_S * 1e3:g} ms each to follow"
        return None


def told(error: str, most: int = 300) -> str:
    """An error of llguidance as one line of at most `most` characters, without control characters."""
    line = " ".join(error.replace(NOT_TOLD, "").split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line[:most])
