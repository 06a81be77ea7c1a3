"""GGUF files, read by the formats' own descriptions: llama.cpp is not installed, so this file contains a reader."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lab.peers.to_gguf import DENSE, convert, metadata, pack, vocabulary
from redline.errors import CheckpointError
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.write import random_checkpoint
from redline.ops.formats import Int4, quantize_int4
from tests.tiny_model import kernel_config

CONFIG = kernel_config(q_lora_rank=64)  # every row is whole blocks
NUMBERS = {0: "f32", 2: "q4_0", 8: "q8_0", 30: "bf16"}
BYTES = {"f32": (1, 4), "q4_0": (32, 18), "q8_0": (32, 34), "bf16": (1, 2)}  # values of a block, and its bytes
SINGLE = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}

Array = np.ndarray[Any, np.dtype[Any]]


class Read(NamedTuple):
    kind: str
    values: Array  # axes in torch's order


class Reader:
    """Reads the container from front to back."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        self._at = 0
        assert self._data[:4] == b"GGUF"
        self._at = 4
        version, tensors, values = self._take("<IQQ")
        assert version == 3
        self.values: dict[str, Any] = {}
        for _ in range(values):
            key = self._string()
            [kind] = self._take("<I")
            self.values[key] = self._list() if kind == 9 else self._value(kind)
        places: dict[str, tuple[tuple[int, ...], str, int]] = {}
        for _ in range(tensors):
            name = self._string()
            [axes] = self._take("<I")
            shape = self._take(f"<{axes}Q")[::-1]
            number, start = self._take("<IQ")
            assert name not in places
            places[name] = shape, NUMBERS[number], start
        self._at = math.ceil(self._at / 32) * 32
        self.tensors = {name: self._tensor(*place) for name, place in places.items()}
        ends = [start + _size(shape, kind) for shape, kind, start in places.values()]
        assert math.ceil(max(ends) / 32) * 32 == len(self._data) - self._at, "no bytes after the last tensor"

    def _value(self, kind: int) -> Any:
        return self._string() if kind == 8 else self._take(SINGLE[kind])[0]

    def _list(self) -> list[Any]:
        kind, length = self._take("<IQ")
        return [self._value(kind) for _ in range(length)]

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _string(self) -> str:
        [length] = self._take("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _tensor(self, shape: tuple[int, ...], kind: str, start: int) -> Read:
        assert start % 32 == 0
        first = self._at + start
        return Read(kind, decode(self._data[first : first + _size(shape, kind)], kind).reshape(shape))


def _size(shape: tuple[int, ...], kind: str) -> int:
    block, size = BYTES[kind]
    assert shape[-1] % block == 0
    return math.prod(shape) // block * size


def decode(data: bytes, kind: str) -> Array:
    """float32, flat. ggml's formulas: q4_0 (code - 8) * d, low nibbles first; q8_0 code * d."""
    if kind == "f32":
        return np.frombuffer(data, "<f4")
    if kind == "bf16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = np.frombuffer(data, np.uint8).reshape(-1, BYTES[kind][1])
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    codes = blocks[:, 2:]
    if kind == "q8_0":
        return (codes.view(np.int8).astype(np.float32) * scale).ravel()
    values = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32) - 8
    return (values * scale).ravel()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(folder, CONFIG)
    return folder


