"""A decode step's layer as a picture: its launches one behind the other, each beside its floor.

    python -m redline.bench.runs.layer_picture benchmarks/results/decode-h100.json --ranks 4
        --save benchmarks/results/layer-four-h100.png

From what `redline bench decode --shape` has measured: a bar for each number of rows at context 1,024, in the order of
the launches, wide as each op takes by itself. Its dark part is the floor. The last piece, `sums`, is what the step
takes beyond its ops, divided by the layers: of several ranks mostly their sums. Needs matplotlib (the `draft` extra).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from redline.bench.program import count, output, program
from redline.bench.step.depth_record import DepthRecord, read
from redline.errors import ConfigError

CONTEXT = 1024
COLOURS = ("tab:blue", "tab:orange")


def main() -> None:
    """Draws the picture of the command line. Raises ConfigError where nothing was measured that it could show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a decode-*.json")
    parser.add_argument("--ranks", type=count, default=1)
    parser.add_argument("--shape", default="kimi-k2.6")
    parser.add_argument("--save", type=output, required=True, help="a PNG")
    given = parser.parse_args()
    shown = chosen(read(given.results, DepthRecord), given.shape, given.ranks)
    if not shown:
        raise ConfigError(f"{given.results} has no ops of {given.shape} over {given.ranks} ranks at {CONTEXT:,} tokens")
    draw(shown, given.save)
    print(f"written: {given.save}")


def chosen(records: Sequence[DepthRecord], shape: str, ranks: int) -> list[DepthRecord]:
    """The newest record of each number of rows of one token, fewest first."""
    found = {
        r.rows: r
        for r in records
        if (r.shape, r.ranks, r.context, r.tokens_per_row) == (shape, ranks, CONTEXT, 1) and r.ops
    }
    return [found[rows] for rows in sorted(found)]


def pieces(record: DepthRecord) -> list[tuple[str, float, float]]:
    """(name, microseconds, floor) of what a layer with experts launches; then what the step takes beyond all ops."""
    layers = max(op.launches for op in record.ops)
    of_a_layer = [(op.name, op.us / op.launches, op.floor_us / op.launches) for op in record.ops if op.launches > 1]
    return [*of_a_layer, ("sums", max(0.0, 1e3 * (record.ms - record.ops_ms) / layers), 0.0)]


def draw(records: Sequence[DepthRecord], to: Path) -> None:
    """Raises ModuleNotFoundError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(records), 1, figsize=(13, 1.6 * len(records) + 0.8), squeeze=False)
    for axis, record in zip(axes[:, 0], records, strict=True):
        at, whole = 0.0, sum(us for _, us, _ in pieces(record))
        for number, (name, us, floor) in enumerate(pieces(record)):
            colour = COLOURS[number % 2]
            axis.barh(0, us, left=at, color=colour, alpha=0.35)
            axis.barh(0, min(floor, us), left=at, color=colour)
            if us > 0.04 * whole:
                axis.text(at + us / 2, 0.48, f"{name}\n{us:.1f}", ha="center", va="bottom", fontsize=7)
            at += us
        axis.set(xlim=(0, whole), ylim=(-0.45, 1.0), yticks=[], ylabel=f"{record.rows} rows")
    axes[-1, 0].set_xlabel("microseconds of one layer; dark: the floor of each op")
    first = records[0]
    figure.suptitle(
        f"{first.shape}, {first.ranks} x {first.gpu}, context {CONTEXT:,}, commit {first.commit}", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(to, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    program(main)
