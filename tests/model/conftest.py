"""Checkpoints used by several tests of the model."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from redline.model.k2.write import random_checkpoint, tiny_config


@pytest.fixture(scope="session")
def big_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1.1 GB of INT4 experts in 256 MB shards. All experts are equal: random ones would take minutes to create."""
    folder = tmp_path_factory.mktemp("big")
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 1024, "intermediate_size": 256, "n_routed_experts": 96}
    config = tiny_config(**sizes, num_hidden_layers=4)
    random_checkpoint(folder, config, shard_bytes=256_000_000, experts_alike=True)
    yield folder
    shutil.rmtree(folder)
