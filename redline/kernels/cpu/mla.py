"""Latent attention on a CPU.

With float32 pages products are exact; with bf16 and e4m3 pages their inputs are rounded to bf16, as on a GPU.
"""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.panels import PANEL, Matrix, laid_out
from redline.kernels.kernel import Kernel
from redline.ops import mla as meaning
from redline.ops.formats import Weight
from redline.ops.mla import FP8, MlaWeights

_mla_qkv, _mla_decode, _mla_prefill = map(native.function, ("mla_qkv", "mla_decode", "mla_prefill"))
_KV_TYPES = {torch.bfloat16: 0, torch.float32: 1, FP8: 2}


def kv_type(plane: Tensor) -> int:
    """The number of the pages' format in core/pages.h. KeyError for an unsupported dtype."""
    return _KV_TYPES[plane.dtype]


def in_panels(w: MlaWeights[Weight]) -> bool:
    """Whether all four weights are in panels, the layout that the C++ reads."""
    return all(isinstance(weight, Matrix) and weight.panels for weight in (w.w_a, w.w_q, w.w_uk, w.w_uv))


def _qkv(args: meaning.MlaQkvArgs[Matrix]) -> Tensor:
    w = args.w
    tokens, d = args.x_TD.shape
    heads, nope, rope, rank, _ = w.sizes
    q = torch.empty(tokens, heads, nope + rope)
    _mla_qkv(
        x=args.x_TD,
        w_a=w.w_a.data,
        q_norm=w.q_norm,
        kv_norm=w.kv_norm,
        w_q=w.w_q.data,
        cos=args.cos,
        sin=args.sin,
        rows=args.slots_T,
        plane=args.plane,
        kv_type=kv_type(args.plane),
        q=q,
        eps=w.eps,
        T=tokens,
        D=d,
        Rq=w.q_norm.shape[0],
        R=rank,
        P=rope,
        H=heads,
        Nn=nope,
    )
    return q


def _qkv_fits(args: meaning.MlaQkvArgs[Weight]) -> bool:
    """Whether the weights are in panels and the query heads end at a panel boundary: whole panels are stored."""
    return in_panels(args.w) and args.w.w_q.shape[0] % PANEL == 0


def _decode(args: meaning.MlaDecodeArgs[Matrix]) -> None:
    w = args.w
    heads, nope, rope, rank, value = w.sizes
    _mla_decode(
        q=args.q_THX,
        tokens=args.tokens_Q,
        slots=args.slots_Q,
        lengths=args.lengths_Q,
        tables=args.tables,
        table_width=args.tables.shape[1],
        plane=args.plane,
        kv_type=kv_type(args.plane),
        w_uk=w.w_uk.data,
        w_uv=w.w_uv.data,
        y=args.out_THV,
        scale=args.scale,
        Q=args.tokens_Q.shape[0],
        H=heads,
        Nn=nope,
        P=rope,
        R=rank,
        V=value,
        skip=args.skip,
    )


def _decode_fits(args: meaning.MlaDecodeArgs[Weight]) -> bool:
    """Whether the weights are in panels and R, P and V are multiples of 32: rows are read 32 numbers at a time."""
    w = args.w
    return in_panels(w) and w.rank % PANEL == w.rope % PANEL == w.value % PANEL == 0


def _prefill(args: meaning.MlaPrefillArgs[Matrix]) -> None:
    w = args.w
    heads, nope, rope, rank, value = w.sizes
    _mla_prefill(
        q=args.q_CHX,
        start=args.start,
        count=args.q_CHX.shape[0],
        pages=args.table,
        plane=args.plane,
        kv_type=kv_type(args.plane),
        w_uk=w.w_uk.data,
        w_uv=w.w_uv.data,
        y=args.out_CHV,
        scale=args.scale,
        H=heads,
        Nn=nope,
        P=rope,
        R=rank,
        V=value,
        skip=args.skip,
    )


def _prefill_fits(args: meaning.MlaPrefillArgs[Weight]) -> bool:
    """Whether the weights are in panels and R, P and V are multiples of 32: keys and values are converted to panels."""
    w = args.w
    return in_panels(w) and w.rank % PANEL == w.rope % PANEL == w.value % PANEL == 0


mla_qkv = Kernel(meaning.mla_qkv, _qkv, "cpu", _qkv_fits, laid_out)
mla_decode = Kernel(meaning.mla_decode, _decode, "cpu", _decode_fits, laid_out)
mla_prefill = Kernel(meaning.mla_prefill, _prefill, "cpu", _prefill_fits, laid_out)
