"""All-gather of columns: the logits of a head that is divided over ranks.    R rows, V columns.

Also all-gather of query heads for context parallelism, where every rank attends with all heads to a part of contexts.
"""

import functools

import torch
from torch import Tensor

from redline.kernels.cuda.collectives.rank_links import RankLinks
from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.kernel import CudaKernel, launch_record

_Launch = launch_record("collectives/all_gather.cu", "AllGatherLaunch")
_THREADS = 512
_QUERY_THREADS = 128  # small, so that one token's heads are spread over many blocks


@functools.cache
def _kernel(width: int, ranks: int, *, turns: bool) -> CudaKernel:
    sizes, threads = {"WIDTH": width, "RANKS": ranks, "TURNS": int(turns)}, _THREADS if turns else _QUERY_THREADS
    return CudaKernel("collectives/all_gather.cu", "all_gather", _Launch, sizes, shared=0, threads=threads)


def all_gather(part_RV: Tensor, links: RankLinks) -> Tensor:
    """float32 [R, V / ranks] of each rank -> [R, V]; V / ranks is a multiple of 4, R columns fit into the buffer."""
    (rows, width), device = part_RV.shape, part_RV.device
    room = links.rooms.gathered
    assert rows * width <= room, f"{rows} rows of {width} columns; a room has {room} words"
    whole = torch.empty(rows, links.ranks * width, device=device)
    given = _Launch(part=part_RV.contiguous(), whole=whole, rows=rows, **links.all_gather_fields())
    blocks = min(dense.multiprocessors(device), -(-rows * width // (4 * _THREADS)))
    _kernel(width, links.ranks, turns=True).launch(given, blocks)
    return whole


def all_gather_queries(part_THW: Tensor, links: RankLinks) -> Tensor:
    """bf16 [T, H / ranks, W] of each rank -> [T, H, W] on every rank; T <= MOST_TOKENS, H W / ranks a multiple of 8.

    A pair of a zero and a minus zero, in this order, is received as two zeros.
    """
    (tokens, heads, width), device = part_THW.shape, part_THW.device
    words, room = heads * width // 2, links.rooms.queries
    assert tokens * words <= room, f"{tokens} tokens of {words} words; a room has {room} words"
    whole = torch.empty(tokens, links.ranks * heads, width, dtype=torch.bfloat16, device=device)
    pairs = part_THW.view(torch.float32), whole.view(torch.float32)
    given = _Launch(part=pairs[0], whole=pairs[1], rows=tokens, **links.query_fields())
    blocks = min(4 * dense.multiprocessors(device), -(-tokens * words // (4 * _QUERY_THREADS)))
    _kernel(words, links.ranks, turns=False).launch(given, blocks)
    return whole
