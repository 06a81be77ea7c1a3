"""An EAGLE-3 drafter in one call on a CPU: the records that the kernels read, and the calls.

T rows, R queries (rows that are finished), D hidden, H heads, P rope, V value width (in logits: vocabulary).

`fuse`   the target's states of some positions, each normed, fused to one feature
`run`    a pass: normed embeddings and features, concatenated, through one layer of latent attention and an MLP
`chain`  greedy drafting: a pass, the argmax token of each query, a pass over those tokens, and so on

Row t reads the token at place t + 1, is rotated by t, and its KV is stored at place t + 1 of its slot's pages; place 0
is unused. A pass has some twenty small tensors and twelve calls, which as separate Python calls would cost as much as
the arithmetic. The computation, and the bits of its results, are defined in `redline.model.eagle3.forward`.
"""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.mla import in_panels, kv_type
from redline.kernels.cpu.panels import PANEL, Matrix
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.record import ArgumentStruct
from redline.ops.gqa import GqaWeights
from redline.ops.mla import MlaWeights

_Weights = native.record("DraftWeights")
_Pages = native.record("DraftPages")
_fuse = native.function("draft_fuse")
_pass = native.function("draft_pass")
_chain = native.function("draft_chain")


@dataclass(frozen=True)
class DraftLayer:
    """All weights of a drafter but the fusion's; the kernels support only latent attention."""

    embedding_VD: Tensor  # bf16
    input_norm: Tensor  # float32 [D], as are the others
    hidden_norm: Tensor
    attention: MlaWeights[Matrix] | GqaWeights[Matrix]  # over [embedding | feature], 2 D
    o_proj: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    norm: Tensor
    head: Matrix | Tiled  # read only by the chain, and then it has the whole vocabulary, in order
    eps: float
    softmax_scale: float
    norm_before_residual: bool
    norm_output: bool  # whether the normed output is fed back

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the kernels support all these sizes."""
        w = self.attention
        if not isinstance(w, MlaWeights):
            return False
        widths = w.w_q.outputs, w.rank, w.rope, w.value, *self.down.shape
        return (
            self.embedding_VD.dtype == torch.bfloat16 and in_panels(w) and all(width % PANEL == 0 for width in widths)
        )

    @functools.cached_property
    def address(self) -> int:
        """Address of the record that the kernels read; valid for the lifetime of this object."""
        return ctypes.addressof(self._layout)

    @functools.cached_property
    def _layout(self) -> ArgumentStruct:
        w, head = self.attention, self.head
        assert isinstance(w, MlaWeights), "the kernels compute latent attention"
        assert isinstance(head, Matrix), "the CPU's kernels read panels"
        return _Weights(
            embedding=self.embedding_VD,
            input_norm=self.input_norm,
            hidden_norm=self.hidden_norm,
            w_a=w.w_a.data,
            q_norm=w.q_norm,
            kv_norm=w.kv_norm,
            w_q=w.w_q.data,
            w_uk=w.w_uk.data,
            w_uv=w.w_uv.data,
            o_proj=self.o_proj.data,
            mlp_norm=self.mlp_norm,
            gate_up=self.gate_up.data,
            down=self.down.data,
            norm=self.norm,
            head=head.data,
            eps=self.eps,
            low_rank_eps=w.eps,
            softmax_scale=self.softmax_scale,
            D=self.norm.shape[0],
            Rq=w.q_norm.shape[0],
            H=w.heads,
            Nn=w.nope,
            P=w.rope,
            R=w.rank,
            V=w.value,
            I=self.down.shape[1],
            vocabulary=head.outputs,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
        )


@dataclass(frozen=True)
class DraftPages:
    """The tensors in which rows are looked up; their contents may change."""

    tokens: Tensor  # int64 [slots, places]
    tables: Tensor  # int32 [slots, pages per slot]
    cos: Tensor  # float32 [positions, P / 2]
    sin: Tensor

    @functools.cached_property
    def address(self) -> int:
        """Address of the record that the kernels read; valid for the lifetime of this object."""
        return ctypes.addressof(self._layout)

    @functools.cached_property
    def _layout(self) -> ArgumentStruct:
        return _Pages(
            tokens=self.tokens,
            tables=self.tables,
            cos=self.cos,
            sin=self.sin,
            tokens_width=self.tokens.shape[1],
            table_width=self.tables.shape[1],
        )


@dataclass(frozen=True)
class DraftRows:
    """`queries`: the rows that are finished. `ids`: the rows' tokens; None: the tokens in their slots."""

    slots: Sequence[int]
    positions: Sequence[int]
    queries: Sequence[int]
    ids: Sequence[int] | None = None


