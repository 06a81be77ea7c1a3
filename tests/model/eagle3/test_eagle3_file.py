"""The drafter's folder: the names that engines read, one by one. A drafter that does not fit its target is refused with
the reason.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import CheckpointError
from redline.model.eagle3.module import Eagle3, Eagle3Config, default_layer_ids
from redline.model.k2.config import K2Config
from tests.tiny_model import kernel_config

FACTS = json.loads((Path(__file__).parents[1] / "kimi-k2.json").read_text())
KIMI = K2Config.from_dict({**FACTS["both"], **FACTS["k2.6"]})
NANO = K2Config.from_folder(Path(__file__).parents[3] / "models" / "kimi-nano")
TINY = kernel_config()
IDS = "eagle_aux_hidden_state_layer_ids"


def nano_drafter() -> Eagle3Config:
    return Eagle3Config.for_target(NANO, intermediate_size=1024, kv_lora_rank=128)


def shapes(config: Eagle3Config) -> dict[str, list[int]]:
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in Eagle3(config).state_dict().items()}


def test_kimis_tensors_are_those_that_engines_read():
    assert shapes(Eagle3Config.for_target(KIMI)) == {
        "layers.0.self_attn.q_a_proj.weight": [1536, 14336],
        "layers.0.self_attn.q_a_layernorm.weight": [1536],
        "layers.0.self_attn.q_b_proj.weight": [12288, 1536],
        "layers.0.self_attn.kv_a_proj_with_mqa.weight": [576, 14336],
        "layers.0.self_attn.kv_a_layernorm.weight": [512],
        "layers.0.self_attn.kv_b_proj.weight": [16384, 512],
        "layers.0.self_attn.o_proj.weight": [7168, 8192],
        "layers.0.mlp.gate_proj.weight": [18432, 7168],
        "layers.0.mlp.up_proj.weight": [18432, 7168],
        "layers.0.mlp.down_proj.weight": [7168, 18432],
        "layers.0.input_layernorm.weight": [7168],
        "layers.0.hidden_norm.weight": [7168],
        "layers.0.post_attention_layernorm.weight": [7168],
        "fc.weight": [7168, 21504],
        "fc_norm.0.weight": [7168],
        "fc_norm.1.weight": [7168],
        "fc_norm.2.weight": [7168],
        "norm.weight": [7168],
        "lm_head.weight": [163840, 7168],
    }


def test_kimis_config_has_every_key_that_engines_read():
    assert Eagle3Config.for_target(KIMI).to_dict() == {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "draft_vocab_size": 163840,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "fc_norm": True,
        "norm_output": True,
        IDS: [2, 30, 58],
        "num_aux_hidden_states": 3,
        "eagle_config": {IDS: [2, 30, 58], "use_aux_hidden_state": True},
    }


def test_nanos_drafter_has_its_own_sizes_and_the_targets_rope():
    config = nano_drafter()
    assert shapes(config) == {
        "layers.0.self_attn.q_a_proj.weight": [128, 640],
        "layers.0.self_attn.q_a_layernorm.weight": [128],
        "layers.0.self_attn.q_b_proj.weight": [768, 128],
        "layers.0.self_attn.kv_a_proj_with_mqa.weight": [192, 640],
        "layers.0.self_attn.kv_a_layernorm.weight": [128],
        "layers.0.self_attn.kv_b_proj.weight": [1024, 128],
        "layers.0.self_attn.o_proj.weight": [320, 512],
        "layers.0.mlp.gate_proj.weight": [1024, 320],
        "layers.0.mlp.up_proj.weight": [1024, 320],
        "layers.0.mlp.down_proj.weight": [320, 1024],
        "layers.0.input_layernorm.weight": [320],
        "layers.0.hidden_norm.weight": [320],
        "layers.0.post_attention_layernorm.weight": [320],
        "fc.weight": [320, 960],
        "fc_norm.0.weight": [320],
        "fc_norm.1.weight": [320],
        "fc_norm.2.weight": [320],
        "norm.weight": [320],
        "lm_head.weight": [4096, 320],
    }
    assert config.to_dict()[IDS] == [2, 4, 5]
    assert config.softmax_scale == NANO.softmax_scale
    assert torch.equal(config.inv_freq(), NANO.inv_freq())
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * (128 + 64)


def test_a_llama_body_has_llamas_tensors_and_a_reduced_vocabulary_its_tables():
    config = Eagle3Config.for_target(KIMI, architecture="llama", draft_vocab_size=32000, fc_norm=False)
    found = shapes(config)
    assert {name: found[name] for name in found if "self_attn" in name or "2" in name or name == "lm_head.weight"} == {
        "layers.0.self_attn.q_proj.weight": [8192, 14336],
        "layers.0.self_attn.k_proj.weight": [8192, 14336],
        "layers.0.self_attn.v_proj.weight": [8192, 14336],
        "layers.0.self_attn.o_proj.weight": [7168, 8192],
        "lm_head.weight": [32000, 7168],
        "d2t": [32000],
        "t2d": [163840],
    }
    assert len(found) == 7 + 8  # and fc, norm, three of the MLP, three norms of the layer: no fc_norm
    written = config.to_dict()
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (written["model_type"], written["head_dim"], written["draft_vocab_size"]) == ("llama", 128, 32000)
    assert not {"fc_norm", "q_lora_rank", "kv_lora_rank", "first_k_dense_replace"} & set(written)


CONFIGS = {
    "mla": Eagle3Config.for_target(TINY),
    "mla, EAGLE-3": Eagle3Config.for_target(TINY, fc_norm=False, norm_output=False),
    "mla, the target's head": Eagle3Config.for_target(TINY, draft_vocab_size=None),
    "llama": Eagle3Config.for_target(TINY, architecture="llama", num_key_value_heads=2),
    "llama, reduced": Eagle3Config.for_target(TINY, architecture="llama", draft_vocab_size=96),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_a_saved_drafter_opens_the_same_to_the_bit(config: Eagle3Config, tmp_path: Path):
    drafter = Eagle3(config).bfloat16()
    if config.draft_vocab_size == 96:
        drafter.keep(torch.randperm(TINY.vocab_size)[:96])
    drafter.save(tmp_path)
    opened = Eagle3.open(tmp_path, TINY)
    assert opened.config == config
    ours, theirs = drafter.state_dict(), opened.state_dict()
    assert ours.keys() == theirs.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_initialise_takes_the_targets_rows_of_the_tokens_that_are_kept():
    drafter = Eagle3(CONFIGS["llama, reduced"])
    ids, head = torch.randperm(TINY.vocab_size)[:96], torch.randn(TINY.vocab_size, TINY.hidden_size)
    drafter.keep(ids)
    drafter.initialise(torch.randn_like(head), head)
    assert torch.equal(drafter.lm_head.weight, head[ids.sort().values])
    assert torch.equal(drafter.t2d.nonzero().flatten(), ids.sort().values)


def test_fc_begins_as_the_mean_of_the_states():
    drafter = Eagle3(CONFIGS["mla, EAGLE-3"])
    states = torch.randn(5, 3, TINY.hidden_size)
    assert torch.allclose(drafter.fuse(states.flatten(1)), states.mean(1), atol=1e-6)


# Files written by other projects.


@pytest.fixture(params=["mla", "llama, reduced"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    Eagle3(CONFIGS[request.param]).save(tmp_path)
    return tmp_path


@pytest.fixture
def mla(tmp_path: Path) -> Path:
    Eagle3(CONFIGS["mla"]).save(tmp_path)
    return tmp_path


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    Eagle3(CONFIGS["llama, reduced"]).save(tmp_path)
    return tmp_path


def change(folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Sets keys and tensors; ... removes one, a function changes it. `__` in a tensor's name represents a dot."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **(config or {})}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    stored = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        name = name.replace("__", ".")
        stored[name] = value(stored[name]) if callable(value) else value
    save_file({name: tensor for name, tensor in stored.items() if tensor is not ...}, folder / "model.safetensors")


def test_both_spellings_of_the_layer_load(folder: Path):
    ours = Eagle3.open(folder, TINY).state_dict()
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()}
    for number, word in enumerate(("low", "mid", "high")):
        if f"fc_norm.{number}.weight" in renamed:
            renamed[f"aux_norm_{word}.weight"] = renamed.pop(f"fc_norm.{number}.weight")
    save_file(renamed, folder / "model.safetensors")
    theirs = Eagle3.open(folder, TINY).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_v3_alias_is_the_same_body(mla: Path):
    change(mla, {"architectures": ["Eagle3DeepseekV3ForCausalLM"]})
    assert Eagle3.open(mla, TINY).config == CONFIGS["mla"]


def test_t2d_may_be_missing_and_what_nobody_reads_may_be_there(reduced: Path):
    t2d = Eagle3.open(reduced, TINY).t2d
    change(reduced, t2d=..., embed_tokens__weight=torch.zeros(TINY.vocab_size, TINY.hidden_size))
    change(reduced, midlayer__self_attn__rotary_emb__inv_freq=torch.zeros(16))
    opened = Eagle3.open(reduced, TINY)
    assert torch.equal(opened.t2d, t2d)
    assert "embed_tokens.weight" not in opened.state_dict()


def test_no_head_and_no_draft_vocabulary_is_the_targets_head(mla: Path):
    change(mla, {"draft_vocab_size": ...}, lm_head__weight=...)
    assert Eagle3.open(mla, TINY).config.draft_vocab_size is None


def test_a_full_head_needs_no_draft_vocabulary(mla: Path):
    change(mla, {"draft_vocab_size": ...})
    assert Eagle3.open(mla, TINY).config == CONFIGS["mla"]


@pytest.mark.parametrize(
    ("top", "nested", "ids"),
    [
        ((0, 2), (0, 2), (0, 2)),
        ((0, 2), ..., (0, 2)),
        (..., (0, 2), (0, 2)),
        (..., (1, 2), (2, 3)),  # keys that SGLang adds
        (..., ..., default_layer_ids(TINY.num_hidden_layers)),
    ],
)
def test_layer_ids_are_read_where_they_stand(top: Any, nested: Any, ids: tuple[int, ...]):
    values = {**CONFIGS["mla"].to_dict(), IDS: top, "num_aux_hidden_states": ..., "eagle_config": {IDS: nested}}
    values["eagle_config"] = {} if nested is ... else {IDS: list(nested)}
    values = {key: list(value) if key == IDS and value is not ... else value for key, value in values.items()}
    read = Eagle3Config.from_dict({key: value for key, value in values.items() if value is not ...}, target=TINY)
    assert read.layer_ids == ids


def test_the_default_states_are_the_engines():
    assert default_layer_ids(61) == (2, 30, 58)
    assert default_layer_ids(8) == (2, 4, 5)
    for layers in range(1, 70):
        ids = default_layer_ids(layers)
        assert list(ids) == sorted(set(ids))
        assert ids[-1] <= layers
        assert ids[0] != 1


YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("scaling", "amplitude"),
    [(YARN, 0.1 * 4.158883 + 1), ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0), (None, 1.0)],
)
def test_yarn_in_a_llama_body_scales_the_angles_as_its_trainers_do(scaling: dict[str, Any] | None, amplitude: float):
    config = Eagle3Config.from_dict({**CONFIGS["llama"].to_dict(), "rope_scaling": scaling})
    assert config.softmax_scale == pytest.approx(32**-0.5 * amplitude**2, rel=1e-6)


CONFIG_REFUSALS = [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures is .*Eagle3DeepseekV2ForCausalLM"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2; supported: 1"),
    ({"hidden_size": 32}, "hidden_size is 32; this target needs 64"),
    ({"target_hidden_size": 32}, "target_hidden_size is 32; this target needs 64"),
    ({"vocab_size": 1024}, "vocab_size is 1024; this target needs 512"),
    ({"draft_vocab_size": 513}, "draft_vocab_size is 513; supported: at most vocab_size, 512"),
    ({"q_lora_rank": None}, "q_lora_rank is None"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2; supported: 4"),
    ({IDS: [0, 2, 4], "eagle_config": {}}, r"\[0, 2, 4\]; this target has ids 0 .* to 3"),
    ({IDS: [0, 2], "num_aux_hidden_states": 2}, r"\[0, 2\] at the top and \[0, 2, 3\] in eagle_config"),
    ({IDS: [2, 0, 3], "eagle_config": {}}, "ids that increase"),
    ({IDS: [1, 2, 3], "eagle_config": {}}, "a first id of 1 means another layer to SGLang"),
    ({IDS: [], "eagle_config": {}, "num_aux_hidden_states": 0}, r"is \[\]; supported: ids that increase"),
    ({"num_aux_hidden_states": 5}, "num_aux_hidden_states is 5; supported: 3"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is True"),
    ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is False"),
    ({"qk_rope_head_dim": 31}, "qk_rope_head_dim is 31; supported: an even number"),
    ({"fc_norm": False}, "fc_norm.0.weight: expected nothing of that name: config.json has no fc_norm"),
    ({"intermediate_size": 128}, r"down_proj.weight: expected .* \[64, 128\], found BF16 \[64, 160\]"),
    ({"draft_vocab_size": 96}, r"lm_head.weight: expected BF16 or F16 or F32 \[96, 64\], found BF16 \[512, 64\]"),
]


@pytest.mark.parametrize(("config", "reason"), CONFIG_REFUSALS, ids=[reason for _, reason in CONFIG_REFUSALS])
def test_a_config_that_does_not_fit_is_refused(mla: Path, config: dict[str, Any], reason: str):
    change(mla, config)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        Eagle3.open(mla, TINY)
    assert str(mla) in str(refusal.value)


def put(index: int, value: int) -> Callable[[Tensor], Tensor]:
    return lambda d2t: d2t.index_fill(0, torch.tensor([index]), value)


TENSOR_REFUSALS = [
    ("mla", {"norm__weight": ...}, r"norm.weight: missing; expected \[64\]"),
    ("mla", {"fc_norm__1__weight": ...}, "fc_norm.1.weight: missing; .* since config.json has fc_norm"),
    ("mla", {"lm_head__weight": ...}, "lm_head.weight: missing; .* draft_vocab_size; without it the target's head"),
    ("mla", {"input_norm__weight": torch.zeros(192)}, "input_norm.weight: expected nothing of that name"),
    ("mla", {"fc__weight": torch.zeros(64, 128)}, "it reads 2 states of the target, and 3 layer ids are given"),
    ("mla", {"norm__weight": torch.zeros(64, dtype=torch.int32)}, "expected BF16 or F16 or F32 .*, found I32"),
    ("mla", {"embed_tokens__weight": torch.zeros(500, 64)}, r"embed_tokens.weight: expected .* \[512, 64\]"),
    ("mla", {"d2t": torch.arange(512)}, "d2t: draft id 256 is token 512; the target has 512 tokens"),
    ("mla", {"midlayer__hidden_norm__weight": torch.zeros(64)}, "a second tensor of that name"),
    ("llama, reduced", {"d2t": ...}, r"d2t: missing; expected \[96\]"),
    ("llama, reduced", {"d2t": put(3, 509)}, "d2t: draft id 3 is token 512; the target has 512 tokens"),
    ("llama, reduced", {"d2t": put(3, -4)}, "d2t: draft id 3 is token -1"),
    ("llama, reduced", {"d2t": put(3, -1), "t2d": ...}, "d2t: two draft ids are the same token"),
    ("llama, reduced", {"d2t": put(95, 9)}, "t2d: marks other tokens than those that d2t points to"),
]


@pytest.mark.parametrize(("made", "tensors", "reason"), TENSOR_REFUSALS, ids=[r[2] for r in TENSOR_REFUSALS])
def test_tensors_that_do_not_fit_are_refused(made: str, tensors: dict[str, Any], reason: str, tmp_path: Path):
    Eagle3(CONFIGS[made]).save(tmp_path)
    change(tmp_path, **tensors)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        Eagle3.open(tmp_path, TINY)
    assert str(tmp_path / "model.safetensors") in str(refusal.value)


def test_a_truncated_or_missing_file_is_refused(mla: Path):
    path = mla / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        Eagle3.open(mla, TINY)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing"):
        Eagle3.open(mla, TINY)


def test_ids_that_engines_read_differently_are_never_written():
    config = Eagle3Config.for_target(TINY, layer_ids=(1, 2, 3))
    with pytest.raises(CheckpointError, match="a first id of 1"):
        config.to_dict()
