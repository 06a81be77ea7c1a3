"""The vision encoder's attention and norms on a GPU.        T patches of an image, H heads of D, W width.

Two ops, in Triton on a GPU (`triton/patches.py`). On an NVIDIA H200 PyTorch's own operations took 17 of the 26 ms of an
image of 1,024 x 1,024 (docs/log.md, 2026-11-30), and its fastest attention plans 40 ms for each new size of an image.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

MOST_HEAD = 128  # values of a head


# --------------------------------------------------------------------------------------------------- attend_patches


class AttendPatchesArgs(NamedTuple):
    """Turns queries and keys by their patches' angles, and attends: every patch to all of the image."""

    qkv_T3HD: Tensor  # [T, 3, H, D]: neighbouring values of a query and of a key are a pair that turns
    cos: Tensor  # float32 [T, D / 2]: of the angle of each pair
    sin: Tensor  # float32 [T, D / 2]


def _attend_reference(args: AttendPatchesArgs) -> Tensor:
    """-> [T, H * D] in the dtype of qkv; float32 inside."""
    pairs = torch.view_as_complex(args.qkv_T3HD[:, :2].float().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * torch.complex(args.cos, args.sin)[:, None, None]).flatten(-2)
    q, k, v = (x.transpose(0, 1)[None] for x in (*turned.unbind(1), args.qkv_T3HD[:, 2].float()))
    mixed = scaled_dot_product_attention(q, k, v)  # its scale is D^-0.5
    return mixed[0].transpose(0, 1).flatten(1).to(args.qkv_T3HD.dtype)


def _attend_cuda(args: AttendPatchesArgs) -> Tensor:
    from redline.kernels.cuda.triton import patches

    return patches.attend_patches(args.qkv_T3HD, args.cos, args.sin)


def _attend_fits(args: AttendPatchesArgs) -> bool:
    qkv = args.qkv_T3HD
    return qkv.dtype == torch.bfloat16 and qkv.is_contiguous() and qkv.shape[3] % 2 == 0 and qkv.shape[3] <= MOST_HEAD


def _attend_cost(args: AttendPatchesArgs) -> Cost:
    tokens, _, heads, head = args.qkv_T3HD.shape
    return Cost(args.qkv_T3HD.nbytes * 4 // 3 + 2 * args.cos.nbytes, 4 * tokens * tokens * heads * head)


def _attend_cases() -> Iterator[Case]:
    def make(tokens: int, heads: int, head: int):
        def inputs(g: torch.Generator) -> AttendPatchesArgs:
            angle = torch.rand(tokens, head // 2, generator=g) * 6
            return AttendPatchesArgs(
                torch.randn(tokens, 3, heads, head, generator=g).bfloat16(), angle.cos(), angle.sin()
            )

        return inputs

    yield Case("T=4, heads of 32", make(4, 2, 32))
    yield Case("T=128, heads of 72", make(128, 2, 72))
    yield Case("T=150, heads of 72", make(150, 2, 72))
    yield Case("T=60, heads of 100", make(60, 1, 100))
    yield Case("T=5476 Kimi", make(5476, 16, 72), small=False)


# --------------------------------------------------------------------------------------------------- add_layer_norm


class AddLayerNormArgs(NamedTuple):
    """Adds to the residual, rounds it, and norms it."""

    residual_TW: Tensor  # [T, W]; changed in place if something is added
    partial_TW: Tensor | None  # of the same dtype; None: nothing to add
    weight: Tensor  # [W], of the same dtype
    bias: Tensor  # [W], of the same dtype
    eps: float


def _norm_reference(args: AddLayerNormArgs) -> Tensor:
    """-> [T, W] in the residual's dtype; float32 inside."""
    if args.partial_TW is not None:
        args.residual_TW.add_(args.partial_TW)
    return layer_norm(args.residual_TW, args.residual_TW.shape[1:], args.weight, args.bias, args.eps)


def _norm_cuda(args: AddLayerNormArgs) -> Tensor:
    from redline.kernels.cuda.triton import patches

    return patches.add_layer_norm(args.residual_TW, args.partial_TW, args.weight, args.bias, args.eps)


def _norm_fits(args: AddLayerNormArgs) -> bool:
    return args.residual_TW.is_contiguous() and (args.partial_TW is None or args.partial_TW.is_contiguous())


def _norm_cost(args: AddLayerNormArgs) -> Cost:
    added = 0 if args.partial_TW is None else 2 * args.residual_TW.nbytes
    return Cost(2 * args.residual_TW.nbytes + added + args.weight.nbytes + args.bias.nbytes)


def _norm_cases() -> Iterator[Case]:
    def make(tokens: int, width: int, first: bool):
        def inputs(g: torch.Generator) -> AddLayerNormArgs:
            residual, partial = (torch.randn(tokens, width, generator=g).bfloat16() + 1 for _ in range(2))
            weight, bias = (torch.rand(width, generator=g).bfloat16() for _ in range(2))
            return AddLayerNormArgs(residual, None if first else partial, weight, bias, 1e-5)

        return inputs

    yield Case("T=3, first", make(3, 64, True))
    yield Case("T=9", make(9, 100, False))
    yield Case("T=5476 Kimi", make(5476, 1152, False), small=False)


attend_patches = Kernel(
    Op("attend_patches", AttendPatchesArgs, _attend_reference, _attend_cost, _attend_cases, roundings=3),
    _attend_cuda,
    "cuda",
    _attend_fits,
)
add_layer_norm = Kernel(
    Op("add_layer_norm", AddLayerNormArgs, _norm_reference, _norm_cost, _norm_cases, writes=("residual_TW",)),
    _norm_cuda,
    "cuda",
    _norm_fits,
)
