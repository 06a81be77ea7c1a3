"""Expert routing: the experts of each token and their weights.        T tokens, D hidden, E experts, K chosen.

s = sigmoid(x W^T); the K largest of s + bias are chosen; weights are s without the bias, divided by their sum + 1e-20,
times the scale (DeepSeek-V3's noaux_tc with one group). In float32. A GPU routes from logits that `gates` or a matrix
product computed: `kernels/hopper/decode/choose_experts.py`, and `kernels/hopper/block.py` for many tokens.
"""

from collections.abc import Iterator
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from redline.ops.formats import Plain, W, Weight
from redline.ops.op import Case, Cost, Op


class RouteExpertsArgs(NamedTuple, Generic[W]):
    """Chooses the experts of each token, and computes their weights."""

    x_TD: Tensor  # [T, D], normed; float32 on a CPU
    weight: W  # bf16 [E, D]: the router
    bias_E: Tensor  # float32 [E]: added to the scores for the choice, not for the weights
    k: int  # experts per token
    normalise: bool  # whether the weights are divided by their sum
    scale: float  # final factor of the weights


def reference(args: RouteExpertsArgs[Weight]) -> tuple[Tensor, Tensor]:
    """-> (ids int32 [T, K], best first, ties to the lower id; weights float32 [T, K])."""
    logits_TE = args.x_TD.float() @ args.weight.dense().float().T
    return choose(logits_TE, args.bias_E, args.k, args.normalise, args.scale)


def choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    k: int,
    normalise: bool,
    scale: float,
    forced_TK: Tensor | None = None,
    *,
    ties: bool = True,
) -> tuple[Tensor, Tensor]:
    """The router's choice from its logits -> (ids int32 [T, K], best first; weights [T, K]).

    bias_E: float32, or None for zeros. forced_TK: int32, given experts; their weights still come from the scores.
    ties: whether the lower id comes first among equal scores; without this order a GPU does not have to sort.
    """
    scores = torch.sigmoid(logits_TE)
    if forced_TK is None:
        biased = scores if bias_E is None else scores + bias_E
        sort = torch.sort(biased, dim=-1, descending=True, stable=True) if ties else biased.topk(k)
        forced_TK = sort.indices[:, :k].to(torch.int32)
    weights = scores.gather(1, forced_TK.long())
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return forced_TK, weights * scale


def cost(args: RouteExpertsArgs[Weight]) -> Cost:
    """x, the router and the bias are read once; an id and a weight of 4 bytes each are written per choice."""
    tokens, d = args.x_TD.shape
    return Cost(
        args.x_TD.nbytes + args.weight.nbytes + args.bias_E.nbytes + tokens * args.k * 8,
        2 * tokens * d * args.weight.shape[-2],
    )


def cases() -> Iterator[Case]:
    """Sizes of nano and Kimi; the weights are normalized and scaled as in Kimi."""

    def make(tokens: int, d: int, e: int, k: int):
        def inputs(g: torch.Generator) -> RouteExpertsArgs[Weight]:
            weight = (torch.randn(e, d, generator=g) * d**-0.5).to(torch.bfloat16)
            bias = torch.randn(e, generator=g) * 0.1
            return RouteExpertsArgs(torch.randn(tokens, d, generator=g), Plain(weight), bias, k, True, 2.827)

        return inputs

    yield Case("T=1 nano", make(1, 320, 16, 4))
    yield Case("T=40 nano", make(40, 320, 16, 4))
    yield Case("T=4 Kimi", make(4, 7168, 384, 8))


route_experts = Op("route_experts", RouteExpertsArgs[Weight], reference, cost, cases)
