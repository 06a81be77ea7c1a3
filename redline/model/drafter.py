"""Learned drafters: chains (EAGLE-3) and blocks (DFlash, DSpark), and which one a folder has."""

from pathlib import Path

from redline.model.block.config import ARCHITECTURES, BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.eagle3.config import Eagle3Config
from redline.model.eagle3.module import Eagle3
from redline.model.k2.config import K2Config, read_json

Drafter = Eagle3 | BlockDrafter
DrafterConfig = Eagle3Config | BlockConfig


def is_block(folder: Path | str) -> bool:
    """Whether the folder's config.json names a block drafter. CheckpointError if it is missing or broken."""
    values = read_json(Path(folder) / "config.json")
    match values.get("architectures"):
        case [str(name)]:
            return name in ARCHITECTURES
        case _:
            return values.get("speculators_model_type") is not None


def open_drafter(folder: Path | str, target: K2Config) -> Drafter:
    """Loads a drafter. CheckpointError, with file, field or tensor and the reason, if it is broken or does not fit."""
    return (BlockDrafter if is_block(folder) else Eagle3).open(folder, target)
