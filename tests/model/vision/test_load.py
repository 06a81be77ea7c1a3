"""A tower is read from the checkpoint that holds it, by its published tensor names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import CheckpointError
from redline.media.rules import ImageRules
from redline.model.k2 import write as writing
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.write import random_checkpoint, tiny_config
from redline.model.vision.config import VisionConfig
from redline.model.vision.load import load_tower, random_tensors, vision_config
from redline.model.vision.tower import Grid, VisionTower

TEXT = tiny_config()
SIZES: dict[str, Any] = {"patch": 14, "rows": 8, "columns": 8, "frames": 4, "projector_eps": 1e-5, "token": 9}
VISION = VisionConfig(**SIZES, hidden=32, layers=2, heads=2, intermediate=48, text_hidden=TEXT.hidden_size)
CPU = torch.device("cpu")


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, *, without: str = "", dtype: torch.dtype) -> Checkpoint:
    """A tiny K2 with a tower."""
    tower = [(name, values.to(dtype)) for name, values in random_tensors(VISION) if name != without]
    monkeypatch.setattr(writing, "random_tensors", lambda *_: iter(tower))
    random_checkpoint(folder, TEXT, vision=VISION, media_token=9)
    return Checkpoint.open(folder)


def test_a_tower_is_read_as_it_is_stored(tmp_path: Path):
    random_checkpoint(tmp_path, TEXT, vision=VISION, media_token=9)
    checkpoint = Checkpoint.open(tmp_path)
    assert vision_config(tmp_path, TEXT.hidden_size) == VISION
    assert ImageRules.of(tmp_path) == ImageRules()
    tower = load_tower(checkpoint, VISION, CPU)
    expected = VisionTower(VISION, {name: values.float() for name, values in random_tensors(VISION)})
    patches, grid = torch.rand(8, 3, 14, 14), Grid(1, 2, 4)
    assert torch.equal(tower.encode(patches, grid), expected.encode(patches, grid))


def test_a_text_model_has_no_tower(tmp_path: Path):
    random_checkpoint(tmp_path, TEXT)
    assert vision_config(tmp_path, TEXT.hidden_size) is None


def test_a_missing_tensor_or_one_of_another_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "vision_tower.encoder.blocks.1.wo.bias"
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        load_tower(write(tmp_path, monkeypatch, without=name, dtype=torch.bfloat16), VISION, CPU)
    with pytest.raises(CheckpointError, match=r"patch_embed\.proj\.weight has dtype F64; expected one of BF16"):
        load_tower(write(tmp_path, monkeypatch, dtype=torch.float64), VISION, CPU)
