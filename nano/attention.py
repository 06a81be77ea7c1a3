"""Causal attention over packed documents that never see each other.

Three ways to compute it: the flash kernel over variable lengths (a GPU), each document by itself (a CPU), and plain
causal rows, where a document sees what stands before it in its row. `choose` tries the kernel on this machine and takes
it only if forward and backward agree with documents taken one by one.

T tokens, H heads, W width of queries, keys and values.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Way = Literal["flash", "each", "causal"]


class Layout(NamedTuple):
    """Where documents begin and end in T tokens, cut into equal rows."""

    positions: Tensor  # int64 [T], from 0 in every document
    ends: Tensor  # int32 [S + 1], from 0 to T: document s is [ends[s], ends[s + 1]); filled up with T
    longest: Tensor  # int64 [1], on the CPU: the row length, which bounds every document
    rows: int  # number of rows; 0 where rows do not matter, so that compiled code does not depend on it
    way: Way


def layout_of(starts: Tensor, row: int, way: Way, documents: int) -> Layout:
    """The layout of T tokens that lie in rows of `row`; T is a multiple of it.

    starts bool [T]: true at the first token of every document and of every row. documents: at least how many there are.
    """
    tokens = starts.shape[0]
    index = torch.arange(tokens, device=starts.device)
    positions = index - torch.where(starts, index, 0).cummax(0).values
    # The k-th start goes to slot k; what no document fills stays T. No sizes depend on data, so nothing waits.
    ends = torch.full((documents + 2,), tokens, dtype=torch.int32, device=starts.device)
    slot = torch.where(starts, starts.cumsum(0) - 1, documents + 1).clamp_max(documents + 1)
    ends = ends.scatter(0, slot, torch.where(starts, index, tokens).to(torch.int32))[: documents + 1]
    ends[-1] = tokens
    return Layout(positions, ends, torch.tensor([row]), tokens // row if way == "causal" else 0, way)


def attend(q_THW: Tensor, k_THW: Tensor, v_THW: Tensor, layout: Layout, scale: float) -> Tensor:
    """Causal attention within each document: q, k, v [T, H, W] -> [T, H, W].

    In the way "causal" a document also sees what stands before it in its row. `scale` multiplies q . k.
    """
    if layout.way == "flash":
        return _flash(q_THW, k_THW, v_THW, layout.ends, layout.longest, scale)[0]
    if layout.way == "causal":
        rows = (x.unflatten(0, (layout.rows, -1)).transpose(1, 2) for x in (q_THW, k_THW, v_THW))
        return mixed(*rows, is_causal=True, scale=scale).transpose(1, 2).flatten(0, 1)
    sizes = layout.ends.diff().tolist()
    documents = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q_THW, k_THW, v_THW)), strict=True)
    out = [F.scaled_dot_product_attention(*qkv, is_causal=True, scale=scale) for qkv in documents if qkv[0].shape[1]]
    return torch.cat(out, 1).transpose(0, 1)


def mixed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """`scaled_dot_product_attention`; on a CPU in float32, whose gradients are four times faster than those of bf16."""
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, **options)
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)


@torch.library.custom_op("nano::flash", mutates_args=())
def _flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out [T, H, W], log-sum-exp [H, T]). Opaque to the compiler, so that `longest` may change without recompiling."""
    row = int(longest)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, row, row, 0.0, True, False, scale=scale)
    return out, lse


@_flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("nano::flash_backward", mutates_args=())
def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Tensor, longest: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    row = int(longest)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    grads = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, ends, ends, row, row, 0.0, True, seed, seed[0], scale=scale
    )
    return grads[0], grads[1], grads[2]


@_flash_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Tensor, longest: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ends, longest, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, ends, longest)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, ends, longest = ctx.saved_tensors
    grads = _flash_backward(grad.contiguous(), q, k, v, out, lse, ends, longest, ctx.scale)
    return (*grads, None, None, None)


_flash.register_autograd(_differentiate, setup_context=_keep)


def choose(device: torch.device, heads: int, width: int) -> tuple[Way, str]:
    """(the best way that works on this device, why), from a trial on three documents in two rows.

    heads, width: of queries and keys.
    """
    if device.type != "cuda":
        return "each", "no GPU"
    try:
        error = _disagreement(device, heads, width)
    except RuntimeError as reason:
        return "causal", f"flash kernel failed: {str(reason).splitlines()[0]}"
    if error < 0.02:
        return "flash", f"agrees with documents one by one to {error:.1e}"
    return "causal", f"flash kernel is off by {error:.1e}"


def _disagreement(device: torch.device, heads: int, width: int) -> float:
    """Largest relative distance from documents one by one in float32, over the output and the three gradients."""
    row = 256
    starts = torch.zeros(2 * row, dtype=torch.bool, device=device)
    starts[[0, 100, row]] = True
    generator = torch.Generator(device).manual_seed(0)
    inputs = [torch.randn(2 * row, heads, width, generator=generator, device=device) for _ in range(4)]
    results: list[list[Tensor]] = []
    ways: tuple[tuple[Way, torch.dtype], ...] = (("flash", torch.bfloat16), ("each", torch.float32))
    for way, dtype in ways:
        q, k, v = (x.to(torch.bfloat16).to(dtype).requires_grad_() for x in inputs[:3])
        out = attend(q, k, v, layout_of(starts, row, way, documents=8), width**-0.5)
        grads = torch.autograd.grad(out, (q, k, v), inputs[3].to(torch.bfloat16).to(dtype))
        results.append([x.float() for x in (out, *grads)])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True))
