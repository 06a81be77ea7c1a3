"""Where a decode step's time goes here, in a minute: each op beside its floor, as a picture.

    python -m redline.bench.runs.where [--shape kimi-nano] [--batch 1] [--context 1024] [--out runs/where.json]

`redline bench decode --shape`: the step of a model's shape on random weights, so no checkpoint is needed.
The ops are timed alone; what the engine does around them on a CPU is `step_profile.py`.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from redline.bench.program import count, drawn, output, program


def draw(case: dict[str, Any], path: Path) -> None:
    """A picture at `path`: the microseconds of a step that each op takes, and the least that it could."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = sorted(case["ops"], key=lambda op: op["us"])
    names = [f"{op['name']} x {op['launches']}" for op in ops]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.4 * len(ops)), layout="constrained")
    axes.barh(names, [op["us"] for op in ops], color="#4a90c4", label="measured")
    axes.barh(names, [op["floor_us"] for op in ops], color="#1b4f8a", height=0.4, label="floor")
    axes.set_xlabel("microseconds of a step")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{case['shape']}, {case['gpu']}, {case['rows']} rows: {case['ms']:.2f} ms, floor {case['floor_ms']:.2f} ms",
        loc="left",
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    """Measures, prints, adds the case to the result and draws it beside it; the exit code of the verb."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="kimi-nano", help="or kimi-k2.6")
    parser.add_argument("--alias", type=count, help="layers in memory, where it is short")
    parser.add_argument("--batch", type=count, default=1)
    parser.add_argument("--context", type=count, default=1024)
    parser.add_argument("--out", type=output, default="runs/where.json", help="the picture is beside it")
    asked = parser.parse_args()
    command = ["bench", "decode", "--shape", asked.shape, "--batch", str(asked.batch), "--context", str(asked.context)]
    alias = ["--alias", str(asked.alias)] if asked.alias else []
    status = subprocess.run([sys.executable, "-m", "redline", *command, *alias, "--save", str(asked.out)], check=False)
    if not status.returncode:
        result = json.loads(asked.out.read_text())[-1]
        drawn(partial(draw, result), asked.out.with_suffix(".png"))
    return status.returncode


if __name__ == "__main__":
    program(main)
