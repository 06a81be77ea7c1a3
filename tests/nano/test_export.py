"""Exported weights equal, bit for bit, those of the training graph."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from nano.config import MEDIA_PLACEHOLDER, NANO
from nano.export import SIDE_CONFIGS, export, export_experts, join_bf16, stacks_of, view, write_side_configs
from nano.model import EXPERTS, effective, shapes
from nano.see import VISION
from nano.tokenizer import TOKENIZER_FILES, write
from redline.model.k2.checkpoint import Checkpoint, weights
from redline.model.k2.config import K2Config, Unquantized
from redline.model.k2.write import k25_config, tiny_config
from redline.ops.formats import Int4, fake_int4
from tests.nano.test_model import random_model

CONFIG = tiny_config()


def test_the_checkpoint_holds_what_the_graph_computes_with(tmp_path: Path) -> None:
    masters, bias = random_model(CONFIG)
    export(tmp_path, masters, bias, CONFIG)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == CONFIG
    computed = effective(masters, True, torch.bfloat16)
    quantised = masters | {name: fake_int4(masters[name]) for name in EXPERTS}
    for weight in weights(CONFIG):
        in_graph = view(computed, bias, CONFIG, weight.name)
        if weight.kind == "expert":
            _, layer, _, _, expert, projection, _ = weight.name.split(".")
            stored = checkpoint.expert(int(layer), int(expert), projection.removesuffix("_proj"))  # type: ignore[arg-type]
            assert isinstance(stored, Int4)
            assert stored.dequantize().equal(view(quantised, bias, CONFIG, weight.name))
            assert stored.dequantize(torch.bfloat16).equal(in_graph)
        else:
            assert checkpoint.plain(weight.name).equal(in_graph), weight.name


def test_the_stacks_of_a_checkpoint_are_what_the_graph_computes_with(tmp_path: Path) -> None:
    masters, bias = random_model(CONFIG)
    export(tmp_path, masters, bias, CONFIG)
    found, found_bias = stacks_of(tmp_path)
    computed = effective(masters, True, torch.float32)
    assert found.keys() == computed.keys()
    assert all(found[name].to(torch.bfloat16).equal(computed[name].to(torch.bfloat16)) for name in computed)
    assert found_bias.equal(bias)


def test_every_master_is_exported_whole() -> None:
    """Each element of every stack is in exactly one weight of the checkpoint."""
    stacks = {name: torch.zeros(shape) for name, shape in shapes(CONFIG).items()}
    bias = torch.zeros(CONFIG.moe_layers, CONFIG.n_routed_experts)
    for weight in weights(CONFIG):
        part = view(stacks, bias, CONFIG, weight.name)
        assert part.shape == weight.shape
        part += 1
    assert all(stack.eq(1).all() for stack in (*stacks.values(), bias))


def test_the_bf16_twin_shares_every_other_tensor(tmp_path: Path) -> None:
    masters, bias = random_model(CONFIG)
    folder, out = tmp_path / "int4", tmp_path / "bf16"
    write(folder, [bytes([value]) for value in range(256)])
    export(folder, masters, bias, CONFIG)
    export_experts(tmp_path / "experts", masters)
    join_bf16(folder, tmp_path / "experts", out)
    int4, bf16 = Checkpoint.open(folder), Checkpoint.open(out)
    assert bf16.config == replace(CONFIG, quantization=Unquantized())
    for weight in weights(CONFIG):
        if weight.kind == "expert":
            expected = view(masters, bias, CONFIG, weight.name).to(torch.bfloat16)
        else:
            expected = int4.plain(weight.name)
        assert bf16.plain(weight.name).equal(expected), weight.name
    beside = (*TOKENIZER_FILES, *SIDE_CONFIGS)
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in beside)


def test_the_committed_configs_are_what_is_written_today(tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "models" / "kimi-nano"
    write_side_configs(tmp_path, NANO)
    for name in SIDE_CONFIGS:
        assert (tmp_path / name).read_bytes() == (committed / name).read_bytes(), name
    written = k25_config(NANO, vision_config=VISION.to_dict(), media_placeholder_token_id=MEDIA_PLACEHOLDER)
    assert json.loads((committed / "config.json").read_text()) == written


def test_nano_is_small_enough_to_bundle() -> None:
    assert NANO.weight_bytes < 33e6
    assert isinstance(NANO, K2Config)
    assert NANO.yarn is not None
    assert NANO.yarn.factor * NANO.yarn.original_max_position_embeddings == NANO.max_position_embeddings
