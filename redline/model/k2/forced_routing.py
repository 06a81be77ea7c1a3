"""Random expert choices for speed measurements.

With random weights a real router would send all tokens to the same few experts, and every step would look too fast.

L layers, R rows, M tokens per row, T = R M, E experts, k chosen experts per token.
"""

import torch
from torch import Tensor

OVERLAP = 0.4  # four tokens of a row then use 2.5 times one token's experts, as measured on a production model


def draw(
    generator: torch.Generator, layers: int, rows: int, tokens: int, experts: int, chosen: int, overlap: float = 0.0
) -> Tensor:
    """Distinct experts for every token, on the generator's device: int32 [L, R M, k].

    Within a row each of a token's experts is kept for the next token with probability `overlap`; the others are drawn
    from the remaining experts. So all experts are equally likely, and with 0 tokens are independent. Rows and layers
    are always independent.
    """
    keys = torch.rand(layers, rows, tokens, experts, generator=generator, device=generator.device)
    if not overlap:
        return keys.topk(chosen).indices.flatten(1, 2).to(torch.int32)
    stays = torch.rand(layers, rows, tokens, chosen, generator=generator, device=generator.device) < overlap
    ids: list[Tensor] = []
    for token in range(tokens):
        if ids:  # a key above 1 is among the largest
            keys[:, :, token].scatter_add_(-1, ids[-1], stays[:, :, token].float())
        ids.append(keys[:, :, token].topk(chosen).indices)
    return torch.stack(ids, 2).flatten(1, 2).to(torch.int32)


def distinct(ids_LTk: Tensor, experts: int) -> Tensor:
    """Number of distinct experts that a layer's tokens chose: int64 [L]. experts: number of experts per layer."""
    hit = torch.zeros(ids_LTk.shape[0], experts, dtype=torch.int64, device=ids_LTk.device)
    return hit.scatter_(1, ids_LTk.flatten(1).long(), 1).sum(1)
