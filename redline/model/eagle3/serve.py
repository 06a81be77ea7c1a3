"""A drafter's weights as the ops take them, and its pass over pages: eight ops and a head for each draft.

With latent attention and the whole vocabulary, what decodes goes through `draft_pass` and `draft_chain`, which are the
same in one call. Prompts' chunks in the expanded form, and other drafters, go op by op.

T rows of a pass, R of them that are finished, H heads, X query width, V value width, D hidden.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from redline.kernels.by_chip import linear
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.blocks.draft_pass import SKIP, DraftLayer, DraftPages, draft_fuse
from redline.kernels.cpu.mla import mla_decode, mla_prefill, mla_qkv
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.panels import Matrix
from redline.kernels.inputs import Inputs
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.cpu import K2
from redline.ops.gqa import gqa_decode, gqa_prefill, rotate_halves
from redline.ops.mla import MlaWeights, rounds, stored


class Served:
    """A drafter's weights as the ops take them, made from its state and from the model that it drafts for.

    They are copied where an op wants another layout. `layer` is the same for `draft_pass`, or None where that cannot
    take them.
    """

    def __init__(self, config: Eagle3Config, state: Mapping[str, Tensor], model: K2) -> None:
        reader = _Reader(state, model.device)
        at = "layers.0"
        self._config = config
        self._dtype = model.dtype
        self._embedding_VD = model.embedding_VD
        self._fc = reader.matrix("fc.weight")
        norms = [reader.vector(f"fc_norm.{i}.weight") for i in range(len(config.layer_ids))] if config.fc_norm else []
        self._fc_norms = torch.stack(norms) if norms else None
        self._input_norm = reader.vector(f"{at}.input_layernorm.weight")
        self._hidden_norm = reader.vector(f"{at}.hidden_norm.weight")
        attention = MlaAttention if config.architecture == "mla" else LlamaAttention
        self._attention = attention(config, reader, f"{at}.self_attn")
        self._o_proj = reader.matrix(f"{at}.self_attn.o_proj.weight")
        self._mlp_norm = reader.vector(f"{at}.post_attention_layernorm.weight")
        self._gate_up = reader.matrix(f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight")
        self._down = reader.matrix(f"{at}.mlp.down_proj.weight")
        self._norm = reader.vector("norm.weight")
        self._head = model.head if config.draft_vocab_size is None else reader.matrix("lm_head.weight")
        self.inv_freq = config.inv_freq().to(model.device)
        whole = config.draft_vocab_size in (None, config.vocab_size)
        self.layer = self._layer(self._attention) if whole and isinstance(self._attention, MlaAttention) else None

    def _layer(self, attention: "MlaAttention") -> DraftLayer:
        config = self._config
        return DraftLayer(
            *(self._embedding_VD, self._input_norm, self._hidden_norm, attention.weights, self._o_proj),
            *(self._mlp_norm, self._gate_up, self._down, self._norm, self._head),
            *(config.rms_norm_eps, attention.scale, config.norm_before_residual, config.norm_output),
        )

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [..., rope width / 2], of integer positions."""
        angle = positions.float()[..., None] * self.inv_freq
        return angle.cos(), angle.sin()

    def pages(self, tokens: Tensor, tables: Tensor) -> DraftPages:
        """What `draft_pass` looks rows up in.

        tokens int64 [slots, the longest a slot can be]; tables int32 [slots, pages per slot].
        """
        return DraftPages(tokens, tables, *self.angles(torch.arange(tokens.shape[1], device=self.inv_freq.device)))

    def fuse(self, features_NF: Tensor, sources: Sequence[int] | None = None) -> Tensor:
        """The target's states side by side [N, states * D] -> fused features [T, D], of rows `sources` or of all."""
        features_NF, rows = features_NF.to(self._dtype), range(features_NF.shape[0]) if sources is None else sources
        return draft_fuse(features_NF, rows, self._fc_norms, self._fc, self._config.rms_norm_eps)

    def forward(self, inputs: Inputs, feature_TD: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
        """As `Eagle3.forward`: rows over pages -> (normed, fed), [R, D] each."""
        eps = self._config.rms_norm_eps
        embedding = self._embedding_VD[inputs.ids_T].to(self._dtype)
        _, embedding = add_norm(embedding, None, self._input_norm, eps)
        _, hidden = add_norm(feature_TD, None, self._hidden_norm, eps)
        rows_R = _finished(inputs)
        o_RHV = self._attention(torch.cat([embedding, hidden], -1), inputs, rows_R, plane)
        source = hidden if self._config.norm_before_residual else feature_TD
        residual = source.clone() if rows_R is None else source[rows_R]
        if not residual.shape[0]:
            return residual, residual
        partial = linear(o_RHV.flatten(1), self._o_proj, rounds(plane))
        residual, x = add_norm(residual, partial, self._mlp_norm, eps)
        partial = moe(x, self._gate_up, self._down, None, rounds(plane))
        residual, normed = add_norm(residual, partial, self._norm, eps)
        return normed, normed if self._config.norm_output else residual

    def logits(self, normed_RD: Tensor) -> Tensor:
        """[R, D], normed -> [R, draft vocabulary]."""
        return linear(normed_RD, self._head)


class MlaAttention:
    """Latent attention over the drafter's pages."""

    def __init__(self, config: Eagle3Config, reader: "_Reader", at: str) -> None:
        kv_b = reader.plain(f"{at}.kv_b_proj.weight").unflatten(0, (config.num_attention_heads, -1))
        w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        self.scale = config.softmax_scale
        self.weights = MlaWeights(
            w_a=reader.matrix(f"{at}.q_a_proj.weight", f"{at}.kv_a_proj_with_mqa.weight"),
            q_norm=reader.vector(f"{at}.q_a_layernorm.weight"),
            kv_norm=reader.vector(f"{at}.kv_a_layernorm.weight"),
            w_q=reader.matrix(f"{at}.q_b_proj.weight"),
            w_uk=Matrix.prepare(w_uk.transpose(1, 2).contiguous()),
            w_uv=Matrix.prepare(w_uv.contiguous()),
            eps=config.rms_norm_eps,
        )

    def __call__(self, x: Tensor, inputs: Inputs, rows_R: Tensor | None, plane: Tensor) -> Tensor:
        """[T, 2 D] -> [R, H, V]. Writes the plane."""
        w = self.weights
        q = mla_qkv(x, w, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane)
        q = q if rows_R is None else q[rows_R]
        o = q.new_empty(q.shape[0], w.heads, w.value)
        first = 0
        for chunk in inputs.chunks:
            rows = slice(first, first := first + chunk.count)
            mla_prefill(q[rows], w, self.scale, chunk.start, inputs.tables[chunk.slot], plane, o[rows], SKIP)
        if first < q.shape[0]:
            queries = _from(first, q), inputs.slots_Q, inputs.lengths_Q
            mla_decode(q, w, self.scale, *queries, inputs.tables, plane, o, SKIP)
        return o


class LlamaAttention:
    """Grouped-query attention over the drafter's pages."""

    def __init__(self, config: Eagle3Config, reader: "_Reader", at: str) -> None:
        self._scale, self._width = config.softmax_scale, config.head_dim
        self._heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        self._qkv = reader.matrix(*(f"{at}.{name}_proj.weight" for name in "qkv"))

    def __call__(self, x: Tensor, inputs: Inputs, rows_R: Tensor | None, plane: Tensor) -> Tensor:
        """[T, 2 D] -> [R, H, X]. Writes the plane."""
        q, k, v = linear(x, self._qkv).unflatten(-1, (-1, self._width)).split(self._heads, -2)
        cos, sin = inputs.cos_T[:, None], inputs.sin_T[:, None]
        row = torch.cat([rotate_halves(k.float(), cos, sin), v.float()], -2).flatten(-2)
        plane.view(-1, plane.shape[-1])[inputs.rows_T] = stored(row, plane.dtype)
        q = rotate_halves(q.float(), cos, sin).to(x.dtype)
        q = q if rows_R is None else q[rows_R]
        o = torch.empty_like(q)
        first = 0
        for chunk in inputs.chunks:
            rows = slice(first, first := first + chunk.count)
            gqa_prefill(q[rows], self._scale, chunk.start, inputs.tables[chunk.slot], plane, o[rows], SKIP)
        queries = _from(first, q), inputs.slots_Q, inputs.lengths_Q
        gqa_decode(q, self._scale, *queries, inputs.tables, plane, o, SKIP)
        return o


class _Reader:
    def __init__(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        self._state = state
        self._device = device

    def plain(self, name: str) -> Tensor:
        return self._state[name].detach().to(self._device, torch.bfloat16)

    def vector(self, name: str) -> Tensor:
        """In float32, and its own memory: training goes on beside what is served."""
        return self._state[name].detach().to(self._device, torch.float32, copy=True)

    def matrix(self, *names: str) -> Matrix:
        weights = [self.plain(name) for name in names]
        return Matrix.prepare(weights[0] if len(weights) == 1 else torch.cat(weights))


def _finished(inputs: Inputs) -> Tensor | None:
    """int64 [R]: the tokens of the chunks, then the queries; None where that is every token in order."""
    if not inputs.chunks:
        return None if inputs.tokens_Q.shape[0] == inputs.ids_T.shape[0] else inputs.tokens_Q.long()
    chunks = [torch.arange(c.first, c.first + c.count, device=inputs.tokens_Q.device) for c in inputs.chunks]
    return torch.cat([*chunks, inputs.tokens_Q.long()])


def _from(first: int, q_RHX: Tensor) -> Tensor:
    """int32 [R - first]: the rows that decode."""
    return torch.arange(first, q_RHX.shape[0], dtype=torch.int32, device=q_RHX.device)
