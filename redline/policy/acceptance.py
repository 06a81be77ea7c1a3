"""Estimated acceptance rates of draft tokens, from the drafts verified so far.

Draft j of a row is reached when every draft before it was accepted. For each place j we count, with exponential fading,
how many drafts were reached and how many of these were accepted. A prior pulls the counts towards UNSEEN, so that
drafts are tried before they are judged, and tried again once the counts have faded.
"""

UNSEEN = 0.9  # acceptance rate assumed before any draft was verified; with a lower one good drafts would not be tried
WEIGHT = 8.0  # weight of UNSEEN, in rows
MOST = 100.0  # largest weight of the counts, in rows: a full batch fades as fast as a single request
KEEPS = 0.85  # share of the counts that each decision keeps while drafts are verified
REST_KEEPS = 0.997  # the same while no drafts are verified: they are tried again some 500 decisions later


class Acceptance:
    """Fading counts of one drafter's tokens, by their place in the row: `reached`, and of those `held`, the accepted
    ones.

    most: draft tokens of a row, at most.
    """

    def __init__(self, most: int) -> None:
        self.reached = [0.0] * most
        self.held = [0.0] * most

    def seen(self, proposed: int, accepted: int, rows: int = 1) -> None:
        """Counts `rows` more rows, each of which verified `proposed` drafts and accepted the first `accepted`."""
        for place in range(min(accepted + 1, proposed)):
            self.reached[place] += rows
        for place in range(accepted):
            self.held[place] += rows
        if self.reached and self.reached[0] > MOST:
            self.fade(MOST / self.reached[0])

    def fade(self, keeps: float) -> None:
        """Multiplies all counts by `keeps`."""
        self.reached = [count * keeps for count in self.reached]
        self.held = [count * keeps for count in self.held]

    def survival(self) -> list[float]:
        """The probability that the first 1, 2 ... drafts of a row are all accepted."""
        alive, chances = 1.0, list[float]()
        for reached, held in zip(self.reached, self.held, strict=True):
            alive *= (held + WEIGHT * UNSEEN) / (reached + WEIGHT)
            chances.append(alive)
        return chances
