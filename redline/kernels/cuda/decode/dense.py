"""Dense matmuls of a GPU decode step: shared code of `project_a`, `project_q`, `project_out`, `gates` and `head`.

T <= 256 tokens, N outputs, K inputs, D hidden. Up to 8 tokens are the columns of one mma.sync, in dense.cu; more tokens
use Triton (`triton/dense.py`). Activations between the ops of a step, all contiguous:

residual  float32 [T, D]
x         bf16 [T, D padded to 128 with zeros]: residual * gamma of the next norm, not yet divided by its rms
squares   float32 [parts, T padded to 8]: sums of the residual's squares, one part per block that wrote x

A matmul is linear, so every reader of x multiplies its outputs by 1 / rms: a norm needs no launch of its own.
"""

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from redline.kernels.cuda.chips import HOPPER, chip
from redline.kernels.cuda.kernel import CudaKernel, emulating
from redline.kernels.cuda.layouts.records import Slabs
from redline.kernels.cuda.layouts.tiled import PAD_K, TILE_K, TILE_N, Tiled, Tiled8, padded
from redline.kernels.record import ArgumentStruct
from redline.ops.op import Cost

MOST_TOKENS = 8  # maximum for dense.cu
MOST_STREAMED = 256  # maximum for the Triton kernels
MOST_PARTS = 256  # maximum parts of squares that a matmul reads, so maximum blocks of the matmul before it

# Tensor cores truncate when they add 16 products to a float32 sum: 2^-24 on average, always towards zero. The tolerance
# is for 18,432 inputs, times 1.5 for partial sums and for 1 / rms.
RTOL = 18432 / 16 * 2**-24 * 1.5

_WARPS = 16
_ROOM = HOPPER.block_shared
_RING = {16: 1024, 8: 2048}  # bits of a weight -> offset of the ring buffer, after barriers and small sums
_IN_FLIGHT = 192 << 10  # maximum bytes of a ring buffer; more does not read faster
_MOST_STAGES = {16: 6, 8: 12}
_X_PAD = 64  # padding between the tokens' rows of x, in bytes
_MOST_SHARE = 16  # units of x in a warp's registers, 4 registers each; for 8 bits half of this number, 8 registers each
_MOST_SLICE = 10  # the same if the next units are loaded into a separate buffer, 8 KB each
_MOST_TILES = {16: 4, 4: 2}  # warps of a tile -> accumulators per warp, 4 registers each
_WITH_OPERANDS = ("PROJECT_A", "PROJECT_Q", "PROJECT_OUT")


@dataclass(frozen=True)
class MatmulPlan:
    """How a matmul is divided; dense.cu defines each number.

    Only warps, units and slices determine a result's bits, and they do not depend on the number of tokens.
    """

    warps: int
    units: int
    stages: int
    free_stages: int
    early_stages: int
    columns: int
    slices: int
    tiles: int
    batched: bool
    blocks: int
    ring: int
    x_at: int
    sums_at: int
    operands_at: int
    shared: int


