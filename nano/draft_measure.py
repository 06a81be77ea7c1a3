"""What mining is worth: the same prompts under every drafter, with intervals over prompts and seeds.

Answers are greedy and so the same under every drafter; what differs is the rounds they take. Acceptance length is
tokens per round, the target's own among them, over rounds that had drafts.

The ceiling is what a drafter reaches that knows the target itself: with greedy answers nothing is left to chance, so
all k drafts hold in every round but the last of an answer, which ends where the answer ends. It is measured on the
same answers, and is near k + 1 where they are long.

P prompts, A drafters, B bootstrap draws, S seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redline.messages.base import Record

Floats = NDArray[np.float64]

DRAWS = 4_000
MOST_OTHER = 0.01  # of a domain's prompts
WITHIN = (2.5, 97.5)  # percentiles
ARMS = ("mined", "control")

# What the drafter and mining have to reach: tokens per round, shares of a gap, rounds of a domain.
LEAST_CLOSED, LEAST_CHANGE = 0.2, -0.03
LEAST_MEAN, LEAST_DOMAIN, LEAST_ROUNDS = 3.0, 2.5, 20_000


class Answered(Record, frozen=True):
    """One answer under one drafter, and what a perfect one would have made of it."""

    id: str
    domain: str
    digest: str  # of the answer's ids
    rounds: int
    tokens: int  # that came of these rounds
    best_rounds: int
    best_tokens: int


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % bootstrap interval, in the unit of the values."""

    mean: float
    low: float
    high: float

    def to_json(self) -> list[float]:
        """[mean, low, high], to four decimals."""
        return [round(value, 4) for value in (self.mean, self.low, self.high)]

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Domain:
    """One domain's figures, in tokens per round."""

    prompts: int
    other: int  # prompts left out, since their answers differ
    rounds: int  # of the drafter with the fewest
    ceiling: float
    lengths: dict[str, Interval]  # of each drafter; over prompts
    mined: Interval  # mean of the seeds; over prompts and seeds, as all below
    control: Interval
    change: Interval  # mined - control
    closed: Interval  # the same, as a share of what control leaves to the ceiling

    def to_json(self) -> dict[str, Any]:
        """The figures by field name, to four decimals; each interval as [mean, low, high]."""
        return {
            "prompts": self.prompts,
            "other": self.other,
            "rounds": self.rounds,
            "ceiling": round(self.ceiling, 4),
            "lengths": {name: length.to_json() for name, length in self.lengths.items()},
            **{name: getattr(self, name).to_json() for name in (*ARMS, "change", "closed")},
        }


def compare(drafters: Mapping[str, Sequence[Answered]], seeds: Sequence[int], seed: int = 0) -> Domain:
    """`drafters` of one domain: "base", and "mined-S" and "control-S" for each of the seeds, all with the same prompts.

    Prompts whose answers differ are left out and counted: where a near tie falls can hang on what else is in a step.
    Raises ValueError where a prompt is missing under a drafter, or more than MOST_OTHER of the answers differ.
    """
    names = list(drafters)
    answers = [{one.id: one for one in drafters[name]} for name in names]
    ids = sorted(answers[0])
    for name, found in zip(names, answers, strict=True):
        if sorted(found) != ids:
            raise ValueError(f"{name} has not answered the prompts that {names[0]} has")
    same = [prompt for prompt in ids if len({found[prompt].digest for found in answers}) == 1]
    other = len(ids) - len(same)
    if other > MOST_OTHER * len(ids):
        raise ValueError(f"{other} of {len(ids)} prompts have another answer under one drafter than under another")
    ids = same
    rounds_PA = np.array([[found[prompt].rounds for found in answers] for prompt in ids], np.float64)
    tokens_PA = np.array([[found[prompt].tokens for found in answers] for prompt in ids], np.float64)
    best_P2 = np.array([[answers[0][prompt].best_tokens, answers[0][prompt].best_rounds] for prompt in ids], np.float64)
    rng = np.random.default_rng(seed)
    # How often each prompt is drawn; the first draw is the sample itself.
    counts_BP = rng.multinomial(len(ids), np.full(len(ids), 1 / len(ids)), DRAWS)
    counts_BP = np.vstack([np.ones((1, len(ids)), np.int64), counts_BP]).astype(np.float64)
    lengths_BA = (counts_BP @ tokens_PA) / (counts_BP @ rounds_PA)
    ceiling_B = np.divide(*(counts_BP @ best_P2).T)
    # Both arms of a seed are drawn together: they share their order of examples.
    picks_BS = rng.integers(len(seeds), size=(DRAWS + 1, len(seeds)))
    picks_BS[0] = np.arange(len(seeds))
    arm_B = {
        arm: np.take_along_axis(
            lengths_BA[:, [names.index(f"{arm}-{number}") for number in seeds]], picks_BS, axis=1
        ).mean(axis=1)
        for arm in ARMS
    }
    change_B = arm_B["mined"] - arm_B["control"]
    return Domain(
        prompts=len(ids),
        other=other,
        rounds=int(rounds_PA.sum(axis=0).min()),
        ceiling=float(ceiling_B[0]),
        lengths={name: interval(lengths_BA[:, place]) for place, name in enumerate(names)},
        mined=interval(arm_B["mined"]),
        control=interval(arm_B["control"]),
        change=interval(change_B),
        closed=interval(change_B / (ceiling_B - arm_B["control"])),
    )


