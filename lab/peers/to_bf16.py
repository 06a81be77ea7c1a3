"""A K2 checkpoint with every weight in bf16, under DeepSeek-V3's names, for servers that read neither INT4 nor Kimi.

    python -m lab.peers.to_bf16 models/kimi-nano FOLDER

vLLM's CPU build is one: its 4-bit experts are those of AWQ and GPTQ, not of compressed-tensors. The product of an INT4
code and its scale has up to eleven significant bits, of which bf16 keeps eight. The folder gets config.json, the
weights in one file, and the unchanged vocabulary files.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.program import program
from redline.model.k2.checkpoint import Checkpoint, Projection, weights

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
# transformers does not write these two keys, but vLLM reads them: without them it routes by softmax.
ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

PROJECTIONS: dict[str, Projection] = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def convert(folder: Path, out: Path) -> None:
    """Writes the checkpoint in `folder` to the folder `out`, which is created.

    Raises CheckpointError if the checkpoint is broken.
    """
    checkpoint = Checkpoint.open(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config(folder), indent=1) + "\n")
    tensors = {_name(weight.name): _plain(checkpoint, weight.name) for weight in weights(checkpoint.config)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in COPIED:
        if (folder / name).exists():
            shutil.copyfile(folder / name, out / name)


def config(folder: Path) -> dict[str, Any]:
    """The text model's settings of config.json, as DeepSeek-V3's and without quantisation."""
    top = json.loads((folder / "config.json").read_text())
    text: dict[str, Any] = top.get("text_config", top)
    kept = {key: value for key, value in text.items() if key != "quantization_config"}
    return ROUTING | kept | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


def _name(logical: str) -> str:
    return logical if logical.startswith("lm_head.") else f"model.{logical}"


def _plain(checkpoint: Checkpoint, name: str) -> Tensor:
    """bf16, except for the correction biases of routers, which are float32 as stored."""
    match name.split("."):
        case ["layers", layer, "mlp", "experts", expert, matrix, "weight"]:
            stored = checkpoint.expert(int(layer), int(expert), PROJECTIONS[matrix])
            weight = stored if isinstance(stored, Tensor) else stored.dequantize()
        case _:
            weight = checkpoint.plain(name)
    return (weight if name.endswith("e_score_correction_bias") else weight.to(torch.bfloat16)).contiguous()


def main() -> None:
    """Writes the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    convert(arguments.folder, arguments.out)


if __name__ == "__main__":
    program(main)
