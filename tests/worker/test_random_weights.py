"""`engine.random_weights`: an engine from a config and a tokenizer; most of its layers are views of other layers."""

import json
from pathlib import Path

import pytest

from redline.deploy.config import read
from redline.errors import ConfigError
from redline.model.k2.write import k25_config
from redline.run.fit import MemorySizes
from redline.worker.config import EngineConfig
from redline.worker.engine import EngineCore
from tests.tiny_model import job, kernel_config, prompt, run
from tests.tiny_tokenizer import RESERVED, write_tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("random"), ())
    config = kernel_config(
        num_hidden_layers=6, vocab_size=256 + RESERVED, moe_intermediate_size=64, intermediate_size=64
    )
    (folder / "config.json").write_text(json.dumps(k25_config(config)))
    return folder


def config(layers: int, **changes: int) -> EngineConfig:
    return EngineConfig(kv_memory=10_000_000, max_model_len=512, device="cpu", random_weights=layers, **changes)


def answer(folder: Path) -> tuple[int, ...]:
    engine = EngineCore.load(folder, config(2))
    try:
        assert "random weights, 2 of 6 layers in memory" in engine.ready.summary
        asked = job("asked", prompt(seed=1, length=40), max_tokens=20, stop_ids=(), logprobs=None)
        return run(engine, [asked])["asked"].tokens
    finally:
        engine.runner.close()


def test_it_answers_and_answers_the_same_again(folder: Path):
    first = answer(folder)
    assert len(first) == 20
    assert answer(folder) == first


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (7, "engine.random_weights is 7; the model has 6 layers, so at most 6"),
        (1, r"engine.random_weights is 1; the 1 layers without experts are not shared, so it is at least 2"),
    ],
)
def test_a_number_that_the_model_cannot_use_is_refused(folder: Path, layers: int, said: str):
    with pytest.raises(ConfigError, match=said):
        EngineCore.load(folder, config(layers))


def test_ranks_on_a_cpu_have_no_random_parts(folder: Path):
    with pytest.raises(ConfigError, match="random_weights over 2 ranks need GPUs"):
        EngineCore.load(folder, config(2, ranks=2))


def test_only_layers_that_lie_in_memory_are_counted():
    of = kernel_config(num_hidden_layers=6)
    assert MemorySizes(of, in_memory=2).weight_bytes == MemorySizes(kernel_config(num_hidden_layers=2)).weight_bytes
    assert MemorySizes(of, in_memory=2).page_bytes == MemorySizes(of).page_bytes


def test_what_others_reach_is_no_place_for_it(folder: Path):
    with pytest.raises(ConfigError, match=r"engine\.random_weights is for benchmarks.*host is 0\.0\.0\.0"):
        read(folder, {"engine.random_weights": 2, "host": "0.0.0.0"})
