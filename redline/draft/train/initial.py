"""Initial weights of a block drafter, from the target's embedding and the states of some sequences.

Random layers learn slowly what EAGLE-3 is given in its input: to look at the state of the last token. And where the
target's embedding is large, a small layer's output is lost in the residual stream. So

- a matrix that writes to the residual stream is drawn at the embedding's scale;
- each head of the first layers attends to one of the last B tokens, counted from its own position (B: the block). Its
  keys are nearly the same for all tokens, and so are its queries, turned back by that distance by rope.

Measured on Kimi-Nano: docs/log.md, 2026-11-30.
"""

import math

import torch
from torch import Tensor, nn

from redline.draft.train.batches import Source
from redline.model.block.module import BlockAttention, BlockDrafter, BlockLayer

TOKENS = 20_000  # whose states are read
PAIRS = 4  # pairs of a head that rope turns fastest: they tell near places apart
NOISE = 0.5  # of such a head's other weights, of their usual size
MASKS = 1 / 3  # share of masks among the embeddings that queries are fitted to
RIDGE = 1e-3


@torch.no_grad()
def set_initial(drafter: BlockDrafter, source: Source, seed: int) -> None:
    """Sets the weights of all layers. The drafter, on the CPU, has the target's embedding attached.

    seed: of the order in which the source's sequences are read.
    """
    scale = drafter.residual_scale
    layers = [layer for layer in drafter.layers if isinstance(layer, BlockLayer)]
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for writes in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writes.weight.mul_(scale)
    contexts, embedded = _seen(drafter, source, seed)
    of_context, of_token = _constant(contexts), _constant(embedded)
    frequencies, size = drafter.config.inv_freq(), drafter.config.block_size
    first = 0
    for layer in layers:
        if first >= size:
            break
        distances = [(first + head) % size + 1 for head in range(drafter.config.num_attention_heads)]
        _look_back(layer.self_attn, distances, frequencies, of_context, of_token)
        first += len(distances)


def _look_back(
    attention: BlockAttention, distances: list[int], frequencies: Tensor, of_context: Tensor, of_token: Tensor
) -> None:
    """Makes each head attend to the token at its distance. of_context, of_token: [D], `_constant` of what it reads."""
    width = attention.width
    queries, keys = (each.weight.mul_(NOISE).unflatten(0, (-1, width)) for each in (attention.q_proj, attention.k_proj))
    pairs = min(PAIRS, width // 2)
    long = math.sqrt(width / (2 * pairs))
    keys[:, :pairs] += long * of_context
    angles = -frequencies[:pairs, None].float() * torch.tensor(distances)
    for head, angle in enumerate(angles.unbind(1)):
        queries[head, :pairs] += long * angle.cos()[:, None] * of_token
        queries[head, width // 2 : width // 2 + pairs] += long * angle.sin()[:, None] * of_token


def _seen(drafter: BlockDrafter, source: Source, seed: int) -> tuple[Tensor, Tensor]:
    """What layers read: normed contexts, and normed embeddings of anchors and masks, [N, D] each."""
    contexts: list[Tensor] = []
    tokens: list[Tensor] = []
    left = TOKENS
    for sequence in source.sequences(0, seed):
        contexts.append(drafter.context(sequence.features[:left]).float())
        tokens.append(sequence.tokens[:left])
        left -= len(tokens[-1])
        if left <= 0:
            break
    ids = torch.cat(tokens)
    masks = torch.full((math.ceil(MASKS / (1 - MASKS) * len(ids)),), drafter.config.mask_token_id)
    first = drafter.layers[0]
    assert isinstance(first, BlockLayer), "as built"
    return torch.cat(contexts), first.input_layernorm(drafter.embed(torch.cat([ids, masks])).float())


def _constant(x: Tensor) -> Tensor:
    """w [D] for which x w is nearest to 1 in all rows of x [N, D]: least squares, with a ridge."""
    gram = x.T @ x / len(x)
    return torch.linalg.solve(gram + RIDGE * torch.eye(len(gram)), x.mean(0))