def interval(values_B: Floats) -> Interval:
    """[B + 1] -> the interval. The first value is the sample's own, the others are its bootstrap draws."""
    low, high = np.percentile(values_B[1:], WITHIN)
    return Interval(float(values_B[0]), float(low), float(high))


def report(domains: Mapping[str, Domain]) -> dict[str, Any]:
    """All figures as JSON, and which of the conditions above are met.

    The worst domain is the one whose base is furthest below its ceiling.
    """
    gaps = {name: domain.ceiling - domain.lengths["base"].mean for name, domain in domains.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    base = [domain.lengths["base"].mean for domain in domains.values()]
    mean = math.fsum(base) / len(base)
    met = {
        f"base: mean acceptance length at least {LEAST_MEAN}": mean >= LEAST_MEAN,
        f"base: no domain below {LEAST_DOMAIN}": min(base) >= LEAST_DOMAIN,
        f"at least {LEAST_ROUNDS:,} rounds in each domain": min(d.rounds for d in domains.values()) >= LEAST_ROUNDS,
        f"mining closes {LEAST_CLOSED:.0%} of the worst domain's gap": domains[worst].closed.mean >= LEAST_CLOSED,
        f"no domain's interval lies below {LEAST_CHANGE}": min(d.change.high for d in domains.values()) >= LEAST_CHANGE,
    }
    return {
        "worst": worst,
        "worst_closed": domains[worst].closed.to_json(),
        "base_mean": round(mean, 4),
        "met": met,
        "domains": {name: domain.to_json() for name, domain in domains.items()},
    }


def table(domains: Mapping[str, Domain]) -> str:
    """The figures as Markdown, a row for each domain, in tokens per round."""
    rows = [
        "| domain | rounds | ceiling | base | control | mined | mined - control | share of the gap closed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {name} | {d.rounds:,} | {d.ceiling:.3f} | {d.lengths['base']} | {d.control} | {d.mined} | {d.change} "
        f"| {d.closed} |"
        for name, d in domains.items()
    ]
    return "\n".join(rows)


def plot(path: Path, domains: Mapping[str, Domain]) -> None:
    """Draws an image: acceptance lengths with their intervals, side by side by domain, under the ceiling."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    places = np.arange(len(domains))
    ceilings = [domain.ceiling for domain in domains.values()]
    axes.hlines(ceilings, places - 0.35, places + 0.35, colors="#6b6b6b", linestyles="dashed", label="ceiling")
    shown = {
        "base": ("#9db7d1", [domain.lengths["base"] for domain in domains.values()]),
        "control": ("#5b8c5a", [domain.control for domain in domains.values()]),
        "mined": ("#1f4e79", [domain.mined for domain in domains.values()]),
    }
    for at, (name, (colour, lengths)) in enumerate(shown.items()):
        means = np.array([length.mean for length in lengths])
        errors = [means - [length.low for length in lengths], [length.high for length in lengths] - means]
        axes.errorbar(places + 0.2 * (at - 1), means, np.abs(errors), fmt="o", capsize=3, color=colour, label=name)
    axes.set_xticks(places, list(domains))
    axes.set_ylabel("tokens per round")
    figure.legend(ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=110)
    plt.close(figure)
