"""Masters to checkpoints: what the training graph computes with, in Kimi K2.5's own layout.

    python -m nano.export --bf16 CHECKPOINT EXPERTS OUT

joins an INT4 checkpoint with its run's bf16 experts into a whole bf16 checkpoint, for measuring what INT4 costs. The
two share every other tensor, bit for bit, so a run needs to hand back only the experts.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano.config import MEDIA_PLACEHOLDER
from nano.model import Weights, shapes
from nano.tokenizer import TOKENIZER_FILES
from redline.model.k2.checkpoint import Checkpoint, weights
from redline.model.k2.config import Int4Experts, K2Config, Unquantized
from redline.model.k2.write import (
    SHARD_BYTES,
    int4_tensors,
    k25_config,
    k25_preprocessor_config,
    stored_name,
    write_checkpoint,
)
from redline.ops.formats import Int4, Nvfp4, quantize_int4

SIDE_CONFIGS = ("generation_config.json", "preprocessor_config.json")

# Where a checkpoint's weight stands in the stacks; gate and up are the halves of one.
_ATTENTION = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn.q_a_proj": "q_a",
    "self_attn.q_a_layernorm": "q_norm",
    "self_attn.q_b_proj": "q_b",
    "self_attn.kv_a_proj_with_mqa": "kv_a",
    "self_attn.kv_a_layernorm": "kv_norm",
    "self_attn.kv_b_proj": "kv_b",
    "self_attn.o_proj": "o",
}
_ENDS = {"embed_tokens.weight": "embed", "norm.weight": "final_norm", "lm_head.weight": "head"}


def view(masters: Weights, bias: Tensor, config: K2Config, name: str) -> Tensor:
    """The part of the stacks that is the weight of this logical name (`redline.model.k2.checkpoint.weights`): a view.

    bias float32 [M, E]: the router's correction. Raises AssertionError for a name that the model does not have.
    """
    if name in _ENDS:
        return masters[_ENDS[name]]
    _, number, rest = name.split(".", 2)
    layer = int(number)
    part = rest.removesuffix(".weight")
    if part in _ATTENTION:
        return masters[_ATTENTION[part]][layer]
    moe = layer - config.first_k_dense_replace
    match part.split("."):
        case ["mlp", "gate"]:
            return masters["router"][moe]
        case ["mlp", "gate", "e_score_correction_bias"]:
            return bias[moe]
        case ["mlp", projection]:
            return _projection(masters, "dense", layer, projection)
        case ["mlp", "shared_experts", projection]:
            return _projection(masters, "shared", moe, projection)
        case ["mlp", "experts", expert, "down_proj"]:
            return masters["expert_down"][moe, int(expert)]
        case ["mlp", "experts", expert, "gate_proj"]:
            return masters["expert_gate_up"][moe, 0, int(expert)]
        case ["mlp", "experts", expert, "up_proj"]:
            return masters["expert_gate_up"][moe, 1, int(expert)]
        case _:
            raise AssertionError(name)


def _projection(masters: Weights, kind: str, index: int, projection: str) -> Tensor:
    if projection == "down_proj":
        return masters[f"{kind}_down"][index]
    return masters[f"{kind}_gate_up"][index, 0 if projection == "gate_proj" else 1]


def export(folder: Path, masters: Weights, bias: Tensor, config: K2Config) -> None:
    """Writes the checkpoint into `folder`. bias float32 [M, E].

    Routed experts are INT4 or bf16, as `config` says; the router's bias is float32, all else bf16. The tokenizer's
    files are not written here.
    """
    masters = {name: tensor.detach().cpu() for name, tensor in masters.items()}
    bias = bias.detach().float().cpu()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for weight in weights(config):
            # Cloned, since a shard's tensors may share no memory.
            value = view(masters, bias, config, weight.name).clone()
            name = stored_name(weight.name)
            if weight.kind == "expert" and isinstance(config.quantization, Int4Experts):
                yield from int4_tensors(name, quantize_int4(value))
            else:
                yield name, value if value.ndim == 1 and weight.name.endswith("bias") else value.to(torch.bfloat16)

    write_checkpoint(folder, tensors(), k25_config(config, media_placeholder_token_id=MEDIA_PLACEHOLDER))
    write_side_configs(folder, config)


def stacks_of(folder: Path) -> tuple[Weights, Tensor]:
    """(the stacks float32, bias float32 [M, E]) of a checkpoint that `export` has written, in the values that it
    holds: `effective` of its masters."""
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    masters = {name: torch.zeros(shape) for name, shape in shapes(config).items()}
    bias = torch.zeros(config.moe_layers, config.n_routed_experts)
    for weight in weights(config):
        if weight.kind == "expert":
            _, layer, _, _, expert, projection, _ = weight.name.split(".")
            stored = checkpoint.expert(int(layer), int(expert), projection.removesuffix("_proj"))  # type: ignore[arg-type]
            assert not isinstance(stored, Nvfp4), "nano writes experts as INT4 or bf16"
            value = stored.dequantize(torch.float32) if isinstance(stored, Int4) else stored
        else:
            value = checkpoint.plain(weight.name)
        view(masters, bias, config, weight.name).copy_(value)
    return masters, bias


def write_side_configs(folder: Path, config: K2Config) -> None:
    """Writes SIDE_CONFIGS. Answers are greedy by default: the model is measured so, and small models profit from it.

    The model reads no images, but vLLM opens no file of this architecture without a preprocessor_config.json.
    """
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.pad_token_id,
        "do_sample": False,
    }
    for name, values in zip(SIDE_CONFIGS, (generation, k25_preprocessor_config()), strict=True):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def export_experts(folder: Path, masters: Weights) -> None:
    """Writes the routed experts before quantisation, bf16, as stacks, in files of about SHARD_BYTES."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("expert_gate_up", "expert_down"):
        value = masters[name].detach().cpu().to(torch.bfloat16)
        parts = -(-value.nbytes // SHARD_BYTES)
        for number, part in enumerate(value.chunk(parts)):
            save_file({name: part.contiguous()}, folder / f"{name}-{number}.safetensors")


def join_bf16(checkpoint: Path, experts: Path, out: Path) -> None:
    """Writes a whole bf16 checkpoint to `out`: an INT4 one, with the experts that `export_experts` left in `experts`.

    Raises CheckpointError where the INT4 checkpoint is broken.
    """
    opened = Checkpoint.open(checkpoint)
    config = replace(opened.config, quantization=Unquantized())
    stacks = {
        name: torch.cat([load_file(path)[name] for path in sorted(experts.glob(f"{name}-*.safetensors"))])
        for name in ("expert_gate_up", "expert_down")
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for weight in weights(config):
            if weight.kind == "expert":
                value = view(stacks, torch.empty(0), config, weight.name)
            else:
                value = opened.plain(weight.name)
            yield stored_name(weight.name), value.clone()

    write_checkpoint(out, tensors(), k25_config(config, media_placeholder_token_id=MEDIA_PLACEHOLDER))
    for name in (*TOKENIZER_FILES, *SIDE_CONFIGS):
        shutil.copyfile(checkpoint / name, out / name)


def main() -> None:
    """The command line above: `join_bf16` over its three folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", type=Path, nargs=3, metavar=("CHECKPOINT", "EXPERTS", "OUT"), required=True)
    join_bf16(*parser.parse_args().bf16)


if __name__ == "__main__":
    main()
