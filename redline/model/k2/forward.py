"""K2's forward pass, top to bottom: embedding, blocks of latent attention and experts, the last norm, the head.

A block is two sublayers. Each takes the normed stream and returns its partial sum; adding it to the residual belongs to
the next sublayer's norm (`add_norm`), across block borders:

    residual += partial;  partial = attention(norm(residual));  residual += partial;  partial = experts(norm(residual))

Over several ranks, each of which has a part of the heads and of every expert's width, a partial sum is one rank's: the
group adds them up (`kernels.group`), and puts the parts of the logits side by side.

All else is held to this page: what a CPU does in one call has its bits (law 1), what a GPU cuts otherwise comes near
its logits, and those are transformers' (law 10). Ops are called as the CPU's kernels; within `references()`, and where
a kernel does not take a size, each is its plain torch reference.

T tokens, D hidden, H heads, V value width (in logits: vocabulary), Q queries, L blocks, F states that are kept,
R tokens whose next one is asked for.
"""

import torch
from torch import Tensor

from redline.kernels.by_chip import best, linear
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.blocks.block import Block, Moe
from redline.kernels.cpu.blocks.transformer import Predicted, TransformerArgs
from redline.kernels.cpu.mla import mla_decode, mla_prefill, mla_qkv
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.panels import Matrix
from redline.kernels.cpu.route_experts import route_experts
from redline.kernels.group import ALONE, Group
from redline.kernels.inputs import Inputs
from redline.ops.mla import MlaWeights, prefill_whole, rounds
from redline.ops.moe import Routed


def forward(step: TransformerArgs, group: Group = ALONE) -> Predicted:
    """A whole step: the likeliest token of every asked row, with the states and logits behind it."""
    planes, weights, inputs, layers, asked = step
    residual, partial = weights.embedding_VD[inputs.ids_T].to(weights.dtype), None
    features = residual.new_empty(residual.shape[0], len(layers), residual.shape[1]) if layers else None
    wanted = {layer: place for place, layer in enumerate(layers)}
    for layer, (block_, plane) in enumerate(zip(weights.blocks, planes.unbind(0), strict=True)):
        if features is not None and layer in wanted:
            features[:, wanted[layer]] = residual if partial is None else residual + partial
        residual, partial = block(residual, partial, block_, inputs, plane, group)
    residual, x = add_norm(residual, partial, weights.norm, weights.eps)
    if features is not None and len(weights.blocks) in wanted:
        features[:, wanted[len(weights.blocks)]] = residual
    logits_RV = group.gather(linear(x[list(asked)], weights.head).float())
    return predicted(x, None if features is None else features.flatten(1), logits_RV)


def block(
    residual_TD: Tensor,
    partial_TD: Tensor | None,
    weights: Block,
    inputs: Inputs,
    plane: Tensor,
    group: Group = ALONE,
) -> tuple[Tensor, Tensor]:
    """One block: (residual, partial) in, (residual, partial) out, [T, D] each; a partial sum may be None at first.

    Both given ones may be changed in place and must not be used afterwards. plane [pages, 64, kv width]: read, and
    written at rows_T.
    """
    residual, x = attended(residual_TD, partial_TD, weights, inputs, plane, group)
    routed = route(x, weights.experts)
    return residual, group.add(moe(x, weights.shared_gate_up, weights.shared_down, routed, rounds(plane)))


def attended(
    residual_TD: Tensor,
    partial_TD: Tensor | None,
    weights: Block,
    inputs: Inputs,
    plane: Tensor,
    group: Group = ALONE,
) -> tuple[Tensor, Tensor]:
    """The first half of a block: (residual, what the experts or the dense MLP read), [T, D] each. As `block` takes."""
    w = weights.attention
    residual, x = add_norm(residual_TD, partial_TD, weights.attention_norm, weights.eps)
    q = mla_qkv(x, w, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane)
    o = torch.empty(x.shape[0], w.heads, w.value, dtype=x.dtype, device=x.device)
    attend(q, w, weights.softmax_scale, inputs, plane, o)
    partial = group.add(linear(o.flatten(1), weights.o_proj, rounds(plane)))
    return add_norm(residual, partial, weights.mlp_norm, weights.eps)


def attend(
    q: Tensor, w: MlaWeights[Matrix], scale: float, inputs: Inputs, plane: Tensor, o: Tensor, skip: int = 0
) -> None:
    """q [T, H, X]: rows of chunks and queries, whose latents are in their pages. Writes o [T, H, V] at those.

    skip: 0, or 1 where the first row of a slot holds nothing; it is not read, and no chunk begins there.
    """
    chunks = inputs.chunks
    if q.is_cuda and (whole := [(chunk.first, chunk.count) for chunk in chunks if chunk.start == 0]):
        prefill_whole(q, w, scale, whole, inputs.rows_T, plane, o)
        chunks = [chunk for chunk in chunks if chunk.start]
    for chunk in chunks:
        rows = slice(chunk.first, chunk.first + chunk.count)
        mla_prefill(q[rows], w, scale, chunk.start, inputs.tables[chunk.slot], plane, o[rows], skip)
    if inputs.tokens_Q.shape[0]:
        queries = inputs.tokens_Q, inputs.slots_Q, inputs.lengths_Q
        mla_decode(q, w, scale, *queries, inputs.tables, plane, o, skip)


def route(x: Tensor, experts: Moe | None) -> Routed | None:
    """Which experts each row of x [T, D] goes to, with their weights; None of a dense layer."""
    if experts is None:
        return None
    e = experts
    ids, weights = route_experts(x, e.router, e.bias_E, e.chosen, e.normalise, e.scale)
    return Routed(e.gate_up, e.down, ids, weights)


def predicted(hidden_TD: Tensor, features: Tensor | None, logits_RV: Tensor) -> Predicted:
    """The result of a step from hidden [T, D], kept states [T, F D] and logits float32 [R, V].

    The likeliest token of a row whose logits are not all finite is -1.
    """
    ids_R, finite_R = best(logits_RV)
    return Predicted(ids_R.masked_fill_(~finite_R, -1).tolist(), features, lambda: hidden_TD, lambda: logits_RV)
