"""How many drafts will hold: an estimate from what came of earlier ones.

Draft j of a row is reached when every draft before it held. Of the reached ones we count, the past fading, how many
held; and the counts are drawn to a constant, so that drafts are tried before they are judged, and again once what was
learnt of them has faded.
"""

UNSEEN = 0.9  # share of drafts that is taken to hold before any was offered: less, and good ones would not be tried
WEIGHT = 8.0  # UNSEEN counts like so many rows
MOST = 100.0  # what was seen counts like so many rows, at most: a full batch is forgotten as soon as one stream
KEEPS = 0.85  # share of the counts that stays with each decision while drafts are verified
REST_KEEPS = 0.997  # the same while none are: they are tried again some five hundred decisions later


class Acceptance:
    """Fading counts of the drafts of one source, by their place in the row: reached ones, and those of them that held.

    most: drafts of a row.
    """

    def __init__(self, most: int) -> None:
        self.reached = [0.0] * most
        self.held = [0.0] * most

    def seen(self, proposed: int, accepted: int, rows: int = 1) -> None:
        """So many rows more, each of which verified `proposed` drafts, of which the first `accepted` held."""
        for place in range(min(accepted + 1, proposed)):
            self.reached[place] += rows
        for place in range(accepted):
            self.held[place] += rows
        if self.reached and self.reached[0] > MOST:
            self.fade(MOST / self.reached[0])

    def fade(self, keeps: float) -> None:
        """Leaves a share `keeps` of all counts."""
        self.reached = [count * keeps for count in self.reached]
        self.held = [count * keeps for count in self.held]

    def survival(self) -> list[float]:
        """The probability that the first 1, 2 ... drafts of a row all hold."""
        alive, chances = 1.0, list[float]()
        for reached, held in zip(self.reached, self.held, strict=True):
            alive *= (held + WEIGHT * UNSEEN) / (reached + WEIGHT)
            chances.append(alive)
        return chances
