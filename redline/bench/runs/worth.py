"""What speculation is worth here, in a minute: tokens/s and acceptance by the number of drafts, as a picture.

    python -m redline.bench.runs.worth [models/kimi-nano] [--draft models/kimi-nano-eagle3] [--out runs/worth.json]

`redline bench speculate` with one question of each domain and one round, at batch 1. What counts is the ratio to no
drafts in the same run; for figures to quote run the verb itself, with its own defaults.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from redline.bench.program import drawn, output, program

KS = (1, 2, 3, 5, 7)


class Worth(NamedTuple):
    """A variant's means over domains. times: tokens/s over those without drafts. length: tokens of a round."""

    variant: str
    times: float
    length: float


def worths(rates: list[dict[str, Any]]) -> list[Worth]:
    """The variants of a result's rates, in their order; without drafts a round is one token. A rate that was above its
    floor is left out."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for rate in rates:
        if rate["times"] is not None:
            found[rate["variant"]].append(rate)
    return [
        Worth(variant, fmean(one["times"] for one in same), fmean(one["length"] or 1.0 for one in same))
        for variant, same in found.items()
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """A picture at `path`: speed over no drafts, and tokens of a round, for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = worths(result["rates"])
    names = [one.variant for one in found]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.bar(names, [one.times for one in found], color="#1b4f8a")
    left.axhline(1, color="black", linewidth=1, linestyle="--")
    left.set_title("tokens/s, times no drafts", loc="left")
    right.bar(names, [one.length for one in found], color="#2e7d4f")
    right.set_title("tokens of a round", loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result['config']['folder']}, {result['machine']}, {result['cores']} cores, one stream")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    """Measures, prints, writes the result and the picture beside it; the exit code of the verb."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="models/kimi-nano")
    parser.add_argument("--draft", default="models/kimi-nano-eagle3")
    parser.add_argument("--out", type=output, default="runs/worth.json", help="the picture is beside it")
    asked = parser.parse_args()
    few = ["--batch", "1", "--questions", "1", "--rounds", "1", "--max-tokens", "64", "--repeats", "10"]
    ks = [word for k in KS for word in ("--k", str(k))]
    command = ["bench", "speculate", asked.folder, "--draft", asked.draft, *few, *ks, "--save", str(asked.out)]
    status = subprocess.run([sys.executable, "-m", "redline", *command], check=False).returncode
    if not status:
        result = json.loads(asked.out.read_text())
        drawn(partial(draw, result), asked.out.with_suffix(".png"))
    return status


if __name__ == "__main__":
    program(main)
