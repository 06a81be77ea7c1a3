"""Every layout of the family is read to the same numbers; a broken checkpoint raises a one-line error that names the
fault.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import CheckpointError
from redline.model.k2.checkpoint import Checkpoint, dequantize_fp8, weights
from redline.model.k2.config import Fp8Blocks, K2Config
from redline.model.k2.cpu import load
from redline.model.k2.write import (
    Layout,
    k25_config,
    nvfp4_tensors,
    random_checkpoint,
    stored_name,
    tiny_config,
    write_checkpoint,
)
from redline.ops.formats import Int4, Nvfp4, quantize_nvfp4
from tests import forked

Format = Literal["int4", "nvfp4", "bf16", "fp8"]
PROJECTIONS = ("gate", "up", "down")


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the shards under its stored name, read by the safetensors library."""
    return {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def read_all(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every weight under its logical name, dequantised."""
    values: dict[str, Tensor] = {}
    for weight in weights(checkpoint.config):
        if weight.kind == "expert":
            _, layer, _, _, expert, projection, _ = weight.name.split(".")
            value = checkpoint.expert(int(layer), int(expert), projection.removesuffix("_proj"))
            values[weight.name] = value if isinstance(value, Tensor) else value.dequantize()
        else:
            values[weight.name] = checkpoint.plain(weight.name)
    return values


# Layouts that are read.


@pytest.mark.parametrize(
    ("layout", "prefix", "head"),
    [
        ("k25", "language_model.model.", "language_model.lm_head.weight"),
        ("k25-short", "language_model.", "language_model.lm_head.weight"),
        ("k2", "model.", "lm_head.weight"),
    ],
)
@pytest.mark.parametrize("quantization", ["int4", "nvfp4", "bf16", "fp8"])
def test_every_layout_and_format_is_read(tmp_path: Path, layout: Layout, prefix: str, head: str, quantization: Format):
    config = random_checkpoint(tmp_path, tiny_config(), 0, quantization, layout, shard_bytes=100_000)
    checkpoint = Checkpoint.open(tmp_path)
    files = stored(tmp_path)
    assert checkpoint.config == config
    assert {name: tuple(value.shape) for name, value in read_all(checkpoint).items()} == {
        weight.name: weight.shape for weight in weights(config)
    }
    assert torch.equal(checkpoint.plain("lm_head.weight"), files[head])
    assert torch.equal(checkpoint.plain("embed_tokens.weight"), files[f"{prefix}embed_tokens.weight"])
    bias = checkpoint.plain("layers.2.mlp.gate.e_score_correction_bias")
    assert torch.equal(bias, files[f"{prefix}layers.2.mlp.gate.e_score_correction_bias"])
    expert = checkpoint.expert(2, 7, "down")
    assert isinstance(expert, Int4) == (quantization == "int4")
    if isinstance(expert, Int4):
        assert torch.equal(expert.packed, files[f"{prefix}layers.2.mlp.experts.7.down_proj.weight_packed"])
        assert torch.equal(expert.scale, files[f"{prefix}layers.2.mlp.experts.7.down_proj.weight_scale"])
    assert isinstance(expert, Nvfp4) == (quantization == "nvfp4")
    if isinstance(expert, Nvfp4):
        assert torch.equal(expert.codes, files[f"{prefix}layers.2.mlp.experts.7.down_proj.weight"])
        assert torch.equal(expert.scale[0], files[f"{prefix}layers.2.mlp.experts.7.down_proj.weight_scale_2"])


def test_a_head_without_the_wrappers_prefix_is_found(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config())
    tensors = stored(tmp_path)
    head = tensors.pop("language_model.lm_head.weight")
    write_checkpoint(tmp_path, {**tensors, "lm_head.weight": head}.items(), config_of(tmp_path))
    assert torch.equal(Checkpoint.open(tmp_path).plain("lm_head.weight"), head)


def test_int4_decodes_as_the_library_that_owns_the_format_decodes_it(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config())
    group = config_of(tmp_path)["text_config"]["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme.model_validate(group)
    checkpoint = Checkpoint.open(tmp_path)
    files = stored(tmp_path)
    for projection in PROJECTIONS:
        name = f"language_model.model.layers.1.mlp.experts.3.{projection}_proj."
        state = {key.removeprefix(name): value for key, value in files.items() if key.startswith(name)}
        ours = checkpoint.expert(1, 3, projection)
        assert isinstance(ours, Int4)
        codes = unpack_from_int32(state["weight_packed"], 4, torch.Size(ours.shape))
        assert torch.equal(ours.codes() - 8, codes.int())
        theirs = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
        assert theirs.dtype == torch.bfloat16
        assert torch.equal(ours.dequantize(torch.bfloat16), theirs)


def renamed(folder: Path) -> dict[str, Tensor]:
    """The tensors of an NVFP4 checkpoint under compressed-tensors' names, with scales in its convention."""
    tensors: dict[str, Tensor] = {}
    for name, value in stored(folder).items():
        if name.endswith("weight_scale_2"):
            tensors[name.removesuffix("scale_2") + "global_scale"] = 1 / value.reshape(1)
        else:
            tensors[f"{name}_packed" if value.dtype == torch.uint8 else name] = value
    return tensors


def test_nvfp4_decodes_as_the_library_that_packs_it_decodes_it(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config(), quantization="nvfp4")
    config, tensors = config_of(tmp_path), renamed(tmp_path)
    group = config["text_config"]["quantization_config"]["config_groups"]["group_0"]
    group = {**group, "input_activations": None, "weights": {**group["weights"], "strategy": "tensor_group"}}
    packed = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"0": group}}
    config["text_config"]["quantization_config"] = packed
    modelopt = read_all(Checkpoint.open(tmp_path))
    write_checkpoint(tmp_path, tensors.items(), config)
    checkpoint = Checkpoint.open(tmp_path)
    scheme = QuantizationScheme.model_validate(group)
    for projection in PROJECTIONS:
        name = f"language_model.model.layers.1.mlp.experts.3.{projection}_proj."
        state = {key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        ours = checkpoint.expert(1, 3, projection)
        assert isinstance(ours, Nvfp4)
        assert torch.allclose(ours.dequantize(theirs.dtype).float(), theirs.float(), rtol=2**-7, atol=0)
        assert torch.equal(ours.codes, state["weight_packed"])
    for name, value in read_all(checkpoint).items():
        assert torch.allclose(value.float(), modelopt[name].float(), rtol=1e-6, atol=0), name


def test_linears_may_be_nvfp4_too_and_come_as_bf16(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config(), quantization="nvfp4")
    tensors, at = stored(tmp_path), "language_model.model.layers.1.mlp.shared_experts.up_proj.weight"
    plain = tensors.pop(at)
    packed = quantize_nvfp4(plain)
    write_checkpoint(tmp_path, {**tensors, **dict(nvfp4_tensors(at, packed))}.items(), config_of(tmp_path))
    given = Checkpoint.open(tmp_path).plain("layers.1.mlp.shared_experts.up_proj.weight")
    assert given.dtype == torch.bfloat16
    assert torch.equal(given, packed.dequantize(torch.bfloat16))


def test_a_scale_that_is_no_number_is_zero_over_zeros_and_refused_elsewhere(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config(), quantization="nvfp4")
    tensors, at = stored(tmp_path), "language_model.model.layers.1.mlp.experts.0.up_proj.weight"
    tensors[at][3, :8] = 0x08  # eight times 0, eight times -0
    tensors[f"{at}_scale"].view(torch.uint8)[3, 0] = 0x7F
    write_checkpoint(tmp_path, tensors.items(), config_of(tmp_path))
    mended = Checkpoint.open(tmp_path).expert(1, 0, "up")
    assert isinstance(mended, Nvfp4)
    assert not mended.dequantize()[3, :16].any()
    assert mended.dequantize().isfinite().all()
    tensors[at][3, 7] = 0x10
    write_checkpoint(tmp_path, tensors.items(), config_of(tmp_path))
    with pytest.raises(CheckpointError, match=r"experts.0.up_proj.weight_scale: the scale of a block is NaN"):
        Checkpoint.open(tmp_path).expert(1, 0, "up")


def test_int4_codes_are_offset_binary(tmp_path: Path):
    # In two's complement, the same bits would have their peak at 0 and 15.
    random_checkpoint(tmp_path, tiny_config())
    expert = Checkpoint.open(tmp_path).expert(1, 0, "gate")
    assert isinstance(expert, Int4)
    assert expert.codes().flatten().bincount(minlength=16).argmax() == 8


def test_fp8_is_the_plain_product_per_block_with_partial_last_blocks():
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale_inv = torch.rand(2, 3)
    expected = torch.empty(200, 300)
    for row in range(200):
        for column in range(300):
            expected[row, column] = weight[row, column].float() * scale_inv[row // 128, column // 128]
    assert torch.equal(dequantize_fp8(weight, scale_inv, Fp8Blocks(128, 128)), expected.bfloat16())


def test_an_fp8_checkpoint_may_keep_some_linears_in_bf16(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config(), quantization="fp8")
    tensors = stored(tmp_path)
    name = "language_model.model.layers.0.self_attn.o_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = tensors[name].bfloat16()
    write_checkpoint(tmp_path, tensors.items(), config_of(tmp_path))
    assert torch.equal(Checkpoint.open(tmp_path).plain("layers.0.self_attn.o_proj.weight"), tensors[name])


def test_a_single_file_without_index_is_read(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config())
    before = read_all(Checkpoint.open(tmp_path))
    tensors = stored(tmp_path)
    for file in (*tmp_path.glob("*.safetensors"), tmp_path / "model.safetensors.index.json"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    after = read_all(Checkpoint.open(tmp_path))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tied_embeddings_serve_as_the_head(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config(tie_word_embeddings=True))
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.plain("lm_head.weight"), checkpoint.plain("embed_tokens.weight"))


def test_what_the_text_model_does_not_need_is_skipped(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config())
    before = Checkpoint.open(tmp_path)
    model = "language_model.model.layers."
    others = {
        "vision_tower.patch_embed.proj.weight": torch.zeros(8, 3, 14, 14),
        "mm_projector.proj.0.bias": torch.zeros(8),
        f"{model}3.eh_proj.weight": torch.zeros(64, 128),  # the draft (MTP) layer after the last layer
        f"{model}3.mlp.experts.0.gate_proj.weight": torch.zeros(32, 64),
        f"{model}0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        f"{model}0.self_attn.k_proj.k_scale": torch.ones(()),
        f"{model}0.self_attn.v_proj.v_scale": torch.ones(()),
    }
    write_checkpoint(tmp_path, {**stored(tmp_path), **others}.items(), config_of(tmp_path))
    after = Checkpoint.open(tmp_path)
    assert after.bytes == before.bytes


def test_weight_shape_is_not_trusted(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config())
    before = read_all(Checkpoint.open(tmp_path))
    tensors = stored(tmp_path)
    shapes = [name for name in tensors if name.endswith("weight_shape")]
    garbage = {name: torch.tensor([-1752796263, -1707567530]) for name in shapes}
    write_checkpoint(tmp_path, {**tensors, **garbage}.items(), config_of(tmp_path))
    after = read_all(Checkpoint.open(tmp_path))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("quantization", ["int4", "bf16", "fp8"])
def test_progress_adds_up_to_the_bytes_of_the_checkpoint(tmp_path: Path, quantization: Format):
    random_checkpoint(tmp_path, tiny_config(), 0, quantization)
    checkpoint = Checkpoint.open(tmp_path)
    read: list[int] = []
    checkpoint.progress = read.append
    read_all(checkpoint)
    assert sum(read) == checkpoint.bytes


def test_the_fingerprint_follows_the_content(tmp_path: Path):
    for folder, seed in (("one", 0), ("same", 0), ("other", 1)):
        random_checkpoint(tmp_path / folder, tiny_config(), seed)
    one, same, other = (Checkpoint.open(tmp_path / folder).fingerprint for folder in ("one", "same", "other"))
    assert one == same != other
    text = config_of(tmp_path / "same")
    text["text_config"]["rms_norm_eps"] = 1e-6
    (tmp_path / "same" / "config.json").write_text(json.dumps(text))
    assert Checkpoint.open(tmp_path / "same").fingerprint != one


@pytest.mark.parametrize("place", ["header", "start", "start's end", "middle", "middle's end", "end's start", "end"])
def test_the_fingerprint_samples_the_start_the_middle_and_the_end_of_every_shard(tmp_path: Path, place: str):
    random_checkpoint(tmp_path, tiny_config(), shard_bytes=200_000)
    before = Checkpoint.open(tmp_path).fingerprint
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        raw = shard.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        middle = (start + len(raw)) // 2
        assert middle + 8192 < len(raw)
        at = {
            "header": raw.index(b'"pt"') + 1,  # in its metadata, which does not describe tensors
            "start": start,
            "start's end": start + 4095,
            "middle": middle,
            "middle's end": middle + 4095,
            "end's start": len(raw) - 4096,
            "end": len(raw) - 1,
        }[place]
        changed = bytearray(raw)
        changed[at] ^= 1
        shard.write_bytes(changed)
        assert Checkpoint.open(tmp_path).fingerprint != before, shard.name
        shard.write_bytes(raw)
    assert Checkpoint.open(tmp_path).fingerprint == before


def test_a_tensor_at_an_odd_offset_is_read(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config(), shard_bytes=10**9)
    (shard,) = tmp_path.glob("*.safetensors")
    expected = {name: tensor.clone() for name, tensor in stored(tmp_path).items()}
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip(b" ")
    # One more space in the header moves all data by one byte.
    padded = header + b" " * (length - len(header) + 1)
    shard.write_bytes(len(padded).to_bytes(8, "little") + padded + raw[8 + length :])
    name = "layers.0.self_attn.o_proj.weight"
    assert torch.equal(Checkpoint.open(tmp_path).plain(name), expected[f"language_model.model.{name}"])


READ_EVERYTHING = """
import sys
from pathlib import Path
from threading import Event, Thread

import torch
from redline.model.k2.checkpoint import Checkpoint, weights


def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def watch():
    global peak
    while not over.wait(0.001):
        peak = max(peak, anonymous())


torch.zeros(1000).clone()  # what torch allocates once is not the checkpoint's
peak = before = anonymous()
over = Event()
watcher = Thread(target=watch)
watcher.start()
checkpoint = Checkpoint.open(sys.argv[1])
read, largest = [], 0
checkpoint.progress = read.append
for weight in weights(checkpoint.config):
    if weight.kind == "expert":
        _, layer, _, _, expert, projection, _ = weight.name.split(".")
        value = checkpoint.expert(int(layer), int(expert), projection.removesuffix("_proj"))
        copy = (value.packed.clone(), value.scale.clone())
    else:
        copy = (checkpoint.plain(weight.name).clone(),)
    peak = max(peak, anonymous())
    largest = max(largest, sum(part.nbytes for part in copy))
over.set()
watcher.join()
print(sum(read), largest, (peak - before) * 1024)
"""


def test_reading_1_gb_takes_the_memory_of_one_tensor(big_checkpoint: Path):
    child = forked.run(
        [sys.executable, "-c", READ_EVERYTHING, str(big_checkpoint)], capture_output=True, text=True, check=True
    )
    read, largest, grown = map(int, child.stdout.split())
    assert read > 1_000_000_000
    assert grown <= largest + 200_000_000


def sparse_shard(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
    """A shard with a true header (dtype, shape, bytes of each tensor) and a sparse hole as data."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + end)


def test_a_kimi_of_full_size_is_proven_without_reading_it(tmp_path: Path):
    facts = json.loads((Path(__file__).parents[1] / "kimi-k2.json").read_text())
    config = K2Config.from_dict({**facts["both"], **facts["k2.6"]})
    (tmp_path / "config.json").write_text(json.dumps(k25_config(config)))
    by_layer: dict[str, dict[str, tuple[str, tuple[int, ...], int]]] = {}
    for weight in weights(config):
        tensors = by_layer.setdefault("".join(weight.name.split(".")[:2]), {})
        name = stored_name(weight.name)
        rows, columns = weight.shape if len(weight.shape) == 2 else (1, weight.shape[0])
        if weight.kind == "expert":
            tensors[f"{name}_packed"] = ("I32", (rows, columns // 8), rows * columns // 2)
            tensors[f"{name}_scale"] = ("BF16", (rows, columns // 32), rows * columns // 16)
        else:
            tensors[name] = ("BF16", weight.shape, rows * columns * 2)
    for shard, tensors in by_layer.items():
        sparse_shard(tmp_path / shard, tensors)
    weight_map = {name: shard for shard, tensors in by_layer.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.bytes == config.weight_bytes
    assert round(checkpoint.bytes / 1e9) == 594
    assert checkpoint.expert(60, 383, "down").shape == (7168, 2048)


# Checkpoints that are refused.


def break_tensor(
    change: Callable[[dict[str, Tensor]], object], quantization: Format = "int4"
) -> Callable[[Path], None]:
    """Write the tiny checkpoint with `change` applied to its tensors."""

    def write(folder: Path) -> None:
        random_checkpoint(folder, tiny_config(), 0, quantization)
        tensors = stored(folder)
        change(tensors)
        write_checkpoint(folder, tensors.items(), config_of(folder))

    return write


AT = "language_model.model.layers."
NORM = f"{AT}1.input_layernorm.weight"
PACKED = f"{AT}2.mlp.experts.5.up_proj.weight_packed"


def missing_shard(folder: Path) -> None:
    random_checkpoint(folder, tiny_config(), shard_bytes=100_000)
    (folder / "model-00002-of-00004.safetensors").unlink()


def truncated_shard(folder: Path) -> None:
    random_checkpoint(folder, tiny_config(), shard_bytes=100_000)
    shard = folder / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def truncated_header(folder: Path) -> None:
    random_checkpoint(folder, tiny_config())
    shard = folder / "model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])


def something_else(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        random_checkpoint(folder, tiny_config())
        (folder / "model-00001-of-00001.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)

    return write


def edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        random_checkpoint(folder, tiny_config())
        index = folder / "model.safetensors.index.json"
        value = json.loads(index.read_text())
        change(value)
        index.write_text(json.dumps(value))

    return write


def edit_text_config(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        random_checkpoint(folder, tiny_config())
        value = config_of(folder)
        value["text_config"].update(changes)
        (folder / "config.json").write_text(json.dumps(value))

    return write


def only_a_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(k25_config(tiny_config())))


def lying_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Write the tiny checkpoint, then its header with `change` applied, at the same length."""

    def write(folder: Path) -> None:
        random_checkpoint(folder, tiny_config())
        shard = folder / "model-00001-of-00001.safetensors"
        raw = shard.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= length + 64
        shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return write


def swapped(header: dict[str, Any], name: str) -> None:
    header[name]["data_offsets"].reverse()


def of_another(header: dict[str, Any], name: str, other: str) -> None:
    header[name]["data_offsets"] = header[other]["data_offsets"]


def a_folder_for_a_file(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        random_checkpoint(folder, tiny_config(), shard_bytes=10**9)
        (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
        (folder / "model.safetensors.index.json").unlink()
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return write


def link_to_itself(folder: Path) -> None:
    random_checkpoint(folder, tiny_config())
    shard = folder / "model-00001-of-00001.safetensors"
    shard.unlink()
    shard.symlink_to(shard)


def deep(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        random_checkpoint(folder, tiny_config())
        (folder / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)

    return write


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "tensors that lie over one another": (
        lying_header(
            lambda header: of_another(header, f"{AT}1.input_layernorm.weight", f"{AT}0.input_layernorm.weight")
        ),
        "input_layernorm.weight: its data begins at ",
    ),
    "a tensor that ends before it begins": (
        lying_header(lambda header: swapped(header, NORM)),
        f"{NORM}: its data ends before it begins",
    ),
    "data that no tensor has": (lying_header(lambda header: header.pop(NORM)), ": its data begins at "),
    "a folder in the place of the weights": (
        a_folder_for_a_file("model.safetensors"),
        "cannot be read: Is a directory",
    ),
    "a folder in the place of the config": (a_folder_for_a_file("config.json"), "cannot be read: Is a directory"),
    "a config without a floor": (deep("config.json"), "config.json: expected one JSON object"),
    "an index without a floor": (deep("model.safetensors.index.json"), "index.json: expected one JSON object"),
    "a header without a floor": (
        something_else(b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        "expected a safetensors header: ",
    ),
    "a shard that is a link to itself": (link_to_itself, ": missing shard; expected to hold "),
    "a missing shard": (
        missing_shard,
        "/model-00002-of-00004.safetensors: missing shard; expected to hold language_model.model.layers.",
    ),
    "a truncated shard": (truncated_shard, ": truncated: the file has "),
    "a truncated header": (truncated_header, "1,000 bytes, truncated or not safetensors; expected a header of "),
    "an absurd header": (something_else(b"\xff" * 64), "expected a safetensors header"),
    "a header entry of the wrong form": (
        something_else(b'{"x": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 0]}}'),
        "x: expected a safetensors header: Expected `int` >= 0 - at `$.shape[0]`",
    ),
    "a missing tensor": (
        break_tensor(lambda t: t.pop(NORM)),
        "index.json: layers.1.input_layernorm.weight: missing; expected BF16 or F32 [64]",
    ),
    "a wrong dtype": (
        break_tensor(lambda t: t.update({NORM: t[NORM].half()})),
        f"model-00001-of-00001.safetensors: {NORM}: expected BF16 or F32 [64], found F16 [64]",
    ),
    "a wrong shape": (
        break_tensor(lambda t: t.update({NORM: t[NORM][:32].clone()})),
        f"{NORM}: expected BF16 or F32 [64], found BF16 [32]",
    ),
    "packed weights of a wrong shape": (
        break_tensor(lambda t: t.update({PACKED: t[PACKED][:, :4].clone()})),
        f"{PACKED}: expected I32 [32, 8], found I32 [32, 4]",
    ),
    "scales of a wrong dtype": (
        break_tensor(lambda t: t.update({f"{AT}1.mlp.experts.0.up_proj.weight_scale": torch.ones(32, 2)})),
        "up_proj.weight_scale: expected BF16 [32, 2], found F32 [32, 2]",
    ),
    "a tensor that the model has no place for": (
        break_tensor(lambda t: t.update({f"{AT}0.self_attn.o_proj.bias": torch.zeros(64)})),
        f"{AT}0.self_attn.o_proj.bias: expected nothing of that name",
    ),
    "zero points": (
        break_tensor(lambda t: t.update({f"{AT}1.mlp.experts.0.up_proj.weight_zero_point": torch.zeros(4, 2)})),
        "weight_zero_point: expected nothing of that name",
    ),
    "two tensors of one meaning": (
        break_tensor(lambda t: t.update({"model.norm.weight": torch.ones(64)})),
        "norm.weight: a second tensor of that name",
    ),
    "FP8 weights without scales": (
        break_tensor(lambda t: t.pop(f"{AT}0.self_attn.o_proj.weight_scale_inv"), "fp8"),
        "layers.0.self_attn.o_proj.weight_scale_inv: missing; expected F32 [1, 1]",
    ),
    "FP8 weights in a file that does not say so": (
        break_tensor(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        f"{NORM}: expected BF16 or F32 [64], found F8_E4M3 [64]",
    ),
    "INT4 experts in a file that does not say so": (
        edit_text_config(quantization_config=None),
        "layers.1.mlp.experts.0.gate_proj.weight: missing; expected BF16 or F32 [32, 64]",
    ),
    "an unknown quantisation": (
        edit_text_config(quantization_config={"quant_method": "gptq"}),
        "config.json: text_config: quantization_config: unknown quantisation (quant_method 'gptq'); supported: bf16, ",
    ),
    "a config of another size": (
        edit_text_config(hidden_size=128),
        "embed_tokens.weight: expected BF16 or F32 [512, 128], found BF16 [512, 64]",
    ),
    "an index that points elsewhere": (
        edit_index(lambda index: index["weight_map"].update({NORM: "../model.safetensors"})),
        f"index.json: {NORM}: is in '../model.safetensors'; expected a file of the same folder",
    ),
    "an index that lists what is not there": (
        edit_index(lambda index: index["weight_map"].update({"x": "model-00001-of-00001.safetensors"})),
        "model-00001-of-00001.safetensors: x: missing; model.safetensors.index.json expects it here",
    ),
    "an index without a map": (
        edit_index(lambda index: index.pop("weight_map")),
        "index.json: weight_map: Expected `object`, got `null`",
    ),
    "no weights": (only_a_config, "no weights; expected model.safetensors.index.json and its shards, or model.saf"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_one_line_with_file_and_tensor(tmp_path: Path, case: str):
    write, expected = BROKEN[case]
    write(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(tmp_path)
    message = str(refusal.value)
    assert message.startswith(str(tmp_path))
    assert expected in message
    assert "\n" not in message


def test_a_header_whose_offsets_and_shape_disagree_is_refused(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config())
    shard = tmp_path / "model-00001-of-00001.safetensors"
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    end = header[NORM]["data_offsets"][1]
    for entry in header.values():  # the two bytes overlap its neighbour's, so that there is no gap
        entry["data_offsets"] = [place - 2 * (place == end) for place in entry.get("data_offsets", [])]
    del header["__metadata__"]
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight: expected 128 bytes, found 126"):
        Checkpoint.open(tmp_path)


def test_shards_may_be_links_as_in_a_cache_of_downloads(tmp_path: Path):
    random_checkpoint(tmp_path / "blobs", tiny_config(), shard_bytes=100_000)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    linked, whole = Checkpoint.open(tmp_path / "snapshot"), Checkpoint.open(tmp_path / "blobs")
    assert linked.fingerprint == whole.fingerprint
    assert torch.equal(linked.plain("norm.weight"), whole.plain("norm.weight"))


def test_a_config_with_more_layers_than_the_files_is_refused(tmp_path: Path):
    config: K2Config = random_checkpoint(tmp_path, tiny_config())
    deeper = replace(config, num_hidden_layers=10**9)
    (tmp_path / "config.json").write_text(json.dumps(k25_config(deeper)))
    with pytest.raises(CheckpointError, match=r"layers\.3\.input_layernorm\.weight: missing"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", "input_layernorm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_chooses_experts_or_norms_must_be_finite(tmp_path: Path, name: str, value: float):
    """A NaN in a router would choose other experts, without any visible sign in the answer."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{AT}1.{name}"].view(-1)[3] = value

    break_tensor(change)(tmp_path)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.{name}: expected finite numbers, found NaN or infinity"):
        load(Checkpoint.open(tmp_path), torch.device("cpu"))
