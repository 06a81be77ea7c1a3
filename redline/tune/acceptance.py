"""How many drafts will hold: an estimate from what came of earlier ones.

Draft j of a row is reached when every draft before it held. Of the reached ones we count, the past fading, how many
held. A job's counts are drawn to those of all jobs, and those to a constant: so a new job begins as others do, and one
that has not been offered drafts for a while is given the benefit of the doubt again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

UNSEEN = 0.9  # share of drafts that is taken to hold before any was offered: less, and good ones would not be tried
JOB_KEEPS = 0.9  # share of a job's counts that stays with each of its rows
ALL_KEEP = 0.998  # the same of the counts of all jobs
JOB_WEIGHT = 2.0  # the rate of all jobs counts like so many rows of the job
ALL_WEIGHT = 8.0  # UNSEEN counts like so many rows of all jobs


@dataclass(frozen=True)
class Acceptance:
    """Fading counts, by position in the row: drafts that were reached, and those of them that held."""

    reached: tuple[float, ...] = ()
    held: tuple[float, ...] = ()

    def seen(self, proposed: int, accepted: int, keeps: float) -> "Acceptance":
        """The counts after one more row, which verified `proposed` drafts, of which the first `accepted` held.

        keeps: the share of the old counts that stays.
        """
        reached = [count * keeps for count in self.reached]
        held = [count * keeps for count in self.held]
        missing = proposed - len(reached)
        if missing > 0:
            reached += [0.0] * missing
            held += [0.0] * missing
        for place in range(min(accepted + 1, proposed)):
            reached[place] += 1
        for place in range(accepted):
            held[place] += 1
        return Acceptance(tuple(reached), tuple(held))


def rates(everyone: Acceptance, most: int) -> list[float]:
    """For each of `most` places in a row, the share (0 to 1) of the drafts reached there that hold, over all jobs."""
    seen = len(everyone.reached)
    return [
        (everyone.held[place] + ALL_WEIGHT * UNSEEN) / (everyone.reached[place] + ALL_WEIGHT)
        if place < seen
        else UNSEEN
        for place in range(most)
    ]


def survival(job: Acceptance, common: Sequence[float]) -> list[float]:
    """The probability that the first 1, 2 ... drafts of the job's next row all hold, given the rates of all jobs."""
    alive, chances, seen = 1.0, list[float](), len(job.reached)
    for place, rate in enumerate(common):
        if place < seen:
            rate = (job.held[place] + JOB_WEIGHT * rate) / (job.reached[place] + JOB_WEIGHT)
        alive *= rate
        chances.append(alive)
    return chances
