"""Expert routing: the experts of each token and their weights.     T tokens, D hidden, E experts, K chosen, G groups.

s = sigmoid(x W^T); the K largest of s + bias are chosen; weights are s without the bias, divided by their sum + 1e-20,
times the scale (DeepSeek-V3's noaux_tc). With several groups of E / G experts, only the experts of the best groups may
be chosen; a group's score is the sum of its two largest s + bias. In float32. A GPU routes from logits that `gates` or
a matrix product made (`kernels/cuda/decode/choose_experts.py`, and `kernels/cuda/block.py` for many tokens), and
has one group.
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
    groups: int = 1  # groups of E / groups experts, by id
    chosen_groups: int = 1  # groups whose experts may be chosen


def reference(args: RouteExpertsArgs[Weight]) -> tuple[Tensor, Tensor]:
    """-> (ids int32 [T, K], best first, ties to the lower id; weights float32 [T, K])."""
    logits_TE = args.x_TD.float() @ args.weight.dense().float().T
    groups = args.groups, args.chosen_groups
    return choose(logits_TE, args.bias_E, args.k, args.normalise, args.scale, groups=groups)


def choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    k: int,
    normalise: bool,
    scale: float,
    forced_TK: Tensor | None = None,
    *,
    ties: bool = True,
    groups: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    """The router's choice from its logits -> (ids int32 [T, K], best first; weights [T, K]).

    bias_E: float32, or None for zeros. forced_TK: int32, given experts; their weights still come from the scores.
    ties: whether the lower id comes first among equal scores; without this order a GPU does not have to sort. groups:
    `groups` and `chosen_groups` of RouteExpertsArgs; ties between groups go to the lower one.
    """
    scores = torch.sigmoid(logits_TE)
    if forced_TK is None:
        biased = scores if bias_E is None else scores + bias_E
        if groups[0] > 1:
            biased = _of_the_best_groups(biased, *groups)
        sort = torch.sort(biased, dim=-1, descending=True, stable=True) if ties else biased.topk(k)
        forced_TK = sort.indices[:, :k].to(torch.int32)
    weights = scores.gather(1, forced_TK.long())
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return forced_TK, weights * scale


def _of_the_best_groups(biased_TE: Tensor, groups: int, chosen: int) -> Tensor:
    """The scores, -inf outside of the `chosen` groups with the largest sums of their two best scores."""
    grouped_TGE = biased_TE.unflatten(1, (groups, -1))
    sums_TG = grouped_TGE.topk(2, dim=-1).values.sum(-1)
    best_TG = torch.sort(sums_TG, dim=-1, descending=True, stable=True).indices[:, :chosen]
    kept_TG = torch.zeros_like(sums_TG, dtype=torch.bool).scatter_(1, best_TG, True)
    return grouped_TGE.masked_fill(~kept_TG[:, :, None], -torch.inf).flatten(1)


def cost(args: RouteExpertsArgs[Weight]) -> Cost:
    """x, the router and the bias are read once; an id and a weight of 4 bytes each are written per choice."""
    tokens, d = args.x_TD.shape
    return Cost(
        args.x_TD.nbytes + args.weight.nbytes + args.bias_E.nbytes + tokens * args.k * 8,
        2 * tokens * d * args.weight.shape[-2],
    )


def cases() -> Iterator[Case]:
    """Sizes of nano and Kimi, whose weights are normalized and scaled; DeepSeek-V3's groups."""

    def make(tokens: int, d: int, e: int, k: int, groups: int = 1, chosen_groups: int = 1):
        def inputs(g: torch.Generator) -> RouteExpertsArgs[Weight]:
            weight = (torch.randn(e, d, generator=g) * d**-0.5).to(torch.bfloat16)
            bias = torch.randn(e, generator=g) * 0.1
            x = torch.randn(tokens, d, generator=g)
            return RouteExpertsArgs(x, Plain(weight), bias, k, True, 2.827, groups, chosen_groups)

        return inputs

    yield Case("T=1 nano", make(1, 320, 16, 4))
    yield Case("T=40 nano", make(40, 320, 16, 4))
    yield Case("T=4 Kimi", make(4, 7168, 384, 8))
    yield Case("T=40, 4 of 8 groups", make(40, 320, 64, 8, 8, 4))
    yield Case("T=4 DeepSeek-V3, 4 of 8 groups", make(4, 7168, 256, 8, 8, 4))


route_experts = Op("route_experts", RouteExpertsArgs[Weight], reference, cost, cases)
