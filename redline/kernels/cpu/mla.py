"""Latent attention on a CPU.

Over float32 pages products are exact; over bf16 and e4m3 pages what enters one is rounded to bf16, as on a GPU.
"""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.panels import PANEL, Matrix, laid_out
from redline.kernels.kernel import Kernel
from redline.ops import mla as meaning
from redline.ops.formats import Weight
from redline.ops.mla import FP8, MlaWeights

_KV_TYPES = {torch.bfloat16: 0, torch.float32: 1, FP8: 2}


def kv_type(plane: Tensor) -> int:
    """The format of these pages, as core/pages.h numbers it. KeyError for a dtype that no page has."""
    return _KV_TYPES[plane.dtype]


def in_panels(w: MlaWeights[Weight]) -> bool:
    """Whether all four weights lie in panels, which the C++ reads."""
    return all(isinstance(weight, Matrix) and weight.panels for weight in (w.w_a, w.w_q, w.w_uk, w.w_uv))


def _qkv(args: meaning.MlaQkvArgs[Matrix]) -> Tensor:
    w = args.w
    library = native.library()
    assert library is not None
    tokens, d = args.x_TD.shape
    heads, nope, rope, rank, _ = w.sizes
    q = torch.empty(tokens, heads, nope + rope)
    library.redline_mla_qkv(
        native.pointer(args.x_TD),
        w.w_a.address,
        native.pointer(w.q_norm),
        native.pointer(w.kv_norm),
        w.w_q.address,
        native.pointer(args.cos),
        native.pointer(args.sin),
        native.pointer(args.slots_T),
        native.pointer(args.plane),
        kv_type(args.plane),
        q.data_ptr(),
        *(w.eps, tokens, d, w.q_norm.shape[0], rank, rope, heads, nope),
    )
    return q


def _qkv_fits(args: meaning.MlaQkvArgs[Weight]) -> bool:
    """Whether the weights lie in panels and the query heads end with one: they are stored by whole panels."""
    return in_panels(args.w) and args.w.w_q.shape[0] % PANEL == 0


def _decode(args: meaning.MlaDecodeArgs[Matrix]) -> None:
    w = args.w
    library = native.library()
    assert library is not None
    library.redline_mla_decode(
        native.pointer(args.q_THX),
        native.pointer(args.tokens_Q),
        native.pointer(args.slots_Q),
        native.pointer(args.lengths_Q),
        native.pointer(args.tables),
        args.tables.shape[1],
        native.pointer(args.plane),
        kv_type(args.plane),
        w.w_uk.address,
        w.w_uv.address,
        native.pointer(args.out_THV),
        *(args.scale, args.tokens_Q.shape[0], *w.sizes, args.skip),
    )


def _decode_fits(args: meaning.MlaDecodeArgs[Weight]) -> bool:
    """Whether the weights lie in panels and R, P and V are multiples of 32: rows are read 32 numbers at a time."""
    w = args.w
    return in_panels(w) and w.rank % PANEL == w.rope % PANEL == w.value % PANEL == 0


def _prefill(args: meaning.MlaPrefillArgs[Matrix]) -> None:
    w = args.w
    library = native.library()
    assert library is not None
    library.redline_mla_prefill(
        native.pointer(args.q_CHX),
        *(args.start, args.q_CHX.shape[0]),
        native.pointer(args.table),
        native.pointer(args.plane),
        kv_type(args.plane),
        w.w_uk.address,
        w.w_uv.address,
        native.pointer(args.out_CHV),
        *(args.scale, *w.sizes, args.skip),
    )


def _prefill_fits(args: meaning.MlaPrefillArgs[Weight]) -> bool:
    """Whether the weights lie in panels and R, P and V are multiples of 32: keys and values become panels."""
    w = args.w
    return in_panels(w) and w.rank % PANEL == w.rope % PANEL == w.value % PANEL == 0


mla_qkv = Kernel(meaning.mla_qkv, _qkv, "cpu", _qkv_fits, laid_out)
mla_decode = Kernel(meaning.mla_decode, _decode, "cpu", _decode_fits, laid_out)
mla_prefill = Kernel(meaning.mla_prefill, _prefill, "cpu", _prefill_fits, laid_out)
