"""The training graph of Kimi-Nano: DeepSeek-V3's formulas as pure functions over stacked weights.

Every weight of one kind is one tensor over all layers, so that casting, quantising and optimising take one call each.
All experts are computed for all tokens and weighted with zero where they were not chosen: exact, and without dispatch.

T tokens (packed documents, flat), D hidden, H heads, L layers, M of them with experts, E routed experts of width I.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nano.attention import Layout, attend
from redline.model.k2.config import K2Config
from redline.ops.formats import fake_int4

Weights = dict[str, Tensor]

EXPERTS = ("expert_gate_up", "expert_down")  # what is stored in INT4


def shapes(config: K2Config) -> dict[str, tuple[int, ...]]:
    """The shape of every trained tensor, by name.

    Matrices are [..., out, in], as in the checkpoint; gate stands before up.
    """
    c, layers, moe = config, config.num_hidden_layers, config.moe_layers
    hidden, heads, width = c.hidden_size, c.num_attention_heads, c.moe_intermediate_size
    return {
        "embed": (c.vocab_size, hidden),
        "head": (c.vocab_size, hidden),
        "final_norm": (hidden,),
        "input_norm": (layers, hidden),
        "post_norm": (layers, hidden),
        "q_a": (layers, c.q_lora_rank, hidden),
        "q_norm": (layers, c.q_lora_rank),
        "q_b": (layers, heads * c.qk_head_dim, c.q_lora_rank),
        "kv_a": (layers, c.kv_width, hidden),
        "kv_norm": (layers, c.kv_lora_rank),
        "kv_b": (layers, heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o": (layers, hidden, heads * c.v_head_dim),
        "dense_gate_up": (layers - moe, 2, c.intermediate_size, hidden),
        "dense_down": (layers - moe, hidden, c.intermediate_size),
        "shared_gate_up": (moe, 2, c.shared_intermediate_size, hidden),
        "shared_down": (moe, hidden, c.shared_intermediate_size),
        "router": (moe, c.n_routed_experts, hidden),
        "expert_gate_up": (moe, 2, c.n_routed_experts, width, hidden),
        "expert_down": (moe, c.n_routed_experts, hidden, width),
    }


def initial_weights(config: K2Config, seed: int) -> Weights:
    """Float32 masters on the CPU, the same on every machine.

    Every matrix that writes into the residual stream starts at zero, so that the stream is the embedding at first.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in shapes(config).items():
        if name.endswith("norm"):
            weights[name] = torch.ones(shape)
        elif name in ("o", "dense_down", "shared_down", "expert_down"):
            weights[name] = torch.zeros(shape)
        else:
            scale = {"embed": 1.0, "head": 0.002, "router": 0.5 / math.sqrt(shape[-1])}.get(name, shape[-1] ** -0.5)
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


class _StraightThrough(torch.autograd.Function):
    """INT4's values forward, the identity backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return fake_int4(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def effective(masters: Weights, int4: bool, dtype: torch.dtype) -> Weights:
    """What the graph computes with: the masters in the values that the checkpoint can hold, differentiable.

    Everything is rounded to bf16; if `int4`, routed experts are quantised before that. The results have dtype `dtype`,
    which decides the precision of the arithmetic and not the values.
    """
    held = {name: _StraightThrough.apply(w) if int4 and name in EXPERTS else w for name, w in masters.items()}
    return {name: w.to(torch.bfloat16).to(dtype) for name, w in held.items()}


class Attention(NamedTuple):
    """One layer's attention with the norm before it and the norm after it."""

    input_norm: Tensor
    q_a: Tensor
    q_norm: Tensor
    q_b: Tensor
    kv_a: Tensor
    kv_norm: Tensor
    kv_b: Tensor
    o: Tensor
    post_norm: Tensor


class Dense(NamedTuple):
    """The weights of one SwiGLU MLP of width F: a dense layer's, or the shared expert's."""

    gate_up: Tensor  # [2, F, D]
    down: Tensor  # [D, F]


