"""Weights for the ops: handles that kernels read as panels and references read as plain matrices.

`prepare` makes the panels once, at load; the plain tensor is not kept, and `dense()` rebuilds it exactly.
N outputs, K inputs, E experts.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP, Int4, Nvfp4, Plain

A = TypeVar("A", bound=tuple[Any, ...])

PANEL = 32  # outputs stored together; the reason is in core/gemm.h
STEP = 32  # K of every product over panels is a multiple of this

_lay_side_by_side = native.function("side_by_side")
_pack_codes = native.function("pack_codes")


@dataclass(frozen=True)
class Matrix:
    """A bf16 weight [..., N, K]: plain, or in panels.

    data: plain [..., N, K], or in panels [..., N / 32, K / 2, 32, 2], N padded to 32 with zeros. outputs: N.
    """

    data: Tensor
    outputs: int
    panels: bool

    @staticmethod
    def prepare(weight: Tensor) -> "Matrix":
        """weight bf16 [..., N, K]. On a CPU with kernels, if K is a multiple of 32: panels in new memory; else the
        weight itself."""
        n, k = weight.shape[-2:]
        if weight.is_cuda or native.library() is None or k % STEP:
            return Matrix(weight, n, panels=False)
        assert weight.element_size() == 2, f"panels hold bf16, not {weight.dtype}"
        data = torch.empty(*weight.shape[:-2], -(-n // PANEL), k // 2, PANEL, 2, dtype=weight.dtype)
        for rows, panels in zip(weight.reshape(-1, n, k), data.view(-1, *data.shape[-4:]), strict=True):
            _side_by_side(rows, panels, unit=4)
        return Matrix(data, n, panels=True)

    def dense(self) -> Tensor:
        """[..., N, K] bf16: the original weight, bit for bit."""
        if not self.panels:
            return self.data
        return self.data.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., : self.outputs, :]

    def matrix(self, expert: int) -> Tensor:
        """[N, K] bf16 of one expert, if the weight is [E, N, K]."""
        return Matrix(self.data[expert], self.outputs, self.panels).dense()

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K), without the panels' padding."""
        if self.panels:
            return (*self.data.shape[:-4], self.outputs, 2 * self.data.shape[-3])
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, including the panels' padding."""
        return self.data.nbytes


