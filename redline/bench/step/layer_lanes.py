"""A recorded layer as a picture: a panel for each number of rows, a lane for each rank, a bar for each kernel.

What overlaps is drawn in two rows of its lane, or three where three kernels do. Below the ranks lies the layer's floor,
op by op, on the same scale.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redline.bench.step.layer_kernels import KernelTime, LaneTrace, LayerCase, LayerTrace, of_a_layer

COLOURS = {
    "project_a": "tab:blue",
    "project_q": "tab:cyan",
    "absorb": "tab:olive",
    "attend": "tab:orange",
    "unabsorb": "gold",
    "project_out": "tab:green",
    "sum_ranks": "tab:pink",
    "gates": "tab:purple",
    "choose_experts": "plum",
    "experts_up": "tab:red",
    "experts_down": "tab:brown",
}
UNKNOWN = "tab:gray"
NAMED = 0.035  # of a panel's width: narrower bars have no name
MOST_ROWS = 3  # of a rank's lane


def rows_of(kernels: Sequence[KernelTime]) -> list[int]:
    """Which row each bar lies in: the first that is free at its start. Where all MOST_ROWS are taken, bars overlap in
    the one that is free soonest."""
    free = [float("-inf")] * MOST_ROWS
    found: list[int] = []
    for kernel in kernels:
        soonest = min(range(MOST_ROWS), key=free.__getitem__)
        row = next((i for i in range(MOST_ROWS) if free[i] <= kernel.start_us), soonest)
        free[row] = max(free[row], kernel.end_us)
        found.append(row)
    return found


def draw(trace: LayerTrace, to: Path) -> None:
    """Raises ModuleNotFoundError where matplotlib is not installed, and OSError where it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    heights = [len(case.lanes) + 0.9 for case in trace.cases]
    made: Any = pyplot.subplots(
        len(heights), 1, figsize=(15, 0.8 * sum(heights) + 1.1 * len(heights) + 1.0), height_ratios=heights,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    figure, axes = made
    for axis, case in zip(axes[:, 0], trace.cases, strict=True):
        _panel(axis, case)
    axes[-1, 0].set_xlabel("microseconds from the start of each rank's own layer; beside a name: what the kernel adds")
    ops = {kernel.op for case in trace.cases for lane in case.lanes for kernel in lane.kernels}
    known = [Patch(color=colour, label=op) for op, colour in COLOURS.items() if op in ops]
    others = [Patch(color=UNKNOWN, label=op[:40]) for op in sorted(ops - set(COLOURS))]
    figure.legend(handles=[*known, *others], loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=8)
    step = trace.cases[0].step
    figure.suptitle(
        f"One layer, recorded: {step.shape}, {step.ranks} x {step.gpu}, context {step.context:,}, commit {step.commit}"
        f"\n{trace.notes[-1]}",
        fontsize=10,
    )
    figure.savefig(to, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, case: LayerCase) -> None:
    lanes = case.lanes
    width = max([case.floor_us, *(kernel.end_us for lane in lanes for kernel in lane.kernels)])
    bars = [rows_of(lane.kernels) for lane in lanes]
    most = max([2, *(1 + row for of in bars for row in of)])
    for number, lane in enumerate(lanes):
        top = -number
        for kernel, row in zip(lane.kernels, bars[number], strict=True):
            at = top - 0.88 / most * (row + 0.5)
            colour = COLOURS.get(kernel.op, UNKNOWN)
            long = kernel.end_us - kernel.start_us
            axis.barh(at, long, 0.84 / most, kernel.start_us, color=colour, alpha=0.75, edgecolor="white")
            if long > NAMED * width * most / 2:
                name = f"{kernel.op[:18]}{' ' if most > 2 else chr(10)}{kernel.adds_us:.1f}"
                axis.text(kernel.start_us + long / 2, at, name, ha="center", va="center", fontsize=6.5)
        axis.plot([lane.layer_us] * 2, [top, top - 0.9], color="black", linewidth=1)  # the next layer begins
    floor = -len(lanes) - 0.25
    at = 0.0
    for op in of_a_layer(case.step):
        long = op.floor_us / op.launches
        axis.barh(floor, long, height=0.38, left=at, color=COLOURS.get(op.name, UNKNOWN), edgecolor="white")
        if long > NAMED * width:
            axis.text(at + long / 2, floor, f"{op.name}\n{long:.1f}", ha="center", va="center", fontsize=6.5)
        at += long
    axis.set_yticks([*(-number - 0.44 for number in range(len(lanes))), floor], [*map(_label, lanes), "floor"])
    axis.set(xlim=(0, 1.01 * width), ylim=(floor - 0.4, 0.05))
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(_title(case), loc="left", fontsize=9)


def _label(lane: LaneTrace) -> str:
    return f"rank {lane.rank}" if lane.kernels else f"rank {lane.rank}\nnothing whole"


def _title(case: LayerCase) -> str:
    """What the panel shows, and what recording it has cost."""
    seen = [lane for lane in case.lanes if lane.kernels]
    layer = max(lane.layer_us for lane in seen)
    ms, recorded = (max(times) for times in zip(*((lane.ms, lane.span_ms) for lane in seen), strict=True))
    least = min(lane.layers for lane in seen)
    return (
        f"{case.name}: a layer takes {layer:.1f} us, its floor is {case.floor_us:.1f} (line: the next layer begins); "
        f"the whole step {ms:.2f} ms, recorded {recorded:.2f}; medians of {least} layers or more"
    )
