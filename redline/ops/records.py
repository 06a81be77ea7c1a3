"""Expert weights as the GPU's kernels stream them.        E experts, N outputs, K inputs, I expert width, D hidden.

A record is 16 rows x KS inputs of INT4, weights and scales in one piece, in the order in which one warp multiplies
them; four records that four warps of a group read side by side lie side by side, so that one bulk copy brings them.

    record = KS / 64 blocks of [lane 4g + t][4 words]    word 2h + r: row g + 8r, inputs 64j + 32h + 8t + e, e = 0..7,
                                                         code u of e at bit 0, 16, 4, 20, 8, 24, 12, 28
             then bf16 scales [KS / 64][g][r][h]         9 KS bytes in all

N and K are padded with code 8 and scale 0, which stand for zero.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.ops.formats import INT4_GROUP, Int4
from redline.ops.tiled import PAD_K, Tiled, padded

TILE_ROWS = 16
MOST_INPUTS = 512  # of a record: the fragments of x take a register for every eight
MOST_KEPT = 448  # where they are kept in registers from row tile to row tile
SLAB_ROWS = 64  # of a block of `experts_down`: four row tiles, one for each warp of a group
_ZERO_CODES = -0x77777778  # eight codes of 8
_BIT = (0, 16, 4, 20, 8, 24, 12, 28)  # of code e in a record's word


@dataclass(frozen=True)
class Form:
    """How a matrix [N, K] is cut. tiles: of 16 rows, padding counted; slices of `inputs` each."""

    tiles: int
    slices: int
    inputs: int

    @property
    def record_bytes(self) -> int:
        return 9 * self.inputs


def up_form(width: int, hidden: int) -> Form:
    """Of gate and up [2 I, D]: a row tile is 8 rows of gate, then their 8 rows of up; 4, 8 or 16 warps share K."""
    slices = next((n for n in (4, 8) if _slice(hidden, n) <= MOST_KEPT), 16)
    down = down_form(hidden, width)
    return Form(down.slices * down.inputs // 8, slices, _slice(hidden, slices))


def down_form(hidden: int, width: int) -> Form:
    """Of down [D, I]. D is padded to whole slabs and to the input of the products that follow."""
    slices = -(-width // MOST_INPUTS)
    return Form(padded(hidden, PAD_K) // TILE_ROWS, slices, _slice(width, slices))


def _slice(inputs: int, slices: int) -> int:
    return padded(-(-inputs // slices), 64)


@dataclass(frozen=True)
class Records:
    """INT4 experts. data uint8: up [E, tiles, slices, record]; down [E, tiles / 4, slices, 4, record]."""

    data: Tensor
    use: Literal["up", "down"]
    outputs: int
    inputs: int

    @staticmethod
    def empty(use: Literal["up", "down"], experts: int, outputs: int, inputs: int, device: torch.device) -> "Records":
        """Room for `experts` weights [N, K], to be `put`."""
        form = _form(use, outputs, inputs)
        stack = (form.tiles, form.slices) if use == "up" else (form.tiles // 4, form.slices, 4)
        data = torch.empty(experts, *stack, form.record_bytes, dtype=torch.uint8, device=device)
        return Records(data, use, outputs, inputs)

    @staticmethod
    def prepare(use: Literal["up", "down"], weight: Int4) -> "Records":
        """weight [E, N, K] on any device: up is gate and up, gate first. Expert by expert: small temporaries."""
        experts, outputs, inputs = weight.shape
        records = Records.empty(use, experts, outputs, inputs, weight.packed.device)
        for expert in range(experts):
            records.put(expert, Int4(weight.packed[expert], weight.scale[expert]))
        return records

    def put(self, expert: int, weight: Int4) -> None:
        """weight [N, K]"""
        form, place = self.form, self.data[expert]
        words = self._rows(_interleave(weight.packed), form.inputs // 8 * form.slices, _ZERO_CODES)
        scales = self._rows(weight.scale, form.inputs // INT4_GROUP * form.slices, 0)
        # [r, tile, g, slice, block, h, t] -> [tile, slice, block, g, t, h, r]
        words = words.unflatten(-1, (form.slices, -1, 2, 4)).permute(1, 3, 4, 2, 6, 5, 0)
        scales = scales.unflatten(-1, (form.slices, -1, 2)).permute(1, 3, 4, 2, 0, 5)
        code_bytes = form.inputs * 8
        for part, bytes_ in ((words, slice(0, code_bytes)), (scales, slice(code_bytes, None))):
            whole = part.contiguous().view(torch.uint8).view(form.tiles, form.slices, -1)
            if self.use == "down":
                whole = whole.unflatten(0, (-1, 4)).transpose(1, 2)
            place[..., bytes_] = whole

    def int4(self) -> Int4:
        """The weight that was given, bit for bit."""
        parts = [self.expert(i) for i in range(self.data.shape[0])]
        return Int4(torch.stack([part.packed for part in parts]), torch.stack([part.scale for part in parts]))

    def expert(self, expert: int) -> Int4:
        """[N, K]"""
        form, whole = self.form, self.data[expert]
        if self.use == "down":
            whole = whole.transpose(1, 2).flatten(0, 1)
        code_bytes, blocks = form.inputs * 8, form.inputs // 64
        words = whole[..., :code_bytes].contiguous().view(torch.int32).view(form.tiles, form.slices, blocks, 8, 4, 2, 2)
        scales = (
            whole[..., code_bytes:].contiguous().view(torch.bfloat16).view(form.tiles, form.slices, blocks, 8, 2, 2)
        )
        packed = _deinterleave(words.permute(6, 0, 3, 1, 2, 5, 4).flatten(3))
        scale = scales.permute(4, 0, 3, 1, 2, 5).flatten(3)
        return Int4(self._matrix(packed, self.inputs // 8), self._matrix(scale, self.inputs // INT4_GROUP))

    def _rows(self, part: Tensor, columns: int, fill: int) -> Tensor:
        """[N, columns or fewer] -> [r, tile, g, columns]: row g + 8r of the tile; gate is r = 0 and up r = 1."""
        tiles = self.form.tiles
        if self.use == "up":
            halves = part.unflatten(0, (2, -1))
            full = F.pad(halves, (0, columns - part.shape[1], 0, 8 * tiles - halves.shape[1]), value=fill)
            return full.view(2, tiles, 8, columns)
        full = F.pad(part, (0, columns - part.shape[1], 0, 16 * tiles - part.shape[0]), value=fill)
        return full.view(tiles, 2, 8, columns).transpose(0, 1)

    def _matrix(self, rows: Tensor, columns: int) -> Tensor:
        """`_rows` undone."""
        if self.use == "up":
            return rows.flatten(1, 2)[:, : self.outputs // 2, :columns].flatten(0, 1)
        return rows.transpose(0, 1).flatten(0, 2)[: self.outputs, :columns].contiguous()

    @functools.cached_property
    def form(self) -> Form:
        return _form(self.use, self.outputs, self.inputs)

    @property
    def experts(self) -> int:
        return self.data.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """[E, N, K]"""
        return self.experts, self.outputs, self.inputs

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def _form(use: Literal["up", "down"], outputs: int, inputs: int) -> Form:
    return up_form(outputs // 2, inputs) if use == "up" else down_form(outputs, inputs)


def _interleave(packed: Tensor) -> Tensor:
    """Words with code e at bit 4e -> at `_BIT[e]`: two codes that one instruction unpacks lie 16 bits apart."""
    words = torch.zeros_like(packed)
    for e, bit in enumerate(_BIT):
        words |= (packed >> 4 * e & 15) << bit
    return words


def _deinterleave(words: Tensor) -> Tensor:
    packed = torch.zeros_like(words)
    for e, bit in enumerate(_BIT):
        packed |= (words >> bit & 15) << 4 * e
    return packed


def random_int4(g: torch.Generator, experts: int, outputs: int, inputs: int) -> Int4:
    """Any codes, and scales that keep the variance of a product's inputs; on the generator's device."""
    codes, groups = (experts, outputs, inputs // 8), (experts, outputs, inputs // INT4_GROUP)
    packed = torch.randint(-(2**31), 2**31, codes, dtype=torch.int32, generator=g, device=g.device)
    scale = (torch.rand(groups, generator=g, device=g.device) + 0.5) * (0.2 * inputs**-0.5)
    return Int4(packed, scale.to(torch.bfloat16))


@dataclass(frozen=True)
class Slabs:
    """A bf16 weight [N, K] beside `Records` of "down": data [N / 64, K / 128, 4, 4, 16, 32].

    A slab's 64 rows are in order of K, 128 inputs of them in one bulk copy: four row tiles, four tiles of 32 inputs.
    """

    data: Tensor
    outputs: int
    inputs: int

    @staticmethod
    def prepare(weight: Tensor) -> "Slabs":
        """weight bf16 [N, K], on any device; new memory."""
        n, k = weight.shape
        tiled = Tiled.prepare(F.pad(weight, (0, 0, 0, padded(n, PAD_K) - n))).data
        data = tiled.unflatten(1, (-1, 4)).unflatten(0, (-1, 4)).transpose(1, 2)
        return Slabs(data.contiguous(), n, k)

    def dense(self) -> Tensor:
        """[N, K] bf16: the weight that was given, bit for bit."""
        rows = self.data.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
        return rows[: self.outputs, : self.inputs].contiguous()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes
