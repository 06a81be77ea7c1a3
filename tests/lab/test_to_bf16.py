"""The copy in bf16 equals the model: transformers, which reads it by itself, has the same weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from lab.peers.to_bf16 import convert
from redline.model.k2.write import random_checkpoint
from tests.oracle import transformers_model
from tests.tiny_model import kernel_config


def test_the_copy_has_the_weights_of_the_original_rounded_to_bf16(tmp_path: Path):
    random_checkpoint(tmp_path / "mine", kernel_config(q_lora_rank=64))
    convert(tmp_path / "mine", tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    assert "quantization_config" not in config
    copied = load_file(tmp_path / "copy" / "model.safetensors")
    kinds = {name.rpartition(".")[2]: tensor.dtype for name, tensor in copied.items()}
    assert kinds == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}
    mine = transformers_model(tmp_path / "mine").state_dict()
    copy = transformers_model(tmp_path / "copy").state_dict()
    assert mine.keys() == copy.keys()
    for name, weight in mine.items():
        exact = name.endswith("e_score_correction_bias")
        assert torch.equal(copy[name], weight if exact else weight.to(torch.bfloat16).float()), name
