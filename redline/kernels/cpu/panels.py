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
from redline.ops.formats import INT4_GROUP, Int4, Plain

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
        e, n, k = weight.shape
        codes = torch.empty(e, n // PANEL, k // 4, PANEL // 2, 2, 2, dtype=torch.uint8)
        for i in range(e):  # one expert at a time, so that the temporaries stay small
            # [panel, half, output, K / 4, q]: a byte holds the code of an even input and, above it, of the odd one.
            pairs = weight.packed[i].view(torch.uint8).view(-1, 2, PANEL // 2, k // 4, 2)
            first, second = pairs.transpose(2, 3).unbind(1)
            codes[i, ..., 0, :] = first & 15 | second << 4
            codes[i, ..., 1, :] = first >> 4 | second & 240
        scales = weight.scale.view(e, n // PANEL, PANEL, k // INT4_GROUP).transpose(-1, -2)
        return Int4Panels(codes, scales.contiguous())

    def int4(self) -> Int4:
        """The weight that was given, bit for bit."""
        u = torch.stack([self.codes & 15, self.codes >> 4], dim=2)  # [E, panel, half, K / 4, output, i, q]
        u = u.permute(0, 1, 2, 4, 3, 6, 5).flatten(4).flatten(1, 3).to(torch.int32)
        packed = (u.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
        return Int4(packed, self.scales.transpose(-1, -2).flatten(1, 2).contiguous())

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


Experts = Matrix | Int4 | Int4Panels  # one projection of all experts, [E, N, K]


def prepare_experts(weight: Tensor | Int4) -> Experts:
    """weight [E, N, K], bf16 or INT4 -> panels on a CPU with kernels (INT4: of whole panels), else as it is."""
    if isinstance(weight, Tensor):
        return Matrix.prepare(weight)
    if weight.packed.is_cuda or native.library() is None or weight.shape[-2] % PANEL:
        return weight
    return Int4Panels.prepare(weight)


def stack_experts(weights: Iterable[Tensor | Int4], count: int) -> Experts:
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


def _lone(weight: Tensor | Int4) -> Tensor | Int4:
    """[N, K] -> [1, N, K]"""
    return weight[None] if isinstance(weight, Tensor) else Int4(weight.packed[None], weight.scale[None])


def _parts(experts: Experts) -> tuple[Tensor, ...]:
    match experts:
        case Matrix(data):
            return (data,)
        case Int4(packed, scale):
            return packed, scale
        case Int4Panels(codes, scales):
            return codes, scales


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


def laid_out(args: A) -> A:
    """An op's record with every plain weight in panels, those within records too."""
    return type(args)(*map(panels_of, args))


def panels_of(value: Any) -> Any:
    """A weight in panels; a record with every weight of its fields in panels; anything else as it is."""
    match value:
        case Plain(data):
            return Matrix.prepare(data)
        case Int4():
            return prepare_experts(value)
        case Matrix() | Int4Panels() | Tensor():
            return value
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: panels_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        case _:
            return value
