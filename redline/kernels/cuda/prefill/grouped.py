"""Grouped GEMM of the routed experts for many tokens, with dequantisation inside.      T tokens, D hidden, K chosen.

y = sum over k of weight[k] * expert[ids[k]](x), as in `moe`; for more than 32 tokens, in prefill or decode. On a
Hopper the products are wgmmas (grouped.cu); on other chips they are Triton kernels (`triton/experts.py`). The
distribution of tokens over experts is known only on the device. No size here depends on it, so a CUDA graph can capture
the step.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.chips import chip
from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.records import BF16_INPUTS, KINDS, Kind, Records, random_experts
from redline.kernels.cuda.prefill.sort_pairs import WIDEST, most_rows, most_tiles, sort_pairs
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_ITEMS = 3
_STAGES: dict[str, tuple[int, int]] = {"up": (2, 5), "down": (2, 6)}  # of weights, of columns: the most that fit
_COLUMN_BYTES = 128  # per step
_GATHER_PARTS = 4  # blocks per tile


class GroupedExpertsArgs(NamedTuple):
    """Computes the weighted sum of each token's routed experts."""

    x_TD: Tensor  # bf16 [T, D]; further columns are ignored
    ids_TK: Tensor  # int32 [T, K]
    weights_TK: Tensor  # float32 [T, K]
    up: Records  # [E, 2 I, D], gate first
    down: Records  # [E, D, I]
    rstd_T: Tensor | None = None  # float32 [T or more]: factor of x, if x is not normed yet


def _reference(args: GroupedExpertsArgs) -> Tensor:
    """-> y float32 [T, D]."""
    x_TD = args.x_TD
    x_TD = x_TD[:, : args.up.inputs].float()
    if args.rstd_T is not None:
        x_TD = x_TD * args.rstd_T[: x_TD.shape[0], None]
    y_TD = torch.zeros_like(x_TD)
    for expert in args.ids_TK.unique().tolist():
        rows, choice = torch.where(args.ids_TK == expert)
        gate, upper = (x_TD[rows] @ args.up.dense(expert).T).chunk(2, -1)
        part = (F.silu(gate) * upper) @ args.down.dense(expert).T
        y_TD = y_TD.index_add(0, rows, part * args.weights_TK[rows, choice, None])
    return y_TD


_Gather = launch_record("prefill/grouped.cu", "GatherLaunch")
_Multiply = launch_record("prefill/grouped.cu", "MultiplyExpertsLaunch")
_Combine = launch_record("prefill/grouped.cu", "CombineLaunch")
_kernels: dict[tuple[object, ...], CudaKernel] = {}


def _rows_kernel(
    part: Literal["gather", "combine"], down: Records, chosen: int, up: Records | None = None
) -> CudaKernel:
    sizes = {
        "PART": "GATHER" if part == "gather" else "COMBINE",
        "FORMAT": down.kind,
        "INPUTS": down.outputs,
        "PADDED_INPUTS": up.form.width if up is not None else 0,
        "PADDED_OUTPUTS": down.form.tiles * 16,
        "CHOSEN": chosen,
    }
    key = tuple(sizes.values())
    if key not in _kernels:
        launch, threads = (_Gather, 512) if part == "gather" else (_Combine, 256)
        _kernels[key] = CudaKernel("prefill/grouped.cu", part, launch, sizes, 0, threads)
    return _kernels[key]


