# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""The vision encoder's attention and norms.        T patches, H heads of D, W width.

A first kernel turns queries and keys and lays q, k and v out by head, in rows of LO + HI columns, whole blocks of
patches: LO is a power of two, and so is HI, the rest of a head (72 is 64 + 16; Triton's matrices have such sizes only).
The second reads keys and values of such rows with the bulk tensor copy engine, and multiplies both parts of a head one
after the other. Its time does not depend on which image sizes came before: PyTorch's fastest attention (cuDNN) plans
for each number of patches, and keeps every plan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK = 64  # patches of queries per program; patches are padded to a multiple of it
KEYS = 64  # patches of keys per iteration
STAGES = 3
WARPS = 4
PACKED = 16  # patches per program of the first kernel
NORMED = 4  # patches per program of the norm
NORM_WARPS = 4
_LOG2_E = 1.4426950408889634


@triton.jit
def _turned(word, c, s):
    """Words are pairs of bf16 values, which turn together: the first is the lower half."""
    x = (word << 16).to(tl.float32, bitcast=True)
    y = (word & -65536).to(tl.float32, bitcast=True)
    low = (x * c - y * s).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = (x * s + y * c).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return low | high


@triton.jit(do_not_specialize=["T"])
def _pack(qkv, cos, sin, out, T, TP, factor, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr,
          ROWS: tl.constexpr):  # fmt: skip
    head = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, HALF)
    real = (t[:, None] < T) & (i[None, :] < D // 2)
    inside = i[None, :] < W // 2
    at = qkv + t[:, None].to(tl.int64) * (3 * H * D // 2) + head * (D // 2) + i[None, :]
    to = out + (head * TP + t[:, None]).to(tl.int64) * (W // 2) + i[None, :]
    c = tl.load(cos + t[:, None] * (D // 2) + i[None, :], mask=real, other=0.0)
    s = tl.load(sin + t[:, None] * (D // 2) + i[None, :], mask=real, other=0.0)
    part = H * TP * (W // 2)
    q = tl.load(at, mask=real, other=0)
    k = tl.load(at + H * D // 2, mask=real, other=0)
    v = tl.load(at + H * D, mask=real, other=0)
    tl.store(to, _turned(q, c * factor, s * factor), mask=inside)
    tl.store(to + part, _turned(k, c, s), mask=inside)
    tl.store(to + 2 * part, v, mask=inside)


@triton.jit
def _step(q0, q1, a0, a1, top, total, k0, k1, v0, v1, start, T, KEYS: tl.constexpr, HI: tl.constexpr,
          TAIL: tl.constexpr):  # fmt: skip
    """One block of keys: flash attention's update of (a0, a1, top, total), in powers of two."""
    s = tl.dot(q0, k0.T)
    if HI:
        s = tl.dot(q1, k1.T, s)
    if TAIL:
        s = tl.where((start + tl.arange(0, KEYS) < T)[None, :], s, -1e30)
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    keep = tl.exp2(top - new)
    total = total * keep + tl.sum(p, 1)
    p = p.to(v0.dtype)
    a0 = tl.dot(p, v0, a0 * keep[:, None])
    if HI:
        a1 = tl.dot(p, v1, a1 * keep[:, None])
    return a0, a1, new, total


@triton.jit(do_not_specialize=["T"])
def _attend(q, low, high, out, T, TP, H: tl.constexpr, D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
            BLOCK: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """low, high: descriptors of rows [3 * H * TP, LO + HI] with boxes [KEYS, LO] and [KEYS, HI]."""
    head = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    m = first + tl.arange(0, BLOCK)
    i, j = tl.arange(0, LO), tl.arange(0, HI if HI else LO)
    row = q + (head * TP + m[:, None]).to(tl.int64) * (LO + HI)
    q0 = tl.load(row + i[None, :])
    q1 = q0
    if HI:
        q1 = tl.load(row + LO + j[None, :])
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    a0 = tl.zeros([BLOCK, LO], tl.float32)
    a1 = tl.zeros([BLOCK, HI if HI else LO], tl.float32)
    k_row, v_row = (H + head) * TP, (2 * H + head) * TP
    whole = T // KEYS * KEYS
    for start in tl.range(0, whole, KEYS, num_stages=STAGES):
        k0, v0 = low.load([k_row + start, 0]), low.load([v_row + start, 0])
        k1, v1 = k0, v0
        if HI:
            k1, v1 = high.load([k_row + start, LO]), high.load([v_row + start, LO])
        a0, a1, top, total = _step(q0, q1, a0, a1, top, total, k0, k1, v0, v1, start, T, KEYS, HI, False)
    if whole < T:
        k0, v0 = low.load([k_row + whole, 0]), low.load([v_row + whole, 0])
        k1, v1 = k0, v0
        if HI:
            k1, v1 = high.load([k_row + whole, LO]), high.load([v_row + whole, LO])
        a0, a1, top, total = _step(q0, q1, a0, a1, top, total, k0, k1, v0, v1, whole, T, KEYS, HI, True)
    o = out + m[:, None].to(tl.int64) * (H * D) + head * D
    real = m[:, None] < T
    tl.store(o + i[None, :], (a0 / total[:, None]).to(out.dtype.element_ty), mask=real & (i[None, :] < D))
    if HI:
        rest = LO + j[None, :]
        tl.store(o + rest, (a1 / total[:, None]).to(out.dtype.element_ty), mask=real & (rest < D))


def parts(head: int) -> tuple[int, int]:
    """The two parts of a head's columns, powers of two of at least 16; the second is 0 if one part is enough."""
    low = max(16, 1 << (head.bit_length() - 1))
    if head <= low:
        return low, 0
    if low < 64:
        return 2 * low, 0
    return low, max(16, 1 << (head - low - 1).bit_length())


def pack(qkv_T3HD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """-> bf16 [3, H, T padded to BLOCK, LO + HI]: turned queries in powers of two, turned keys, values; zeros fill."""
    tokens, _, heads, head = qkv_T3HD.shape
    low, high = parts(head)
    padded = triton.cdiv(tokens, BLOCK) * BLOCK
    out = torch.empty(3, heads, padded, low + high, dtype=torch.bfloat16, device=qkv_T3HD.device)
    _pack[(padded // PACKED, heads)](
        *(qkv_T3HD.view(torch.int32), cos, sin, out.view(torch.int32), tokens, padded, head**-0.5 * _LOG2_E),
        H=heads,
        D=head,
        W=low + high,
        HALF=triton.next_power_of_2((low + high) // 2),
        ROWS=PACKED,
        num_warps=4,
    )
    return out


def attend_patches(qkv_T3HD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`attend_patches`: -> bf16 [T, H * D]."""
    tokens, _, heads, head = qkv_T3HD.shape
    low, high = parts(head)
    packed = pack(qkv_T3HD, cos, sin)
    padded = packed.shape[2]
    out = torch.empty(tokens, heads * head, dtype=torch.bfloat16, device=packed.device)
    rows = packed.view(-1, low + high)
    boxes = [TensorDescriptor.from_tensor(rows, [KEYS, part or low]) for part in (low, high)]
    _attend[(padded // BLOCK, heads)](
        *(packed, *boxes, out, tokens, padded),
        H=heads,
        D=head,
        LO=low,
        HI=high,
        BLOCK=BLOCK,
        KEYS=KEYS,
        STAGES=STAGES,
        num_warps=WARPS,
    )
    return out


@triton.jit(do_not_specialize=["T"])
def _add_layer_norm(residual, partial, weight, bias, y, T, W, eps, ADD: tl.constexpr, ROWS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    inside = (t[:, None] < T) & (i[None, :] < W)
    at = t[:, None].to(tl.int64) * W + i[None, :]
    r = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        r += tl.load(partial + at, mask=inside, other=0.0).to(tl.float32)
        rounded = r.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        r = rounded.to(tl.float32)
    mean = tl.sum(r, 1) / W
    centred = tl.where(inside, r - mean[:, None], 0.0)
    root = tl.rsqrt(tl.sum(centred * centred, 1) / W + eps)
    w = tl.load(weight + i, mask=i < W, other=0.0).to(tl.float32)
    b = tl.load(bias + i, mask=i < W, other=0.0).to(tl.float32)
    normed = centred * root[:, None] * w[None, :] + b[None, :]
    tl.store(y + at, normed.to(y.dtype.element_ty), mask=inside)


def add_layer_norm(residual_TW: Tensor, partial_TW: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`add_layer_norm`: -> y [T, W]; the residual changes in place if there is a partial sum."""
    tokens, width = residual_TW.shape
    y = torch.empty_like(residual_TW)
    given = residual_TW if partial_TW is None else partial_TW
    _add_layer_norm[(triton.cdiv(tokens, NORMED),)](
        *(residual_TW, given, weight, bias, y, tokens, width, eps),
        ADD=partial_TW is not None,
        ROWS=NORMED,
        BLOCK=triton.next_power_of_2(width),
        num_warps=NORM_WARPS,
    )
    return y
