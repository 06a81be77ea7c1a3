"""EAGLE-3's training-time test: the drafter is unrolled over its own features, as it runs in serving.

Row t is position t of a sequence. In step j it reads the token x_{t+1+j} and predicts x_{t+2+j}: in step 0 from the
target's feature, later from the feature that it fed back itself. It attends to the keys of step 0 up to its own
position, which come from the target's features, and of each later step only to its own key (arXiv 2503.01840).

B sequences, T rows, H heads, X width of queries and keys, V width of values, D hidden, F target features.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from redline.model.eagle3.module import Eagle3

QUERIES = 256  # query rows per block without a fused kernel; only one block's scores are in memory

Way = Literal["fused", "blocked"]


def unroll(drafter: Eagle3, tokens_BT: Tensor, features_BTF: Tensor, steps: int, way: Way = "blocked") -> list[Tensor]:
    """The normed hidden states [B, T, D] of each step.

    tokens_BT: int64, padded on the right. No valid row reads the padding: rows attend only to earlier rows, and a row
    is valid only if the token that it predicts is in the sequence. way: the attention implementation, from `choose`.
    """
    feature = drafter.fuse(features_BTF)
    rows = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    normed: list[Tensor] = []
    for step in range(steps):
        cos, sin = drafter.angles(rows + step)
        q, kv = drafter.project(drafter.embed(tokens_BT.roll(-1 - step, 1)), feature, cos, sin)
        key, value = drafter.expand(kv)
        keys.append(key)
        values.append(value)
        attended = attend(q, keys, values, drafter.config.softmax_scale, way)
        hidden, feature = drafter.finish(attended, feature)
        normed.append(hidden)
    return normed


def attend(
    q_BTHX: Tensor, keys_BTHX: Sequence[Tensor], values_BTHV: Sequence[Tensor], scale: float, way: Way = "blocked"
) -> Tensor:
    """[B, T, H, V]: one softmax over the keys of step 0 up to the query's row and each later step's key of that row.

    Scores are float32. Memory is linear in T: only the scores of one block of queries exist at a time.
    """
    inputs = [q_BTHX, *keys_BTHX, *values_BTHV]
    if way == "fused":  # the fused kernel reads 16-bit values only
        inputs = [x.to(torch.bfloat16) for x in inputs]
    return cast(Tensor, _Attend.apply(scale, way, len(keys_BTHX), *inputs))


class _Attend(torch.autograd.Function):
    """The causal part from any kernel, with its log-sum-exp, merged with the keys of later steps.

    In the backward pass the causal kernel gets the merged output and the merged log-sum-exp: then its probabilities are
    those of the whole softmax, and so are its gradients (as in ring attention, arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, scale: float, way: Way, steps: int, q: Tensor, *keys_values: Tensor) -> Tensor:
        keys, values = keys_values[:steps], keys_values[steps:]
        out, lse, state = _FORWARD[way](q, keys[0], values[0], scale)
        if steps > 1:
            scores = [_dot(q, key) * scale for key in keys[1:]]
            merged = torch.stack([lse, *scores]).logsumexp(0)
            mixed = out.float() * (lse - merged).exp()[..., None]
            for score, value in zip(scores, values[1:], strict=True):
                mixed = torch.addcmul(mixed, (score - merged).exp()[..., None], value.float())
            out, lse = mixed.to(q.dtype), merged
        ctx.save_for_backward(q, out, lse, *keys_values)
        ctx.scale, ctx.way, ctx.steps, ctx.state = scale, way, steps, state
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        q, out, lse, *keys_values = ctx.saved_tensors
        keys, values = keys_values[: ctx.steps], keys_values[ctx.steps :]
        grad_q, grad_key, grad_value = _BACKWARD[ctx.way](grad, q, keys[0], values[0], out, lse, ctx.scale, ctx.state)
        grad_keys, grad_values = [grad_key], [grad_value]
        if ctx.steps > 1:
            grad_q = grad_q.float()
            mean = _dot(grad, out)
            for key, value in zip(keys[1:], values[1:], strict=True):
                weight = (_dot(q, key) * ctx.scale - lse).exp()
                grad_score = (weight * (_dot(grad, value) - mean) * ctx.scale)[..., None]
                grad_q = torch.addcmul(grad_q, grad_score, key.float())
                grad_keys.append((grad_score * q.float()).to(q.dtype))
                grad_values.append((weight[..., None] * grad.float()).to(q.dtype))
            grad_q = grad_q.to(q.dtype)
        return None, None, None, grad_q, *grad_keys, *grad_values


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() * b.float()).sum(-1)


class _Causal(NamedTuple):
    out: Tensor  # [B, T, H, V]
    lse: Tensor  # float32 [B, T, H]
    state: Any


