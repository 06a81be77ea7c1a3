"""The plot of a training: loss and simulated acceptance length over tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_curve(path: Path, log: Sequence[Mapping[str, Any]]) -> None:
    """Writes the plot to `path`.

    log: lines with `tokens`, and `loss` (training) or `held_out` with `length` (held-out sequences). Raises
    ModuleNotFoundError if matplotlib is not installed, and OSError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True)
    trained = [line for line in log if "loss" in line]
    tested = [line for line in log if "held_out" in line]
    for axes, key, name in ((above, "loss", "loss, nats per token"), (below, "length", "acceptance length, simulated")):
        millions = [line["tokens"] / 1e6 for line in trained]
        axes.plot(millions, [line[key] for line in trained], color="#9db7d1", label="training")
        millions = [line["tokens"] / 1e6 for line in tested]
        axes.plot(millions, [line["held_out"][key] for line in tested], "o-", ms=3, color="#1f4e79", label="held out")
        axes.set(ylabel=name)
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False)
    if any(line["loss"] > 0 for line in trained):
        above.set_yscale("log")
    below.set(xlabel="tokens, millions")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
