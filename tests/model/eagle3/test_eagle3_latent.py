"""A drafter's latent padded to its target's width: the same drafter for every reader, and narrowed
again by our loader.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.model.eagle3.latent import cut_latent, pad_latent
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.config import K2Config
from tests.tiny_model import kernel_config

MODELS = Path(__file__).parents[3] / "models"
TARGET = replace(kernel_config(), kv_lora_rank=256)
OWN = Eagle3Config.for_target(TARGET, kv_lora_rank=64)
AT = "layers.0.self_attn"


def drafter(config: Eagle3Config = OWN, seed: int = 5) -> Eagle3:
    torch.manual_seed(seed)
    made = Eagle3(config)
    if config.architecture == "mla":
        torch.nn.init.uniform_(made.layer.self_attn.kv_a_layernorm.weight, 0.5, 2.0)
    return made.bfloat16()


def same(one: Eagle3, other: Eagle3) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def attended(of: Eagle3, size: float) -> tuple[Tensor, Tensor]:
    """Keys and values, float32, of rows with latents of magnitude `size`: with small ones epsilon matters."""
    of = of.float().requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    embedding, feature = torch.randn(2, 7, of.config.hidden_size, generator=generator)
    of.layer.self_attn.kv_a_proj_with_mqa.weight[: of.config.kv_lora_rank] *= size
    return of.expand(of.project(embedding, feature, *of.angles(torch.arange(7)))[1])


def read_whole(folder: Path) -> Eagle3:
    """The folder as read by an engine that drops nothing: every tensor of the file, in the widths of its config."""
    whole = Eagle3(Eagle3Config.from_folder(folder, TARGET)).bfloat16()
    whole.load_state_dict(load_file(folder / "model.safetensors"))
    return whole


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_a_padded_drafter_has_the_same_keys_and_values_epsilon_included(tmp_path: Path, size: float):
    drafter().save(tmp_path, TARGET.kv_lora_rank)
    whole = read_whole(tmp_path)
    assert whole.config.kv_lora_rank == whole.layer.self_attn.kv_b_proj.weight.shape[1] == 256
    for ours, theirs in zip(attended(drafter(), size), attended(whole, size), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6 * float(ours.abs().max()))


def test_what_is_padded_is_read_as_narrow_as_it_was_to_the_bit(tmp_path: Path):
    drafter().save(tmp_path, TARGET.kv_lora_rank)
    opened = Eagle3.open(tmp_path, TARGET)
    assert opened.config == OWN
    assert opened.config.kv_width == 64 + TARGET.qk_rope_head_dim
    assert same(opened, drafter())


def test_a_ratio_that_is_no_power_of_four_is_right_to_the_rounding_of_a_weight():
    config = replace(OWN, kv_lora_rank=128)
    stored = {name: tensor.detach() for name, tensor in drafter(config).state_dict().items()}
    padded = pad_latent(config, stored, 256)
    whole = Eagle3(padded[0]).bfloat16()
    whole.load_state_dict(padded[1])
    for ours, theirs in zip(attended(drafter(config), 1.0), attended(whole, 1.0), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=2**-7, atol=2**-8 * float(ours.abs().max()))
    narrow, cut = cut_latent(*padded)
    assert narrow == config
    different = [name for name in stored if not torch.equal(cut[name], stored[name])]
    assert different == [f"{AT}.kv_a_layernorm.weight"], "only this tensor is rounded"


def test_padding_of_other_makers_is_dropped_too(tmp_path: Path):
    """The rows unchanged and only the norm's weights halved: the mean square is a quarter, so epsilon weighs more."""
    drafter().save(tmp_path, TARGET.kv_lora_rank)
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{AT}.kv_a_proj_with_mqa.weight"][:64] /= 2
    stored[f"{AT}.kv_b_proj.weight"][:, 64:] = 3.0  # columns multiplied by zeros may have any value
    save_file(stored, tmp_path / "model.safetensors")
    opened = Eagle3.open(tmp_path, TARGET)
    assert opened.config == OWN
    for ours, theirs in zip(attended(opened, 1e-3), attended(read_whole(tmp_path), 1e-3), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6 * float(ours.abs().max()))


@pytest.mark.parametrize(
    "config",
    [
        Eagle3Config.for_target(TARGET),
        Eagle3Config.for_target(TARGET, architecture="llama", num_key_value_heads=2),
        replace(OWN, kv_lora_rank=96),
    ],
    ids=["as wide", "no latent", "a width that no kernel reads"],
)
def test_what_has_no_padding_stays_as_it_is(config: Eagle3Config):
    stored = drafter(config).state_dict()
    assert cut_latent(config, stored) == (config, stored)
    if config.kv_lora_rank != 96:
        assert pad_latent(config, stored, TARGET.kv_lora_rank) == (config, stored)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_latent_of_nothing_at_all_is_no_padding(value: float):
    config = Eagle3Config.for_target(TARGET)
    stored = drafter(config).state_dict()
    stored[f"{AT}.kv_a_proj_with_mqa.weight"][:256] = value
    assert cut_latent(config, stored)[0] == config


def test_the_shipped_drafter_is_what_is_written_today_and_as_wide_as_its_target(tmp_path: Path):
    target, folder = K2Config.from_folder(MODELS / "kimi-nano"), MODELS / "kimi-nano-eagle3"
    opened = Eagle3.open(folder, target)
    assert opened.config.kv_lora_rank == 128
    assert json.loads((folder / "config.json").read_text())["kv_lora_rank"] == target.kv_lora_rank == 512
    opened.save(tmp_path, target.kv_lora_rank)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name
