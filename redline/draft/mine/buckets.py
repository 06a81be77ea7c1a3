"""Where a drafter loses acceptance length: positions are grouped into buckets, and buckets are ranked by cost.

A position belongs to one bucket of each dimension: the domain and the language of its example, the length of the text
before it, and its distance from the start of the answer and from the last control token.

R rows of an example, as in `difficulty`.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from redline.draft.mine.difficulty import Ints, Scores
from redline.messages.base import Record

DIMENSIONS = ("domain", "language", "length", "since start", "since control")
_LENGTHS = (128, 512, 4096, 32_768, 131_072)
_DISTANCES = (4, 16, 64, 256)


class DifficultyBucket(Record, frozen=True):
    """One row of the report. `cost`: share x lost, the loss of the average round of all traffic in this bucket."""

    dimension: str
    name: str
    positions: int
    share: float  # of the traffic; of all positions if the traffic is not given
    acceptance: float  # of the first draft
    gap: float  # reducible, of the first draft
    length: float  # expected acceptance length, including the target's own token
    longest: float  # the same at the ceiling
    rejected: int = 0  # number of rounds that the serving engine rejected here (from traces)

    @property
    def lost(self) -> float:
        """Tokens per round lost, compared with the ceiling, by rounds that begin in this bucket."""
        return self.longest - self.length

    @property
    def cost(self) -> float:
        """Tokens per round of all traffic lost in this bucket."""
        return self.share * self.lost


@dataclass(frozen=True)
class Scored:
    """An example with its scores, and arrays [R] over its positions.

    rejected_R: 1 if a trace has a rejected draft at that position. since_start_R, since_control_R: distances in tokens
    from the start of the answer and from the last control token.
    """

    id: str
    domain: str
    language: str
    answer: int  # number of answer tokens
    scores: Scores
    since_start_R: Ints
    since_control_R: Ints
    rejected_R: Ints

    @property
    def hardness_R(self) -> "np.ndarray":
        """The reducible gap of each position [R], doubled at positions where a served draft was rejected."""
        return self.scores.gap_R * (1 + self.rejected_R)

    @property
    def hardness(self) -> float:
        """The mean hardness of the example's positions; 0 if it has none."""
        return float(self.hardness_R.mean()) if len(self.scores.position_R) else 0.0


@dataclass
class _Sum:
    positions: int = 0
    rejected: int = 0
    sums: "np.ndarray" = field(default_factory=lambda: np.zeros(4))


def since_control(tokens: Sequence[int], controls: frozenset[int], positions: Ints) -> Ints:
    """Distance in tokens of each position from the last control token before it; from the start if there is none.

    int64 [R].
    """
    last, seen = -1, np.empty(len(tokens), dtype=np.int64)
    for at, token in enumerate(tokens):
        seen[at] = last
        if token in controls:
            last = at
    return positions - seen[positions] if len(positions) else positions


def rejections(rounds: Iterable[tuple[int, int, int]], positions: Ints) -> Ints:
    """1 for each of `positions` at which a round rejected a draft, else 0: int64 [R].

    rounds: (position of the first draft, proposed, accepted) of each.
    """
    refused = {position + accepted for position, proposed, accepted in rounds if accepted < proposed}
    return np.fromiter((int(at) in refused for at in positions), dtype=np.int64, count=len(positions))


def buckets(scored: Iterable[Scored], traffic: Mapping[str, float] | None = None) -> list[DifficultyBucket]:
    """All buckets that contain a position, in order of decreasing cost.

    traffic: share of each domain; positions are weighted so that their domain has that share. Domains that are missing
    have no traffic. None: each position counts once.
    """
    found: dict[tuple[str, str, str], _Sum] = defaultdict(_Sum)
    for one in scored:
        for dimension, names in _names(one).items():
            for name in np.unique(names):
                here = names == name
                sums = found[dimension, str(name), one.domain]
                sums.positions += int(here.sum())
                sums.rejected += int(one.rejected_R[here].sum())
                sums.sums += [float(values[here].sum()) for values in _values(one)]
    domains: dict[str, int] = defaultdict(int)
    for (dimension, _, domain), sums in found.items():
        if dimension == "domain":
            domains[domain] += sums.positions
    total = sum(domains.values())
    told = None if traffic is None else sum(traffic.values())
    weight = {
        domain: 1 / total if traffic is None or not told else traffic.get(domain, 0.0) / told / positions
        for domain, positions in domains.items()
    }
    merged: dict[tuple[str, str], list[tuple[float, _Sum]]] = defaultdict(list)
    for (dimension, name, domain), sums in found.items():
        merged[dimension, name].append((weight[domain], sums))
    made = [_bucket(dimension, name, parts) for (dimension, name), parts in merged.items()]
    return sorted(made, key=lambda bucket: (-bucket.cost, DIMENSIONS.index(bucket.dimension), bucket.name))


def _bucket(dimension: str, name: str, parts: Sequence[tuple[float, _Sum]]) -> DifficultyBucket:
    share = sum(weight * sums.positions for weight, sums in parts)
    positions = sum(sums.positions for _, sums in parts)
    if share > 0:
        means = sum(weight * sums.sums for weight, sums in parts) / share
    else:
        means = sum(sums.sums for _, sums in parts) / positions
    acceptance, gap, length, longest = (round(float(value), 6) for value in np.asarray(means))
    return DifficultyBucket(
        dimension=dimension,
        name=name,
        positions=positions,
        share=round(share, 6),
        acceptance=acceptance,
        gap=gap,
        length=length,
        longest=longest,
        rejected=sum(sums.rejected for _, sums in parts),
    )


def _values(one: Scored) -> tuple["np.ndarray", ...]:
    scores = one.scores
    return scores.accept_Rk[:, 0], scores.gap_R, scores.length_R, scores.longest_R


def _names(one: Scored) -> dict[str, "np.ndarray"]:
    """The bucket of each position in each dimension."""
    count = len(one.scores.position_R)
    return {
        "domain": np.full(count, one.domain),
        "language": np.full(count, one.language),
        "length": _classes(one.scores.position_R, _LENGTHS),
        "since start": _classes(one.since_start_R, _DISTANCES),
        "since control": _classes(one.since_control_R, _DISTANCES),
    }


def _classes(values: Ints, limits: Sequence[int]) -> "np.ndarray":
    """Names of the classes, such as "<= 4", "5-16", "> 256"."""
    names = [f"<= {limits[0]:,}"]
    names += [f"{low + 1:,}-{high:,}" for low, high in itertools.pairwise(limits)]
    names.append(f"> {limits[-1]:,}")
    return np.asarray(names)[np.searchsorted(limits, values)]
