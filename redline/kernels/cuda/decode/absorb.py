"""Projects queries into latent space: q_abs = [W_UK q_nope | q_rope].      T tokens, H heads, N nope, P rope, R rank.

Attention then runs directly over cached latents (`attend`), all heads against one row. 8.4 MB of weights at Kimi's
sizes, read once: 128 blocks, (head, half of R), each with its 64 KB requested before the preceding grid has ended.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_Launch = launch_record("decode/absorb.cu", "AbsorbLaunch")


class AbsorbArgs(NamedTuple):
    """Multiplies the nope part of each head by its W_UK, and copies the rotated part."""

    q_THX: Tensor  # bf16 [T, H, N + P], the last P of each head rotated
    w_uk: Tiled  # [H, R, N]


def _reference(args: AbsorbArgs) -> Tensor:
    """-> [T, H, R + P] in q's dtype."""
    q_THX = args.q_THX
    nope = args.w_uk.shape[-1]
    absorbed = torch.einsum("thn,hrn->thr", q_THX[..., :nope].float(), args.w_uk.dense().float())
    return torch.cat([absorbed.to(q_THX.dtype), q_THX[..., nope:]], -1)


@functools.cache
def _kernel(nope: int, rope: int, rank: int) -> CudaKernel:
    shared = rank * nope + 16  # half a head's weights, 2 bytes each, and a barrier
    return CudaKernel("decode/absorb.cu", "absorb", _Launch, {"N": nope, "P": rope, "R": rank}, shared)


def _cuda(args: AbsorbArgs) -> Tensor:
    q_THX = args.q_THX
    tokens, heads, width = q_THX.shape
    _, rank, nope = args.w_uk.shape
    out = torch.empty(tokens, heads, rank + width - nope, dtype=torch.bfloat16, device=q_THX.device)
    arguments = _Launch(q=q_THX, weight=args.w_uk.data, absorbed=out, tokens=tokens, heads=heads)
    _kernel(nope, width - nope, rank).launch(arguments, heads if tokens else 0, 2)
    return out


def _cuda_fits(args: AbsorbArgs) -> bool:
    """Whether half a head's W_UK (R N bytes) fits in 64 KB of shared memory, and sizes are whole copies and tiles."""
    _, rank, nope = args.w_uk.shape
    rope = args.q_THX.shape[-1] - nope
    return args.q_THX.dtype == torch.bfloat16 and nope % 128 == rank % 64 == rope % 8 == 0 and rank * nope <= 65536


def _cost(args: AbsorbArgs) -> Cost:
    q_THX = args.q_THX
    heads, rank, nope = args.w_uk.shape
    rope = q_THX.shape[-1] - nope
    moved = q_THX.nbytes + q_THX.shape[0] * heads * (rank + rope) * q_THX.element_size()
    return Cost(args.w_uk.nbytes + moved, 2 * q_THX.shape[0] * heads * rank * nope)


def _cases() -> Iterator[Case]:
    def make(tokens: int, heads: int, rank: int):
        def inputs(g: torch.Generator) -> AbsorbArgs:
            w_uk = (torch.randn(heads, rank, 128, generator=g) * 128**-0.5).to(torch.bfloat16)
            return AbsorbArgs(torch.randn(tokens, heads, 128 + 64, generator=g).to(torch.bfloat16), Tiled.prepare(w_uk))

        return inputs

    yield Case("T=1 nano", make(1, 4, 512))
    yield Case("T=11 nano", make(11, 4, 512))
    yield Case("T=45 nano", make(45, 4, 512))
    yield Case("T=4 drafter", make(4, 4, 128))
    for tokens in (1, 4, 8, 512):
        yield Case(f"T={tokens} Kimi", make(tokens, 64, 512), small=False)


absorb = Kernel(Op("absorb", AbsorbArgs, _reference, _cost, _cases), _cuda, "cuda", _cuda_fits)
