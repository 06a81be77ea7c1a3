"""Expert weights in the layout that GPU kernels stream.     E experts, N outputs, K inputs, I expert width, D hidden.

A record is 16 rows x some inputs, codes and scales together, in the order in which one warp multiplies them. The four
records that the four warps of a group read at the same time are adjacent, so that one bulk copy loads them.

    INT4   KS / 64 blocks of [lane 4g + t][4 words]   word 2h + r: row g + 8r, inputs 64j + 32h + 8t + e, e = 0..7,
                                                      code u of e at bit 0, 16, 4, 20, 8, 24, 12, 28
           then bf16 scales [KS / 64][g][r][h]        9 KS bytes in all
    NVFP4  KS / 64 blocks of [lane 4g + t][4 words]   word q: inputs 64j + 16q + 4t + e, e = 0..3; row g + 8r is value
                                                      2 (e / 2) + r of half e % 2 of the word: `_SIGN`, `_MAGNITUDE`
           then e4m3 scales [KS / 64][g][h][r][2]     of groups 2h and 2h + 1 of the block's four
           then float32 [4]                           the matrices' scales of rows g and g + 8; 9 KS + 16 bytes in all
    BF16   tiles of 16 rows x 32 inputs (tiled.py)    64 or 128 inputs

N and K are padded with values that represent zero.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import PAD_K, TILE_K, Tiled, padded
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP, Int4, Nvfp4

Use = Literal["up", "down"]
Kind = Literal["INT4", "NVFP4", "BF16"]
KINDS: tuple[Kind, ...] = "INT4", "NVFP4", "BF16"
Weight = Int4 | Nvfp4 | Tensor  # [E, N, K], or of one expert [N, K]; a tensor is bf16

TILE_ROWS = 16
MOST_INPUTS = 512  # maximum inputs of a slice: the fragments of x take one register per eight inputs
MOST_KEPT = 448  # maximum inputs of a slice with fragments that stay in registers from row tile to row tile
BF16_INPUTS = 128  # maximum inputs of a BF16 record: 4 KB
SLAB_ROWS = 64  # rows per block of `experts_down`: four row tiles, one for each warp of a group
_ZERO_CODES = -0x77777778  # eight codes of 8
_BIT = (0, 16, 4, 20, 8, 24, 12, 28)  # bit position of code e in a record's word
_SIGN, _MAGNITUDE = (15, 12, 14, 13), (9, 6, 3, 0)  # bit positions of four values in half a word


@dataclass(frozen=True)
class RecordForm:
    """How a matrix [N, K] is divided into records.

    tiles: of 16 rows, including padding. slices: of K, `inputs` inputs each, one per warp. part: inputs per record.
    """

    kind: Kind
    use: Use
    tiles: int
    slices: int
    inputs: int
    part: int

    @property
    def parts(self) -> int:
        """Records per slice."""
        return self.inputs // self.part

    @property
    def width(self) -> int:
        """K, padded to whole slices."""
        return self.slices * self.inputs

    @property
    def record_bytes(self) -> int:
        """Bytes of one record, codes and scales."""
        return {"INT4": 9 * self.part, "NVFP4": 9 * self.part + 16, "BF16": 2 * TILE_ROWS * self.part}[self.kind]


def up_form(kind: Kind, width: int, hidden: int) -> RecordForm:
    """The form of gate and up [2 I, D]: a row tile is 8 rows of gate and their 8 of up; 4, 8 or 16 warps divide K."""
    slices = next((n for n in (4, 8) if _slice(hidden, n) <= MOST_KEPT), 16)
    inputs = _slice(hidden, slices)
    part = (BF16_INPUTS if inputs % BF16_INPUTS == 0 else 64) if kind == "BF16" else inputs
    return RecordForm(kind, "up", down_form(kind, hidden, width).width // 8, slices, inputs, part)


def down_form(kind: Kind, hidden: int, width: int) -> RecordForm:
    """The form of down [D, I]: D is padded to 128, which is whole slabs and the width that the next matmuls read."""
    slices = -(-width // (BF16_INPUTS if kind == "BF16" else MOST_INPUTS))
    inputs = BF16_INPUTS if kind == "BF16" else _slice(width, slices)
    return RecordForm(kind, "down", padded(hidden, PAD_K) // TILE_ROWS, slices, inputs, inputs)


def _slice(inputs: int, slices: int) -> int:
    return padded(-(-inputs // slices), 64)


def kind_of(weight: Weight) -> Kind:
    """The record format for this weight; a tensor counts as bf16."""
    match weight:
        case Int4():
            return "INT4"
        case Nvfp4():
            return "NVFP4"
        case Tensor():
            return "BF16"


def one_of(weight: Weight, expert: int) -> Weight:
    """One expert's weight: [E, N, K] -> [N, K], a view."""
    match weight:
        case Int4(packed, scale):
            return Int4(packed[expert], scale[expert])
        case Nvfp4(codes, scales, scale):
            return Nvfp4(codes[expert], scales[expert], scale[expert])
        case Tensor():
            return weight[expert]


