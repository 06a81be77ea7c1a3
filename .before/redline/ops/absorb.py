"""A query taken into the latent space: q_abs = [W_UK q_nope | q_rope].       T tokens, H heads, N nope, P rope, R rank.

Attention then runs over cached latents themselves (`attend`), all heads against one row. 8.4 MB of weights at Kimi's
sizes, read once: 128 blocks, (head, half of R), each with its 64 KB in flight before the grid in front has ended.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops.cuda.kernel import Kernel, address, structure
from redline.ops.op import Case, Cost, Op
from redline.ops.tiled import Tiled

_Arguments = structure("Arguments", "q weight absorbed", "tokens heads")


def _reference(q_THX: Tensor, w_uk: Tiled) -> Tensor:
    """q [T, H, N + P], its last P rotated; w_uk [H, R, N] -> [T, H, R + P], in q's dtype."""
    nope = w_uk.shape[-1]
    absorbed = torch.einsum("thn,hrn->thr", q_THX[..., :nope].float(), w_uk.dense().float())
    return torch.cat([absorbed.to(q_THX.dtype), q_THX[..., nope:]], -1)


@functools.cache
def _kernel(nope: int, rope: int, rank: int) -> Kernel:
    shared = rank * nope + 16  # half a head's weights, 2 bytes each, and a barrier
    return Kernel("absorb.cu", "absorb", {"N": nope, "P": rope, "R": rank}, shared)


def _cuda(q_THX: Tensor, w_uk: Tiled) -> Tensor:
    tokens, heads, width = q_THX.shape
    _, rank, nope = w_uk.shape
    out = torch.empty(tokens, heads, rank + width - nope, dtype=torch.bfloat16, device=q_THX.device)
    arguments = _Arguments(address(q_THX), address(w_uk.data), address(out), tokens, heads)
    _kernel(nope, width - nope, rank).launch(arguments, heads if tokens else 0, 2)
    return out


def _cuda_fits(q_THX: Tensor, w_uk: Tiled) -> bool:
    _, rank, nope = w_uk.shape
    rope = q_THX.shape[-1] - nope
    return q_THX.dtype == torch.bfloat16 and nope % 128 == rank % 64 == rope % 8 == 0 and rank * nope <= 65536


def _cost(q_THX: Tensor, w_uk: Tiled) -> Cost:
    heads, rank, nope = w_uk.shape
    rope = q_THX.shape[-1] - nope
    moved = q_THX.nbytes + q_THX.shape[0] * heads * (rank + rope) * q_THX.element_size()
    return Cost(w_uk.nbytes + moved, 2 * q_THX.shape[0] * heads * rank * nope)


def _cases() -> Iterator[Case]:
    def make(tokens: int, heads: int, rank: int):
        def inputs(g: torch.Generator) -> tuple[Tensor, Tiled]:
            w_uk = (torch.randn(heads, rank, 128, generator=g) * 128**-0.5).to(torch.bfloat16)
            return torch.randn(tokens, heads, 128 + 64, generator=g).to(torch.bfloat16), Tiled.prepare(w_uk)

        return inputs

    yield Case("T=1 nano", make(1, 4, 512))
    yield Case("T=11 nano", make(11, 4, 512))
    yield Case("T=4 drafter", make(4, 4, 128))
    for tokens in (1, 4, 8, 512):
        yield Case(f"T={tokens} Kimi", make(tokens, 64, 512), small=False)


absorb = Op("absorb", _reference, None, _cost, _cases, cuda=_cuda, cuda_fits=_cuda_fits)
