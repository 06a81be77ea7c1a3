"""The inputs of a block (weights) and of a step, in the layouts of the CPU kernels.

T tokens, D hidden. The computation is defined in `redline.model.k2.forward`.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.mla import in_panels
from redline.kernels.cpu.moe import panels, scales, wholes
from redline.kernels.cpu.panels import PANEL, Experts, Matrix
from redline.kernels.inputs import Chunk, Inputs
from redline.kernels.record import ArgumentStruct
from redline.ops.formats import Int4, Nvfp4
from redline.ops.mla import MlaWeights

_BlockTokens, _BlockWeights, _Chunk = map(native.record, ("BlockTokens", "BlockWeights", "Chunk"))
_layouts: "WeakKeyDictionary[Inputs, ArgumentStruct]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Moe:
    """The routed experts of a layer and their router, in the form that `route_experts` and `moe` take."""

    router: Matrix  # bf16 [E, D]
    bias_E: Tensor  # float32
    gate_up: Experts  # [E, 2 I, D], gate first
    down: Experts  # [E, D, I]
    chosen: int  # number of experts per token
    normalise: bool  # whether a token's weights are divided by their sum
    scale: float  # factor of the weights after normalisation
    groups: int = 1  # groups of experts by id
    chosen_groups: int = 1  # groups whose experts may be chosen


@dataclass(frozen=True)
class Block:
    """One layer's weights and scalar parameters."""

    attention_norm: Tensor  # float32 [D]
    attention: MlaWeights[Matrix]
    o_proj: Matrix  # bf16 [D, H V]
    mlp_norm: Tensor  # float32 [D]
    shared_gate_up: Matrix  # bf16 [2 Is, D], gate first: of the shared expert, or of the dense MLP
    shared_down: Matrix  # bf16 [D, Is]
    experts: Moe | None  # None: a dense layer
    eps: float  # of both norms
    softmax_scale: float  # factor of the attention scores

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the kernels support these weights: all in panels, and all output widths multiples of 32."""
        w, moe_ = self.attention, self.experts
        if not in_panels(w):
            return False
        widths = [w.w_q.outputs, w.rank, w.rope, w.value, *self.shared_down.shape]
        if moe_ is not None:
            if isinstance(moe_.gate_up, Int4 | Nvfp4) or isinstance(moe_.down, Int4 | Nvfp4):
                return False
            widths += moe_.down.shape[-2:]
        return all(width % PANEL == 0 for width in widths)

    @functools.cached_property
    def layout(self) -> ArgumentStruct:
        """The record that the kernels read; valid for the lifetime of this block."""
        w, moe_ = self.attention, self.experts
        gate_up, down = (None, None) if moe_ is None else (moe_.gate_up, moe_.down)
        experts, width = (0, 0) if down is None else (down.shape[0], down.shape[2])
        return _BlockWeights(
            attention_norm=self.attention_norm,
            w_a=w.w_a.data,
            q_norm=w.q_norm,
            kv_norm=w.kv_norm,
            w_q=w.w_q.data,
            w_uk=w.w_uk.data,
            w_uv=w.w_uv.data,
            o_proj=self.o_proj.data,
            mlp_norm=self.mlp_norm,
            shared_gate_up=self.shared_gate_up.data,
            shared_down=self.shared_down.data,
            router=None if moe_ is None else moe_.router.data,
            bias=None if moe_ is None else moe_.bias_E,
            gate_up=panels(gate_up),
            gate_up_scales=scales(gate_up),
            gate_up_wholes=wholes(gate_up),
            down=panels(down),
            down_scales=scales(down),
            down_wholes=wholes(down),
            norm_eps=self.eps,
            low_rank_eps=w.eps,
            softmax_scale=self.softmax_scale,
            routed_scale=0.0 if moe_ is None else moe_.scale,
            D=self.mlp_norm.shape[0],
            Rq=w.q_norm.shape[0],
            H=w.heads,
            Nn=w.nope,
            P=w.rope,
            R=w.rank,
            V=w.value,
            Is=self.shared_down.shape[1],
            E=experts,
            k=0 if moe_ is None else moe_.chosen,
            I=width,
            normalise=False if moe_ is None else moe_.normalise,
            groups=1 if moe_ is None else moe_.groups,
            chosen_groups=1 if moe_ is None else moe_.chosen_groups,
        )


def address_of(inputs: Inputs) -> int:
    """Address of a step's record for the kernels. Made once per `inputs`, and valid for their lifetime."""
    layout = _layouts.get(inputs)
    if layout is None:
        layout = _layouts[inputs] = _BlockTokens(
            ids=inputs.ids_T,
            cos=inputs.cos_T,
            sin=inputs.sin_T,
            rows=inputs.rows_T,
            chunks=_chunks(inputs.chunks),
            tokens=inputs.tokens_Q,
            slots=inputs.slots_Q,
            lengths=inputs.lengths_Q,
            tables=inputs.tables,
            table_width=inputs.tables.shape[1],
            T=inputs.count,
            C=len(inputs.chunks),
            Q=inputs.tokens_Q.shape[0],
        )
    return ctypes.addressof(layout)


def _chunks(chunks: Sequence[Chunk]) -> "ctypes.Array[ArgumentStruct]":
    return (_Chunk * len(chunks))(*(_Chunk(first=c.first, count=c.count, start=c.start, slot=c.slot) for c in chunks))
