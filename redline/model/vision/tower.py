"""MoonViT-3D and the projector: pixels of an image, or of up to four frames of a video, become embeddings.

One item is encoded at a time, so that its bits do not depend on other items (law 7). The encoder can stop between
blocks, so that decode steps run in between. Products are PyTorch's. Source of the formulas: Kimi K2.5's model card and
vLLM's kimi_k25_vit; held to transformers' kimi_k25 by tests/model/vision.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, interpolate, linear

from redline.errors import CheckpointError
from redline.kernels.cuda.patches import add_layer_norm, attend_patches
from redline.model.vision.config import MERGE, PROJECTOR, TOWER, VisionConfig

_EPS = 1e-5  # of the tower's norms
_THETA = 10_000.0  # of rotary positions and of the time table


class Grid(NamedTuple):
    """Patches of one item. rows and columns are even."""

    frames: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.frames * self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Positions of the prompt that the item takes: frames are averaged, 2 x 2 patches become one."""
        return self.rows * self.columns // MERGE**2


class Encoding:
    """An item on its way through the blocks: its hidden states, and the number of blocks that have run."""

    def __init__(self, grid: Grid, hidden: Tensor, angles: Tensor) -> None:
        """hidden: [patches, width]. angles: float32 [patches, head / 2], by which pairs of queries and keys turn."""
        self.grid = grid
        self.hidden = hidden
        self.partial: Tensor | None = None  # [patches, width]: what the last block adds to the hidden states
        self.cos, self.sin = angles.cos(), angles.sin()
        self.blocks = 0


