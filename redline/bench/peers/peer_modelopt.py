"""NVFP4 files in NVIDIA's own hands: ModelOpt decodes what we wrote, and rounds what we rounded.

    python -m redline.bench.peers.peer_modelopt SRC NVFP4_FOLDER --save benchmarks/results/modelopt-nano.json

Runs where nvidia-modelopt can be imported, which no extra of Redline brings. Exit code 1 where a routed expert decodes
to another number than ours, in float32 or in bf16. Its errors are relative to the weight, and so are those of the
folder and of the level `fast`.
"""

import argparse
import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.model.k2.checkpoint import Checkpoint, Weight, weights
from redline.ops.formats import NVFP4_GROUP, Nvfp4
from redline.quant.audit import relative
from redline.quant.nvfp4 import MAX_SCALING, max_scale, round_nvfp4
from redline.quant.read import dense

CPU = torch.device("cpu")


def decoded(packed: dict[str, Tensor], like: torch.Size, dtype: torch.dtype) -> Tensor:
    """A stored weight by ModelOpt's dequantiser. packed: its tensors, by what stands behind `.weight`."""
    tensor: Any = resolve_name("modelopt.torch.quantization.qtensor.nvfp4_tensor:NVFP4QTensor")
    scale, whole = packed["_scale"], packed["_scale_2"]
    return tensor(like, dtype, packed[""]).dequantize(
        dtype=dtype, scale=scale, double_scale=whole, block_sizes={-1: NVFP4_GROUP}
    )


def rounded(weight: Tensor) -> Tensor:
    """A float32 weight, rounded and decoded by ModelOpt."""
    tensor: Any = resolve_name("modelopt.torch.quantization.qtensor.nvfp4_tensor:NVFP4QTensor")
    made, scale, whole = tensor.quantize(weight, NVFP4_GROUP)
    return made.dequantize(dtype=torch.float32, scale=scale, double_scale=whole, block_sizes={-1: NVFP4_GROUP})


def stored(checkpoint: Checkpoint, weight: Weight) -> dict[str, Tensor]:
    """The tensors of a weight, read by the safetensors library, by what stands behind `.weight`."""
    found: dict[str, Tensor] = {}
    for part in checkpoint.parts(weight):
        with safe_open(part.file, "pt") as file:
            found[part.name.rpartition(".weight")[2]] = file.get_tensor(part.name)
    return found


def main() -> int:
    """Compares every routed expert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", type=output)
    given = parser.parse_args()
    source, ours = Checkpoint.open(given.source), Checkpoint.open(given.folder)
    same = {torch.float32: 0, torch.bfloat16: 0}
    errors: dict[str, list[float]] = {"folder": [], "modelopt": [], "fast": []}
    every = [weight for weight in weights(ours.config) if weight.kind == "expert"]
    for weight in every:
        value, mine = dense(source, weight, CPU).float(), dense(ours, weight, CPU)
        for dtype in same:
            same[dtype] += torch.equal(decoded(stored(ours, weight), mine.shape, dtype), mine.to(dtype))
        fast: Nvfp4 = round_nvfp4(value, max_scale(float(value.abs().max())), MAX_SCALING)[0]
        for name, other in (("folder", mine), ("modelopt", rounded(value)), ("fast", fast.dequantize())):
            errors[name].append(relative(value, other))
    means = {name: round((sum(e * e for e in found) / len(found)) ** 0.5, 5) for name, found in errors.items()}
    record = {
        **provenance("torch", "nvidia-modelopt"),
        "model": given.source.name,
        "weights": len(every),
        "same_in_float32": same[torch.float32],
        "same_in_bf16": same[torch.bfloat16],
        "errors": means,
    }
    print(json.dumps(record, indent=1))
    if given.save:
        given.save.write_text(json.dumps(record, indent=1) + "\n")
    return int(set(same.values()) != {len(every)})


if __name__ == "__main__":
    program(main)
