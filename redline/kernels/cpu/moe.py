"""`moe` on a CPU."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.panels import PANEL, Int4Panels, Matrix, laid_out
from redline.kernels.kernel import Kernel
from redline.ops import moe as meaning
from redline.ops.formats import ExpertWeights, Weight


def addresses_of(experts: ExpertWeights) -> tuple[int, int]:
    """Of the codes or weights, and of the scales or null."""
    if isinstance(experts, Int4Panels):
        return experts.addresses
    assert isinstance(experts, Matrix), "experts reach the kernel as panels"
    return experts.address, 0


def run(args: meaning.MoeArgs[Matrix]) -> Tensor:
    """-> y float32 [T, D]. A token's experts are added in the order of its choices, whatever its company."""
    x_TD, shared_gate_up, routed = args.x_TD, args.shared_gate_up, args.routed
    library = native.library()
    assert library is not None
    tokens, d = x_TD.shape
    y_TD = torch.empty_like(x_TD)
    shared = (0, 0, 0)
    if shared_gate_up is not None and args.shared_down is not None:
        shared = (shared_gate_up.address, args.shared_down.address, shared_gate_up.outputs // 2)
    pointers, sizes = (0, 0, 0, 0, 0, 0), (0, 0, 0)
    if routed is not None:
        choice = native.pointer(routed.ids_TK), native.pointer(routed.weights_TK)
        pointers = (*choice, *addresses_of(routed.gate_up), *addresses_of(routed.down))
        sizes = (routed.down.shape[0], routed.ids_TK.shape[1], routed.down.shape[2])
    sizes = (tokens, d, *sizes, shared[2], args.rounded)
    library.redline_moe(native.pointer(x_TD), *pointers, *shared[:2], y_TD.data_ptr(), *sizes)
    return y_TD


def fits(args: meaning.MoeArgs[Weight]) -> bool:
    """Whether all weights lie in panels and D and the experts' widths are whole panels: each is an N and a K."""
    routed = args.routed
    weights: list[Weight | ExpertWeights | None] = [args.shared_gate_up, args.shared_down]
    downs: list[Weight | ExpertWeights | None] = [args.shared_down]
    if routed is not None:
        weights += [routed.gate_up, routed.down]
        downs.append(routed.down)
    if not all(weight is None or isinstance(weight, Matrix | Int4Panels) for weight in weights):
        return False
    return all(size % PANEL == 0 for down in downs if down is not None for size in down.shape[-2:])


moe = Kernel(meaning.moe, run, "cpu", fits, laid_out)
