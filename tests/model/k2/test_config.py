"""Every spelling of the family's config.json gives the same facts; unsupported settings are refused by name."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from redline.errors import CheckpointError
from redline.model.k2.checkpoint import weights
from redline.model.k2.config import Fp8Blocks, Int4Experts, K2Config, Nvfp4Experts, Unquantized
from redline.model.k2.write import k25_config, tiny_config

FACTS = json.loads((Path(__file__).parents[1] / "kimi-k2.json").read_text())


def flat(member: str = "k2.6", **changes: Any) -> dict[str, Any]:
    """The text model's keys, in the layout of K2's and K2-Thinking's files."""
    return copy.deepcopy({**FACTS["both"], **FACTS[member], **changes})


def nested(text: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The layout of K2.5's and later files."""
    return {"model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": False, **changes}


def test_kimi_k26_has_the_published_size():
    config = K2Config.from_dict(nested(flat()))
    assert round(config.total_parameters / 1e9, 1) == 1026.4
    assert round(config.active_parameters / 1e9, 1) == 32.9
    assert config.expert_parameters == 44_040_192
    assert config.attention_parameters == 101_124_096
    assert round(config.routed_parameters / 1e9, 1) == 1014.7
    assert round(config.weight_bytes / 1e9) == 594
    assert config.kv_width == 576
    assert config.kv_bytes_per_token(torch.bfloat16) == 70_272
    assert config.kv_bytes_per_token(torch.float8_e4m3fn) == 35_136


@pytest.mark.parametrize(("member", "scale", "ends"), [("k2.6", 0.1446796, (8, 20)), ("k2", 0.1308608, (19, 20))])
def test_yarn_has_the_published_constants(member: str, scale: float, ends: tuple[int, int]):
    config = K2Config.from_dict(flat(member))
    assert config.yarn is not None
    assert config.yarn.correction_range(config.qk_rope_head_dim, config.rope_theta) == ends
    assert config.softmax_scale == pytest.approx(scale, abs=5e-8)


def test_yarn_of_the_first_k2_is_a_step():
    plain = K2Config.from_dict(flat("k2", rope_scaling=None)).inv_freq()
    stretched = K2Config.from_dict(flat("k2")).inv_freq()
    assert torch.equal(stretched[:20], plain[:20])
    assert torch.allclose(stretched[20:], plain[20:] / 32, rtol=1e-6, atol=0)


@pytest.mark.parametrize("member", ["k2", "k2.6"])
def test_frequencies_and_scale_are_those_of_transformers(member: str):
    config = K2Config.from_dict(flat(member))
    rope = {**FACTS[member]["rope_scaling"], "rope_type": "yarn", "rope_theta": 50000.0}
    theirs = DeepseekV3Config(
        qk_rope_head_dim=64, head_dim=64, num_attention_heads=64, hidden_size=4096, rope_parameters=rope
    )
    inv_freq, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    assert amplitude == 1.0  # cos and sin are not scaled: the temperature is part of softmax_scale alone
    assert torch.allclose(config.inv_freq(), inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("betas", "ends"),
    [
        ((1e9, 1e-9), (0, 63)),  # the computed bounds are outside of the existing pairs
        ((32.0, 1e-9), (8, 63)),
        ((1e9, 1.0), (0, 20)),
        ((600.0, 0.5), (0, 22)),  # the first pair turns 652 times
        ((700.0, 0.5), (0, 22)),
    ],
)
def test_the_ends_of_yarns_ramp_stay_among_the_pairs(betas: tuple[float, float], ends: tuple[int, int]):
    scaling = {**FACTS["k2.6"]["rope_scaling"], "beta_fast": betas[0], "beta_slow": betas[1]}
    config = K2Config.from_dict(flat("k2.6", rope_scaling=scaling))
    assert config.yarn is not None
    assert config.yarn.correction_range(64, 50000.0) == ends
    theirs = DeepseekV3Config(
        qk_rope_head_dim=64,
        head_dim=64,
        num_attention_heads=64,
        hidden_size=4096,
        rope_parameters={**scaling, "rope_type": "yarn", "rope_theta": 50000.0},
    )
    inv_freq, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    assert torch.allclose(config.inv_freq(), inv_freq, rtol=1e-6, atol=0)


def test_without_yarn_the_scale_is_plain():
    config = K2Config.from_dict(flat(rope_scaling=None))
    assert config.yarn is None
    assert config.softmax_scale == 192**-0.5


def test_nested_and_flat_files_say_the_same():
    text = flat()
    assert K2Config.from_dict(nested(text)) == K2Config.from_dict(text)


def test_a_text_config_may_call_itself_deepseek_v3():
    assert K2Config.from_dict(nested(flat(model_type="deepseek_v3"))) == K2Config.from_dict(flat())


def test_another_model_around_a_text_config_is_refused():
    with pytest.raises(CheckpointError, match="model_type is 'qwen3_vl'; supported: kimi_k25"):
        K2Config.from_dict({**nested(flat()), "model_type": "qwen3_vl"})


def test_quantization_config_is_found_in_both_places():
    inside = nested(flat())
    outside = nested(flat())
    outside["quantization_config"] = outside["text_config"].pop("quantization_config")
    assert K2Config.from_dict(outside) == K2Config.from_dict(inside)
    twice = {**inside, "quantization_config": inside["text_config"]["quantization_config"]}
    assert K2Config.from_dict(twice) == K2Config.from_dict(inside)


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("theta_inside", [False, True])
def test_rope_is_found_under_every_spelling(key: str, kind_key: str, theta_inside: bool):
    text = flat()
    rope = text.pop("rope_scaling")
    rope[kind_key] = rope.pop("type")
    if theta_inside:
        rope["rope_theta"] = text.pop("rope_theta")
    assert K2Config.from_dict({**text, key: rope}) == K2Config.from_dict(flat())


def test_a_rope_type_of_default_means_no_yarn():
    text = flat()
    del text["rope_scaling"], text["rope_theta"]
    config = K2Config.from_dict({**text, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    assert (config.yarn, config.rope_theta) == (None, 10000.0)


def test_formats_are_recognised():
    assert K2Config.from_dict(flat("k2.6")).quantization == Int4Experts()
    assert K2Config.from_dict(flat("k2")).quantization == Fp8Blocks(128, 128)
    assert K2Config.from_dict(flat(quantization_config=None)).quantization == Unquantized()


def test_token_ids_may_stand_in_the_wrapper_or_be_several():
    text = flat(eos_token_id=[163585, 163586])
    del text["bos_token_id"], text["pad_token_id"]
    config = K2Config.from_dict(nested(text, bos_token_id=163584, eos_token_id=163586))
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (163584, (163585, 163586), None)


def test_low_rank_norms_use_the_models_eps_and_can_be_told_otherwise():
    config = K2Config.from_dict(flat())
    assert config.low_rank_norm_eps == config.rms_norm_eps == 1e-5
    assert replace(config, low_rank_norm_eps=1e-6).rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_group", 8),
        ("topk_group", 4),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("moe_layer_freq", 2),
        ("attention_bias", True),
        ("rope_interleave", False),
        ("q_lora_rank", None),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("hidden_size", "7168"),
        ("hidden_size", 7170),  # not a whole number of INT4 groups
        ("num_key_value_heads", 8),
        ("num_experts_per_tok", 385),
        ("qk_rope_head_dim", 63),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 1),
        ("norm_topk_prob", 1),
        ("model_type", "qwen3_moe"),
        ("eos_token_id", "<|im_end|>"),
        ("rope_scaling", "yarn"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(key: str, value: Any):
    with pytest.raises(CheckpointError) as refusal:
        K2Config.from_dict(flat(**{key: value}), "kimi/config.json")
    message = str(refusal.value)
    assert message.startswith(f"kimi/config.json: {key} is {value!r}; supported: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    "key", ["n_group", "topk_group", "hidden_size", "rms_norm_eps", "norm_topk_prob", "vocab_size"]
)
def test_a_key_whose_default_would_be_wrong_must_be_there(key: str):
    text = flat()
    del text[key]
    with pytest.raises(CheckpointError, match=f"{key} is missing; supported: "):
        K2Config.from_dict(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [("type", "linear"), ("factor", 0.5), ("mscale_all_dim", 0.0), ("attention_factor", 1.2), ("truncate", False)],
)
def test_another_rope_is_refused_by_name(key: str, value: Any):
    text = flat()
    text["rope_scaling"][key] = value
    with pytest.raises(CheckpointError, match=f"config.json: rope_scaling: {key} is {value!r}; supported: "):
        K2Config.from_dict(text)


GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": GROUPS}
NVFP4_PACKED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": GROUPS}


@pytest.mark.parametrize(("quantization", "maker"), [(MODELOPT, "ModelOpt"), (NVFP4_PACKED, "compressed-tensors")])
def test_nvfp4_is_read_from_either_maker(
    quantization: dict[str, Any], maker: Literal["ModelOpt", "compressed-tensors"]
):
    text = flat(quantization_config=None, model_type="deepseek_v3")
    config = K2Config.from_dict(nested(text, quantization_config=quantization))
    assert config.quantization == Nvfp4Experts(maker)
    assert config.bits_per_routed_parameter == 4.5


def test_nvfp4_of_other_blocks_is_refused():
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}}
    text = flat(quantization_config={**MODELOPT, "config_groups": groups})
    with pytest.raises(CheckpointError, match="group_size is 32; supported: 16"):
        K2Config.from_dict(text)


def test_a_format_said_only_in_hf_quant_config_is_read_or_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(flat(quantization_config=None)))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    assert K2Config.from_folder(tmp_path).quantization == Nvfp4Experts("ModelOpt")
    beside.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json has W4A8_AWQ"):
        K2Config.from_folder(tmp_path)