def _product_kernel(records: Records) -> CudaKernel:
    form, (weight_stages, column_stages) = records.form, _STAGES[records.use]
    # BF16 records are consecutive along K: a slice may be any number of them.
    inputs = BF16_INPUTS if records.kind == "BF16" else form.inputs
    sizes = {
        "PART": records.use.upper(),
        "FORMAT": records.kind,
        "RECORD_INPUTS": inputs,
        "SLICES": form.width // inputs,
        "ROW_TILES": form.tiles,
        "COPIED_TILES": 1 if records.use == "up" else 4,
        "WEIGHT_STAGES": weight_stages,
        "COLUMN_STAGES": column_stages,
        "WIDEST": WIDEST,
    }
    key = tuple(sizes.values())
    if key not in _kernels:
        tiles = column_stages + (records.use == "up")
        shared = 1024 + tiles * WIDEST * _COLUMN_BYTES + weight_stages * 8 * form.record_bytes * (inputs // form.part)
        shared += _ITEMS * (8 * WIDEST + 16) + 16 * (weight_stages + column_stages + _ITEMS)
        _kernels[key] = CudaKernel("prefill/grouped.cu", "multiply_experts", _Multiply, sizes, shared, 384)
    return _kernels[key]


def _cuda(args: GroupedExpertsArgs) -> Tensor:
    x_TD, up, down = args.x_TD, args.up, args.down
    (tokens, chosen), device, experts = args.ids_TK.shape, x_TD.device, up.experts
    pairs = tokens * chosen
    columns, tiles = order = sort_pairs(args.ids_TK, args.weights_TK, experts)
    if not chip().warpgroup_mma:
        from redline.kernels.cuda.triton.experts import multiply  # Triton is imported only on use

        return add_pairs(multiply(x_TD, args.ids_TK, order, up, down, args.rstd_T), args.ids_TK, down)
    rows, most = most_rows(pairs, experts), most_tiles(pairs, experts)

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    x_bytes, y_bytes = rows * up.form.width * 2, pairs * down.form.tiles * 32
    columns_of_x = y = room(max(x_bytes, y_bytes))  # x is not read any more when y is written
    columns_of_h = room(rows * down.form.width * 2)
    gather = _Gather(
        x=x_TD,
        rstd=args.rstd_T,
        columns_out=columns_of_x,
        columns=columns,
        tiles=tiles,
        x_stride=x_TD.shape[1],
        parts=_GATHER_PARTS,
    )
    blocks = _blocks(device) if pairs else 0
    _rows_kernel("gather", down, chosen, up).launch(gather, most, _GATHER_PARTS)
    for records, given, made in ((up, columns_of_x, columns_of_h), (down, columns_of_h, y)):
        multiply = _Multiply(weights=records.data, columns_in=given, out=made, columns=columns, tiles=tiles)
        _product_kernel(records).launch(multiply, blocks)
    return add_pairs(y.view(torch.bfloat16), args.ids_TK, down)


def add_pairs(y: Tensor, ids_TK: Tensor, down: Records) -> Tensor:
    """The sum of each token's rows of y, in the order of its choices -> float32 [T, D].

    y: bf16, at least [T K, D padded]; of each 16 outputs, output g and output g + 8 are adjacent.
    """
    tokens, chosen = ids_TK.shape
    out = torch.empty(tokens, down.outputs, dtype=torch.float32, device=y.device)
    combine = _rows_kernel("combine", down, chosen)
    combine.launch(_Combine(y=y, out=out, tokens=tokens), -(-tokens * down.outputs // 8 // combine.threads))
    return out


def _blocks(device: torch.device) -> int:
    """Blocks of a matmul, one per multiprocessor; two under emulation, of which the first does all the work."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _cuda_fits(args: GroupedExpertsArgs) -> bool:
    """Whether dtypes are supported, rows of x are multiples of 16 bytes, D of 32, and there are under 512 experts."""
    right = (
        args.x_TD.dtype == torch.bfloat16
        and args.ids_TK.dtype == torch.int32
        and args.weights_TK.dtype == torch.float32
    )
    return right and args.x_TD.shape[1] % 8 == 0 and args.up.inputs % 32 == 0 and args.up.experts < 512


def _cost(args: GroupedExpertsArgs) -> Cost:
    """Bytes of the experts that are actually chosen, once each; x, and y in float32; the choices."""
    up = args.up
    chosen, pairs = args.ids_TK.unique().numel(), args.ids_TK.numel()
    read = (up.nbytes + args.down.nbytes) // up.experts * chosen
    return Cost(read + 3 * args.x_TD.nbytes + 8 * pairs, 2 * pairs * args.down.inputs * up.inputs * 3)


def _cases() -> Iterator[Case]:
    def make(kind: Kind, tokens: int, d: int, i: int, e: int, k: int, favour: float = 0.0, rms: float = 0.0):
        def inputs(g: torch.Generator) -> GroupedExpertsArgs:
            spread = torch.rand(tokens, generator=g) * rms + 1.0
            x = (torch.randn(tokens, d, generator=g) * spread[:, None]).to(torch.bfloat16)
            scores = torch.rand(tokens, e, generator=g)
            scores[:, 0] += favour
            ids = scores.topk(k).indices.to(torch.int32)
            up = Records.prepare("up", random_experts(g, kind, "up", e, 2 * i, d))
            down = Records.prepare("down", random_experts(g, kind, "down", e, d, i))
            return GroupedExpertsArgs(x, ids, torch.rand(tokens, k, generator=g), up, down, 1 / spread if rms else None)

        return inputs

    for kind in KINDS:
        rtol = rtol_of(kind)
        yield Case(f"{kind} T=1 nano", make(kind, 1, 320, 128, 16, 4), rtol=rtol)
        yield Case(f"{kind} T=40 nano", make(kind, 40, 320, 128, 16, 4), rtol=rtol)
        yield Case(f"{kind} T=40 nano, not normed", make(kind, 40, 320, 128, 16, 4, rms=300.0), rtol=rtol)
        yield Case(f"{kind} T=250 nano, most on one expert", make(kind, 250, 320, 128, 3, 1, 0.9), rtol=rtol)
        yield Case(f"{kind} T=6 of Kimi's hidden size", make(kind, 6, 7168, 64, 3, 2), rtol=rtol)
        yield Case(f"{kind} T=300 Kimi, 16 experts", make(kind, 300, 7168, 2048, 16, 8), small=False, rtol=rtol)
        yield Case(f"{kind} T=2048 Kimi, 32 experts", make(kind, 2048, 7168, 2048, 32, 8), small=False, rtol=rtol)


def rtol_of(kind: Kind) -> float:
    """The error of two roundings: of each pair's y to bf16, and of its h to float16, or to bf16 for BF16 experts."""
    return math.hypot(2**-8, 2**-8 if kind == "BF16" else 2**-11)


grouped_experts = Kernel(
    Op("grouped_experts", GroupedExpertsArgs, _reference, _cost, _cases), _cuda, "cuda", _cuda_fits
)