@dataclass(frozen=True)
class Records:
    """One projection of all experts of a layer, in one format. outputs: N. inputs: K.

    data: uint8, of "up" [E, tiles, slices parts, record bytes], of "down" [E, tiles / 4, slices, 4, record bytes].

    The BF16 records of a row tile are in the order of K; in the other formats a slice is one record.
    """

    data: Tensor
    kind: Kind
    use: Use
    outputs: int
    inputs: int

    @staticmethod
    def empty(use: Use, experts: int, outputs: int, inputs: int, device: torch.device, kind: Kind) -> "Records":
        """Uninitialised memory for `experts` weights [N, K], to be filled by `put`."""
        form = _form(kind, use, outputs, inputs)
        stack = (form.tiles, form.slices * form.parts) if use == "up" else (form.tiles // 4, form.slices, 4)
        data = torch.empty(experts, *stack, form.record_bytes, dtype=torch.uint8, device=device)
        return Records(data, kind, use, outputs, inputs)

    @staticmethod
    def prepare(use: Use, weight: Weight) -> "Records":
        """weight [E, N, K] on any device; in "up" gate comes first. One expert at a time, so temporaries stay small."""
        experts, outputs, inputs = weight.shape
        device = (weight if isinstance(weight, Tensor) else weight.scale).device
        records = Records.empty(use, experts, outputs, inputs, device, kind_of(weight))
        for expert in range(experts):
            records.put(expert, one_of(weight, expert))
        return records

    def put(self, expert: int, weight: Weight) -> None:
        """Lays out the weight [N, K] of one expert, which must have the records' format."""
        assert kind_of(weight) == self.kind, f"{self.kind} records were given a weight that is {kind_of(weight)}"
        first = 0
        for part in self._parts(weight):
            whole = part.contiguous().view(torch.uint8).view(self.form.tiles, self.form.slices * self.form.parts, -1)
            if self.use == "down":
                whole = whole.unflatten(0, (-1, 4)).transpose(1, 2)
            self.data[expert, ..., first : first + whole.shape[-1]] = whole
            first += whole.shape[-1]

    def expert(self, expert: int) -> Weight:
        """The original weight [N, K] of one expert, bit for bit."""
        form, whole = self.form, self.data[expert]
        if self.use == "down":
            whole = whole.transpose(1, 2).flatten(0, 1)
        whole = whole.reshape(form.tiles, form.slices * form.parts, -1)
        match self.kind:
            case "INT4":
                return self._int4(whole)
            case "NVFP4":
                return self._nvfp4(whole)
            case "BF16":
                return self._bf16(whole)

    def dense(self, expert: int) -> Tensor:
        """The values of one expert's weight, float32 [N, K]."""
        weight = self.expert(expert)
        return weight.float() if isinstance(weight, Tensor) else weight.dequantize()

    def _parts(self, weight: Weight) -> tuple[Tensor, ...]:
        """The components of a record, in order: each [tiles, records, ...]."""
        match weight:
            case Int4():
                return self._int4_parts(weight)
            case Nvfp4():
                return self._nvfp4_parts(weight)
            case Tensor():
                units = self._rows(weight, self.form.width).unflatten(-1, (-1, self.form.part // TILE_K, TILE_K))
                return (units.permute(1, 3, 4, 0, 2, 5),)  # [r, tile, g, record, unit, 32] -> [.., unit, row, 32]

    def _bf16(self, whole: Tensor) -> Tensor:
        units = whole.contiguous().view(torch.bfloat16).view(*whole.shape[:2], -1, 2, 8, TILE_K)
        return self._matrix(units.permute(3, 0, 4, 1, 2, 5).flatten(3), self.inputs)

    def _int4_parts(self, weight: Int4) -> tuple[Tensor, ...]:
        form = self.form
        words = self._rows(_interleave(weight.packed), form.width // 8, _ZERO_CODES)
        scales = self._rows(weight.scale, form.width // INT4_GROUP)
        # [r, tile, g, slice, block, h, t] -> [tile, slice, block, g, t, h, r]
        words = words.unflatten(-1, (form.slices, -1, 2, 4)).permute(1, 3, 4, 2, 6, 5, 0)
        return words, scales.unflatten(-1, (form.slices, -1, 2)).permute(1, 3, 4, 2, 0, 5)

    def _int4(self, whole: Tensor) -> Int4:
        codes, scales = whole.split(_code_and_scale_bytes(self.form), -1)
        words = codes.contiguous().view(torch.int32).view(*whole.shape[:2], -1, 8, 4, 2, 2)
        packed = _deinterleave(words.permute(6, 0, 3, 1, 2, 5, 4).flatten(3))
        scale = scales.contiguous().view(torch.bfloat16).view(*whole.shape[:2], -1, 8, 2, 2)
        scale = scale.permute(4, 0, 3, 1, 2, 5).flatten(3)
        return Int4(self._matrix(packed, self.inputs // 8), self._matrix(scale, self.inputs // INT4_GROUP))

    def _nvfp4_parts(self, weight: Nvfp4) -> tuple[Tensor, ...]:
        form = self.form
        codes = self._rows(weight.codes, form.width // 2).int()
        # [r, tile, g, slice, block, q, t, e / 2] -> [r, e / 2, tile, slice, block, g, t, q]
        codes = codes.unflatten(-1, (form.slices, -1, 4, 4, 2)).permute(0, 7, 1, 3, 4, 2, 6, 5)
        words = torch.zeros_like(codes[0, 0])
        for value, (sign, magnitude) in enumerate(zip(_SIGN, _MAGNITUDE, strict=True)):
            both = codes[value % 2, value // 2]
            for half, code in enumerate((both & 15, both >> 4)):
                words |= (code >> 3 << sign | (code & 7) << magnitude) << 16 * half
        # [r, tile, g, slice, block, h, 2] -> [tile, slice, block, g, h, r, 2]
        scales = self._rows(weight.scales.view(torch.uint8), form.width // NVFP4_GROUP)
        scales = scales.unflatten(-1, (form.slices, -1, 2, 2)).permute(1, 3, 4, 2, 5, 0, 6)
        tail = F.pad(weight.scale.expand(2), (0, 2)).expand(form.tiles, form.slices, 4)
        return words, scales, tail

    def _nvfp4(self, whole: Tensor) -> Nvfp4:
        codes, scales, tail = whole.split((*_code_and_scale_bytes(self.form), 16), -1)
        words = codes.contiguous().view(torch.int32).view(*whole.shape[:2], -1, 8, 4, 4)
        values = [
            (words >> 16 * half + sign & 1) << 3 | words >> 16 * half + magnitude & 7
            for sign, magnitude in zip(_SIGN, _MAGNITUDE, strict=True)
            for half in range(2)
        ]
        pairs = torch.stack([low | high << 4 for low, high in zip(values[0::2], values[1::2], strict=True)])
        # [e / 2, r, tile, slice, block, g, t, q] -> [r, tile, g, slice, block, q, t, e / 2]
        pairs = pairs.to(torch.uint8).unflatten(0, (2, 2)).permute(1, 2, 5, 3, 4, 7, 6, 0).flatten(3)
        rows = scales.reshape(*whole.shape[:2], -1, 8, 2, 2, 2).permute(5, 0, 3, 1, 2, 4, 6).flatten(3)
        block_scales = self._matrix(rows, self.inputs // NVFP4_GROUP).view(torch.float8_e4m3fn)
        stacked = 2 if self.use == "up" else 1
        scale = tail[0, 0].contiguous().view(torch.float32)[:stacked].clone()
        return Nvfp4(self._matrix(pairs, self.inputs // 2), block_scales, scale)

    def _rows(self, part: Tensor, columns: int, fill: int = 0) -> Tensor:
        """[N, columns or fewer] -> [r, tile, g, columns]: row g + 8r of the tile; gate is r = 0 and up r = 1."""
        tiles = self.form.tiles
        if self.use == "up":
            halves = part.unflatten(0, (2, -1))
            full = F.pad(halves, (0, columns - part.shape[1], 0, 8 * tiles - halves.shape[1]), value=fill)
            return full.view(2, tiles, 8, columns)
        full = F.pad(part, (0, columns - part.shape[1], 0, 16 * tiles - part.shape[0]), value=fill)
        return full.view(tiles, 2, 8, columns).transpose(0, 1)

    def _matrix(self, rows: Tensor, columns: int) -> Tensor:
        """The inverse of `_rows`."""
        if self.use == "up":
            return rows.flatten(1, 2)[:, : self.outputs // 2, :columns].flatten(0, 1)
        return rows.transpose(0, 1).flatten(0, 2)[: self.outputs, :columns].contiguous()

    @functools.cached_property
    def form(self) -> RecordForm:
        """How each expert's matrix is divided."""
        return _form(self.kind, self.use, self.outputs, self.inputs)

    @property
    def experts(self) -> int:
        """E."""
        return self.data.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K), without padding."""
        return self.experts, self.outputs, self.inputs

    @property
    def nbytes(self) -> int:
        """Bytes of the data, including padding."""
        return self.data.nbytes


def _form(kind: Kind, use: Use, outputs: int, inputs: int) -> RecordForm:
    return up_form(kind, outputs // 2, inputs) if use == "up" else down_form(kind, outputs, inputs)


def _code_and_scale_bytes(form: RecordForm) -> tuple[int, int]:
    return 8 * form.part, form.part


def _interleave(packed: Tensor) -> Tensor:
    """Words with code e at bit 4e -> at `_BIT[e]`: two codes unpacked by one instruction are 16 bits apart."""
    words = torch.zeros_like(packed)
    for e, bit in enumerate(_BIT):
        words |= (packed >> 4 * e & 15) << bit
    return words


def _deinterleave(words: Tensor) -> Tensor:
    packed = torch.zeros_like(words)
    for e, bit in enumerate(_BIT):
        packed |= (words >> bit & 15) << 4 * e
    return packed


def random_experts(g: torch.Generator, kind: Kind, use: Use, experts: int, outputs: int, inputs: int) -> Weight:
    """A weight [E, N, K] in this format whose products keep the variance of their inputs; on the generator's device."""
    match kind:
        case "INT4":
            return random_int4(g, experts, outputs, inputs)
        case "NVFP4":
            return random_nvfp4(g, experts, outputs, inputs, 2 if use == "up" else 1)
        case "BF16":
            weight = torch.randn(experts, outputs, inputs, generator=g, device=g.device)
            return (weight * inputs**-0.5).to(torch.bfloat16)


def random_int4(g: torch.Generator, experts: int, outputs: int, inputs: int) -> Int4:
    """INT4 [E, N, K] with random codes; products keep the variance of their inputs. On the generator's device."""
    codes, groups = (experts, outputs, inputs // 8), (experts, outputs, inputs // INT4_GROUP)
    packed = torch.randint(-(2**31), 2**31, codes, dtype=torch.int32, generator=g, device=g.device)
    scale = (torch.rand(groups, generator=g, device=g.device) + 0.5) * (0.2 * inputs**-0.5)
    return Int4(packed, scale.to(torch.bfloat16))


def random_nvfp4(g: torch.Generator, experts: int, outputs: int, inputs: int, stacked: int) -> Nvfp4:
    """NVFP4 [E, N, K] with random codes; block scales of 1.5 to 2.5, and one in 256 at each end of e4m3's range.

    stacked: number of matrices of equal height with a scale each; 2 if gate and up are stacked.
    """
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, generator=g, device=g.device)
    groups = experts, outputs, inputs // NVFP4_GROUP
    scales, rare = torch.rand(2, *groups, generator=g, device=g.device)
    scales = torch.where(rare < 1 / 256, 2.0**-9, torch.where(rare > 255 / 256, 448.0, scales + 1.5))
    scale = (torch.rand(experts, stacked, generator=g, device=g.device) + 0.5) * (0.01 * inputs**-0.5)
    return Nvfp4(codes, scales.to(torch.float8_e4m3fn), scale)


@dataclass(frozen=True)
class Slabs:
    """The shared expert's down projection, a bf16 weight [N, K], in the layout that `experts_down` streams.

    data: bf16 [N / 64, K / 128, 4, 4, 16, 32], N and K padded to 128 with zeros. A slab's 64 rows are in order of K,
    128 inputs per bulk copy: four row tiles, four tiles of 32 inputs.
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
        """[N, K] bf16: the original weight, bit for bit."""
        rows = self.data.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
        return rows[: self.outputs, : self.inputs].contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of the data, including padding."""
        return self.data.nbytes
