"""The shapes known by name equal those of the published config files."""

import json
from pathlib import Path

import pytest

from redline.errors import ConfigError
from redline.model.k2.config import K2Config
from redline.model.k2.shapes import KIMI_K26, KIMI_NANO, shape

ROOT = Path(__file__).parents[3]
FACTS = json.loads((Path(__file__).parents[1] / "kimi-k2.json").read_text())


def test_kimi_k26_is_the_published_config():
    assert K2Config.from_dict({**FACTS["both"], **FACTS["k2.6"]}) == KIMI_K26


def test_kimi_nano_is_the_model_in_this_repository():
    assert K2Config.from_folder(ROOT / "models" / "kimi-nano") == KIMI_NANO


def test_a_shape_that_nobody_knows_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'kimi-k9'; expected one of kimi-k2\.6, .*, kimi-nano"):
        shape("kimi-k9")
