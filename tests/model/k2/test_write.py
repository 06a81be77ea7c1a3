"""The libraries that own the formats read our files, and a file is written completely or not at all."""

import errno
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from redline.errors import CheckpointError
from redline.model.k2 import write as model_write
from redline.model.k2.checkpoint import Checkpoint, dequantize_fp8, weights
from redline.model.k2.config import Fp8Blocks, K2Config
from redline.model.k2.write import (
    checkpoint_names,
    int4_tensors,
    k25_config,
    quantize_fp8,
    random_checkpoint,
    tiny_config,
    write_checkpoint,
)
from redline.ops.formats import quantize_int4


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_shards_are_numbered_bounded_and_indexed(tmp_path: Path):
    tensors = {f"t{i}": torch.full((25,), float(i)) for i in range(5)}  # 100 bytes each
    tensors["large"] = torch.zeros(100)
    write_checkpoint(tmp_path, tensors.items(), {}, shard_bytes=250)
    assert [(path.name, list(load_file(path))) for path in shards(tmp_path)] == [
        ("model-00001-of-00004.safetensors", ["t0", "t1"]),
        ("model-00002-of-00004.safetensors", ["t2", "t3"]),
        ("model-00003-of-00004.safetensors", ["t4"]),
        ("model-00004-of-00004.safetensors", ["large"]),  # alone above the bound
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 900
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name), tensors[name])
            assert shard.metadata() == {"format": "pt"}


def test_others_may_read_the_files(tmp_path: Path):
    write_checkpoint(tmp_path, [("t", torch.zeros(1))], {})
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044 for path in tmp_path.iterdir())


def test_a_failure_leaves_no_trace_and_the_old_checkpoint_whole(tmp_path: Path):
    config = random_checkpoint(tmp_path, tiny_config())
    before = sorted(tmp_path.iterdir())

    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield "t", torch.zeros(1000)
        yield "u", torch.zeros(1000)
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        write_checkpoint(tmp_path, breaks(), {}, shard_bytes=1000)
    assert sorted(tmp_path.iterdir()) == before
    assert Checkpoint.open(tmp_path).config == config


