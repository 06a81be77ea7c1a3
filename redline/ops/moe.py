"""SwiGLU experts.        T tokens, D hidden, E experts, K chosen per token, I expert width.

y = shared(x) + sum over k of weight[k] * expert[ids[k]](x);  expert(x) = W_down (silu(W_gate x) * W_up x).
Without routed experts, the same op is the dense MLP of layer 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.ops.formats import ExpertWeights, Nvfp4, Plain, W, Weight, quantize_int4, quantize_nvfp4
from redline.ops.op import Case, Cost, Op

# Relative error of a result (of norms) if the inputs of two consecutive products may be rounded to bf16: over 300 draws
# of one token 0.0029 on average and at most 0.0044.
TWICE = 6e-3


@dataclass(frozen=True)
class Routed:
    """The routed experts of a layer, and the experts that each token is routed to."""

    gate_up: ExpertWeights  # [E, 2 I, D], gate first; bf16 or 4 bits
    down: ExpertWeights  # [E, D, I], in the same format
    ids_TK: Tensor  # int32 [T, K]: a token's experts, each at most once
    weights_TK: Tensor  # float32 [T, K]: the weight of each expert


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """[..., I] each -> the input of an expert's down projection."""
    return F.silu(gate) * up


def _swiglu(x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x_TD @ gate_up.to(x_TD.dtype).T).chunk(2, -1)
    return gated(gate, up) @ down.to(x_TD.dtype).T


class MoeArgs(NamedTuple, Generic[W]):
    """Adds up the SwiGLU experts of each token: the shared one and the weighted routed ones."""

    x_TD: Tensor  # [T, D], normed; float32 on a CPU
    # bf16 [2 I, D], gate first: of the shared expert or the dense MLP (their I may differ from the routed experts');
    # None, together with `shared_down`: no shared expert
    shared_gate_up: W | None
    shared_down: W | None  # bf16 [D, I]
    routed: Routed | None  # None: a dense MLP
    rounded: bool = False  # whether a kernel may round the inputs of a product to bf16; the reference never does


def reference(args: MoeArgs[Weight]) -> Tensor:
    """-> y [T, D] in x's dtype. A token's experts are added in the order of expert ids."""
    x_TD, routed = args.x_TD, args.routed
    y_TD = torch.zeros_like(x_TD)
    if args.shared_gate_up is not None and args.shared_down is not None:
        y_TD = _swiglu(x_TD, args.shared_gate_up.dense(), args.shared_down.dense())
    if routed is not None:
        for expert in routed.ids_TK.unique().tolist():
            rows, choice = torch.where(routed.ids_TK == expert)
            part = _swiglu(x_TD[rows], routed.gate_up.matrix(expert), routed.down.matrix(expert))
            y_TD = y_TD.index_add(0, rows, part * routed.weights_TK[rows, choice, None].to(part.dtype))
    return y_TD


def cost(args: MoeArgs[Weight]) -> Cost:
    """Bytes of the experts that are chosen, once each, of x and of y; operations of each (token, expert) pair."""
    shared_gate_up, routed = args.shared_gate_up, args.routed
    total = Cost(2 * args.x_TD.nbytes)
    tokens, d = args.x_TD.shape
    if shared_gate_up is not None and args.shared_down is not None:
        flops = 3 * tokens * d * shared_gate_up.shape[-2]
        total += Cost(shared_gate_up.nbytes + args.shared_down.nbytes, flops)
    if routed is not None:
        experts, chosen = routed.down.shape[0], routed.ids_TK.unique().numel()
        width, pairs = routed.down.shape[2], routed.ids_TK.numel()
        read = (routed.gate_up.nbytes + routed.down.nbytes) // experts * chosen
        total += Cost(read + pairs * 8, 6 * pairs * d * width)
    return total


def cases() -> Iterator[Case]:
    """INT4, NVFP4 and bf16 experts of small sizes, exact and rounded; no shared expert; a dense MLP; Kimi's sizes."""

    def make(tokens: int, d: int, i: int, e: int, k: int, shared: int, kind: str = "", rounded: bool = False):
        def inputs(g: torch.Generator) -> MoeArgs[Weight]:
            def weight(*shape: int) -> Tensor:
                return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(torch.bfloat16)

            x = torch.randn(tokens, d, generator=g)
            shared_up = Plain(weight(2 * shared, d)) if shared else None
            shared_down = Plain(weight(d, shared)) if shared else None
            if not e:
                return MoeArgs(x, shared_up, shared_down, None, rounded)
            gate_up, down = in_format(kind, weight(e, i, d), 3 * weight(e, i, d)), in_format(kind, weight(e, d, i))
            ids = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(tokens)]).to(torch.int32)
            weights = torch.rand(tokens, k, generator=g)
            return MoeArgs(x, shared_up, shared_down, Routed(gate_up, down, ids, weights), rounded)

        return inputs

    for tokens in (1, 2, 7, 50):
        yield Case(f"T={tokens} nano INT4", make(tokens, 320, 128, 16, 4, 128, "INT4"))
    for tokens in (1, 3, 7, 50):
        yield Case(f"T={tokens} nano NVFP4", make(tokens, 320, 128, 16, 4, 128, "NVFP4"))
    for tokens in (1, 3, 16, 50):
        for kind in ("INT4", "NVFP4"):
            make_ = make(tokens, 320, 128, 16, 4, 128, kind, True)
            yield Case(f"T={tokens} nano {kind}, rounded", make_, rtol=TWICE)
    yield Case("T=130 tiny INT4, rounded", make(130, 64, 32, 4, 2, 32, "INT4", True), rtol=TWICE)
    yield Case("T=6 bf16 experts, rounded", make(6, 96, 64, 8, 2, 32, "bf16", True), rtol=TWICE)
    yield Case("T=130 tiny INT4", make(130, 64, 32, 4, 2, 32, "INT4"))
    yield Case("T=130 tiny NVFP4", make(130, 64, 32, 4, 2, 32, "NVFP4"))
    yield Case("T=6 bf16 experts", make(6, 96, 64, 8, 2, 32, "bf16"))
    yield Case("T=3 no shared expert", make(3, 64, 32, 4, 2, 0, "INT4"))
    yield Case("T=5 dense MLP", make(5, 320, 0, 0, 0, 768))
    yield Case("T=1 Kimi, 8 of 384", make(1, 7168, 2048, 384, 8, 2048, "INT4"), small=False)


def in_format(kind: str, *weights: Tensor) -> ExpertWeights:
    """bf16 weights [E, N, K], concatenated along N, as INT4, NVFP4 (each matrix keeps its scale) or bf16."""
    match kind:
        case "INT4":
            return quantize_int4(torch.cat(weights, 1))
        case "NVFP4":
            each = [quantize_nvfp4(weight) for weight in weights]
            parts = zip(*((one.codes, one.scales.view(torch.uint8)) for one in each), strict=True)
            codes, scales = (torch.cat(part, 1) for part in parts)
            return Nvfp4(codes, scales.view(torch.float8_e4m3fn), torch.cat([one.scale for one in each], 1))
        case _:
            return Plain(torch.cat(weights, 1))


moe = Op("moe", MoeArgs[Weight], reference, cost, cases)
