"""Speed of the vision encoder on a GPU: Kimi K2.6's tower and projector over one image, and over several in turn.

    python -m lab.tower [--side 1024] [--images 16] [--save FILE]

Weights and pixels are random. The floor is the operations divided by the rate of a large bf16 matrix product, measured
in this run.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from lab.program import count, output, program
from redline.bench.machine import measure
from redline.bench.record import provenance
from redline.errors import ConfigError
from redline.model.vision.config import KIMI_K26_VISION as KIMI
from redline.model.vision.config import VisionConfig
from redline.model.vision.load import random_tensors
from redline.model.vision.tower import Grid, VisionTower

REPEATS = 9


def operations(config: VisionConfig, grid: Grid) -> int:
    """Of products and attention: two per multiplication and addition."""
    products = 4 * config.hidden**2 + 2 * config.hidden * config.intermediate
    block = grid.patches * 2 * products + 4 * grid.patches**2 * config.hidden
    wide = 4 * config.hidden
    return config.layers * block + grid.tokens * 2 * (wide * wide + wide * config.text_hidden)


def side_patches(pixels: int) -> int:
    """Patches along a side, even: the rest is padded."""
    return -(-pixels // (2 * KIMI.patch)) * 2


@torch.inference_mode()
def times(tower: VisionTower, grid: Grid, images: int) -> list[float]:
    """Milliseconds in which all images are encoded, one after another, by run."""
    pixels = torch.randn(grid.patches, 3, KIMI.patch, KIMI.patch, device=tower.device)
    found = list[float]()
    for _ in range(2 + REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(images):
            tower.encode(pixels, grid)
        after.record()
        torch.cuda.synchronize()
        found.append(before.elapsed_time(after))
    return found[2:]


def main() -> None:
    """Runs the program. Raises ConfigError without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=count, default=1024, help="of the square images, in pixels (default: 1024)")
    parser.add_argument("--images", type=count, default=16, help="of the second measurement (default: 16)")
    parser.add_argument("--save", type=output, help="the results, as JSON")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise ConfigError("lab.tower needs an NVIDIA GPU; torch finds none")
    device = torch.device("cuda")
    machine = measure(device)
    tower = VisionTower(KIMI, {name: values.to(device) for name, values in random_tensors(KIMI)})
    grid = Grid(1, side_patches(asked.side), side_patches(asked.side))
    cases = list[dict[str, Any]]()
    for images in (1, asked.images):
        done = images * operations(KIMI, grid)
        ms, floor_ms = statistics.median(times(tower, grid, images)), 1e3 * done / machine.flops_per_s
        cases.append({"images": images, "ms": ms, "floor_ms": floor_ms, "operations": done})
        print(
            f"{images} of {asked.side} x {asked.side} ({grid.patches} patches, {grid.tokens} tokens): {ms:.2f} ms, "
            f"floor {floor_ms:.2f} ms, {done / ms / 1e9:.0f} TFLOP/s, {floor_ms / ms:.0%} of the rate"
        )
    record = {"gpu": machine.name, "flops_per_s": machine.flops_per_s, "side": asked.side, "patches": grid.patches}
    record |= {"cases": cases, **provenance("torch")}
    if asked.save is not None:
        Path(asked.save).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    program(main)