class DraftFuseArgs(NamedTuple):
    """Fuses each of the rows `sources` of S concatenated states, F = S W, to one feature."""

    features_NF: Tensor
    sources: Sequence[int]
    norms_SW: Tensor | None  # float32; None: the states are not normed
    fc: Matrix  # [D, F]
    eps: float


class DraftPassArgs(NamedTuple):
    """A pass of T rows, R of which are finished."""

    feature_TD: Tensor  # fused from the target's states, or fed back
    weights: DraftLayer
    pages: DraftPages
    rows: DraftRows
    plane: Tensor  # [pages, 64, kv width]: written at the rows' places, then read


class DraftChainArgs(NamedTuple):
    """A pass, followed by drafting from its queries."""

    feature_TD: Tensor
    weights: DraftLayer
    pages: DraftPages
    rows: DraftRows  # its tokens are those in the slots
    wanted: Sequence[int]  # number of drafts of each query, at least one
    plane: Tensor


def fuse(args: DraftFuseArgs) -> Tensor:
    """[T, D]"""
    features_NF, _, norms_SW, fc, eps = args
    sources = array("i", args.sources)
    states, width = (1, features_NF.shape[1]) if norms_SW is None else norms_SW.shape
    fused = features_NF.new_empty(len(sources), fc.outputs)
    _fuse(
        features=features_NF,
        sources=sources.buffer_info()[0],
        norms=norms_SW,
        fc=fc.data,
        fused=fused,
        eps=eps,
        T=len(sources),
        S=states,
        W=width,
        D=fc.outputs,
    )
    return fused


def run(args: DraftPassArgs) -> tuple[Tensor, Tensor]:
    """normed, fed [R, D]."""
    feature_TD, weights, pages, rows, plane = args
    slots, positions, queries = array("i", rows.slots), array("i", rows.positions), array("i", rows.queries)
    ids = None if rows.ids is None else array("i", rows.ids)
    normed, fed = feature_TD.new_empty(2, len(queries), feature_TD.shape[1]).unbind(0)
    _pass(
        weights=weights.address,
        pages=pages.address,
        feature=feature_TD,
        slots=slots.buffer_info()[0],
        positions=positions.buffer_info()[0],
        ids=0 if ids is None else ids.buffer_info()[0],
        queries=queries.buffer_info()[0],
        plane=plane,
        normed=normed,
        fed=fed,
        kv_type=kv_type(plane),
        T=len(slots),
        R=len(queries),
    )
    return normed, fed


def chain(args: DraftChainArgs) -> Tensor:
    """int64 [R, max(wanted)], padded with 0."""
    feature_TD, weights, pages, rows, wanted, plane = args
    assert rows.ids is None, "the chain begins after the tokens in the slots"
    slots, positions, queries = array("i", rows.slots), array("i", rows.positions), array("i", rows.queries)
    wants = array("i", wanted)
    drafted = torch.zeros(len(queries), max(wanted, default=0), dtype=torch.int64)
    _chain(
        weights=weights.address,
        pages=pages.address,
        feature=feature_TD,
        slots=slots.buffer_info()[0],
        positions=positions.buffer_info()[0],
        queries=queries.buffer_info()[0],
        wanted=wants.buffer_info()[0],
        plane=plane,
        drafted=drafted,
        kv_type=kv_type(plane),
        T=len(slots),
        R=len(queries),
        k=drafted.shape[1],
    )
    return drafted


def fuse_fits(args: DraftFuseArgs) -> bool:
    """Whether the weight is in whole panels and the states are contiguous."""
    return args.fc.panels and args.fc.outputs % PANEL == 0 and args.features_NF.is_contiguous()


def fits(args: DraftPassArgs | DraftChainArgs) -> bool:
    """Whether the drafter has latent attention in whole panels and the features are contiguous."""
    return args.weights.fits and args.feature_TD.is_contiguous()
