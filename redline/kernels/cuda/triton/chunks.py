# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""Causal attention of blocks of prompt tokens to unfolded contexts.        H heads, N + P key, V value, R context rows.

A program has one block's queries of one head; it reads keys and values with the bulk tensor copy engine. Nothing
depends on the number of tokens or rows but loop bounds, so a new length costs nothing.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from redline.kernels.cuda.prefill.attend_blocks import ROWS

KEYS = ROWS  # per iteration: none reads rows of two contexts
STAGES = 3
WARPS = 8
_LOG2_E = 1.4426950408889634


@triton.jit
def _update(qn, qr, o, top, total, k, r, v, factor, seen, start, KEYS: tl.constexpr, BLOCK: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """One block of rows: flash attention's update, in powers of two."""
    s = tl.dot(qn, k.T)
    s = tl.dot(qr, r.T, s)
    if MASKED:
        visible = (start + tl.arange(0, KEYS))[None, :] < (seen + tl.arange(0, BLOCK))[:, None]
        s = tl.where(visible, s, -1e30)
    new = tl.maximum(top, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - new[:, None])
    keep = tl.exp2(top - new)
    total = total * keep + tl.sum(p, 1)
    o = tl.dot(p.to(v.dtype), v, o * keep[:, None])
    return o, new, total


@triton.jit(do_not_specialize=["q_stride"])
def _attend_blocks(q, keys, ropes, values, blocks, out, factor, q_stride, H: tl.constexpr, N: tl.constexpr,
                   P: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """keys, ropes, values: descriptors of [R, H * N], [R, P] and [R, H * V]."""
    head = tl.program_id(1)
    at = blocks + 4 * tl.program_id(0)
    first, count, row = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    seen = tl.load(at + 3)
    m = tl.arange(0, BLOCK)
    real = (m < count)[:, None]
    token = (first + m)[:, None].to(tl.int64)
    to_q = q + token * q_stride + head * (N + P)
    qn = tl.load(to_q + tl.arange(0, N)[None, :], mask=real, other=0.0)
    qr = tl.load(to_q + N + tl.arange(0, P)[None, :], mask=real, other=0.0)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    o = tl.zeros([BLOCK, V], tl.float32)
    whole = seen // KEYS * KEYS
    for start in tl.range(0, whole, KEYS, num_stages=STAGES):
        k, r, v = keys.load([row + start, head * N]), ropes.load([row + start, 0]), values.load([row + start, head * V])
        o, top, total = _update(qn, qr, o, top, total, k, r, v, factor, seen, start, KEYS, BLOCK, False)
    for start in tl.range(whole, seen + count - 1, KEYS, num_stages=STAGES):
        k, r, v = keys.load([row + start, head * N]), ropes.load([row + start, 0]), values.load([row + start, head * V])
        o, top, total = _update(qn, qr, o, top, total, k, r, v, factor, seen, start, KEYS, BLOCK, True)
    to = out + (token * H + head) * V + tl.arange(0, V)[None, :]
    tl.store(to, (o / total[:, None]).to(out.dtype.element_ty), mask=real)


def attend_blocks(
    q_THX: Tensor,
    keys_RHN: Tensor,
    ropes_RP: Tensor,
    values_RHV: Tensor,
    blocks_B4: Tensor,
    scale: float,
    out_THV: Tensor,
    block: int,
) -> None:
    """`attend_blocks`. block: tokens of a block, at most."""
    heads, nope = keys_RHN.shape[1:]
    rope, value = ropes_RP.shape[1], values_RHV.shape[2]
    boxes = [
        TensorDescriptor.from_tensor(x, [KEYS, width])
        for x, width in ((keys_RHN.flatten(1), nope), (ropes_RP, rope), (values_RHV.flatten(1), value))
    ]
    _attend_blocks[(len(blocks_B4), heads)](
        *(q_THX, *boxes, blocks_B4, out_THV, scale * _LOG2_E, q_THX.stride(0)),
        H=heads,
        N=nope,
        P=rope,
        V=value,
        BLOCK=block,
        KEYS=KEYS,
        STAGES=STAGES,
        num_warps=WARPS,
    )
