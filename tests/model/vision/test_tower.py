"""The vision tower and projector = transformers' kimi_k25 on the same random weights, in float32."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.model.vision.config import VisionConfig
from redline.model.vision.load import random_tensors
from redline.model.vision.tower import Grid, VisionTower
from tests.model.vision.oracle import theirs

KIMI: dict[str, Any] = {"patch": 14, "rows": 64, "columns": 64, "frames": 4, "projector_eps": 1e-5, "token": 9}
SMALL = VisionConfig(**KIMI, hidden=144, layers=3, heads=2, intermediate=200, text_hidden=96)  # heads of 72, as Kimi's
LIMIT = 1e-4  # relative error


def random_weights(config: VisionConfig) -> dict[str, Tensor]:
    return {name: values.float() for name, values in random_tensors(config)}


def pixels(grid: Grid, seed: int = 1) -> Tensor:
    return torch.rand((grid.patches, 3, 14, 14), generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(SMALL)


@pytest.fixture(scope="module")
def oracle(weights: dict[str, Tensor]) -> tuple[Any, Any]:
    return theirs(SMALL, weights)


GRIDS = [
    Grid(1, 2, 2),  # the smallest: one token
    Grid(1, 6, 14),
    Grid(1, 46, 18),
    Grid(1, 64, 64),  # the table's own size: no interpolation
    Grid(1, 512, 2),  # the longest sides
    Grid(1, 2, 512),
    Grid(2, 4, 6),
    Grid(3, 10, 4),
    Grid(4, 8, 8),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_features_are_those_of_transformers(grid: Grid, weights: dict[str, Tensor], oracle: tuple[Any, Any]):
    patches = pixels(grid)
    ours = VisionTower(SMALL, weights).encode(patches, grid)
    tower, projector = oracle
    with torch.inference_mode():
        expected = projector(tower(patches, torch.tensor([grid])).pooler_output)[:, 0]
    assert ours.shape == (grid.tokens, SMALL.text_hidden) == expected.shape
    assert float((ours - expected).norm() / expected.norm()) <= LIMIT
    assert float((ours - expected).abs().max()) <= LIMIT * float(expected.abs().max())


@pytest.mark.parametrize("layers", [2, pytest.param(27, marks=pytest.mark.slow)])
def test_the_published_sizes_are_transformers(layers: int):
    """Blocks of width 1,152, on one small image."""
    kimi = VisionConfig(**KIMI, hidden=1152, layers=layers, heads=16, intermediate=4304, text_hidden=256)
    weights, grid = random_weights(kimi), Grid(1, 4, 6)
    tower, projector = theirs(kimi, weights)
    with torch.inference_mode():
        expected = projector(tower(pixels(grid), torch.tensor([grid])).pooler_output)[:, 0]
    ours = VisionTower(kimi, weights).encode(pixels(grid), grid)
    assert float((ours - expected).norm() / expected.norm()) <= LIMIT


def test_an_item_may_pause_between_any_two_blocks(weights: dict[str, Tensor]):
    tower, grid = VisionTower(SMALL, weights), Grid(2, 4, 6)
    encoding = tower.begin(pixels(grid), grid)
    for blocks in (1, 2):
        tower.advance(encoding, blocks)
    assert torch.equal(tower.finish(encoding), tower.encode(pixels(grid), grid))


def test_parameters_and_operations_are_those_of_the_model_card():
    kimi = VisionConfig(**KIMI, hidden=1152, layers=27, heads=16, intermediate=4304, text_hidden=7168)
    assert 4e8 < kimi.parameters < 5e8
    assert kimi.operations(1, 74, 74) == pytest.approx(8.4e12, rel=0.01)  # 1,024 x 1,024 pixels


def test_a_config_is_read_as_it_is_written_and_other_towers_are_refused_by_key():
    written = {"vision_config": SMALL.to_dict(), "media_placeholder_token_id": 9}
    assert VisionConfig.from_dict(written, SMALL.text_hidden) == SMALL
    assert VisionConfig.from_dict({}, 64) is None
    for key, value in (
        ("merge_type", "other"),
        ("vt_num_attention_heads", 5),
        ("text_hidden_size", 3),
        ("patch_size", "x"),
    ):
        with pytest.raises(CheckpointError, match=key):
            VisionConfig.from_dict(written | {"vision_config": SMALL.to_dict() | {key: value}}, SMALL.text_hidden)


def test_a_missing_or_misshapen_tensor_is_named(weights: dict[str, Tensor]):
    name = "vision_tower.encoder.blocks.1.wo.weight"
    with pytest.raises(CheckpointError, match=name):
        VisionTower(SMALL, {key: value for key, value in weights.items() if key != name})
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[144, 143\]; expected \[144, 144\]"):
        VisionTower(SMALL, weights | {name: weights[name][:, 1:]})