class VisionTower:
    """The tower and its projector on one device. Weights are of one dtype, in which it computes; norms, softmax and
    rotations are float32 inside."""

    def __init__(self, config: VisionConfig, weights: Mapping[str, Tensor]) -> None:
        """weights: by stored name, as in `VisionConfig.tensors`. CheckpointError for a missing or misshapen tensor."""
        for name, shape in config.tensors():
            if name not in weights:
                raise CheckpointError(f"vision tower: no tensor {name}")
            if tuple(weights[name].shape) != shape:
                raise CheckpointError(
                    f"vision tower: {name} has shape {list(weights[name].shape)}; expected {list(shape)}"
                )
        self.config = config
        self._weights = weights
        some = weights[f"{PROJECTOR}.proj.2.weight"]
        self.dtype, self.device = some.dtype, some.device
        table = weights[f"{TOWER}.patch_embed.pos_emb.weight"]
        self._positions = table.float().permute(2, 0, 1)  # [width, rows, columns]
        steps = torch.arange(0, config.hidden, 2, device=self.device) / config.hidden
        angles = torch.arange(config.frames, device=self.device)[:, None] * _THETA**-steps
        self._times = torch.cat([angles.sin(), angles.cos()], dim=1)  # [frames, width]

    def encode(self, patches: Tensor, grid: Grid) -> Tensor:
        """All of `begin`, `advance` and `finish`: [tokens, text_hidden]."""
        encoding = self.begin(patches, grid)
        self.advance(encoding, self.config.layers)
        return self.finish(encoding)

    def rehearse(self) -> None:
        """Encodes an image of one token and keeps nothing, so that kernels are compiled and loaded before a client
        waits for them."""
        grid, patch = Grid(1, MERGE, MERGE), self.config.patch
        self.encode(torch.zeros(grid.patches, 3, patch, patch, device=self.device), grid)

    @torch.inference_mode()
    def begin(self, patches: Tensor, grid: Grid) -> Encoding:
        """The embedded patches. patches: [patches, 3, patch, patch], normalised pixels, by frame, row, column."""
        config = self.config
        if tuple(patches.shape) != (grid.patches, 3, config.patch, config.patch):
            raise ValueError(f"patches have shape {list(patches.shape)}; {grid} has {grid.patches} of {config.patch}")
        if grid.frames > config.frames or grid.rows % MERGE or grid.columns % MERGE:
            raise ValueError(f"{grid}: expected at most {config.frames} frames of even rows and columns")
        pixels = patches.to(self.device, self.dtype).flatten(1)
        weight = self._weights[f"{TOWER}.patch_embed.proj.weight"].flatten(1)
        hidden = linear(pixels, weight, self._weights[f"{TOWER}.patch_embed.proj.bias"])
        return Encoding(grid, hidden + self._placed(grid).to(self.dtype), self._angles(grid))

    @torch.inference_mode()
    def advance(self, encoding: Encoding, blocks: int) -> None:
        """Runs up to `blocks` further blocks."""
        for layer in range(encoding.blocks, min(encoding.blocks + blocks, self.config.layers)):
            self._block(encoding, f"{TOWER}.encoder.blocks.{layer}")
            encoding.blocks = layer + 1

    @torch.inference_mode()
    def finish(self, encoding: Encoding) -> Tensor:
        """The embeddings [tokens, text_hidden] of an item that has passed all blocks."""
        assert encoding.blocks == self.config.layers
        frames, rows, columns = encoding.grid
        hidden = self._norm(encoding.hidden, encoding.partial, f"{TOWER}.encoder.final_layernorm", _EPS)
        hidden = hidden.view(frames, rows // MERGE, MERGE, columns // MERGE, MERGE, -1)
        pooled = hidden.float().mean(0).to(self.dtype).transpose(1, 2)  # [rows / 2, columns / 2, 2, 2, width]
        pooled = pooled.reshape(-1, self.config.hidden)
        pooled = self._norm(pooled, None, f"{PROJECTOR}.pre_norm", self.config.projector_eps)
        merged = pooled.view(encoding.grid.tokens, -1)
        return self._linear(gelu(self._linear(merged, f"{PROJECTOR}.proj.0")), f"{PROJECTOR}.proj.2")

    def _block(self, encoding: Encoding, at: str) -> None:
        config, hidden = self.config, encoding.hidden
        normed = self._norm(hidden, encoding.partial, f"{at}.norm0", _EPS)
        qkv = self._linear(normed, f"{at}.wqkv").view(-1, 3, config.heads, config.head)
        mixed = self._linear(attend_patches(qkv, encoding.cos, encoding.sin), f"{at}.wo")
        normed = self._norm(hidden, mixed, f"{at}.norm1", _EPS)
        encoding.partial = self._linear(self._activated(normed, f"{at}.mlp.fc0"), f"{at}.mlp.fc1")

    def _activated(self, x: Tensor, name: str) -> Tensor:
        """The product and GELU by its tanh formula. On a GPU the product's kernel applies it too, which saves 22 of 108
        us for 5,476 patches on an NVIDIA H200."""
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        if x.is_cuda:
            return torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return gelu(linear(x, weight, bias), approximate="tanh")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Tensor, partial: Tensor | None, name: str, eps: float) -> Tensor:
        """Adds the partial sum to x in place, and norms it."""
        return add_layer_norm(x, partial, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], eps)

    def _placed(self, grid: Grid) -> Tensor:
        """What each patch adds for its position: float32 [patches, width]. One frame has no term of time."""
        frames, rows, columns = grid
        table = positions_between(self._positions, rows, columns)
        places = table.permute(1, 2, 0).reshape(1, rows * columns, -1)
        if frames > 1:
            places = places + self._times[:frames, None]
        return places.reshape(grid.patches, -1)

    def _angles(self, grid: Grid) -> Tensor:
        """[patches, head / 2], as in all frames."""
        return position_angles(self.config.head, grid.rows, grid.columns, self.device).repeat(grid.frames, 1)


def position_angles(head: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """float32 [rows * columns, head / 2]: by which pairs of a query turn, alternately for the column and the row."""
    frequencies = _THETA ** -(torch.arange(0, head, 4, device=device) / head)
    x = torch.arange(columns, device=device).repeat(rows)
    y = torch.arange(rows, device=device).repeat_interleave(columns)
    return torch.stack([x[:, None] * frequencies, y[:, None] * frequencies], dim=-1).flatten(1)


def positions_between(table: Tensor, rows: int, columns: int) -> Tensor:
    """The table of positions [width, R, C], float32, interpolated to [width, rows, columns]."""
    if (rows, columns) == table.shape[1:]:
        return table
    down, across = (_bicubic(*of, table.device) for of in zip(table.shape[1:], (rows, columns), strict=True))
    return down @ table @ across.T


def _bicubic(size: int, new_size: int, device: torch.device) -> Tensor:
    """[new_size, size]: bicubic interpolation of a vector. As a matrix: PyTorch's own kernel for a table took 8.3 of
    32 ms of an image of 1,024 x 1,024 on an NVIDIA H200."""
    one = torch.eye(size, device=device)[None, None]
    return interpolate(one, size=(new_size, size), mode="bicubic", align_corners=False)[0, 0]
