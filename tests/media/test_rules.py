"""Sizes and token counts of images: the published values, and transformers' on random sizes."""

import ast
import importlib.util
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.errors import CheckpointError
from redline.media.rules import ImageRules
from redline.model.k2.write import k25_preprocessor_config

GOLDEN = {
    (2048, 1365): 3626,
    (17, 64): 3,
    (5000, 6000): 4189,
    (224, 224): 64,
    (640, 480): 414,
    (1024, 1024): 1369,
    (1920, 1080): 2691,
    (3000, 3000): 4225,
}


@pytest.mark.parametrize("size", GOLDEN, ids=str)
def test_published_token_counts(size: tuple[int, int]):
    assert ImageRules().layout(*size).tokens == GOLDEN[size]


def test_a_4k_screenshot_has_the_patches_that_schedulers_expect():
    layout = ImageRules().layout(3840, 2160)
    assert layout.rows * layout.columns == 16_856


def of_transformers(name: str) -> Callable[..., Any]:
    """A function of transformers' image processor, out of its source: the module imports torchvision."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "models" / "kimi_k25" / "image_processing_kimi_k25.py"
    tree = ast.parse(source.read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    scope: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([function], []), source, "exec"), scope)
    return scope[name]


def test_sizes_are_transformers_for_500_random_sizes():
    navit_resize, draw = of_transformers("navit_resize"), random.Random(5)
    for _ in range(500):
        width, height = (int(2 ** draw.uniform(0, 14)) for _ in range(2))
        layout = ImageRules().layout(width, height)
        (h, w), (rows, columns) = navit_resize(height, width, 14, 2, 16_384, 512)
        assert (layout.width, layout.height) == (w, h), (width, height)
        assert (layout.rows * 14, layout.columns * 14) == (rows, columns), (width, height)
        assert layout.tokens == layout.rows * layout.columns // 4


def test_the_file_decides_the_numbers(tmp_path: Path):
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(k25_preprocessor_config()))
    assert ImageRules.of(tmp_path) == ImageRules()
    found = k25_preprocessor_config()
    found["media_proc_cfg"] |= {"in_patch_limit": 64}
    path.write_text(json.dumps(found))
    assert ImageRules.of(tmp_path).layout(640, 480).tokens < ImageRules().layout(640, 480).tokens


@pytest.mark.parametrize(
    ("key", "value"),
    [("in_patch_limit", 0), ("patch_size", "x"), ("image_std", [0.5, 0, 0.5]), ("fixed_output_tokens", 256)],
)
def test_an_unsupported_value_is_named(key: str, value: object, tmp_path: Path):
    found = k25_preprocessor_config()
    found["media_proc_cfg"][key] = value
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=key):
        ImageRules.of(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is missing"):
        ImageRules.of(tmp_path)


def test_a_model_without_a_tower_its_tensors_or_the_preprocessors_file_reads_no_images(tmp_path: Path):
    vision = {"patch_size": 14}
    names = {"vision_tower.patch_embed.proj.weight": "1", "lm_head.weight": "1"}

    def rules(config: object, index: object, preprocessor: bool = True) -> ImageRules | None:
        (tmp_path / "config.json").write_text(json.dumps({"vision_config": config}))
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        path = tmp_path / "preprocessor_config.json"
        path.write_text(json.dumps(k25_preprocessor_config())) if preprocessor else path.unlink(missing_ok=True)
        return ImageRules.of_model(tmp_path)

    assert rules(vision, names) == ImageRules()
    assert rules(None, names) is None
    assert rules(vision, {"lm_head.weight": "1"}) is None
    assert rules(vision, names, preprocessor=False) is None
    assert ImageRules.of_model(tmp_path / "nowhere") is None
