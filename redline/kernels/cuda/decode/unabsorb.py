"""Combines the splits of attention and projects them out of the latent space: o = W_UV latent.

Q queries, H heads, S splits, R rank, V value. 8.4 MB of weights at Kimi's sizes, read once: 128 blocks, (head, half of
V), each with its 64 KB requested before the preceding grid has ended, and small enough to share SMs with blocks of
`attend`. If there are more queries than a block processes at once, two blocks per SM divide them. Both halves of a head
combine its splits: 16.8 MB from the L2 cache for a query with 128 splits.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.decode.attend import SMS
from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.tiled import PAD_K, Tiled, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

MAX_SPLITS = SMS
_COLUMNS = 8  # queries that a block processes at once

_Launch = launch_record("decode/unabsorb.cu", "UnabsorbLaunch")


class UnabsorbArgs(NamedTuple):
    """Combines each query's splits to one latent per head, and multiplies it by the head's W_UV."""

    partial_QHSR: Tensor  # bf16 [Q, H, S, R]: from `attend`
    lse_QHS: Tensor  # float32 [Q, H, S], natural: from `attend`; -inf: the split is empty, and so are all later ones
    w_uv: Tiled  # [H, V, R]


def _reference(args: UnabsorbArgs) -> Tensor:
    """-> o bf16 [Q, H V padded to 128 with zeros]. Empty splits are not read; if all are empty, o is 0."""
    partial_QHSR = args.partial_QHSR
    holds = args.lse_QHS > -torch.inf
    shares = args.lse_QHS.softmax(-1).where(holds, 0.0)
    latents = torch.einsum("qhs,qhsr->qhr", shares, partial_QHSR.float().where(holds[..., None], 0.0))
    latents = latents.to(partial_QHSR.dtype).float()
    out = torch.einsum("qhr,hvr->qhv", latents, args.w_uv.dense().float()).flatten(1).to(partial_QHSR.dtype)
    return F.pad(out, (0, padded(out.shape[1], PAD_K) - out.shape[1]))


@functools.cache
def _kernel(rank: int, value: int, groups: int) -> CudaKernel:
    shares = _COLUMNS * (4 * MAX_SPLITS + 4)
    latents, team_sums = _COLUMNS * (2 * rank + 64), 4 * _COLUMNS * rank
    sums = 4 * (16 // (value // 32)) * (value // 2) * _COLUMNS
    defines = {"R": rank, "V": value, "MAX_SPLITS": MAX_SPLITS, "GROUPS": groups}
    shared = rank * value + shares + latents + team_sums + sums + 8
    return CudaKernel("decode/unabsorb.cu", "unabsorb", _Launch, defines, shared)


def _cuda(args: UnabsorbArgs) -> Tensor:
    partial_QHSR = args.partial_QHSR
    queries, heads, splits, rank = partial_QHSR.shape
    value = args.w_uv.shape[1]
    width = padded(heads * value, PAD_K)
    out = torch.empty(queries, width, dtype=torch.bfloat16, device=partial_QHSR.device)
    arguments = _Launch(
        partial=partial_QHSR,
        lse=args.lse_QHS,
        weight=args.w_uv.data,
        out=out,
        queries=queries,
        heads=heads,
        splits=splits,
        width=width,
        few=few_splits(queries),
    )
    groups = 1 if queries <= _COLUMNS else 2
    _kernel(rank, value, groups).launch(arguments, heads if queries else 0, 2 * groups)
    return out


def few_splits(queries: int) -> int:
    """Maximum splits of a query for which one team of warps sums them while other teams sum other queries'.

    With more splits all teams sum one query after another."""
    return 16 if queries == 1 else 40


def _cuda_fits(args: UnabsorbArgs) -> bool:
    """Whether there are at most 132 splits, R is 128, 256 or 512, and half a head's W_UV divides over 16 warps."""
    w_uv = args.w_uv
    splits, rank = args.partial_QHSR.shape[2:]
    tiles = w_uv.shape[1] // 32  # row tiles of a block, 16 rows each; the other warps divide R
    whole = w_uv.shape[1] % 32 == 0 and tiles in (2, 4, 8) and rank % (32 * (16 // tiles)) == 0
    return whole and splits <= MAX_SPLITS and rank in (128, 256, 512) and rank * w_uv.shape[1] <= 65536


def _cost(args: UnabsorbArgs) -> Cost:
    queries, heads, _, rank = args.partial_QHSR.shape
    value = args.w_uv.shape[1]
    moved = args.w_uv.nbytes + args.partial_QHSR.nbytes + args.lse_QHS.nbytes + queries * heads * value * 2
    return Cost(moved, 2 * queries * heads * rank * value)


def _cases() -> Iterator[Case]:
    def make(queries: int, heads: int, splits: int, rank: int = 512):
        def inputs(g: torch.Generator) -> UnabsorbArgs:
            w_uv = (torch.randn(heads, 128, rank, generator=g) * rank**-0.5).to(torch.bfloat16)
            partial = torch.randn(queries, heads, splits, rank, generator=g).to(torch.bfloat16)
            lse = torch.randn(queries, heads, splits, generator=g) * 2
            for query in range(queries):  # the last splits of some queries are empty
                lse[query, :, max(1, splits - query) :] = -torch.inf
                partial[query, :, max(1, splits - query) :] = torch.nan
            return UnabsorbArgs(partial, lse, Tiled.prepare(w_uv))

        return inputs

    yield Case("1 query, 1 split, nano", make(1, 4, 1))
    yield Case("11 queries, 9 splits, nano", make(11, 4, 9))
    yield Case("1 query, 132 splits, nano", make(1, 4, 132))
    yield Case("2 queries, 30 splits, nano", make(2, 4, 30))
    yield Case("20 queries, 30 splits, nano", make(20, 2, 30))
    yield Case("4 queries, 3 splits, drafter", make(4, 4, 3, 128))
    for queries, splits in ((1, 1), (1, 16), (1, 128), (8, 16), (32, 4), (512, 1)):
        yield Case(f"{queries} queries, {splits} splits, Kimi", make(queries, 64, splits), small=False)


# Both round latents to bf16. Sums in another order differ by 2e-5, so 2e-5 / 2^-7 of latents are rounded differently.
unabsorb = Kernel(
    Op("unabsorb", UnabsorbArgs, _reference, _cost, _cases, rtol=(2e-5 * 2**-7) ** 0.5), _cuda, "cuda", _cuda_fits
)
