"""K2's forward pass, top to bottom: embedding, blocks of latent attention and experts, the last norm, the head.

A block is two sublayers. Each takes the normed residual stream and returns its partial sum; the next sublayer's norm
adds it to the residual (`add_norm`), also across blocks:

    residual += partial;  partial = attention(norm(residual));  residual += partial;  partial = experts(norm(residual))

With tensor parallelism each rank has a part of the heads and of every expert's width, so a partial sum is one rank's:
the group runs an all-reduce over it (`kernels.group`), and an all-gather over the logits.

This module is the reference. The single-call CPU path produces the same bits (law 1), the GPU path comes close to its
logits, and its logits equal transformers' (law 10). Ops run as CPU kernels; within `references()`, and for sizes that a
kernel does not support, each op runs as its plain torch reference.

T tokens, D hidden, H heads, V value width (in logits: vocabulary), Q queries, L blocks, F captured states,
R tokens whose next token is requested.
"""

import torch
from torch import Tensor

from redline.kernels.by_chip import best, linear
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.blocks.block import Block, Moe
from redline.kernels.cpu.blocks.transformer import TransformerArgs, TransformerOutput
from redline.kernels.cpu.mla import mla_decode, mla_prefill, mla_qkv
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.panels import Matrix
from redline.kernels.cpu.route_experts import route_experts
from redline.kernels.group import ALONE, Group
from redline.kernels.inputs import Inputs
from redline.ops.mla import MlaWeights, rounds
from redline.ops.moe import Routed


def forward(step: TransformerArgs, group: Group = ALONE) -> TransformerOutput:
    """A whole step: the argmax token of every requested row, with the captured states and the logits."""
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
    logits_RV = group.all_gather(linear(x[list(asked)], weights.head).float())
    return predicted(x, None if features is None else features.flatten(1), logits_RV)


def block(
    residual_TD: Tensor,
    partial_TD: Tensor | None,
    weights: Block,
    inputs: Inputs,
    plane: Tensor,
    group: Group = ALONE,
) -> tuple[Tensor, Tensor]:
    """One block: (residual, partial) in, (residual, partial) out, [T, D] each; the first block's partial is None.

    Both inputs may be changed in place and must not be used afterwards. plane [pages, 64, kv width]: read, and written
    at rows_T.
    """
    residual, x = attended(residual_TD, partial_TD, weights, inputs, plane, group)
    routed = route(x, weights.experts)
    return residual, group.all_reduce(moe(x, weights.shared_gate_up, weights.shared_down, routed, rounds(plane)))


def attended(
    residual_TD: Tensor,
    partial_TD: Tensor | None,
    weights: Block,
    inputs: Inputs,
    plane: Tensor,
    group: Group = ALONE,
) -> tuple[Tensor, Tensor]:
    """First half of a block: (residual, input of the experts or the dense MLP), [T, D] each. Arguments as `block`."""
    w = weights.attention
    residual, x = add_norm(residual_TD, partial_TD, weights.attention_norm, weights.eps)
    q = mla_qkv(x, w, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane)
    o = torch.empty(x.shape[0], w.heads, w.value, dtype=x.dtype, device=x.device)
    attend(q, w, weights.softmax_scale, inputs, plane, o)
    partial = group.all_reduce(linear(o.flatten(1), weights.o_proj, rounds(plane)))
    return add_norm(residual, partial, weights.mlp_norm, weights.eps)


def attend(
    q: Tensor, w: MlaWeights[Matrix], scale: float, inputs: Inputs, plane: Tensor, o: Tensor, skip: int = 0
) -> None:
    """q [T, H, X]: rows of chunks and queries, whose latents are already in pages. Writes those rows of o [T, H, V].

    skip: 0, or 1 if the first row of each slot is unused; it is not read, and no chunk begins there.
    """
    for chunk in inputs.chunks:
        rows = slice(chunk.first, chunk.first + chunk.count)
        mla_prefill(q[rows], w, scale, chunk.start, inputs.tables[chunk.slot], plane, o[rows], skip)
    if inputs.tokens_Q.shape[0]:
        queries = inputs.tokens_Q, inputs.slots_Q, inputs.lengths_Q
        mla_decode(q, w, scale, *queries, inputs.tables, plane, o, skip)


def route(x: Tensor, experts: Moe | None) -> Routed | None:
    """The experts of each row of x [T, D], with their weights; None in a dense layer."""
    if experts is None:
        return None
    e = experts
    ids, weights = route_experts(x, e.router, e.bias_E, e.chosen, e.normalise, e.scale, e.groups, e.chosen_groups)
    return Routed(e.gate_up, e.down, ids, weights)


def predicted(hidden_TD: Tensor, features: Tensor | None, logits_RV: Tensor) -> TransformerOutput:
    """The result of a step from hidden [T, D], captured states [T, F D] and logits float32 [R, V].

    The argmax is reported as -1 for a row whose logits are not all finite.
    """
    ids_R, finite_R = best(logits_RV)
    return TransformerOutput(ids_R.masked_fill_(~finite_R, -1).tolist(), features, lambda: hidden_TD, lambda: logits_RV)