def _blocked(q: Tensor, key: Tensor, value: Tensor, scale: float) -> _Causal:
    """Causal attention in plain torch, a block of queries at a time."""
    out = torch.empty(*q.shape[:-1], value.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for first in range(0, q.shape[1], QUERIES):
        block = slice(first, first + QUERIES)
        scores = _scores(q, key, first, scale)
        lse[:, block] = scores.logsumexp(-1).transpose(1, 2)
        seen = value[:, : scores.shape[-1]]
        out[:, block] = torch.einsum("bhts,bshv->bthv", scores.softmax(-1).to(q.dtype), seen)
    return _Causal(out, lse, None)


def _blocked_backward(
    grad: Tensor, q: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_key, grad_value = (
        torch.zeros(x.shape, dtype=dtype, device=q.device)
        for x, dtype in ((q, q.dtype), (key, torch.float32), (value, torch.float32))
    )
    mean = _dot(grad, out)
    for first in range(0, q.shape[1], QUERIES):
        block = slice(first, first + QUERIES)
        weights = (_scores(q, key, first, scale) - lse[:, block].transpose(1, 2)[..., None]).exp()
        seen = slice(0, weights.shape[-1])
        of_weights = torch.einsum("bthv,bshv->bhts", grad[:, block], value[:, seen]).float()
        of_scores = (weights * (of_weights - mean[:, block].transpose(1, 2)[..., None]) * scale).to(q.dtype)
        grad_q[:, block] = torch.einsum("bhts,bshx->bthx", of_scores, key[:, seen])
        grad_key[:, seen] += torch.einsum("bhts,bthx->bshx", of_scores, q[:, block])
        grad_value[:, seen] += torch.einsum("bhts,bthv->bshv", weights.to(q.dtype), grad[:, block])
    return grad_q, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _scores(q: Tensor, key: Tensor, first: int, scale: float) -> Tensor:
    """float32 [B, H, queries from `first`, keys up to the last of them]; masked entries are -inf."""
    last = min(first + QUERIES, q.shape[1])
    scores = torch.einsum("bthx,bshx->bhts", q[:, first:last], key[:, :last]).float() * scale
    rows = torch.arange(last, device=q.device)
    return scores.masked_fill(rows > rows[first:, None], -torch.inf)


def _fused(q: Tensor, key: Tensor, value: Tensor, scale: float) -> _Causal:
    """Causal attention by the flash kernel, which needs values as wide as keys."""
    widened = _widened(value, q.shape[-1])
    out, lse, *state = torch.ops.aten._scaled_dot_product_flash_attention(
        *(x.transpose(1, 2) for x in (q, key, widened)), is_causal=True, scale=scale
    )
    return _Causal(out.transpose(1, 2)[..., : value.shape[-1]], lse.transpose(1, 2), state)


def _fused_backward(
    grad: Tensor, q: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    cum_q, cum_key, max_q, max_key, seed, offset, _ = state
    grad, widened, out = (_widened(x, q.shape[-1]) for x in (grad, value, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, key, widened, out)),
        lse.transpose(1, 2).contiguous(),
        *(cum_q, cum_key, max_q, max_key, 0.0, True, seed, offset),
        scale=scale,
    )
    grad_q, grad_key, grad_value = (x.transpose(1, 2) for x in grads)
    return grad_q, grad_key, grad_value[..., : value.shape[-1]]


def _widened(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


_FORWARD = {"fused": _fused, "blocked": _blocked}
_BACKWARD = {"fused": _fused_backward, "blocked": _blocked_backward}


def choose(device: torch.device, heads: int, width: int, value_width: int) -> tuple[Way, str]:
    """The attention implementation for this device, with the reason: "fused" if it runs and agrees with "blocked".

    Both are tried, forward and backward, with this number of heads, queries and keys of `width`, values of
    `value_width`.
    """
    if device.type != "cuda":
        return "blocked", "no GPU"
    generator = torch.Generator(device).manual_seed(0)

    def random(last: int) -> Tensor:
        return torch.randn(2, 130, heads, last, generator=generator, device=device).to(torch.bfloat16)

    inputs = [random(width), random(width), random(width), random(value_width), random(value_width)]
    weight = random(value_width)
    try:
        found = {way: _gradients(inputs, weight, way) for way in ("fused", "blocked")}
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return "blocked", f"the fused kernel fails: {str(error).splitlines()[0]}"
    apart = max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(found["fused"], found["blocked"], strict=True)
    )
    return ("fused", f"agrees to {apart:.0e}") if apart < 2e-2 else ("blocked", f"the fused kernel is {apart:.0e} off")


def _gradients(inputs: list[Tensor], weight: Tensor, way: Way) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(leaves[0], leaves[1:3], leaves[3:5], inputs[0].shape[-1] ** -0.5, way)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]
