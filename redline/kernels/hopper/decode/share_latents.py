"""Contexts divided among ranks: what each read of its part, taken to the rank that has the head.   Q queries, H heads.

Every rank holds all latents, but has only some heads. To read all latents for these costs each rank as much as one
alone. Where contexts are long enough ranks exchange twice: each has the queries of all heads (`gather_queries`), reads
its part of every context with them (`attend`), and gives every other rank what came of its heads (`share_latents`).
`unabsorb` then combines as many splits as there are ranks. Sums are made in another order than undivided; nothing else
differs.
"""

import functools

import torch
from torch import Tensor

from redline.kernels.hopper.decode import attend, dense
from redline.kernels.hopper.decode.unabsorb import MAX_SPLITS
from redline.kernels.hopper.kernel import CudaKernel, launch_record
from redline.kernels.hopper.ranks import MOST_TOKENS, Links

_Launch = launch_record("decode/share_latents.cu", "ShareLatentsLaunch")
_THREADS = 512
_SLICE = 256  # numbers of a latent that a block has
FEW_SPLITS = 8  # up to which a warp combines a query's head by itself

# Two NVIDIA H200 (NV18, `divided-contexts-h200.json`): microseconds of both exchanges, and of each query in them,
# beyond what travels; bytes a microsecond that do, one way; and what is kept of a gain that `attend`'s model tells.
_EXCHANGE, _QUERY, _LINK_SPEED, _KEPT = 5.0, 0.15, 270e3, 0.66


@functools.cache
def _kernel(rank: int, ranks: int) -> CudaKernel:
    sizes = {"R": rank, "RANKS": ranks, "MAX_SPLITS": MAX_SPLITS}
    shared = 4 * _THREADS // 32 * (MAX_SPLITS + _SLICE)
    return CudaKernel("decode/share_latents.cu", "share_latents", _Launch, sizes, shared, _THREADS)


def share_latents(partial_QHSR: Tensor, lse_QHS: Tensor, links: Links) -> tuple[Tensor, Tensor]:
    """bf16 [Q, H, S, R] and natural log-sum-exps float32 [Q, H, S] of this rank's part of every context, of the heads
    of all ranks -> [Q, H / ranks, ranks, R] and [Q, H / ranks, ranks] of this rank's heads, of all parts.

    Q is at most MOST_TOKENS, S MAX_SPLITS, R a multiple of 256. A split with -inf holds nothing, nor do those behind.
    """
    (queries, all_heads, splits, rank), device = partial_QHSR.shape, partial_QHSR.device
    heads, room = all_heads // links.ranks, links.rooms.latents
    assert queries * heads * (rank // 2 + 1) <= room, f"{queries} queries; a room has {room} words"
    out = torch.empty(queries, heads, links.ranks, rank, dtype=torch.bfloat16, device=device)
    lse = torch.empty(queries, heads, links.ranks, device=device)
    given = _Launch(
        partial=partial_QHSR,
        lse=lse_QHS,
        out=out,
        lse_out=lse,
        queries=queries,
        heads=heads,
        splits=splits,
        few=FEW_SPLITS,
        **links.of_latents(),
    )
    slices, places = rank // _SLICE, queries * heads
    blocks = places if splits > FEW_SPLITS else -(-places // (_THREADS // 32))
    most = 2 * dense.multiprocessors(device) // slices  # two lie on a multiprocessor
    _kernel(rank, links.ranks).launch(given, min(blocks, most), slices)
    return out, lse


def divides(links: Links | None, queries: int, heads: int, rank: int, longest: int, positions: int = 1) -> bool:
    """Whether ranks read a part of every context each, in a step of so many queries.

    heads: of a rank. rank: R. longest: tokens, at least those of any query's context, so a recorded shape has one way.
    positions: queries of a row.
    """
    if links is None or queries > MOST_TOKENS or rank % _SLICE or links.contexts == "whole":
        return False
    return links.contexts == "divided" or gain(queries, heads, links.ranks, longest, positions) > 0


@functools.cache
def gain(queries: int, heads: int, ranks: int, longest: int, positions: int = 1) -> float:
    """Microseconds that dividing contexts saves a layer, by the model of `attend` and what the exchanges take.

    Fitted to 41 cases of 1 to 64 queries and 2,048 to 131,072 tokens: it decides otherwise than was measured where less
    than 2 us a layer are to be had. All of them had one query a row; of several a rank may attend to them together.
    """
    bytes_sent = (ranks - 1) * 2 * queries * heads * (2 * attend.LATENT + attend.ROPE)
    whole = attend.predicted(queries, heads, longest, positions)
    divided = attend.predicted(queries, heads * ranks, attend.part_length(longest, ranks), positions)
    return _KEPT * (whole - divided - bytes_sent / _LINK_SPEED) - _EXCHANGE - _QUERY * queries