def test_unknown_quantisation_is_refused_with_what_is_read():
    with pytest.raises(CheckpointError, match=r"unknown quantisation \(quant_method 'awq'\); supported: bf16, INT4"):
        K2Config.from_dict(flat(quantization_config={"quant_method": "awq"}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", 8), ("group_size", 128), ("symmetric", False), ("strategy", "channel"), ("actorder", "group")],
)
def test_another_int4_is_refused_by_name(key: str, value: Any):
    text = flat()
    text["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(CheckpointError, match=f"group_0: weights: {key} is {value!r}; supported: "):
        K2Config.from_dict(text)


@pytest.mark.parametrize("value", [None, [128], [128, 0], [128, "128"]])
def test_fp8_without_blocks_is_refused(value: Any):
    text = flat("k2")
    text["quantization_config"]["weight_block_size"] = value
    with pytest.raises(CheckpointError, match="weight_block_size is"):
        K2Config.from_dict(text)


def test_two_quantization_configs_that_differ_are_refused():
    other = FACTS["k2"]["quantization_config"]
    with pytest.raises(CheckpointError, match="quantization_config at the top and in text_config differ"):
        K2Config.from_dict(nested(flat(), quantization_config=other))


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"a": \xff}', '{"a": ' + "[" * 100_000])
def test_a_broken_config_file_is_one_line(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError) as refusal:
        K2Config.from_folder(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("changes", [{}, {"first_k_dense_replace": 0}, {"tie_word_embeddings": True}])
def test_parameters_are_the_sum_over_the_weights(changes: dict[str, Any]):
    config = tiny_config(n_shared_experts=2, **changes)
    assert config.total_parameters == sum(math.prod(weight.shape) for weight in weights(config))


def test_the_written_config_is_read_back_as_it_was():
    for member in ("k2", "k2.6"):
        config = K2Config.from_dict(flat(member))
        assert K2Config.from_dict(k25_config(config)) == config
        assert K2Config.from_dict(k25_config(config, "k2")) == config


def test_what_transformers_saves_of_our_config_is_read_back_as_it_was(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(k25_config(tiny_config())))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert K2Config.from_folder(tmp_path / "saved") == tiny_config()


def test_the_arithmetic_is_said_in_words():
    config = K2Config.from_dict(flat())
    assert "60 layers x 384 experts x 44,040,192 = 1,014.7 B" in config.explain_parameters()[1]
    assert "1,014.7 B x 4.5 bits = 570.8 GB" in config.explain_weight_bytes()[0]
    assert "61 layers x (512 latent + 64 rope) x 2 bytes = 70,272 bytes" in config.explain_kv_bytes(torch.bfloat16)


def test_the_text_of_another_familys_model_is_not_read_as_kimis():
    with pytest.raises(CheckpointError, match="model_type"):
        K2Config.from_dict(nested(flat(), model_type="llava"))
