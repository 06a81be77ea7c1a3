"""A drafter's weights in the layouts of the ops, on its target's device: what `forward.py` computes with.

N positions whose states are given, F width of the concatenated states, R finished rows, D hidden.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from redline.kernels.by_chip import linear
from redline.kernels.cpu.blocks.draft_pass import DraftLayer, DraftPages, DraftRows
from redline.kernels.cpu.panels import Matrix
from redline.kernels.inputs import Inputs
from redline.model.eagle3.config import Eagle3Config
from redline.model.eagle3.forward import layer
from redline.model.eagle3.one_call import draft_fuse, draft_pass
from redline.model.k2.cpu import K2
from redline.ops.formats import int8_round
from redline.ops.gqa import GqaWeights
from redline.ops.mla import MlaWeights, angles

_ROWS_AT_ONCE = 4096  # rows of a head that are rounded together; bounds the float32 copies


class Served:
    """A drafter's weights in the layouts of the ops, made from its state and from its target model.

    Weights are copied if an op needs another layout.

    layer   all weights but the fusion's, for `draft_pass`, and for `draft_chain` if `chains` is true
    chains  whether all drafts can be computed in one call: the head has the whole vocabulary in order, and attention
            is latent
    """

    def __init__(self, config: Eagle3Config, state: Mapping[str, Tensor], model: K2, head_bits: int = 16) -> None:
        """head_bits: 16, or 8: the head gives the results of an 8-bit head, but is stored as bf16 and no faster."""
        reader = _Reader(state, model.device)
        at = "layers.0"
        self._eps = config.rms_norm_eps
        self._dtype = model.dtype
        self._fc = reader.matrix("fc.weight")
        norms = [reader.vector(f"fc_norm.{i}.weight") for i in range(len(config.layer_ids))] if config.fc_norm else []
        self._fc_norms = torch.stack(norms) if norms else None
        mla = config.architecture == "mla"
        if config.draft_vocab_size is not None:
            head = reader.matrix("lm_head.weight")
        else:  # drafts are computed in one call, which does not support several ranks
            head = model.head if model.group.ranks == 1 else Matrix.prepare(model.whole_head())
        self.layer = DraftLayer(
            embedding_VD=model.embedding_VD,
            input_norm=reader.vector(f"{at}.input_layernorm.weight"),
            hidden_norm=reader.vector(f"{at}.hidden_norm.weight"),
            attention=(_latent if mla else _grouped)(config, reader, f"{at}.self_attn"),
            o_proj=reader.matrix(f"{at}.self_attn.o_proj.weight"),
            mlp_norm=reader.vector(f"{at}.post_attention_layernorm.weight"),
            gate_up=reader.matrix(f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"),
            down=reader.matrix(f"{at}.mlp.down_proj.weight"),
            norm=reader.vector("norm.weight"),
            head=head if head_bits == 16 else Matrix.prepare(_in_8_bits(head.dense())),
            eps=config.rms_norm_eps,
            softmax_scale=config.softmax_scale,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
        )
        self.chains = mla and config.draft_vocab_size in (None, config.vocab_size)
        self.inv_freq = config.inv_freq().to(model.device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [..., rope width / 2], of integer positions."""
        return angles(positions, self.inv_freq)

    def pages(self, tokens: Tensor, tables: Tensor) -> DraftPages:
        """The tensors in which `draft_pass` looks up rows.

        tokens int64 [slots, maximum length of a slot]; tables int32 [slots, pages per slot].
        """
        return DraftPages(tokens, tables, *self.angles(torch.arange(tokens.shape[1], device=self.inv_freq.device)))

    def fuse(self, features_NF: Tensor, sources: Sequence[int] | None = None) -> Tensor:
        """Concatenated target states [N, F] -> fused features [T, D], of rows `sources` or of all."""
        features_NF, rows = features_NF.to(self._dtype), range(features_NF.shape[0]) if sources is None else sources
        return draft_fuse(features_NF, rows, self._fc_norms, self._fc, self._eps)

    def read(self, feature_TD: Tensor, pages: DraftPages, rows: DraftRows, plane: Tensor) -> tuple[Tensor, Tensor]:
        """A pass that looks up its inputs by row -> (normed, fed), [R, D] each, of its queries."""
        return draft_pass(feature_TD, self.layer, pages, rows, plane)

    def forward(self, inputs: Inputs, feature_TD: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
        """As `Eagle3.forward`: runs rows with paged KV -> (normed, fed), [R, D] each."""
        return layer(self.layer, inputs, feature_TD, plane)

    def logits(self, normed_RD: Tensor) -> Tensor:
        """[R, D], normed -> [R, draft vocabulary]."""
        return linear(normed_RD, self.layer.head)


def _latent(config: Eagle3Config, reader: "_Reader", at: str) -> MlaWeights[Matrix]:
    kv_b = reader.plain(f"{at}.kv_b_proj.weight").unflatten(0, (config.num_attention_heads, -1))
    w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    return MlaWeights(
        w_a=reader.matrix(f"{at}.q_a_proj.weight", f"{at}.kv_a_proj_with_mqa.weight"),
        q_norm=reader.vector(f"{at}.q_a_layernorm.weight"),
        kv_norm=reader.vector(f"{at}.kv_a_layernorm.weight"),
        w_q=reader.matrix(f"{at}.q_b_proj.weight"),
        w_uk=Matrix.prepare(w_uk.transpose(1, 2).contiguous()),
        w_uv=Matrix.prepare(w_uv.contiguous()),
        eps=config.rms_norm_eps,
    )


def _grouped(config: Eagle3Config, reader: "_Reader", at: str) -> GqaWeights[Matrix]:
    qkv = reader.matrix(*(f"{at}.{name}_proj.weight" for name in "qkv"))
    return GqaWeights(qkv, config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def _in_8_bits(head_VD: Tensor) -> Tensor:
    """bf16 [V, D]: the head quantized to 8 bits and dequantized again."""
    rounded = (int8_round(rows) for rows in head_VD.split(_ROWS_AT_ONCE))
    return torch.cat([(q * scale[:, None]).to(torch.bfloat16) for q, scale in rounded])


class _Reader:
    def __init__(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        self._state = state
        self._device = device

    def plain(self, name: str) -> Tensor:
        return self._state[name].detach().to(self._device, torch.bfloat16)

    def vector(self, name: str) -> Tensor:
        """In float32, in memory of its own: training may continue while the weights are served."""
        return self._state[name].detach().to(self._device, torch.float32, copy=True)

    def matrix(self, *names: str) -> Matrix:
        weights = [self.plain(name) for name in names]
        return Matrix.prepare(weights[0] if len(weights) == 1 else torch.cat(weights))