@pytest.fixture(scope="module", params=DENSE)
def read(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[str, Reader]:
    path = checkpoint / f"{request.param}.gguf"
    convert(checkpoint, path, request.param)
    return request.param, Reader(path)


def test_every_parameter_is_in_the_file_once(read: tuple[str, Reader]):
    assert sum(tensor.values.size for tensor in read[1].tensors.values()) == CONFIG.total_parameters


def test_the_names_are_those_that_llama_cpp_asks_for(read: tuple[str, Reader]):
    attention = ["norm", "q_a", "q_a_norm", "q_b", "kv_a_mqa", "kv_a_norm", "k_b", "v_b", "output"]
    expected = {"token_embd.weight", "output_norm.weight", "output.weight"}
    for layer in range(CONFIG.num_hidden_layers):
        names = [f"attn_{name}.weight" for name in attention] + ["ffn_norm.weight"]
        endings = ["_exps", "_shexp"] if CONFIG.is_moe(layer) else [""]
        names += [f"ffn_{part}{ending}.weight" for part in ("gate", "up", "down") for ending in endings]
        names += ["ffn_gate_inp.weight", "exp_probs_b.bias"] if CONFIG.is_moe(layer) else []
        expected |= {f"blk.{layer}.{name}" for name in names}
    assert set(read[1].tensors) == expected


def test_routed_experts_keep_their_values(read: tuple[str, Reader], checkpoint: Path):
    """In Q4_0 too, and in every file: these scales are exact in fp16."""
    dense, reader = read
    stored = Checkpoint.open(checkpoint)
    for projection in ("gate", "up", "down"):
        tensor = reader.tensors[f"blk.2.ffn_{projection}_exps.weight"]
        assert tensor.kind == ("f32" if dense == "f32" else "q4_0")
        for expert in range(CONFIG.n_routed_experts):
            mine = stored.expert(2, expert, projection)
            assert isinstance(mine, Int4)
            np.testing.assert_array_equal(tensor.values[expert], mine.dequantize().numpy())


def test_keys_and_values_of_kv_b_come_apart_by_head(read: tuple[str, Reader], checkpoint: Path):
    dense, reader = read
    both = Checkpoint.open(checkpoint).plain("layers.1.self_attn.kv_b_proj.weight").float().numpy()
    both = both.reshape(CONFIG.num_attention_heads, -1, CONFIG.kv_lora_rank)
    step = np.abs(both).max() * {"q4_0": 1 / 8, "q8_0": 1 / 127, "bf16": 0, "f32": 0}[dense]
    keys, values = (reader.tensors[f"blk.1.attn_{part}_b.weight"].values for part in "kv")
    assert np.abs(keys.transpose(0, 2, 1) - both[:, : CONFIG.qk_nope_head_dim]).max() <= step
    assert np.abs(values - both[:, CONFIG.qk_nope_head_dim :]).max() <= step


def test_norms_and_routers_are_exact_in_every_file(read: tuple[str, Reader], checkpoint: Path):
    stored = Checkpoint.open(checkpoint)
    for name, mine in {
        "output_norm.weight": "norm.weight",
        "blk.1.attn_kv_a_norm.weight": "layers.1.self_attn.kv_a_layernorm.weight",
        "blk.1.ffn_gate_inp.weight": "layers.1.mlp.gate.weight",
        "blk.1.exp_probs_b.bias": "layers.1.mlp.gate.e_score_correction_bias",
    }.items():
        tensor = read[1].tensors[name]
        assert tensor.kind == "f32"
        np.testing.assert_array_equal(tensor.values, stored.plain(name=mine).float().numpy())


def test_the_file_says_how_the_model_computes(read: tuple[str, Reader]):
    values = read[1].values
    assert values["general.architecture"] == "deepseek2"
    assert values["tokenizer.ggml.model"] == "no_vocab"
    assert values["deepseek2.attention.key_length"] == CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim
    assert values["deepseek2.attention.key_length_mla"] == CONFIG.qk_nope_head_dim + CONFIG.qk_rope_head_dim
    assert values["deepseek2.expert_weights_scale"] == pytest.approx(CONFIG.routed_scaling_factor)
    assert values["deepseek2.expert_weights_norm"] is True
    assert values["deepseek2.rope.scaling.factor"] == 64
    assert values["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)


@pytest.mark.parametrize(("kind", "most"), [("q4_0", 1.0), ("q8_0", 0.5)])
def test_rounding_stays_within_a_step(kind: str, most: float):
    """Q4_0 has codes -8..7, so the value opposite to the one with the largest magnitude may be a whole step off."""
    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 0
    found = decode(pack(weight, kind), kind).reshape(weight.shape)
    groups = np.abs(weight.numpy().reshape(-1, 32)).max(1)
    step = groups / (8 if kind == "q4_0" else 127)
    apart = np.abs(found - weight.numpy()).reshape(-1, 32).max(1)
    assert (apart <= most * step * (1 + 1 / 16) + 1e-7).all()  # a scale rounded to fp16 moves the largest codes
    assert (found[0, 0] == 0).all()


def test_a_scale_below_the_range_of_fp16_is_rounded_there():
    weight = quantize_int4(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)) * 1e-5)
    found = decode(pack(weight, "q4_0"), "q4_0").reshape(weight.shape)
    half_a_step = 8 * 2**-25  # fp16's subnormals are 2^-24 apart
    np.testing.assert_allclose(found, weight.dequantize().numpy(), rtol=0, atol=half_a_step)


def test_rope_with_two_temperatures_is_refused():
    assert CONFIG.yarn is not None
    config = replace(CONFIG, yarn=replace(CONFIG.yarn, mscale=0.707))
    with pytest.raises(CheckpointError, match=r"mscale is 0.707 and mscale_all_dim 1.0"):
        metadata(config, "q4_0")


def test_the_vocabulary_is_that_of_tokenizer_json(checkpoint: Path):
    model = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    (checkpoint / "tokenizer.json").write_text(
        json.dumps({"model": model, "added_tokens": [{"id": 3, "content": "[E]"}]})
    )
    convert(checkpoint, checkpoint / "words.gguf", words=True)
    values = Reader(checkpoint / "words.gguf").values
    assert values["tokenizer.ggml.model"] == "gpt2"
    assert values["tokenizer.ggml.tokens"] == ["a", "b", "ab", "[E]"]
    assert values["tokenizer.ggml.token_type"] == [1, 1, 1, 3]
    assert values["tokenizer.ggml.merges"] == ["a b"]


def test_a_vocabulary_with_gaps_is_refused(tmp_path: Path):
    model: dict[str, Any] = {"vocab": {"a": 0, "b": 2}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    with pytest.raises(CheckpointError, match="2 tokens with other ids than 0 to 1"):
        vocabulary(tmp_path)
