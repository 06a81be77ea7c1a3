"""`moe` on a CPU."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.panels import PANEL, Int4Panels, Matrix, Nvfp4Panels, laid_out
from redline.kernels.kernel import Kernel
from redline.ops import moe as meaning
from redline.ops.formats import ExpertWeights, Weight

_moe = native.function("moe")


def panels(experts: ExpertWeights | None) -> Tensor | None:
    """The codes or weights of all experts, in the kernel's layout."""
    if experts is None:
        return None
    assert isinstance(experts, Int4Panels | Nvfp4Panels | Matrix), "experts reach the kernel as panels"
    return experts.data if isinstance(experts, Matrix) else experts.codes


def scales(experts: ExpertWeights | None) -> Tensor | None:
    """The scales of quantised codes; bf16 weights have none."""
    return experts.scales if isinstance(experts, Int4Panels | Nvfp4Panels) else None


def wholes(experts: ExpertWeights | None) -> Tensor | None:
    """The matrix scale of each panel; only NVFP4 has them."""
    return experts.wholes if isinstance(experts, Nvfp4Panels) else None


def run(args: meaning.MoeArgs[Matrix]) -> Tensor:
    """-> y float32 [T, D]. A token's experts are added in the order of its choices, independent of the batch."""
    x_TD, shared_gate_up, shared_down, routed = args.x_TD, args.shared_gate_up, args.shared_down, args.routed
    tokens, d = x_TD.shape
    y_TD = torch.empty_like(x_TD)
    gate_up, down = (None, None) if routed is None else (routed.gate_up, routed.down)
    _moe(
        x=x_TD,
        ids=None if routed is None else routed.ids_TK,
        weights=None if routed is None else routed.weights_TK,
        gate_up=panels(gate_up),
        gate_up_scales=scales(gate_up),
        gate_up_wholes=wholes(gate_up),
        down=panels(down),
        down_scales=scales(down),
        down_wholes=wholes(down),
        shared_gate_up=None if shared_gate_up is None else shared_gate_up.data,
        shared_down=None if shared_down is None else shared_down.data,
        y=y_TD,
        T=tokens,
        D=d,
        E=0 if down is None else down.shape[0],
        k=0 if routed is None else routed.ids_TK.shape[1],
        I=0 if down is None else down.shape[2],
        Is=0 if shared_down is None else shared_down.shape[1],
        rounded=args.rounded,
    )
    return y_TD


def fits(args: meaning.MoeArgs[Weight]) -> bool:
    """Whether all weights are in panels and D and the experts' widths are multiples of the panel width."""
    routed = args.routed
    weights: list[Weight | ExpertWeights | None] = [args.shared_gate_up, args.shared_down]
    downs: list[Weight | ExpertWeights | None] = [args.shared_down]
    if routed is not None:
        weights += [routed.gate_up, routed.down]
        downs.append(routed.down)
    if not all(weight is None or isinstance(weight, Matrix | Int4Panels | Nvfp4Panels) for weight in weights):
        return False
    return all(size % PANEL == 0 for down in downs if down is not None for size in down.shape[-2:])


moe = Kernel(meaning.moe, run, "cpu", fits, laid_out)
