"""Row-wise ops between two matmuls of a GPU step.        T tokens, D hidden, H heads, P rope.

Four ops, in Triton on a GPU (`triton/rows.py`). The inputs of matmuls are bf16, padded with zeros to a multiple of 128
columns.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import PAD_K
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.add_norm import rms_norm
from redline.ops.mla import FP8, rotate, stored
from redline.ops.op import Case, Cost, Op


def _filled(x_TK: Tensor) -> Tensor:
    return F.pad(x_TK.to(torch.bfloat16), (0, -x_TK.shape[1] % PAD_K))


# -------------------------------------------------------------------------------------------------------- norm_rows


class NormRowsArgs(NamedTuple):
    """Adds the partial sum to the residual, and norms it for the next matmul."""

    residual_TD: Tensor  # float32 [T, D]; changed in place
    partial_TD: Tensor | None  # float32 or bf16 [T, D]; None: nothing to add
    gamma_D: Tensor  # float32 [D]: weight of the norm
    eps: float  # added to the mean square


def _norm_reference(args: NormRowsArgs) -> tuple[Tensor, Tensor]:
    """-> (the same residual, x bf16 [T, D padded to 128])."""
    residual_TD = args.residual_TD
    if args.partial_TD is not None:
        residual_TD += args.partial_TD
    return residual_TD, _filled(rms_norm(residual_TD, args.gamma_D, args.eps))


def _norm_cuda(args: NormRowsArgs) -> tuple[Tensor, Tensor]:
    from redline.kernels.cuda.triton import rows

    return rows.add_norm(args.residual_TD, args.partial_TD, args.gamma_D, args.eps)


def _norm_fits(args: NormRowsArgs) -> bool:
    return args.residual_TD.is_contiguous() and (args.partial_TD is None or args.partial_TD.is_contiguous())


def _norm_cost(args: NormRowsArgs) -> Cost:
    added = 0 if args.partial_TD is None else args.residual_TD.nbytes + args.partial_TD.nbytes
    return Cost(args.residual_TD.nbytes * 3 // 2 + added + args.gamma_D.nbytes)


def _norm_cases() -> Iterator[Case]:
    def make(tokens: int, d: int, first: bool):
        def inputs(g: torch.Generator) -> NormRowsArgs:
            partial = None if first else torch.randn(tokens, d, generator=g)
            return NormRowsArgs(torch.randn(tokens, d, generator=g), partial, torch.rand(d, generator=g) + 0.5, 1e-5)

        return inputs

    yield Case("T=3 nano, first", make(3, 320, True))
    yield Case("T=9 nano", make(9, 320, False))
    yield Case("T=32 Kimi", make(32, 7168, False), small=False)


# ---------------------------------------------------------------------------------------------------------- split_a


class SplitAArgs(NamedTuple):
    """Norms the low-rank queries, and writes each token's latent row to its page."""

    a_TA: Tensor  # float32 [T, Rq + R + P]: the product with W_a
    q_gamma: Tensor  # float32 [Rq]: weight of the queries' norm
    kv_gamma: Tensor  # float32 [R]: weight of the latent's norm
    cos: Tensor  # float32 [T, P / 2]: of the angles of each token's position
    sin: Tensor  # float32 [T, P / 2]
    rows_T: Tensor  # int64 [T]: page * 64 + place, the cache row of each token
    # [pages, 64, R + P], float32, bf16 or e4m3 (saturating), written at rows_T. Each page is contiguous, pages may be
    # strided.
    plane: Tensor
    eps: float  # of both norms


