"""Sorts the (token, choice) pairs of a step by expert, and divides them into tiles.     T tokens, K chosen, E experts.

A pair is (token, choice), numbered token * K + choice. Each expert's pairs are separate rows, in order, padded to a
multiple of 8. Each expert's rows are divided into tiles of equal width, a multiple of 8 and at most `WIDEST` (the last
tile may be narrower). The numbers of rows R and tiles C are known only on the device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

WIDEST = 192  # 96 accumulator registers in each thread of a warpgroup
_THREADS = 512


class Sorted(NamedTuple):
    """The pairs in the order of experts. Both tensors have worst-case size; values beyond R and C are undefined.

    columns: int32 [R or more, 2], each row's pair, or -1; and its router weight, as the bits of a float32.
    tiles: int32 [1 + C or more, 8]. First (C, 0, ...); its zeros are counters of the matmuls. Then for each tile
    (expert, index of the expert's first tile, number of its tiles, first row, width of a tile, number of rows, ...).
    """

    columns: Tensor
    tiles: Tensor


def most_rows(pairs: int, experts: int) -> int:
    """R in the worst case: the maximum number of experts have pairs, each padded by 7 rows."""
    return pairs + 7 * min(pairs, experts)


def most_tiles(pairs: int, experts: int) -> int:
    """C in the worst case: one partial tile for each expert that can have pairs, and full tiles."""
    return min(pairs, experts) + pairs // WIDEST


def tile_width(pairs: int) -> int:
    """Columns per tile of an expert with `pairs` pairs."""
    tiles = -(-pairs // WIDEST)
    return -(-pairs // tiles // 8) * 8


class SortPairsArgs(NamedTuple):
    """Sorts (token, choice) pairs by expert, and divides each expert's pairs into tiles."""

    ids_TK: Tensor  # int32 [T, K]
    weights_TK: Tensor  # float32 [T, K]
    experts: int  # E


def _reference(args: SortPairsArgs) -> Sorted:
    """Values beyond R rows are -1 here, and beyond C tiles 0."""
    columns, tiles = _room(args.ids_TK, args.experts)
    ids, weights = args.ids_TK.flatten(), args.weights_TK.float().flatten()
    row, count = 0, 0
    columns.fill_(-1)
    tiles.zero_()
    for expert in range(args.experts):
        pairs = torch.where(ids == expert)[0]
        if not len(pairs):
            continue
        here = columns[row : row + len(pairs)]
        here[:, 0], here[:, 1] = pairs, weights[pairs].view(torch.int32)
        width, rows = tile_width(len(pairs)), -(-len(pairs) // 8) * 8
        own = -(-rows // width)
        tiles[1 + count : 1 + count + own, :6] = torch.tensor([expert, count, own, row, width, rows])
        row, count = row + rows, count + own
    tiles[0, 0] = count
    return Sorted(columns, tiles)


def _room(ids_TK: Tensor, experts: int) -> Sorted:
    pairs = ids_TK.numel()
    columns = torch.empty(most_rows(pairs, experts), 2, dtype=torch.int32, device=ids_TK.device)
    tiles = torch.empty(1 + most_tiles(pairs, experts), 8, dtype=torch.int32, device=ids_TK.device)
    return Sorted(columns, tiles)


_Launch = launch_record("prefill/sort_pairs.cu", "SortPairsLaunch")
_kernels: dict[int, CudaKernel] = {}


def _kernel(experts: int) -> CudaKernel:
    if experts not in _kernels:
        warps = _THREADS // 32
        shared = 4 * (warps * experts + experts + warps)
        defines = {"EXPERTS": experts, "WIDEST": WIDEST}
        _kernels[experts] = CudaKernel("prefill/sort_pairs.cu", "sort_pairs", _Launch, defines, shared, _THREADS)
    return _kernels[experts]


def _cuda(args: SortPairsArgs) -> Sorted:
    ids_TK = args.ids_TK
    room = _room(ids_TK, args.experts)
    arguments = _Launch(
        ids=ids_TK, weights=args.weights_TK, columns=room.columns, tiles=room.tiles, pairs=ids_TK.numel()
    )
    _kernel(args.experts).launch(arguments, 1)
    return room


def _cuda_fits(args: SortPairsArgs) -> bool:
    """Whether there are under 512 experts: each has a thread of the only block, and nine bits."""
    return args.ids_TK.dtype == torch.int32 and args.weights_TK.dtype == torch.float32 and args.experts < 512


def _cost(args: SortPairsArgs) -> Cost:
    return Cost(2 * (args.ids_TK.nbytes + args.weights_TK.nbytes))


def _cases() -> Iterator[Case]:
    def make(tokens: int, chosen: int, experts: int):
        def inputs(g: torch.Generator) -> SortPairsArgs:
            scores = torch.rand(tokens, experts, generator=g)
            scores[:, 0] += 0.3
            ids = scores.topk(chosen).indices.to(torch.int32)
            return SortPairsArgs(ids, torch.rand(tokens, chosen, generator=g), experts)

        return inputs

    yield Case("T=3 of 16", make(3, 4, 16))
    yield Case("T=300 of 16", make(300, 4, 16))
    yield Case("T=90 Kimi", make(90, 8, 384))
    yield Case("T=8192 Kimi", make(8192, 8, 384), small=False)


sort_pairs = Kernel(Op("sort_pairs", SortPairsArgs, _reference, _cost, _cases), _cuda, "cuda", _cuda_fits)
