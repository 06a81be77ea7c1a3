"""The last stage of a recipe: exports the better of the base and the mined drafter as a servable folder, with reasons.

Both, and the control arm, were measured by `eval` on the same prompts. Two drafters are compared prompt by prompt, over
the prompts that both answered: prompts differ more than drafters do, and paired differences cancel that.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from redline.draft import export
from redline.draft.evaluate import Mode, Pooled
from redline.draft.export import ExportConfig
from redline.draft.mine.report import narrow
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.worker.acceptance import RESAMPLES

BASE, MINED, CONTROL = "base", "mined", "control"
Place = tuple[int, Mode]  # k and mode


class BestConfig(Record, frozen=True):
    """Settings of the stage. drafters: folders by name (base, mined, control); only base if nothing was mined.

    evaluations: files saved by `redline draft eval`, by the same names. Without them the mined drafter is exported.
    """

    target: str
    out: str
    drafters: dict[str, str]
    evaluations: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class _Saved(msgspec.Struct):
    pooled: tuple[Pooled, ...]


def run(config: BestConfig, console: Console) -> int:
    """Prints the measurements, which drafter is exported and why, and exports it; returns 0.

    Raises ConfigError if an evaluation cannot be read, and the errors of `redline.draft.export.run`.
    """
    measured = {name: _read(Path(path)) for name, path in config.evaluations.items()}
    name = MINED if MINED in config.drafters else BASE
    if {BASE, MINED} <= set(measured):
        console.print(table(measured))
        name, why = better(measured)
        for line in why:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return export.run(ExportConfig(target=config.target, drafter=config.drafters[name], out=config.out), console)


def _read(path: Path) -> dict[Place, Pooled]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Saved).pooled
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it, and the next run measures again") from None
    return {(one.k, one.mode): one for one in found}


def difference(one: Pooled, other: Pooled, seed: int = 0) -> tuple[float, float, float]:
    """(mean of `one` - `other` in tokens per round, low and high of its 95 % interval), by a bootstrap over the prompts
    that both have.

    NaN if they have no prompt in common, or none with a round.
    """
    both = [name for name in one.by_prompt if name in other.by_prompt]
    counts = np.array([(*one.by_prompt[name], *other.by_prompt[name]) for name in both], dtype=np.float64).reshape(
        -1, 4
    )
    rounds = counts.sum(0)
    if not rounds[0] or not rounds[2]:
        return float("nan"), float("nan"), float("nan")
    draws = np.random.default_rng(seed).multinomial(len(both), np.full(len(both), 1 / len(both)), size=RESAMPLES)
    sums = draws @ counts
    sums = sums[(sums[:, 0] > 0) & (sums[:, 2] > 0)]
    low, high = np.percentile(sums[:, 1] / sums[:, 0] - sums[:, 3] / sums[:, 2], [2.5, 97.5])
    return float(rounds[1] / rounds[0] - rounds[3] / rounds[2]), float(low), float(high)


def better(measured: Mapping[str, Mapping[Place, Pooled]]) -> tuple[str, list[str]]:
    """Which of the base and the mined drafter has more tokens per round, and lines that explain the choice.

    The mean is over every k and mode that both have. If there is none with rounds, the mined drafter is chosen.
    """
    places = sorted(set(measured[BASE]) & set(measured[MINED]))
    if not places:
        return MINED, ["exported: mined; no round was measured for both it and base"]
    means = {name: float(np.mean([measured[name][place].length for place in places])) for name in (BASE, MINED)}
    name = MINED if means[MINED] > means[BASE] else BASE
    other = BASE if name == MINED else MINED
    doubtful = _doubtful(measured[MINED], measured[BASE], places)
    why = [
        f"exported: {name}, with {means[name]:.3f} tokens per round; {other} has {means[other]:.3f}; "
        + (
            f"{doubtful} of {len(places)} intervals of mined - base include 0: the difference is not significant"
            if doubtful
            else "no interval of mined - base includes 0"
        )
    ]
    if CONTROL in measured and (common := [place for place in places if place in measured[CONTROL]]):
        more = float(np.mean([measured[MINED][at].length - measured[CONTROL][at].length for at in common]))
        unsure = _doubtful(measured[MINED], measured[CONTROL], common)
        why.append(
            f"control, trained for as long on prompts that were not mined: mined has {more:+.3f} tokens per round; "
            + (
                f"{unsure} of {len(common)} intervals include 0: no significant effect of mining"
                if unsure
                else "no interval includes 0: " + ("mining helped" if more > 0 else "mining hurt")
            )
        )
    return name, why


def _doubtful(one: Mapping[Place, Pooled], other: Mapping[Place, Pooled], places: Sequence[Place]) -> int:
    """Number of `places` for which the difference's interval includes 0 or is unknown."""
    intervals = [difference(one[place], other[place])[1:] for place in places]
    return sum(not (low > 0 or high < 0) for low, high in intervals)


def table(measured: Mapping[str, Mapping[Place, Pooled]]) -> Table:
    """A row for each k and mode: every drafter's tokens per round, and mined minus each of the others."""
    names = [name for name in (BASE, CONTROL, MINED) if name in measured]
    shown = narrow("drafters on the same prompts", "tokens per round with 95 % intervals, all domains together")
    for name in ("k", "mode", *names, *(f"mined - {name}" for name in names if name != MINED)):
        shown.add_column(name, justify="left" if name == "mode" else "right")
    for place in sorted(set.intersection(*(set(measured[name]) for name in names))):
        found = {name: measured[name][place] for name in names}
        lengths = [f"{one.length:.3f} {one.low:.3f}-{one.high:.3f}" for one in found.values()]
        apart = [difference(found[MINED], found[name]) for name in names if name != MINED]
        shown.add_row(
            str(place[0]), place[1], *lengths, *(f"{mean:+.3f} {low:+.3f}-{high:+.3f}" for mean, low, high in apart)
        )
    return shown