def _split_reference(args: SplitAArgs) -> Tensor:
    """-> q_a bf16 [T, Rq padded to 128], normed."""
    plane = args.plane
    rank_q, rank = args.q_gamma.shape[0], args.kv_gamma.shape[0]
    q, latent, key = args.a_TA.split([rank_q, rank, args.a_TA.shape[1] - rank_q - rank], 1)
    row = torch.cat([rms_norm(latent, args.kv_gamma, args.eps), rotate(key, args.cos, args.sin)], 1)
    plane[args.rows_T // PAGE_TOKENS, args.rows_T % PAGE_TOKENS] = stored(row, plane.dtype)
    return _filled(rms_norm(q, args.q_gamma, args.eps))


def _split_cuda(args: SplitAArgs) -> Tensor:
    from redline.kernels.cuda.triton import rows

    return rows.split_a(args.a_TA, args.q_gamma, args.kv_gamma, args.cos, args.sin, args.rows_T, args.plane, args.eps)


def _split_fits(args: SplitAArgs) -> bool:
    """Whether R is a power of two, as Triton's ranges must be."""
    return args.kv_gamma.shape[0].bit_count() == 1


def _split_cost(args: SplitAArgs) -> Cost:
    written = args.q_gamma.shape[0] * 2 + args.plane.shape[-1] * args.plane.element_size()
    return Cost(args.a_TA.nbytes + args.a_TA.shape[0] * written)


def _split_cases() -> Iterator[Case]:
    def make(tokens: int, rank_q: int, dtype: torch.dtype):
        def inputs(g: torch.Generator) -> SplitAArgs:
            a, angle = torch.randn(tokens, rank_q + 576, generator=g), torch.rand(tokens, 32, generator=g) * 6
            a[0, -2:] = 1000.0  # beyond e4m3
            gammas = torch.rand(rank_q, generator=g), torch.rand(512, generator=g)
            rows = torch.randperm(3 * PAGE_TOKENS, generator=g)[:tokens]
            plane = torch.full((3, PAGE_TOKENS, 576), 7.0).to(dtype)
            return SplitAArgs(a, *gammas, angle.cos(), angle.sin(), rows, plane, 1e-5)

        return inputs

    yield Case("T=3 nano", make(3, 128, torch.bfloat16))
    yield Case("T=9 odd width, float32 pages", make(9, 200, torch.float32))
    yield Case("T=5 nano, fp8 pages", make(5, 128, FP8))
    yield Case("T=32 Kimi", make(32, 1536, torch.bfloat16), small=False)
    yield Case("T=32 Kimi, fp8 pages", make(32, 1536, FP8), small=False)


# ----------------------------------------------------------------------------------------------------- rotate_heads


class RotateHeadsArgs(NamedTuple):
    """Rotates the last P of each head by its token's angles, in place."""

    q_THX: Tensor  # bf16 [T, H, N + P]; changed in place
    cos: Tensor  # float32 [T, P / 2]: of the angles of each token's position
    sin: Tensor  # float32 [T, P / 2]


def _rotate_reference(args: RotateHeadsArgs) -> Tensor:
    """-> the same q."""
    part = args.q_THX[..., -2 * args.cos.shape[1] :]
    part.copy_(rotate(part.float(), args.cos[:, None], args.sin[:, None]))
    return args.q_THX


def _rotate_cuda(args: RotateHeadsArgs) -> Tensor:
    from redline.kernels.cuda.triton import rows

    return rows.rotate_heads(args.q_THX, args.cos, args.sin)


def _rotate_cost(args: RotateHeadsArgs) -> Cost:
    q_THX = args.q_THX
    return Cost(2 * q_THX.shape[0] * q_THX.shape[1] * 2 * args.cos.shape[1] * q_THX.element_size())


def _rotate_cases() -> Iterator[Case]:
    def make(tokens: int, heads: int):
        def inputs(g: torch.Generator) -> RotateHeadsArgs:
            angle = torch.rand(tokens, 32, generator=g) * 6
            return RotateHeadsArgs(torch.randn(tokens, heads, 192, generator=g).bfloat16(), angle.cos(), angle.sin())

        return inputs

    yield Case("T=3 nano", make(3, 4))
    yield Case("T=32 Kimi", make(32, 64), small=False)


# ----------------------------------------------------------------------------------------------------------- swiglu


class SwigluArgs(NamedTuple):
    """Computes silu(gate) * up from the product with a weight made by `gates_weight`."""

    gates_TG: Tensor  # float32 [T, G]: from column `first` on 8 gates, the 8 ups, and so on
    first: int  # first column: the number of router rows, padded to 16
    width: int  # I, divisible by 8


def _swiglu_reference(args: SwigluArgs) -> Tensor:
    """-> h bf16 [T, I padded to 128]."""
    gate, up = args.gates_TG[:, args.first : args.first + 2 * args.width].unflatten(1, (-1, 2, 8)).unbind(2)
    return _filled(F.silu(gate.flatten(1)) * up.flatten(1))


def _swiglu_cuda(args: SwigluArgs) -> Tensor:
    from redline.kernels.cuda.triton import rows

    return rows.swiglu(args.gates_TG, args.first, args.width)


def _swiglu_cost(args: SwigluArgs) -> Cost:
    return Cost(args.gates_TG.shape[0] * args.width * (2 * args.gates_TG.element_size() + 2))


def _swiglu_cases() -> Iterator[Case]:
    def make(tokens: int, first: int, width: int):
        def inputs(g: torch.Generator) -> SwigluArgs:
            return SwigluArgs(torch.randn(tokens, first + 2 * width, generator=g), first, width)

        return inputs

    yield Case("T=3 nano", make(3, 16, 128))
    yield Case("T=2 a narrow one", make(2, 0, 40))
    yield Case("T=32 Kimi", make(32, 384, 2048), small=False)


norm_rows = Kernel(
    Op("norm_rows", NormRowsArgs, _norm_reference, _norm_cost, _norm_cases), _norm_cuda, "cuda", _norm_fits
)
split_a = Kernel(
    Op("split_a", SplitAArgs, _split_reference, _split_cost, _split_cases, writes=("plane",)),
    _split_cuda,
    "cuda",
    _split_fits,
)
rotate_heads = Kernel(
    Op("rotate_heads", RotateHeadsArgs, _rotate_reference, _rotate_cost, _rotate_cases), _rotate_cuda, "cuda"
)
swiglu = Kernel(Op("swiglu", SwigluArgs, _swiglu_reference, _swiglu_cost, _swiglu_cases), _swiglu_cuda, "cuda")
