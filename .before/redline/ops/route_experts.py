"""Which experts, and how much of each.        T tokens, D hidden, E experts, K chosen.

s = sigmoid(x W^T); the K largest of s + bias are chosen; weights are s without the bias, over their sum + 1e-20,
times the scale (DeepSeek-V3's noaux_tc with one group; kimi-format.md section 5). Computed in float32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.op import Case, Cost, Op
from redline.ops.weights import Matrix


def reference(
    x_TD: Tensor, weight: Matrix, bias_E: Tensor, k: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """-> (ids int32 [T, K], best first, ties to the lower id; weights float32 [T, K])."""
    scores = torch.sigmoid(x_TD.float() @ weight.dense().float().T)
    ids = torch.sort(scores + bias_E, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * scale


def kernel(
    x_TD: Tensor, weight: Matrix, bias_E: Tensor, k: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    library = native.library()
    assert library is not None
    tokens, d = x_TD.shape
    ids = torch.empty(tokens, k, dtype=torch.int32)
    weights = torch.empty(tokens, k)
    library.redline_route_experts(
        native.pointer(x_TD),
        weight.address,
        native.pointer(bias_E),
        ids.data_ptr(),
        weights.data_ptr(),
        *(tokens, d, weight.outputs, k, normalise, scale),
    )
    return ids, weights


def cost(x_TD: Tensor, weight: Matrix, bias_E: Tensor, k: int, normalise: bool, scale: float) -> Cost:
    tokens, d = x_TD.shape
    return Cost(x_TD.nbytes + weight.nbytes + bias_E.nbytes + tokens * k * 8, 2 * tokens * d * weight.outputs)


def cases() -> Iterator[Case]:
    def make(tokens: int, d: int, e: int, k: int):
        def inputs(g: torch.Generator) -> tuple[Tensor, Matrix, Tensor, int, bool, float]:
            weight = (torch.randn(e, d, generator=g) * d**-0.5).to(torch.bfloat16)
            bias = torch.randn(e, generator=g) * 0.1
            return torch.randn(tokens, d, generator=g), Matrix.prepare(weight), bias, k, True, 2.827

        return inputs

    yield Case("T=1 nano", make(1, 320, 16, 4))
    yield Case("T=40 nano", make(40, 320, 16, 4))
    yield Case("T=4 Kimi", make(4, 7168, 384, 8))


def fits(x_TD: Tensor, weight: Matrix, *_: object) -> bool:
    return weight.panels


route_experts = Op("route_experts", reference, kernel, cost, cases, fits=fits)