def plan(
    inputs: int,
    row_tiles: int,
    columns: int,
    multiprocessors: int,
    *,
    operands: bool,
    bits: int = 16,
    in_units: int = 0,
) -> MatmulPlan:
    """inputs: padded; this rank's, if ranks divide them. operands: 16 bytes for each pair of outputs. bits: of a
    weight, 16 or 8. in_units: row tiles that are processed in units before the others; the last block then has none of
    them. warps, units and stages for 7168 inputs (up to four tiles per block), 1536 and 8192 of 16 bits were tuned on
    an NVIDIA H200; other sizes follow their pattern and are untimed."""
    blocks = min(multiprocessors, row_tiles)
    unit, ring = TILE_K * 16 // bits, _RING[bits]
    whole, one_each = inputs % (16 * unit) == 0, row_tiles <= blocks and not in_units
    warps = 16 if whole and (inputs >= 7168 or (one_each and inputs // unit // 4 > _MOST_SHARE)) else 4
    at_once = _WARPS // warps
    share = inputs // unit // warps
    in_registers = _MOST_SHARE * bits // 16
    most_share = in_registers if share <= in_registers else _MOST_SLICE * bits // 16
    slices = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= most_share)
    with_tiles = blocks - bool(in_units and blocks > 1)
    tiles = -(-(row_tiles - in_units) // with_tiles // at_once)
    batched = tiles > _MOST_TILES[warps] and slices == 1
    assert batched or tiles * at_once <= 8, f"{inputs} inputs: too few multiprocessors for {row_tiles} tiles"
    tiles = 1 if batched else tiles
    units = _units(share // slices, batched=batched)
    stage = _WARPS * units * TILE_N * TILE_K * 2
    x = columns * (inputs // slices * 2 + _X_PAD)
    sums = _WARPS * tiles * TILE_N * columns * 4
    sums_room = 2 * sums if batched else 0
    stages = 2 if units == 7 else min(_MOST_STAGES[bits], _IN_FLIGHT // stage)
    operands_room = tiles * at_once * TILE_N // 2 * columns * 16 if operands and not batched else 0
    if ring + stages * stage + columns * _X_PAD + operands_room > _ROOM:
        operands_room = 0
    room = _ROOM - ring - sums_room - operands_room
    if slices > 1:
        stages = min(stages, (room - x) // stage)
    free = min(stages, (room - x) // stage)
    assert stages > 0 <= free, f"no room for {inputs} inputs, {columns} columns"
    x_at = ring + free * stage
    end = max(ring + stages * stage, x_at + x, 0 if batched else ring + sums)
    return MatmulPlan(
        *(warps, units, stages, free, free, columns, slices, tiles, batched, blocks, ring),
        x_at=x_at,
        sums_at=end if batched else ring,
        operands_at=end if operands_room else 0,
        shared=end + sums_room + operands_room,
    )


def _units(share: int, *, batched: bool) -> int:
    """Tiles per copy: 8 KB to 28 KB, depending on the divisors of a warp's share of K."""
    if share % 7 == 0 and not batched:
        return 7
    return max(n for n in range(1, 5) if share % n == 0)


@functools.cache
def _kernel(
    launch: type[ArgumentStruct],
    epilogue: str,
    inputs: int,
    all_inputs: int,
    row_tiles: int,
    bits: int,
    cut: MatmulPlan,
    sizes: tuple[tuple[str, int | str], ...],
) -> CudaKernel:
    defines: dict[str, int | str] = {
        "EPILOGUE": epilogue,
        "INPUTS": inputs,
        "ALL_INPUTS": all_inputs,
        "BITS": bits,
        "RING": cut.ring,
        "ROW_TILES": row_tiles,
        "WARPS_PER_TILE": cut.warps,
        "UNITS": cut.units,
        "STAGES": cut.stages,
        "FREE_STAGES": cut.free_stages,
        "EARLY_STAGES": cut.early_stages,
        "COLUMNS": cut.columns,
        "SLICES": cut.slices,
        "TILES": cut.tiles,
        "BATCHED": int(cut.batched),
        "X_AT": cut.x_at,
        "SUMS_AT": cut.sums_at,
        "OPERANDS_AT": cut.operands_at,
        **dict(sizes),
    }
    return CudaKernel("decode/dense.cu", "dense", launch, defines, cut.shared)


@functools.cache
def _plan_of(
    inputs: int, row_tiles: int, tokens: int, multiprocessors: int, operands: bool, bits: int, in_units: int
) -> MatmulPlan:
    columns = 1 << (tokens - 1).bit_length()
    return plan(inputs, row_tiles, columns, multiprocessors, operands=operands, bits=bits, in_units=in_units)


def cut_of(w: Tiled | Tiled8, tokens: int, epilogue: str, in_units: int = 0, ranks: int = 1) -> MatmulPlan:
    """How the matmul with a weight is divided. in_units: as in `plan`. ranks: number that divide its inputs."""
    row_tiles, bits = w.data.shape[-4], 8 * w.data.itemsize
    inputs, count = w.data.shape[-3] * w.data.shape[-1] // ranks, multiprocessors(w.data.device)
    return _plan_of(inputs, row_tiles, tokens, count, epilogue in _WITH_OPERANDS, bits, in_units)


def kernel_of(
    launch: type[ArgumentStruct],
    epilogue: str,
    w: Tiled | Tiled8,
    tokens: int,
    in_units: int = 0,
    share: int = 1,
    **sizes: int | str,
) -> tuple[CudaKernel, int]:
    """The kernel, and its number of blocks. launch: the epilogue's struct, sizes: its own macros. in_units: see `plan`.

    share: number of ranks, each of which multiplies a part of the inputs.
    """
    row_tiles, bits = w.data.shape[-4], 8 * w.data.itemsize
    inputs, cut = w.data.shape[-3] * w.data.shape[-1], cut_of(w, tokens, epilogue, in_units, share)
    sizes = {"OUTPUTS": w.outputs, "NORM_INPUTS": w.inputs, **sizes}
    return _kernel(launch, epilogue, inputs // share, inputs, row_tiles, bits, cut, tuple(sizes.items())), cut.blocks


def multiprocessors(device: torch.device) -> int:
    """The device's number of multiprocessors; that of `chip` if there is no GPU."""
    return chip().multiprocessors if emulating() or device.type != "cuda" else _multiprocessors(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def blocks_of(w: Tiled | Slabs) -> int:
    """Number of blocks of a matmul in dense.cu, which is the number of parts of squares that it writes."""
    if isinstance(w, Slabs):
        return w.data.shape[0]
    return min(multiprocessors(w.data.device), w.data.shape[-4])


def fits(x: Tensor, w: Tiled) -> bool:
    """Whether dense.cu supports x [T, K]: up to 8 tokens, in the layout that the preceding op writes."""
    return (
        1 <= x.shape[0] <= MOST_TOKENS
        and x.dtype == w.data.dtype == torch.bfloat16
        and x.shape[1] == padded(w.inputs, PAD_K)
        and w.outputs % 2 == 0
        and blocks_of(w) <= MOST_PARTS
    )


def streams(x: Tensor, w: Tiled | Slabs) -> bool:
    """Whether Triton supports x [T, K]: 9 to 256 tokens, in the layout that the preceding op writes."""
    return (
        MOST_TOKENS < x.shape[0] <= MOST_STREAMED
        and x.dtype == w.data.dtype == torch.bfloat16
        and x.shape[1] == padded(w.inputs, PAD_K)
        and w.outputs % 2 == 0
    )


# --------------------------------------------------------------------------------------------------- used by references


def product(x: Tensor, w: Tiled | Tiled8 | Slabs) -> Tensor:
    """x bf16 [T, K padded] -> W x of each token, float32 [T, N]."""
    return x[:, : w.inputs].float() @ w.dense().float().T


def rstd_of(squares: Tensor, tokens: int, inputs: int, eps: float) -> Tensor:
    """1 / rms of each token, float32 [T, 1]."""
    return torch.rsqrt(squares[:, :tokens].sum(0)[:, None] / inputs + eps)


def part_squares(y_TN: Tensor, blocks: int) -> Tensor:
    """Sums of squares over the tiles of each block, float32 [blocks, T padded to 8]; zeros in the padding."""
    tiles_TX = pad_columns(y_TN.float(), TILE_N).pow(2).unflatten(-1, (-1, TILE_N)).sum(-1)
    bounds = [block * tiles_TX.shape[1] // blocks for block in range(blocks + 1)]
    parts = torch.stack([tiles_TX[:, first:end].sum(1) for first, end in pairwise(bounds)])
    return pad_columns(parts, MOST_TOKENS)


def pad_columns(x: Tensor, to: int = PAD_K) -> Tensor:
    """Pads the last axis to a multiple of `to` with zeros."""
    return torch.nn.functional.pad(x, (0, padded(x.shape[-1], to) - x.shape[-1]))


def cost_of(w: Tiled | Tiled8 | Slabs, tokens: int, *others: Tensor) -> Cost:
    """The weights once, and every tensor in `others`, read or written; both include padding."""
    return Cost(w.nbytes + sum(x.nbytes for x in others), 2 * tokens * w.data.numel())


# -------------------------------------------------------------------------------------------------------- used by cases


def random_tiled(g: torch.Generator, *shape: int) -> Tiled:
    """A weight of this shape whose products keep the variance of their inputs."""
    return Tiled.prepare((torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(torch.bfloat16))


def random_x(g: torch.Generator, tokens: int, inputs: int) -> tuple[Tensor, Tensor]:
    """(x bf16 [T, K padded], squares float32 [3, T padded to 8]) of a residual that grows from token to token."""
    residual = torch.randn(tokens, inputs, generator=g) * (torch.arange(tokens)[:, None] + 1)
    x = pad_columns((residual * (torch.rand(inputs, generator=g) + 0.5)).to(torch.bfloat16))
    return x, part_squares(residual, 3)
