"""Weights as the ops take them: a handle that a kernel reads as panels and a reference reads as plain matrices.

`prepare` makes the panels once, at load; the plain tensor is then gone, and `dense()` rebuilds it exactly.
N outputs, K inputs, E experts.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.ops.formats import Int4, Nvfp4, Plain

A = TypeVar("A", bound=tuple[Any, ...])

PANEL = 32  # outputs side by side; core/gemm.h says why
STEP = 32  # inputs: every product over panels has a multiple of them


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
        """weight bf16 [..., N, K]. Panels, in new memory, on a CPU with kernels where K is a multiple of 32; else the
        weight itself."""
        n, k = weight.shape[-2:]
        if weight.is_cuda or native.library() is None or k % STEP:
            return Matrix(weight, n, panels=False)
        if n % PANEL:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, -n % PANEL))
        outputs = weight.unflatten(-2, (-1, PANEL)).unflatten(-1, (-1, 2))
        data = torch.empty_like(outputs.transpose(-3, -2), memory_format=torch.contiguous_format)
        return Matrix(data.copy_(outputs.transpose(-3, -2)), n, panels=True)

    def dense(self) -> Tensor:
        """[..., N, K] bf16: the weight that was given, bit for bit."""
        if not self.panels:
            return self.data
        return self.data.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., : self.outputs, :]

    def matrix(self, expert: int) -> Tensor:
        """[N, K] bf16 of one expert, where the weight is [E, N, K]."""
        return Matrix(self.data[expert], self.outputs, self.panels).dense()

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K), the panels' padding left out."""
        if self.panels:
            return (*self.data.shape[:-4], self.outputs, 2 * self.data.shape[-3])
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, the panels' padding counted."""
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
        return Int4Panels(_pack(weight.packed.view(torch.uint8)), _side_by_side(weight.scale))

    def int4(self) -> Int4:
        """The weight that was given, bit for bit."""
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

    codes    uint8         [E, N / 32, K / 4, 16, 2, 2]  as of `Int4Panels`
    scales   float8_e4m3fn [E, N / 32, K / 16, 32]
    wholes   float32       [E, N / 32]  the scale of the matrix that a panel is of
    stacked  how many matrices lie above one another
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
        return Nvfp4Panels(_pack(weight.codes), _side_by_side(weight.scales), wholes.contiguous(), stacked)

    def nvfp4(self) -> Nvfp4:
        """The weight that was given, bit for bit."""
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


def _pack(pairs: Tensor) -> Tensor:
    """uint8 [E, N, K / 2] -> codes in panels. A byte holds the code of an even input and, above it, of the odd one."""
    e, n, k = pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]
    codes = torch.empty(e, n // PANEL, k // 4, PANEL // 2, 2, 2, dtype=torch.uint8)
    for i in range(e):  # one expert at a time, so that the temporaries stay small
        # [panel, half, K / 4, output, q]
        first, second = pairs[i].view(-1, 2, PANEL // 2, k // 4, 2).transpose(2, 3).unbind(1)
        codes[i, ..., 0, :] = first & 15 | second << 4
        codes[i, ..., 1, :] = first >> 4 | second & 240
    return codes


def _unpack(codes: Tensor) -> Tensor:
    """What `_pack` was given."""
    u = torch.stack([codes & 15, codes >> 4], dim=2)  # [E, panel, half, K / 4, output, i, q]
    even, odd = u.permute(0, 1, 2, 4, 3, 6, 5).flatten(4).flatten(1, 3).unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4


def _side_by_side(scales: Tensor) -> Tensor:
    """[E, N, groups] -> [E, N / 32, groups, 32]"""
    return scales.unflatten(1, (-1, PANEL)).transpose(-1, -2).contiguous()


def _apart(scales: Tensor) -> Tensor:
    """What `_side_by_side` was given."""
    return scales.transpose(-1, -2).flatten(1, 2).contiguous()


Experts = Matrix | Int4 | Int4Panels | Nvfp4 | Nvfp4Panels  # one projection of all experts, [E, N, K]


def prepare_experts(weight: Tensor | Int4 | Nvfp4) -> Experts:
    """weight [E, N, K], bf16 or of 4 bits -> panels on a CPU with kernels (4 bits: of whole panels), else as it is."""
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
    """`prepare_experts` of `count` weights [N, K] that come one by one: beside the result it holds only one of them."""
    whole: Experts | None = None
    for index, weight in enumerate(weights):
        one = prepare_experts(_lone(weight))
        if whole is None:
            whole = _room(one, count)
        for place, part in zip(_parts(whole), _parts(one), strict=True):
            place[index] = part[0]
    assert whole is not None, "a layer has at least one expert"
    return whole


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
    """Unfilled memory for `count` experts like this one."""

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
    """An op's record with every plain weight in panels, those within records too."""
    return type(args)(*map(panels_of, args))


def panels_of(value: Any) -> Any:
    """A weight in panels; a record with every weight of its fields in panels; anything else as it is."""
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
