"""The last stage of a recipe: the better of the first and the mined drafter, and why, as a folder that serves.

Both, and the control arm, were measured by `eval` on the same prompts. Two are compared prompt by prompt, over those
that both were asked: prompts differ more than drafters do, and a paired difference leaves that out.
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
from redline.wire.base import Record
from redline.worker.acceptance import RESAMPLES

BASE, MINED, CONTROL = "base", "mined", "control"
Place = tuple[int, Mode]  # k and mode


class BestConfig(Record, frozen=True):
    """What the stage is told. drafters: folders by name: base, mined, control; the first alone where nothing was mined.

    evaluations: by the same names, what `redline draft eval` has saved. Without them the mined one is exported.
    """

    target: str
    out: str
    drafters: dict[str, str]
    evaluations: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class _Saved(msgspec.Struct):
    pooled: tuple[Pooled, ...]


def run(config: BestConfig, console: Console) -> int:
    """Prints what was measured, which drafter is exported and why, and exports it; returns 0.

    Raises ConfigError where an evaluation cannot be read, and what `redline.draft.export.run` raises.
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
        raise ConfigError(f"{path}: cannot be read ({error}); remove it, and the run measures again") from None
    return {(one.k, one.mode): one for one in found}


def difference(one: Pooled, other: Pooled, seed: int = 0) -> tuple[float, float, float]:
    """(how many tokens a round `one` has more than `other`, its 95 % interval), by a bootstrap over common prompts.

    NaN where no prompt, or none with a round, is common.
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
    """Which of the first and the mined drafter has more tokens a round, and lines that say why.

    The mean counts over every k and mode that both have. Where none has rounds, it is the mined one.
    """
    places = sorted(set(measured[BASE]) & set(measured[MINED]))
    if not places:
        return MINED, ["exported: mined; no round was measured that would compare it with base"]
    means = {name: float(np.mean([measured[name][place].length for place in places])) for name in (BASE, MINED)}
    name = MINED if means[MINED] > means[BASE] else BASE
    other = BASE if name == MINED else MINED
    doubtful = _doubtful(measured[MINED], measured[BASE], places)
    why = [
        f"exported: {name}, with {means[name]:.3f} tokens a round, where {other} has {means[other]:.3f}; "
        + (
            f"{doubtful} of {len(places)} intervals of mined - base include 0: these prompts do not tell the two apart"
            if doubtful
            else "no interval of mined - base includes 0"
        )
    ]
    if CONTROL in measured and (common := [place for place in places if place in measured[CONTROL]]):
        more = float(np.mean([measured[MINED][at].length - measured[CONTROL][at].length for at in common]))
        unsure = _doubtful(measured[MINED], measured[CONTROL], common)
        why.append(
            f"control, trained as long on prompts that were not mined: mined has {more:+.3f} tokens a round more; "
            + (
                f"{unsure} of {len(common)} intervals include 0: that mining helped is not shown"
                if unsure
                else "no interval includes 0: " + ("mining helped" if more > 0 else "mining did harm")
            )
        )
    return name, why


def _doubtful(one: Mapping[Place, Pooled], other: Mapping[Place, Pooled], places: Sequence[Place]) -> int:
    """Of how many places the difference's interval includes 0, or is unknown."""
    intervals = [difference(one[place], other[place])[1:] for place in places]
    return sum(not (low > 0 or high < 0) for low, high in intervals)


def table(measured: Mapping[str, Mapping[Place, Pooled]]) -> Table:
    """A row for each k and mode: every drafter's tokens a round, and how many the mined one has more."""
    names = [name for name in (BASE, CONTROL, MINED) if name in measured]
    shown = narrow("drafters on the same prompts", "tokens a round with 95 % intervals, all domains together")
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
