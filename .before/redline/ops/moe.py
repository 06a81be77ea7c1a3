"""SwiGLU experts.        T tokens, D hidden, E experts, K chosen, I expert width.

y = shared(x) + sum over k of weight[k] * expert[ids[k]](x);  expert(x) = W_down (silu(W_gate x) * W_up x).
The same op without routed experts is the dense MLP of layer 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.ops import native
from redline.ops.formats import Int4, quantize_int4
from redline.ops.linear import ROUNDED
from redline.ops.op import Case, Cost, Op
from redline.ops.weights import PANEL, Experts, Int4Panels, Matrix, expert_matrix, prepare_experts


@dataclass(frozen=True)
class Routed:
    """The routed experts of a layer: gate_up [E, 2 I, D] (gate first), down [E, D, I]; and who goes where."""

    gate_up: Experts
    down: Experts
    ids_TK: Tensor  # int32
    weights_TK: Tensor  # float32


def _swiglu(x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x_TD @ gate_up.to(x_TD.dtype).T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.to(x_TD.dtype).T


def reference(
    x_TD: Tensor,
    shared_gate_up: Matrix | None,
    shared_down: Matrix | None,
    routed: Routed | None,
    rounded: bool = False,
) -> Tensor:
    """rounded: a kernel may round to bf16 what enters a product."""
    y_TD = torch.zeros_like(x_TD)
    if shared_gate_up is not None and shared_down is not None:
        y_TD = _swiglu(x_TD, shared_gate_up.dense(), shared_down.dense())
    if routed is not None:
        for expert in routed.ids_TK.unique().tolist():
            rows, choice = torch.where(routed.ids_TK == expert)
            part = _swiglu(x_TD[rows], expert_matrix(routed.gate_up, expert), expert_matrix(routed.down, expert))
            y_TD = y_TD.index_add(0, rows, part * routed.weights_TK[rows, choice, None].to(part.dtype))
    return y_TD


def addresses_of(experts: Experts) -> tuple[int, int]:
    """Of the codes or weights, and of the scales or null."""
    if isinstance(experts, Int4Panels):
        return experts.addresses
    assert isinstance(experts, Matrix), "INT4 experts reach the kernel as panels"
    return experts.address, 0


def kernel(
    x_TD: Tensor,
    shared_gate_up: Matrix | None,
    shared_down: Matrix | None,
    routed: Routed | None,
    rounded: bool = False,
) -> Tensor:
    library = native.library()
    assert library is not None
    tokens, d = x_TD.shape
    y_TD = torch.empty_like(x_TD)
    shared = (0, 0, 0)
    if shared_gate_up is not None and shared_down is not None:
        shared = (shared_gate_up.address, shared_down.address, shared_gate_up.outputs // 2)
    pointers, sizes = (0, 0, 0, 0, 0, 0), (0, 0, 0)
    if routed is not None:
        choice = native.pointer(routed.ids_TK), native.pointer(routed.weights_TK)
        pointers = (*choice, *addresses_of(routed.gate_up), *addresses_of(routed.down))
        sizes = (routed.down.shape[0], routed.ids_TK.shape[1], routed.down.shape[2])
    sizes = (tokens, d, *sizes, shared[2], rounded)
    library.redline_moe(native.pointer(x_TD), *pointers, *shared[:2], y_TD.data_ptr(), *sizes)
    return y_TD


def fits(
    x_TD: Tensor,
    shared_gate_up: Matrix | None,
    shared_down: Matrix | None,
    routed: Routed | None,
    rounded: bool = False,
) -> bool:
    downs: list[Matrix | Int4Panels] = [shared_down] if shared_down is not None else []
    if routed is not None:
        if isinstance(routed.gate_up, Int4) or isinstance(routed.down, Int4):
            return False
        downs.append(routed.down)
    return all(size % PANEL == 0 for down in downs for size in down.shape[-2:])


def cost(
    x_TD: Tensor,
    shared_gate_up: Matrix | None,
    shared_down: Matrix | None,
    routed: Routed | None,
    rounded: bool = False,
) -> Cost:
    """Bytes of the experts that are really chosen, once each."""
    total = Cost(2 * x_TD.nbytes)
    tokens, d = x_TD.shape
    if shared_gate_up is not None and shared_down is not None:
        flops = 3 * tokens * d * shared_gate_up.outputs
        total += Cost(shared_gate_up.nbytes + shared_down.nbytes, flops)
    if routed is not None:
        experts, chosen = routed.down.shape[0], routed.ids_TK.unique().numel()
        width, pairs = routed.down.shape[2], routed.ids_TK.numel()
        read = (routed.gate_up.nbytes + routed.down.nbytes) // experts * chosen
        total += Cost(read + pairs * 8, 6 * pairs * d * width)
    return total


def cases() -> Iterator[Case]:
    def make(tokens: int, d: int, i: int, e: int, k: int, shared: int, int4: bool, rounded: bool = False):
        def inputs(g: torch.Generator) -> tuple[Tensor, Matrix | None, Matrix | None, Routed | None, bool]:
            def weight(*shape: int) -> Tensor:
                return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(torch.bfloat16)

            x = torch.randn(tokens, d, generator=g)
            shared_up = Matrix.prepare(weight(2 * shared, d)) if shared else None
            shared_down = Matrix.prepare(weight(d, shared)) if shared else None
            if not e:
                return x, shared_up, shared_down, None, rounded
            up, down = weight(e, 2 * i, d), weight(e, d, i)
            ids = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(tokens)]).to(torch.int32)
            weights = torch.rand(tokens, k, generator=g)
            routed = Routed(
                prepare_experts(quantize_int4(up) if int4 else up),
                prepare_experts(quantize_int4(down) if int4 else down),
                *(ids, weights),
            )
            return x, shared_up, shared_down, routed, rounded

        return inputs

    for tokens in (1, 2, 7, 50):
        yield Case(f"T={tokens} nano INT4", make(tokens, 320, 128, 16, 4, 128, True))
    for tokens in (1, 3, 16, 50):
        make_ = make(tokens, 320, 128, 16, 4, 128, True, True)
        yield Case(f"T={tokens} nano INT4, rounded", make_, rtol=ROUNDED)
    yield Case("T=130 tiny INT4, rounded", make(130, 64, 32, 4, 2, 32, True, True), rtol=ROUNDED)
    yield Case("T=6 bf16 experts, rounded", make(6, 96, 64, 8, 2, 32, False, True), rtol=ROUNDED)
    yield Case("T=130 tiny INT4", make(130, 64, 32, 4, 2, 32, True))
    yield Case("T=6 bf16 experts", make(6, 96, 64, 8, 2, 32, False))
    yield Case("T=3 no shared expert", make(3, 64, 32, 4, 2, 0, True))
    yield Case("T=5 dense MLP", make(5, 320, 0, 0, 0, 768, False))
    yield Case("T=1 Kimi, 8 of 384", make(1, 7168, 2048, 384, 8, 2048, True), small=False)


moe = Op("moe", reference, kernel, cost, cases, fits=fits)
