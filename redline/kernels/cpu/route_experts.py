"""`route_experts` on a CPU."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.panels import Matrix, laid_out
from redline.kernels.kernel import Kernel
from redline.ops import route_experts as meaning
from redline.ops.formats import Weight

_route_experts = native.function("route_experts")


def run(args: meaning.RouteExpertsArgs[Matrix]) -> tuple[Tensor, Tensor]:
    """-> (ids int32 [T, K], weights float32 [T, K]). The product is exact."""
    k = args.k
    tokens, d = args.x_TD.shape
    ids = torch.empty(tokens, k, dtype=torch.int32)
    weights = torch.empty(tokens, k)
    _route_experts(
        x=args.x_TD,
        w=args.weight.data,
        bias=args.bias_E,
        ids=ids,
        weights=weights,
        T=tokens,
        D=d,
        E=args.weight.outputs,
        k=k,
        normalise=args.normalise,
        scale=args.scale,
        groups=args.groups,
        chosen_groups=args.chosen_groups,
    )
    return ids, weights


def fits(args: meaning.RouteExpertsArgs[Weight]) -> bool:
    """Whether the router is in panels, the only layout that the C++ reads; D is then a multiple of 32."""
    return isinstance(args.weight, Matrix) and args.weight.panels


route_experts = Kernel(meaning.route_experts, run, "cpu", fits, laid_out)
