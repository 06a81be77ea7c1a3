"""A folder's config.json names its family; DeepSeek-V3's published sizes are read, impossible ones refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import CheckpointError
from redline.folder import SERVED
from redline.model.k2.config import Fp8Blocks, K2Config
from redline.model.spec import SPECS, spec_of

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def folder(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "kimi_k25"}, "Kimi K2"),
        ({"model_type": "kimi_k2", "n_group": 1}, "Kimi K2"),
        ({"model_type": "deepseek_v3", "n_group": 1}, "Kimi K2"),
        ({"model_type": "deepseek_v3", "n_group": 8}, "DeepSeek-V3"),
    ],
)
def test_the_config_names_the_family(tmp_path: Path, config: dict[str, Any], name: str):
    assert spec_of(folder(tmp_path, **config)).name == name


def test_another_family_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="model_type is 'llama'; supported: kimi_k25, kimi_k2, deepseek_v3"):
        spec_of(folder(tmp_path, model_type="llama"))
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        spec_of(tmp_path / "absent")


def test_the_folders_check_knows_the_same_families():
    assert set(SERVED) == {each for spec in SPECS for each in spec.model_types}


def test_deepseek_v3_has_the_published_size(tmp_path: Path):
    config = spec_of(folder(tmp_path, **DEEPSEEK)).loader.config(tmp_path)
    assert round(config.total_parameters / 1e9) == 671
    assert round(config.active_parameters / 1e9, 1) == 37.6
    assert (config.n_group, config.topk_group, config.moe_layers) == (8, 4, 58)
    assert config.quantization == Fp8Blocks(128, 128)
    assert config.kv_bytes_per_token(torch.bfloat16) == 70_272
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.3688879**2, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"n_group": 7}, r"n_group is 7; supported: a divisor of n_routed_experts \(256\)"),
        ({"n_group": 256}, "n_group is 256; supported: a divisor .* with two experts or more"),
        ({"topk_group": 9}, r"topk_group is 9; supported: at most n_group \(8\)"),
        ({"topk_group": 1, "num_experts_per_tok": 64}, "num_experts_per_tok is 64; supported: at most 32"),
        ({"model_type": "kimi_k2"}, "n_group is 8; supported: 1"),
    ],
)
def test_impossible_groups_are_refused(changes: dict[str, Any], refused: str):
    with pytest.raises(CheckpointError, match=refused):
        K2Config.from_dict({**DEEPSEEK, **changes})
