"""The MLP inputs of each layer over the calibration texts, kept on disk while a checkpoint is quantized.

A file per layer contains the inputs of all tokens, and the experts that each token was routed to. A worker takes the
rows of its expert from it and computes what it needs: the second moments of a 1T model's experts would take 80 GB per
layer, the inputs of 65,536 tokens take one. Of the attention's KV cache, only the largest magnitude per layer is kept.

T tokens, D hidden, K chosen experts, n rows of an expert, I expert width.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from redline.disk import save, sync
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.model.k2.checkpoint import Checkpoint, CheckpointWeight
from redline.ops.formats import E4M3_MOST, NVFP4_MOST
from redline.ops.moe import gated
from redline.quant.read import dense
from redline.quant.stream import through
from redline.quant.texts import CalibrationText

ROWS = 8192  # maximum number of rows for calibrating a weight, spread evenly over all its inputs
SEEN = 32  # rows below which an expert is not calibrated: its moments would come from a handful of tokens
UNSEEN = 512  # rows of the whole layer that estimate the largest activations of such an expert


def digest_of(texts: Sequence[CalibrationText]) -> str:
    """A hex digest; equal for the same texts in the same order."""
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(repr(text.tokens).encode())
    return digest.hexdigest()


def stored_bytes(checkpoint: Checkpoint, texts: Sequence[CalibrationText]) -> int:
    """The size of the files on disk in bytes, without their headers."""
    config = checkpoint.config
    row = 2 * config.hidden_size
    tokens = sum(len(text.tokens) for text in texts)
    return tokens * (row * config.num_hidden_layers + 4 * config.num_experts_per_tok * config.moe_layers)


class _Told(Record, frozen=True):
    digest: str
    largest_kept: tuple[float, ...]  # per layer, over latents and rotated keys


class CalibrationInputs:
    """The files of a finished calibration pass. Thread-safe for reading."""

    def __init__(self, folder: Path, largest_kept: Sequence[float]) -> None:
        self._folder = folder
        self._largest_kept = largest_kept

    def kv_scale(self, layer: int) -> float:
        """The fp8 scale that maps the largest magnitude in a layer's KV cache to the largest fp8 number."""
        largest = self._largest_kept[layer]
        return largest / E4M3_MOST if largest > 0 else 1.0

    def of(self, checkpoint: Checkpoint, weight: CheckpointWeight, device: torch.device) -> tuple[Tensor, int]:
        """(inputs of a weight's projection, float32 [rows, inputs]; number of tokens that were routed to it).

        If an expert received fewer than SEEN tokens, the rows are a sample of the whole layer's, and only show how
        large its activations become.
        """
        at, _, projection = weight.name.removesuffix("_proj.weight").rpartition(".")
        layer = int(at.split(".")[1])
        x, seen = self._rows(layer, int(at.split(".")[4]) if weight.kind == "expert" else None)
        x = x.to(device).float()
        if projection == "down":
            gate, up = (dense(checkpoint, _sibling(weight, name), device).float() for name in ("gate", "up"))
            x = gated(x @ gate.T, x @ up.T)
        return x, seen

    def _rows(self, layer: int, expert: int | None) -> tuple[Tensor, int]:
        with safe_open(_path(self._folder, layer), "pt") as file:
            x = file.get_tensor("x")
            if expert is None:
                return _some(x, ROWS), len(x)
            chosen = (file.get_tensor("ids") == expert).any(1).nonzero()[:, 0]
            if len(chosen) < SEEN:
                return _some(x, UNSEEN), len(chosen)
            return x[_some(chosen, ROWS)], len(chosen)


def input_scale(x: Tensor) -> float:
    """The scale of 4-bit activations with the same largest magnitude as x: one per tensor, as for weights."""
    largest = float(x.abs().max())
    return largest / (NVFP4_MOST * E4M3_MOST) if largest > 0 else 1.0


def _some(rows: Tensor, most: int) -> Tensor:
    """At most `most` rows, spread evenly over all."""
    return rows if len(rows) <= most else rows[torch.arange(most) * len(rows) // most]


def _sibling(weight: CheckpointWeight, projection: str) -> CheckpointWeight:
    hidden, width = weight.shape
    name = weight.name.replace(".down_proj.", f".{projection}_proj.")
    return CheckpointWeight(name, (width, hidden), weight.kind)


def _path(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:05}.safetensors"


def capture(
    checkpoint: Checkpoint,
    texts: Sequence[CalibrationText],
    folder: Path,
    device: torch.device,
    progress: Callable[[int, int], object] = lambda layer, layers: None,
) -> CalibrationInputs:
    """Compute the inputs of every layer, or reuse those of a finished pass over the same texts.

    Raises OSError or SafetensorError if the disk is full.
    """
    told, digest = folder / "told.json", digest_of(texts)
    if told.exists():
        found = msgspec.json.decode(told.read_bytes(), type=_Told)
        if found.digest != digest:
            raise ConfigError(f"{folder}: calibrated with other texts: name another folder")
        return CalibrationInputs(folder, found.largest_kept)
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[Tensor, Tensor | None]] = []
    whole = sum(len(text.tokens) for text in texts)
    largest_kept = [0.0] * checkpoint.config.num_hidden_layers

    def listen(layer: int, x: Tensor, ids: Tensor | None, kept: Tensor) -> None:
        largest_kept[layer] = max(largest_kept[layer], float(kept.abs().max()))
        parts.append((x.to("cpu", torch.bfloat16), None if ids is None else ids.cpu()))
        if sum(len(x) for x, _ in parts) < whole:
            return
        tensors = {"x": torch.cat([x for x, _ in parts])}
        chosen = [ids for _, ids in parts if ids is not None]
        if chosen:
            tensors["ids"] = torch.cat(chosen)
        path = _path(folder, layer)
        save_file(tensors, path)
        sync(path)
        parts.clear()

    through(checkpoint, texts, device, listen, progress)
    save(told, msgspec.json.encode(_Told(digest=digest, largest_kept=tuple(largest_kept))))
    return CalibrationInputs(folder, largest_kept)