class Moe(NamedTuple):
    """The weights of one layer of experts, the shared expert included."""

    router: Tensor  # [E, D]
    bias: Tensor  # [E] float32, of the choice only; moved by the load, not by gradients
    gate_up: Tensor  # [2, E, I, D]
    down: Tensor  # [E, D, I]
    shared: Dense


class Layer(NamedTuple):
    """The weights of one block: its attention, then its dense MLP or its experts."""

    attention: Attention
    mlp: Dense | Moe


def layers(config: K2Config, weights: Weights, bias: Tensor) -> list[Layer]:
    """The stacks cut into layers: views, whose gradients come back as one stack. bias [M, E] float32."""
    cut = {name: w.unbind(0) for name, w in weights.items() if name not in ("embed", "head", "final_norm")}
    dense = config.num_hidden_layers - config.moe_layers
    result: list[Layer] = []
    for n in range(config.num_hidden_layers):
        m = n - dense
        mlp: Dense | Moe
        if m < 0:
            mlp = Dense(cut["dense_gate_up"][n], cut["dense_down"][n])
        else:
            shared = Dense(cut["shared_gate_up"][m], cut["shared_down"][m])
            mlp = Moe(cut["router"][m], bias[m], cut["expert_gate_up"][m], cut["expert_down"][m], shared)
        result.append(Layer(Attention(*(cut[name][n] for name in Attention._fields)), mlp))
    return result


class Latents(NamedTuple):
    """What attention is made from. `latent` [T, 512] and `k_rope` [T, 64] are what a serving engine caches."""

    q_nope: Tensor  # [T, H, 128]
    q_rope: Tensor  # [T, H, 64]
    latent: Tensor
    k_rope: Tensor


def project(x_TD: Tensor, config: K2Config, w: Attention, cos: Tensor, sin: Tensor) -> Latents:
    """Queries and what a cache would hold, of x_TD [T, D] before its norm.

    cos, sin: float32 [T, 32], of each token's position.
    """
    c = config
    x_TD = rms_norm(x_TD, w.input_norm, c.rms_norm_eps)
    q = F.linear(rms_norm(F.linear(x_TD, w.q_a), w.q_norm, c.low_rank_norm_eps), w.q_b)
    q_nope, q_rope = q.unflatten(-1, (c.num_attention_heads, c.qk_head_dim)).split(
        (c.qk_nope_head_dim, c.qk_rope_head_dim), -1
    )
    latent, k_rope = F.linear(x_TD, w.kv_a).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
    latent = rms_norm(latent, w.kv_norm, c.low_rank_norm_eps)
    return Latents(q_nope, rotate(q_rope, cos[:, None], sin[:, None]), latent, rotate(k_rope, cos, sin))