@dataclass(frozen=True)
class Int4Panels:
    """INT4 weights [E, N, K] in panels.

    codes  uint8 [E, N / 32, K / 4, 16, 2, 2]  byte [c, o, i, q] = u of output o | u of output 16 + o << 4,
                                               of input 4c + 2q + i
    scales bf16  [E, N / 32, K / 32, 32]
    """

    codes: Tensor
    scales: Tensor

    @staticmethod
    def prepare(weight: Int4) -> "Int4Panels":
        """weight [E, N, K] on a CPU, N and K divisible by 32; new memory."""
        prepared = Int4Panels.empty(*weight.shape)
        for expert, (packed, scale) in enumerate(zip(weight.packed, weight.scale, strict=True)):
            prepared.put(expert, 0, Int4(packed, scale))
        return prepared

    @staticmethod
    def empty(e: int, n: int, k: int) -> "Int4Panels":
        """Uninitialised memory for weights [E, N, K], N and K divisible by 32."""
        codes = torch.empty(e, n // PANEL, k // 4, PANEL // 2, 2, 2, dtype=torch.uint8)
        return Int4Panels(codes, torch.empty(e, n // PANEL, k // INT4_GROUP, PANEL, dtype=torch.bfloat16))

    def put(self, expert: int, first: int, weight: Int4) -> None:
        """Converts a weight [N, K] to rows [first, first + N) of one expert, both divisible by 32.

        It may be a view of a file: only that part of the file is read, and it is not copied first.
        """
        panels = slice(first // PANEL, (first + weight.shape[-2]) // PANEL)
        _pack(weight.packed.view(torch.uint8), self.codes[expert, panels])
        _side_by_side(weight.scale, self.scales[expert, panels], unit=2)

    def int4(self) -> Int4:
        """The original weight, bit for bit."""
        return Int4(_unpack(self.codes).view(torch.int32), _apart(self.scales))

    def matrix(self, expert: int) -> Tensor:
        """[N, K] float32 of one expert."""
        one = slice(expert, expert + 1)
        return Int4Panels(self.codes[one], self.scales[one]).int4().dequantize()[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K)"""
        e, panels, quads = self.codes.shape[:3]
        return e, panels * PANEL, 4 * quads

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: 4.5 bits a weight."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Nvfp4Panels:
    """NVFP4 weights [E, N, K] in panels.

    codes    uint8         [E, N / 32, K / 4, 16, 2, 2]  as in `Int4Panels`
    scales   float8_e4m3fn [E, N / 32, K / 16, 32]
    wholes   float32       [E, N / 32]  the scale of the panel's matrix
    stacked  number of matrices stacked along N
    """

    codes: Tensor
    scales: Tensor
    wholes: Tensor
    stacked: int

    @staticmethod
    def prepare(weight: Nvfp4) -> "Nvfp4Panels":
        """weight [E, N, K] on a CPU, K and the rows of each stacked matrix divisible by 32; new memory."""
        stacked = weight.scale.shape[-1]
        wholes = weight.scale.repeat_interleave(weight.shape[-2] // PANEL // stacked, -1)
        e, n, k = weight.shape
        codes = torch.empty(e, n // PANEL, k // 4, PANEL // 2, 2, 2, dtype=torch.uint8)
        scales = torch.empty(e, n // PANEL, k // NVFP4_GROUP, PANEL, dtype=torch.float8_e4m3fn)
        for expert in range(e):
            _pack(weight.codes[expert], codes[expert])
            _side_by_side(weight.scales[expert], scales[expert], unit=1)
        return Nvfp4Panels(codes, scales, wholes.contiguous(), stacked)

    def nvfp4(self) -> Nvfp4:
        """The original weight, bit for bit."""
        scale = self.wholes[:, :: self.wholes.shape[1] // self.stacked].contiguous()
        return Nvfp4(_unpack(self.codes), _apart(self.scales), scale)

    def matrix(self, expert: int) -> Tensor:
        """[N, K] float32 of one expert."""
        one = slice(expert, expert + 1)
        return Nvfp4Panels(self.codes[one], self.scales[one], self.wholes[one], self.stacked).nvfp4().dequantize()[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K)"""
        e, panels, quads = self.codes.shape[:3]
        return e, panels * PANEL, 4 * quads

    @property
    def nbytes(self) -> int:
        """Bytes of codes and both kinds of scales: 4.5 bits a weight, and 4 bytes a panel."""
        return self.codes.nbytes + self.scales.nbytes + self.wholes.nbytes


def _pack(rows: Tensor, codes: Tensor) -> None:
    """uint8 [N, K / 2] -> codes in panels. The low half of a byte is the code of an even input."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _pack_codes(rows=rows.data_ptr(), ld=rows.stride(0), codes=codes, N=rows.shape[0], K=2 * rows.shape[1])


def _unpack(codes: Tensor) -> Tensor:
    """The inverse of `_pack`."""
    u = torch.stack([codes & 15, codes >> 4], dim=2)  # [E, panel, half, K / 4, output, i, q]
    even, odd = u.permute(0, 1, 2, 4, 3, 6, 5).flatten(4).flatten(1, 3).unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4


def _side_by_side(rows: Tensor, panels: Tensor, unit: int) -> None:
    """[N, columns] -> [ceil(N / 32), columns, 32], keeping each `unit` bytes of a row together."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    size = rows.element_size()
    _lay_side_by_side(
        rows=rows.data_ptr(),
        ld=rows.stride(0) * size,
        panels=panels.data_ptr(),
        N=rows.shape[0],
        units=rows.shape[1] * size // unit,
        unit=unit,
    )


def _apart(scales: Tensor) -> Tensor:
    """[E, N / 32, groups, 32] -> [E, N, groups]"""
    return scales.transpose(-1, -2).flatten(1, 2).contiguous()


Experts = Matrix | Int4 | Int4Panels | Nvfp4 | Nvfp4Panels  # one projection of all experts, [E, N, K]


def prepare_experts(weight: Tensor | Int4 | Nvfp4) -> Experts:
    """weight [E, N, K], bf16 or 4-bit -> panels on a CPU with kernels (4-bit: only whole panels), else unchanged."""
    match weight:
        case Tensor():
            return Matrix.prepare(weight)
        case Int4(packed):
            whole = weight.shape[-2] % PANEL == 0
            return Int4Panels.prepare(weight) if whole and _is_read_by_kernels(packed) else weight
        case Nvfp4(codes, _, scale):
            whole = weight.shape[-2] % (PANEL * scale.shape[-1]) == 0 and weight.shape[-1] % STEP == 0
            return Nvfp4Panels.prepare(weight) if whole and _is_read_by_kernels(codes) else weight


def _is_read_by_kernels(part: Tensor) -> bool:
    return not part.is_cuda and native.library() is not None


def stack_experts(weights: Iterable[Tensor | Int4 | Nvfp4], count: int) -> Experts:
    """`prepare_experts` of `count` weights [N, K] from an iterator; only one is in memory besides the result."""
    stack = Stack(count)
    for index, weight in enumerate(weights):
        stack.put(index, [weight])
    return stack.whole


class Stack:
    """`prepare_experts` of `count` weights, each given as parts to stack along N: [N, K] in total."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._whole: Experts | None = None

    def put(self, index: int, parts: Sequence[Tensor | Int4 | Nvfp4]) -> None:
        """Adds one weight, as parts of the same kind. INT4 parts are written directly to the panels; of any other kind
        one weight is in memory in addition to the result."""
        int4 = [part for part in parts if isinstance(part, Int4)]
        if int4 and all(part.shape[-2] % PANEL == 0 and _is_read_by_kernels(part.packed) for part in int4):
            rows = sum(part.shape[-2] for part in int4)
            if self._whole is None:
                self._whole = Int4Panels.empty(self._count, rows, int4[0].shape[-1])
            assert isinstance(self._whole, Int4Panels), "all experts are of one kind"
            first = 0
            for part in int4:
                self._whole.put(index, first, part)
                first += part.shape[-2]
            return
        one = prepare_experts(_lone(above_one_another(parts)))
        if self._whole is None:
            self._whole = _room(one, self._count)
        for place, part in zip(_parts(self._whole), _parts(one), strict=True):
            place[index] = part[0]

    @property
    def whole(self) -> Experts:
        """The result, once all weights have been put."""
        assert self._whole is not None, "a layer has at least one expert"
        return self._whole


def above_one_another(parts: Sequence[Tensor | Int4 | Nvfp4]) -> Tensor | Int4 | Nvfp4:
    """Weights [N, K] of one kind, stacked along N; a single one is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    match parts[0]:
        case Int4():
            return Int4(
                *(
                    torch.cat(same)
                    for same in zip(*((p.packed, p.scale) for p in parts if isinstance(p, Int4)), strict=True)
                )
            )
        case Nvfp4():
            of = ((p.codes, p.scales.view(torch.uint8), p.scale) for p in parts if isinstance(p, Nvfp4))
            codes, scales, scale = (torch.cat(same) for same in zip(*of, strict=True))
            return Nvfp4(codes, scales.view(torch.float8_e4m3fn), scale)
        case Tensor():
            return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _lone(weight: Tensor | Int4 | Nvfp4) -> Tensor | Int4 | Nvfp4:
    """[N, K] -> [1, N, K]"""
    match weight:
        case Tensor():
            return weight[None]
        case Int4(packed, scale):
            return Int4(packed[None], scale[None])
        case Nvfp4(codes, scales, scale):
            return Nvfp4(codes[None], scales[None], scale[None])


def _parts(experts: Experts) -> tuple[Tensor, ...]:
    match experts:
        case Matrix(data):
            return (data,)
        case Int4(packed, scale):
            return packed, scale
        case Int4Panels(codes, scales):
            return codes, scales
        case Nvfp4(codes, scales, scale):
            return codes, scales, scale
        case Nvfp4Panels(codes, scales, wholes):
            return codes, scales, wholes


def _room(one: Experts, count: int) -> Experts:
    """Uninitialised memory for `count` experts like this one."""

    def room(part: Tensor) -> Tensor:
        return part.new_empty(count, *part.shape[1:])

    match one:
        case Matrix(data, outputs, panels):
            return Matrix(room(data), outputs, panels)
        case Int4(packed, scale):
            return Int4(room(packed), room(scale))
        case Int4Panels(codes, scales):
            return Int4Panels(room(codes), room(scales))
        case Nvfp4(codes, scales, scale):
            return Nvfp4(room(codes), room(scales), room(scale))
        case Nvfp4Panels(codes, scales, wholes, stacked):
            return Nvfp4Panels(room(codes), room(scales), room(wholes), stacked)


def laid_out(args: A) -> A:
    """An op's record with every plain weight converted to panels, including weights in nested records."""
    return type(args)(*map(panels_of, args))


def panels_of(value: Any) -> Any:
    """A weight in panels; a record with every weight of its fields in panels; anything else unchanged."""
    match value:
        case Plain(data):
            return Matrix.prepare(data)
        case Int4() | Nvfp4():
            return prepare_experts(value)
        case Matrix() | Int4Panels() | Nvfp4Panels() | Tensor():
            return value
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: panels_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        case _:
            return value
