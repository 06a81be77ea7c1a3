"""Greedy answers of many prompts at once, in the training graph's own weights, for the evaluation that ends a run.

Prompts are prefilled packed, as training reads them; decoding keeps the latent cache (576 values per token and layer)
and absorbs the key and value matrices into the query and the output.

B prompts, C cache positions, H heads, R latent width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nano.attention import Way, layout_of
from nano.model import (
    Attention,
    Dense,
    Layer,
    Moe,
    Weights,
    angles,
    attention,
    experts,
    layers,
    project,
    rms_norm,
    swiglu,
)
from redline.model.k2.config import K2Config


@torch.inference_mode()
def greedy(
    config: K2Config, weights: Weights, bias: Tensor, prompts: Sequence[list[int]], count: int, way: Way, stop: int
) -> list[list[int]]:
    """Up to `count` tokens after each prompt, in the order of the prompts, without the `stop` id that ended them.

    bias float32 [M, E]; prompts: ids. Prompts of like length share a batch.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: list[list[int]] = [[] for _ in prompts]
    batch: list[int] = []
    budget = 2_000_000 if weights["embed"].is_cuda else 20_000  # cache positions of a batch: 18 GB of bf16 on a GPU
    for index in [*order, None]:
        longest = 0 if index is None else len(prompts[index]) + count
        if batch and (index is None or (len(batch) + 1) * longest > budget):
            together = _batch(config, weights, bias, [prompts[i] for i in batch], count, way, stop)
            for i, answer in zip(batch, together, strict=True):
                answers[i] = answer
            batch = []
        if index is not None:
            batch.append(index)
    return answers


def _batch(
    config: K2Config, weights: Weights, bias: Tensor, prompts: list[list[int]], count: int, way: Way, stop: int
) -> list[list[int]]:
    device = weights["embed"].device
    stack = layers(config, weights, bias)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    capacity = max(map(len, prompts)) + count
    cache = torch.zeros(
        (len(stack), len(prompts), capacity, config.kv_width), dtype=weights["embed"].dtype, device=device
    )
    tokens = _prefill(config, weights, stack, prompts, cache, way)
    made = torch.full((len(prompts), count), stop, device=device)
    done = tokens == stop
    for step in range(count):
        made[:, step] = torch.where(done, stop, tokens)
        # Looking at the device each time would keep it waiting.
        if step % 16 == 15 and bool(done.all()):
            break
        tokens = _decode(config, weights, stack, tokens, lengths + step, cache)
        done |= tokens == stop
    return [answer[: answer.index(stop)] if stop in answer else answer for answer in made.tolist()]


def _prefill(
    config: K2Config, weights: Weights, stack: list[Layer], prompts: list[list[int]], cache: Tensor, way: Way
) -> Tensor:
    """Fills the cache, some prompts at a time to bound what is held at once; gives each answer's first token."""
    firsts: list[Tensor] = []
    group = max(1, 65_536 // max(map(len, prompts)))
    for first in range(0, len(prompts), group):
        some = prompts[first : first + group]
        row = max(map(len, some))
        padded = torch.zeros((len(some), row), dtype=torch.long)
        starts = torch.zeros((len(some), row), dtype=torch.bool)
        for n, prompt in enumerate(some):
            padded[n, : len(prompt)] = torch.tensor(prompt)
            starts[n, 0] = True
            starts[n, len(prompt) :][:1] = True  # what fills the row is a document of its own
        layout = layout_of(starts.flatten().to(cache.device), row, way, documents=2 * len(some))
        cos, sin = angles(config, layout.positions)
        x_TD = F.embedding(padded.flatten().to(cache.device), weights["embed"])
        for n, layer in enumerate(stack):
            t = project(x_TD, config, layer.attention, cos, sin)
            cache[n, first : first + len(some), :row] = torch.cat((t.latent, t.k_rope), -1).unflatten(0, (-1, row))
            x_TD = x_TD + attention(x_TD, config, layer.attention, cos, sin, layout)
            x_TD = x_TD + _mlp(x_TD, config, layer)
        ends = torch.tensor([n * row + len(prompt) - 1 for n, prompt in enumerate(some)], device=cache.device)
        firsts.append(_next(config, weights, x_TD[ends]))
    return torch.cat(firsts)


def _decode(
    config: K2Config, weights: Weights, stack: list[Layer], tokens: Tensor, positions: Tensor, cache: Tensor
) -> Tensor:
    """One token further for all. positions [B] are those of `tokens`."""
    cos, sin = angles(config, positions)
    index = torch.arange(len(tokens), device=tokens.device)
    visible = torch.arange(cache.shape[2], device=tokens.device) <= positions[:, None]
    x_BD = F.embedding(tokens, weights["embed"])
    for n, layer in enumerate(stack):
        t = project(x_BD, config, layer.attention, cos, sin)
        cache[n, index, positions] = torch.cat((t.latent, t.k_rope), -1)
        x_BD = x_BD + _absorbed(config, layer.attention, t.q_nope, t.q_rope, cache[n], visible)
        x_BD = x_BD + _mlp(x_BD, config, layer)
    return _next(config, weights, x_BD)


def _absorbed(
    config: K2Config, w: Attention, q_nope: Tensor, q_rope: Tensor, cache_BCR: Tensor, visible_BC: Tensor
) -> Tensor:
    c = config
    up = w.kv_b.unflatten(0, (c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim))
    key_up, value_up = up.split((c.qk_nope_head_dim, c.v_head_dim), 1)
    query = torch.cat((torch.einsum("bhn,hnr->bhr", q_nope, key_up), q_rope), -1)
    scores = torch.einsum("bhr,bcr->bhc", query, cache_BCR).float() * c.softmax_scale
    share = scores.masked_fill(~visible_BC[:, None], -torch.inf).softmax(-1).to(query.dtype)
    latent = torch.einsum("bhc,bcr->bhr", share, cache_BCR[..., : c.kv_lora_rank])
    return F.linear(torch.einsum("bhr,hvr->bhv", latent, value_up).flatten(-2), w.o)


def _mlp(x_TD: Tensor, config: K2Config, layer: Layer) -> Tensor:
    x_TD = rms_norm(x_TD, layer.attention.post_norm, config.rms_norm_eps)
    match layer.mlp:
        case Dense():
            return swiglu(x_TD, layer.mlp)
        case Moe():
            return experts(x_TD, config, layer.mlp)[0]


def _next(config: K2Config, weights: Weights, x_TD: Tensor) -> Tensor:
    """The likeliest token after each hidden state; unused reserved ids are never trained and never likely."""
    return F.linear(rms_norm(x_TD, weights["final_norm"], config.rms_norm_eps), weights["head"]).argmax(-1)