def attention(x_TD: Tensor, config: K2Config, w: Attention, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Causal attention in the expanded form: each head has its own keys (192) and values (128).

    x_TD [T, D] is the residual stream before its norm. Gives what is to be added to it, [T, D].
    """
    c = config
    t = project(x_TD, c, w, cos, sin)
    kv = F.linear(t.latent, w.kv_b).unflatten(-1, (c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim))
    k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
    q = torch.cat((t.q_nope, t.q_rope), -1)
    k = torch.cat((k_nope, t.k_rope[:, None].expand(-1, c.num_attention_heads, -1)), -1)
    # Fused kernels want one width for queries, keys and values; zeros added to a value stay zeros.
    v = F.pad(v, (0, c.qk_head_dim - c.v_head_dim))
    out = attend(q, k, v, layout, c.softmax_scale)[..., : c.v_head_dim]
    return F.linear(out.flatten(-2), w.o)


def dense_layer(
    x_TD: Tensor, config: K2Config, w: Attention, mlp: Dense, cos: Tensor, sin: Tensor, layout: Layout
) -> Tensor:
    """One block without experts: x_TD [T, D] -> [T, D], both the residual stream. cos, sin: float32 [T, 32]."""
    x_TD = x_TD + attention(x_TD, config, w, cos, sin, layout)
    return x_TD + swiglu(rms_norm(x_TD, w.post_norm, config.rms_norm_eps), mlp)


def moe_layer(
    x_TD: Tensor, config: K2Config, w: Attention, mlp: Moe, cos: Tensor, sin: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """One block with experts: x_TD [T, D] -> (residual stream [T, D], load float32 [E]).

    The load is how many tokens chose each expert.
    """
    x_TD = x_TD + attention(x_TD, config, w, cos, sin, layout)
    added, load_E = experts(rms_norm(x_TD, w.post_norm, config.rms_norm_eps), config, mlp)
    return x_TD + added, load_E


def swiglu(x_TD: Tensor, mlp: Dense) -> Tensor:
    """down(silu(gate(x)) * up(x)): [T, D] -> [T, D]. Shazeer, arXiv 2002.05202."""
    gate, up = F.linear(x_TD, mlp.gate_up.flatten(0, 1)).chunk(2, -1)
    return F.linear(F.silu(gate) * up, mlp.down)


def experts(x_TD: Tensor, config: K2Config, mlp: Moe) -> tuple[Tensor, Tensor]:
    """Shared and routed experts of normed x_TD [T, D] -> (their sum [T, D], load float32 [E]).

    The load is how many tokens chose each expert.
    """
    weights_TE, chosen_TE = route(x_TD, config, mlp)
    gate, up = F.linear(x_TD, mlp.gate_up.flatten(0, 2)).chunk(2, -1)
    each_TEI = (F.silu(gate) * up).unflatten(-1, (config.n_routed_experts, -1))
    weighted = (each_TEI * weights_TE[..., None].to(x_TD.dtype)).flatten(-2)
    # One matrix over (expert, width) sums the experts as it multiplies.
    out = F.linear(weighted, mlp.down.transpose(0, 1).flatten(1))
    return out + swiglu(x_TD, mlp.shared), chosen_TE.sum(0)


def route(x_TD: Tensor, config: K2Config, mlp: Moe) -> tuple[Tensor, Tensor]:
    """(weights, chosen), float32 [T, E]: DeepSeek-V3's sigmoid routing (arXiv 2412.19437).

    Weights are zero where an expert is not chosen; `chosen` is 0 or 1. The bias moves the choice and not the weights.
    """
    scores = torch.sigmoid(F.linear(x_TD.float(), mlp.router.float()))
    choice = (scores + mlp.bias).detach()
    # An expert is chosen if fewer than k stand before it. Unlike top-k this fuses; ties go to the lower index.
    ahead = choice[:, None, :] > choice[:, :, None]
    index = torch.arange(choice.shape[-1], device=choice.device)
    tied = (choice[:, None, :] == choice[:, :, None]) & (index[None, :] < index[:, None])
    chosen = ((ahead | tied).sum(-1) < config.num_experts_per_tok).float()
    weights = scores * chosen
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor, chosen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; statistics in float32, the product in x's dtype, as in transformers."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope over interleaved pairs (2i, 2i + 1). x [..., 64], cos and sin float32 [..., 32]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def angles(config: K2Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """positions int64 [T] -> cos, sin float32 [T, 32]."""
    radians = positions.float()[:, None] * config.inv_freq().to(positions.device)
    return radians.cos(), radians.sin()


def cross_entropy_with_gradients(
    x_TD: Tensor, head_VD: Tensor, targets_T: Tensor, share_T: Tensor, told_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """([sum of share * loss, sum of told * loss], the gradient of the first sum by x_TD, and by head_VD).

    targets_T int64 [T]; share_T and told_T float32 [T] weigh each token's loss, in nats. The logits exist only in here.
    """
    logits = F.linear(x_TD, head_VD).float()
    normal = logits.logsumexp(-1)
    losses = normal - logits.gather(-1, targets_T[:, None]).squeeze(-1)
    hit = torch.arange(head_VD.shape[0], device=x_TD.device) == targets_T[:, None]
    slope = (((logits - normal[:, None]).exp() - hit.float()) * share_T[:, None]).to(x_TD.dtype)
    sums = torch.stack(((losses * share_T).sum(), (losses * told_T).sum()))
    return sums, slope @ head_VD, slope.t() @ x_TD


class Compiled(NamedTuple):
    """The functions that take nearly all time, plain or compiled. One compilation serves all layers of a kind."""

    dense_layer: Any = dense_layer
    moe_layer: Any = moe_layer
    cross_entropy: Any = cross_entropy_with_gradients

    @classmethod
    def on(cls, device: torch.device) -> "Compiled":
        """Compiled on a GPU; as they are on a CPU, where compiling costs more than a rehearsal gains."""
        return cls(*(torch.compile(f, dynamic=False) for f in cls())) if device.type == "cuda" else cls()


def forward(
    config: K2Config, weights: Weights, bias: Tensor, tokens: Tensor, layout: Layout, code: Compiled
) -> tuple[Tensor, Tensor]:
    """(hidden [T, D] after the final norm, load float32 [M, E]).

    `weights` come from `effective`; bias float32 [M, E], tokens int64 [T].
    """
    return blocks(config, weights, bias, F.embedding(tokens, weights["embed"]), layout, code)


def blocks(
    config: K2Config, weights: Weights, bias: Tensor, x_TD: Tensor, layout: Layout, code: Compiled
) -> tuple[Tensor, Tensor]:
    """As `forward`, from embeddings x_TD [T, D]."""
    cos, sin = angles(config, layout.positions)
    loads: list[Tensor] = []
    for layer in layers(config, weights, bias):
        if isinstance(layer.mlp, Moe):
            x_TD, load_E = code.moe_layer(x_TD, config, layer.attention, layer.mlp, cos, sin, layout)
            loads.append(load_E)
        else:
            x_TD = code.dense_layer(x_TD, config, layer.attention, layer.mlp, cos, sin, layout)
    return rms_norm(x_TD, weights["final_norm"], config.rms_norm_eps), torch.stack(loads)


class _MeanLoss(torch.autograd.Function):
    """Cross-entropy whose gradients are made in the forward pass, chunk by chunk, so that no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, head_VD: Tensor, targets_T: Tensor, share_T: Tensor, told_T: Tensor, code: Any
    ) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(2, device=x_TD.device)
        x_grads: list[Tensor] = []
        head_grad = torch.zeros_like(head_VD, dtype=torch.float32)
        for chunk in zip(*(x.split(_CHUNK) for x in (x_TD, targets_T, share_T, told_T)), strict=True):
            x, targets, share, told = chunk
            chunk_sums, x_grad, slope_head = code(x, head_VD, targets, share, told)
            sums = sums + chunk_sums
            x_grads.append(x_grad)
            head_grad += slope_head
        ctx.save_for_backward(torch.cat(x_grads), head_grad.to(head_VD.dtype))
        loss, looked_at = sums.unbind()
        ctx.mark_non_differentiable(looked_at)
        return loss, looked_at

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, head_grad = ctx.saved_tensors
        slope = grads[0].to(x_grad.dtype)
        return slope * x_grad, slope * head_grad, None, None, None, None


_CHUNK = 16_384  # tokens whose logits exist at once: 268 MB in float32


def mean_loss(
    x_TD: Tensor, head_VD: Tensor, targets_T: Tensor, weights_T: Tensor, told_T: Tensor, code: Compiled
) -> tuple[Tensor, Tensor]:
    """(mean cross-entropy weighted by `weights_T`, differentiable; the mean weighted by `told_T`, to look at), in nats.

    x_TD [T, D] after the final norm, head_VD [V, D], targets_T int64 [T], both weights float32 [T].
    """
    share_T, told_T = (w / w.sum().clamp_min(1e-6) for w in (weights_T, told_T))
    return _MeanLoss.apply(x_TD, head_VD, targets_T, share_T, told_T, code.cross_entropy)  # type: ignore[no-any-return]


def entropy_of(load_ME: Tensor) -> Tensor:
    """How even the experts' load is, [M] of load_ME [M, E]: 1 is perfectly even, 0 is one expert for all tokens."""
    share = load_ME / load_ME.sum(-1, keepdim=True)
    return -(share * share.clamp_min(1e-9).log()).sum(-1) / math.log(load_ME.shape[-1])