def test_a_second_checkpoint_replaces_the_first(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config(), shard_bytes=50_000)
    config = random_checkpoint(tmp_path, tiny_config(n_routed_experts=4), shard_bytes=200_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {path.name for path in shards(tmp_path)} == set(index["weight_map"].values())
    assert Checkpoint.open(tmp_path).config == config


def test_tensors_are_taken_one_by_one(tmp_path: Path):
    """When a tensor is requested, all but the last of the earlier shards have been written."""

    def stream() -> Iterator[tuple[str, Tensor]]:
        for i in range(6):
            assert len(list(tmp_path.glob(".writing-*/*"))) == max(0, i - 1)
            yield f"t{i}", torch.zeros(25)

    write_checkpoint(tmp_path, stream(), {}, shard_bytes=100)
    assert len(shards(tmp_path)) == 6


def test_names_are_those_of_the_published_files():
    names = checkpoint_names(tiny_config())
    assert names["layers.2.mlp.experts.5.down_proj.weight"] == (
        "language_model.model.layers.2.mlp.experts.5.down_proj.weight"
    )
    assert names["layers.1.mlp.gate.e_score_correction_bias"] == (
        "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    )
    assert names["lm_head.weight"] == "language_model.lm_head.weight"
    assert checkpoint_names(tiny_config(), "k2")["norm.weight"] == "model.norm.weight"


def test_the_library_that_owns_int4_reads_our_tensors_to_the_same_numbers():
    config = k25_config(tiny_config())["text_config"]["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert isinstance(scheme, QuantizationScheme)
    ours = quantize_int4(torch.randn(48, 96))
    tensors = {name.removeprefix("x."): tensor for name, tensor in int4_tensors("x.weight", ours)}
    theirs = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert torch.equal(ours.dequantize(torch.bfloat16), theirs)
    again = PackedQuantizationCompressor.compress({"weight": theirs, "weight_scale": ours.scale}, scheme)
    assert torch.equal(again["weight_packed"], ours.packed)


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (5, 7)])
def test_fp8_comes_back_within_half_a_step(shape: tuple[int, int]):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scale_inv = quantize_fp8(weight, Fp8Blocks(128, 128))
    assert (codes.dtype, tuple(codes.shape)) == (torch.float8_e4m3fn, shape)
    assert tuple(scale_inv.shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = dequantize_fp8(codes, scale_inv, Fp8Blocks(128, 128)).float()
    # e4m3 has 4 significant bits, so half a step is 2^-4 of the value; bf16's rounding and subnormals add a little.
    assert ((back - weight).abs() <= weight.abs() * (2**-4 + 2**-8) + scale_inv.max() * 2**-9).all()


def test_the_largest_of_an_fp8_block_is_the_largest_e4m3():
    """So every code is used: with a smaller scale, the blocks' small values would lose bits."""
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    codes, _ = quantize_fp8(weight, Fp8Blocks(2, 4))
    largest = codes.float().abs().view(3, 2, 2, 4).amax((1, 3))
    assert (largest == torch.finfo(torch.float8_e4m3fn).max).all()


def test_an_fp8_block_of_zeros_stays_zero():
    codes, scale_inv = quantize_fp8(torch.zeros(4, 4), Fp8Blocks(2, 2))
    assert not dequantize_fp8(codes, scale_inv, Fp8Blocks(2, 2)).any()


def test_transformers_reads_our_config_as_its_own_kimi(tmp_path: Path):
    config = tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(k25_config(config, media_placeholder_token_id=9)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (theirs.model_type, theirs.architectures) == ("kimi_k25", ["KimiK25ForConditionalGeneration"])
    text = theirs.text_config
    for key in ("hidden_size", "kv_lora_rank", "n_routed_experts", "n_group", "rms_norm_eps", "routed_scaling_factor"):
        expected = 1 if key == "n_group" else getattr(config, key)
        assert getattr(text, key) == expected
    assert text.rope_parameters["factor"] == 64.0
    assert text.rope_parameters["rope_theta"] == config.rope_theta


def test_the_config_has_the_published_form():
    config = k25_config(tiny_config(), vision_config={"patch_size": 14}, media_placeholder_token_id=9)
    assert config["text_config"]["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["text_config"]["model_type"] == "kimi_k2"
    assert "quantization_config" not in config
    assert config["vision_config"] == {"patch_size": 14}
    assert config["media_placeholder_token_id"] == 9
    assert "vision_config" not in k25_config(tiny_config())
    first_k2 = k25_config(tiny_config(quantization=Fp8Blocks(128, 128)), "k2")
    assert first_k2["quantization_config"]["weight_block_size"] == [128, 128]
    assert "text_config" not in first_k2


def test_random_weights_follow_the_seed(tmp_path: Path):
    def values(folder: str, seed: int) -> dict[str, Tensor]:
        random_checkpoint(tmp_path / folder, tiny_config(), seed)
        return {name: tensor for shard in shards(tmp_path / folder) for name, tensor in load_file(shard).items()}

    one, same, other = values("one", 0), values("same", 0), values("other", 1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if not name.endswith("weight_shape"))


def test_experts_may_be_alike_and_are_still_all_there(tmp_path: Path):
    config = random_checkpoint(tmp_path, tiny_config(), experts_alike=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.bytes >= config.weight_bytes
    packed = [checkpoint.expert(layer, expert, "up").packed for layer in (1, 2) for expert in range(8)]
    assert all(torch.equal(one, packed[0]) for one in packed)
    assert not torch.equal(packed[0], checkpoint.expert(1, 0, "gate").packed)


@pytest.mark.parametrize("changes", [{"hidden_size": 80}, {"num_experts_per_tok": 9}])
def test_an_impossible_geometry_is_refused_when_it_is_read(changes: dict[str, Any]):
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        K2Config.from_dict(k25_config(tiny_config(**changes)))


def test_the_tiny_model_has_every_part():
    kinds = {weight.kind for weight in weights(tiny_config())}
    assert kinds == {"plain", "linear", "expert"}
    assert tiny_config().yarn is not None
    assert 0 < tiny_config().first_k_dense_replace < tiny_config().num_hidden_layers
    assert tiny_config().total_parameters < 300_000


@pytest.mark.parametrize("fails_at", ["the second shard", "config.json", "model.safetensors.index.json"])
def test_a_disk_that_fills_up_leaves_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
):
    random_checkpoint(tmp_path, tiny_config(), seed=1, shard_bytes=100_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save, write, saved = model_write.save_file, Path.write_text, list[object]()

    def full_save(tensors: dict[str, torch.Tensor], path: Path, **how: Any) -> None:
        saved.append(path)
        if fails_at == "the second shard" and len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, **how)

    def full_write(path: Path, *content: Any, **how: Any) -> int:
        if path.name == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *content, **how)

    with monkeypatch.context() as patch:
        patch.setattr(model_write, "save_file", full_save)
        patch.setattr(Path, "write_text", full_write)
        with pytest.raises(OSError, match="No space left"):
            random_checkpoint(tmp_path, tiny_config(), seed=2, shard_bytes=100_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    Checkpoint.open(tmp_path)
