"""`redline draft export`: writes a trained drafter for engines, its latent at the target's width or its own.

    OUT/config.json, OUT/model.safetensors

vLLM stores a drafter's KV rows in the target's cache, so it needs the target's width (redline/model/eagle3/latent.py).
Redline reads either, with equal results. So the target's width is the default: one folder that all engines load.
"""

import errno
import os
from pathlib import Path
from typing import Literal

from rich.console import Console
from safetensors import SafetensorError

from redline.disk import is_full, written
from redline.messages.base import Record
from redline.model.block.module import BlockDrafter
from redline.model.drafter import open_drafter
from redline.model.k2.checkpoint import Checkpoint


class ExportConfig(Record, frozen=True):
    """Settings of `redline draft export`.

    latent: "target" pads a narrower latent with zeros, "own" leaves it as trained.
    """

    target: str
    drafter: str  # the folder to read
    out: str
    latent: Literal["target", "own"] = "target"


def run(config: ExportConfig, console: Console) -> int:
    """Opens the drafter as the engine does, writes it to the folder `out`, and returns 0.

    Raises ConfigError if it cannot be written, and CheckpointError if target or drafter cannot be read.
    """
    target, out = Checkpoint.open(config.target).config, Path(config.out)
    drafter = open_drafter(Path(config.drafter), target)
    with written(out):
        try:
            if isinstance(drafter, BlockDrafter):
                drafter.save(out)
            else:
                drafter.save(out, target.kv_lora_rank if config.latent == "target" else 0)
        except SafetensorError as error:
            if not is_full(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out)) from None
    size = (out / "model.safetensors").stat().st_size
    own = 0 if isinstance(drafter, BlockDrafter) else drafter.config.kv_lora_rank
    width = max(own, target.kv_lora_rank) if config.latent == "target" else own
    latent = f", latent {own} padded to {width}" if own and width > own else ""
    console.print(
        f"{out}: {drafter.parameter_count / 1e6:.2f} M parameters{latent}, {size / 1e6:.1f} MB",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0
