"""Limits on the cost of structured output: bounds on each step, which llguidance counts, and a CPU time budget per
request.

The bounds are counts, so all tensor parallel ranks of a worker reach them at the same token. The time budget covers
slow machines and kinds of grammars that the bounds do not foresee.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

NOT_TOLD = "<non-verbose/>"  # placeholder in an error for the parser's state, which contains the client's text
# Earley items per mask, at most 60 ms; schemas take 200 to 5,000, 400 optional properties take 12,000
STEP_ITEMS = 15_000
LEXER_STATES = 20_000  # lexer states of one matcher, 1 to 2 kB each; JSON schemas take up to 2,000
# seconds of one step: four times what a mask within STEP_ITEMS takes, since machines stall for moments
LONGEST_S = 0.25
# Seconds per step, averaged over a request: nearly four times what the slowest strings take (1.6 ms; JSON schemas take
# 0.02 to 0.1 ms), since machines differ by that factor.
EACH_S = 0.006
AHEAD_S = 0.5  # seconds of burst: how far a request may exceed that average


def parser_limits() -> LLParserLimits:
    """The bounds for every compiled grammar, both at validation and in use."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=STEP_ITEMS, max_items_in_row=STEP_ITEMS, max_lexer_states=LEXER_STATES, verbose_errors=False
    )


class GrammarBudget:
    """CPU seconds that one request's grammar may still use."""

    def __init__(self) -> None:
        self._left_s = AHEAD_S

    def spend(self, seconds: float, steps: int = 1) -> str | None:
        """Charges `seconds` for `steps` steps (one mask or one token each). Returns why that exceeds the budget, or
        None."""
        self._left_s = min(AHEAD_S, self._left_s + EACH_S * steps) - seconds
        if seconds > LONGEST_S * max(1, steps):
            return f"one token took {seconds * 1e3:.0f} ms to process; at most {LONGEST_S * 1e3:.0f} ms are allowed"
        if self._left_s < 0:
            return f"its tokens take more than {EACH_S * 1e3:g} ms each to process"
        return None


def told(error: str, most: int = 300) -> str:
    """An llguidance error as one line of at most `most` characters, without control characters."""
    line = " ".join(error.replace(NOT_TOLD, "").split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line[:most])
