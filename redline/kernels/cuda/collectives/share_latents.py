"""Context parallelism: exchanges partial attention results of divided contexts among ranks.   Q queries, H heads.

Every rank stores all latents, but has only some heads. Reading all latents for these heads takes each rank the time of
a single GPU. If contexts are long enough, the ranks exchange data twice: each gets the queries of all heads
(`all_gather_queries`), attends with them to its part of every context (`attend`), and sends each other rank the partial
results of that rank's heads (`share_latents`). `unabsorb` then combines one split per rank. Only the order of summation
differs from undivided attention.
"""

import functools

import torch
from torch import Tensor

from redline.kernels.cuda.collectives.rank_links import MOST_TOKENS, RankLinks
from redline.kernels.cuda.decode import attend, dense
from redline.kernels.cuda.decode.unabsorb import MAX_SPLITS
from redline.kernels.cuda.kernel import CudaKernel, launch_record

_Launch = launch_record("collectives/share_latents.cu", "ShareLatentsLaunch")
_THREADS = 512
_SLICE = 256  # numbers of a latent per block
FEW_SPLITS = 8  # maximum splits for which one warp combines a query's head

# Two NVIDIA H200 (NV18, `divided-contexts-h200.json`): microseconds of both exchanges, and per query, without the
# transfer; bytes per microsecond of the link, one way; and the share of the gain in `attend`'s model that is realised.
_EXCHANGE, _QUERY, _LINK_SPEED, _KEPT = 5.0, 0.15, 270e3, 0.66


@functools.cache
def _kernel(rank: int, ranks: int) -> CudaKernel:
    sizes = {"R": rank, "RANKS": ranks, "MAX_SPLITS": MAX_SPLITS}
    shared = 4 * _THREADS // 32 * (MAX_SPLITS + _SLICE)
    return CudaKernel("collectives/share_latents.cu", "share_latents", _Launch, sizes, shared, _THREADS)


def share_latents(partial_QHSR: Tensor, lse_QHS: Tensor, links: RankLinks) -> tuple[Tensor, Tensor]:
    """bf16 [Q, H, S, R] and natural log-sum-exps float32 [Q, H, S] of this rank's part of every context, for the heads
    of all ranks -> [Q, H / ranks, ranks, R] and [Q, H / ranks, ranks] of this rank's heads, for all parts.

    Q <= MOST_TOKENS, S <= MAX_SPLITS, R a multiple of 256. A split with -inf is empty, and so are all later ones.
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
        **links.latent_fields(),
    )
    slices, places = rank // _SLICE, queries * heads
    blocks = places if splits > FEW_SPLITS else -(-places // (_THREADS // 32))
    most = 2 * dense.multiprocessors(device) // slices  # two blocks fit on a multiprocessor
    _kernel(rank, links.ranks).launch(given, min(blocks, most), slices)
    return out, lse


def divides(links: RankLinks | None, queries: int, heads: int, rank: int, longest: int, positions: int = 1) -> bool:
    """Whether each rank reads only a part of every context, in a step of `queries` queries.

    heads: of a rank. rank: R. longest: tokens, an upper bound of every query's context, so that a captured shape has a
    fixed choice. positions: queries of a row.
    """
    if links is None or queries > MOST_TOKENS or rank % _SLICE or links.contexts == "whole":
        return False
    return links.contexts == "divided" or gain(queries, heads, links.ranks, longest, positions) > 0


@functools.cache
def gain(queries: int, heads: int, ranks: int, longest: int, positions: int = 1) -> float:
    """Microseconds per layer saved by dividing contexts, from the model of `attend` and the cost of the exchanges.

    Fitted to 41 cases of 1 to 64 queries and 2,048 to 131,072 tokens: it decides wrongly only where less than 2 us per
    layer can be saved. All cases had one query per row; with several a rank may compute them together.
    """
    bytes_sent = (ranks - 1) * 2 * queries * heads * (2 * attend.LATENT + attend.ROPE)
    whole = attend.predicted(queries, heads, longest, positions)
    divided = attend.predicted(queries, heads * ranks, attend.part_length(longest, ranks), positions)
    return _KEPT * (whole - divided - bytes_sent / _LINK_SPEED) - _EXCHANGE - _QUERY * queries
