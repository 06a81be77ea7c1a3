"""A block drafter's weights in the layouts of the CPU's ops, and its passes over pages.

The drafter's plane has a row per layer for each token: the rotated keys and the values that the layer computes of the
token's context vector, at the token's own place. So a page depends only on tokens up to its end, and nothing has to be
computed again after a cached prefix or a KV transfer. The rows of a block itself are not stored here, since its tokens
are guesses, and its keys do not come from the target's states; a GPU stores them in places that true rows overwrite.

N positions whose states are given, R blocks, B positions of a block, D hidden, H query heads, G key heads, X head
width, W = 2 G X, S places of the longest context, V vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.by_chip import best, linear
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.attend_block import attend_block
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.panels import Matrix
from redline.model.block.config import BlockConfig
from redline.model.k2.cpu import K2
from redline.ops.add_norm import rms_norm
from redline.ops.gqa import heads_and_row
from redline.ops.mla import angles, stored


class BlockRows(NamedTuple):
    """The blocks of a pass."""

    anchors_R: Tensor  # int64: the last token of each slot
    starts_R: Tensor  # int64: its position; the context is all tokens before it
    counts_R: Tensor  # int64: positions of the block that are used; those after them are not seen, and mean nothing
    tables_RP: Tensor  # int32: the pages of each slot
    longest: int  # no start is larger
    spare_page: int = 0  # a GPU stores a block's rows; those of positions that are not used go to this page


class ServedLayer(NamedTuple):
    """One layer. Norms are float32."""

    input_norm: Tensor
    q: Matrix
    kv: Matrix  # [2 G X, D]: keys, then values
    q_norm: Tensor
    k_norm: Tensor
    o: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    window: int | None


class ServedBlock:
    """The weights that `read`, `states` and `logits` compute with; made from a drafter's state and its target."""

    def __init__(self, config: BlockConfig, state: Mapping[str, Tensor], model: K2, ids: Tensor | None) -> None:
        """model: on a CPU. ids: tokens of the draft vocabulary; None: all."""
        self.config = config
        self._embedding_VD, self._dtype, self._ids = model.embedding_VD, model.dtype, ids

        def plain(name: str) -> Tensor:
            return state[name].detach().to(torch.bfloat16)

        def vector(name: str) -> Tensor:
            return state[name].detach().to(torch.float32, copy=True)

        def matrix(*names: str) -> Matrix:
            weights = [plain(f"{name}.weight") for name in names]
            return Matrix.prepare(weights[0] if len(weights) == 1 else torch.cat(weights))

        self._fc, self._hidden_norm = matrix("fc"), vector("hidden_norm.weight")
        self._layers: list[ServedLayer] = []
        for number, window in enumerate(config.windows):
            at = f"layers.{number}"
            layer = ServedLayer(
                input_norm=vector(f"{at}.input_layernorm.weight"),
                q=matrix(f"{at}.self_attn.q_proj"),
                kv=matrix(f"{at}.self_attn.k_proj", f"{at}.self_attn.v_proj"),
                q_norm=vector(f"{at}.self_attn.q_norm.weight"),
                k_norm=vector(f"{at}.self_attn.k_norm.weight"),
                o=matrix(f"{at}.self_attn.o_proj"),
                mlp_norm=vector(f"{at}.post_attention_layernorm.weight"),
                gate_up=matrix(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                down=matrix(f"{at}.mlp.down_proj"),
                window=window,
            )
            self._layers.append(layer)
        self._norm = vector("norm.weight")
        if config.draft_vocab_size is not None:
            self._head = matrix("lm_head")
        else:
            assert isinstance(model.head, Matrix), "the CPU's model has a head in panels"
            self._head = model.head if model.group.ranks == 1 else Matrix.prepare(model.whole_head())
        self._w1 = plain("markov_head.markov_w1.weight") if config.markov_rank else None
        self._w2 = matrix("markov_head.markov_w2") if config.markov_rank else None
        self._confidence = None
        if config.confidence:
            weight, bias = (state[f"confidence_head.proj.{name}"].detach().float() for name in ("weight", "bias"))
            self._confidence = weight[0], bias[0]
        self.inv_freq = config.inv_freq()

    def read(self, features_TF: Tensor, position_T: Tensor, rows_T: Tensor, plane: Tensor) -> None:
        """Stores the context rows of the target's states of these positions.

        rows_T  int64: page * 64 + place in the page, of each
        plane   [pages, 64, layers x W]: written
        """
        config = self.config
        context_TD = _norm(linear(features_TF.to(self._dtype), self._fc), self._hidden_norm, config.rms_norm_eps)
        cos, sin = angles(position_T, self.inv_freq)
        for number, layer in enumerate(self._layers):
            row_TW = self._row(layer, context_TD, cos, sin)
            self._plane(plane, number).flatten(0, 1)[rows_T] = stored(row_TW, plane.dtype)

    def states(self, blocks: BlockRows, plane: Tensor) -> Tensor:
        """One pass over all blocks -> the head's inputs [R, B, D]; plane: only read."""
        config, eps = self.config, self.config.rms_norm_eps
        count, size = len(blocks.anchors_R), config.block_size
        position_RB = blocks.starts_R[:, None] + torch.arange(size)
        cos, sin = angles(position_RB.flatten(), self.inv_freq)
        residual = self._embedding_VD[block_ids(blocks.anchors_R, config).flatten()].to(self._dtype)
        for number, layer in enumerate(self._layers):
            normed = _norm(residual, layer.input_norm, eps)
            q = linear(normed, layer.q).unflatten(-1, (-1, config.head_dim))
            k, v = self._keys_values(layer, normed)
            q, row = heads_and_row(rms_norm(q, layer.q_norm, eps), k, v, cos, sin)
            q, row = (each.unflatten(0, (count, size)) for each in (q, row))
            mixed = self._attend(q, row, blocks, self._plane(plane, number), layer.window)
            added = linear(mixed.flatten(2).flatten(0, 1).to(self._dtype), layer.o)
            residual, normed = add_norm(residual, added, layer.mlp_norm, eps)
            residual = residual + moe(normed, layer.gate_up, layer.down, None, True)
        return _norm(residual, self._norm, eps).unflatten(0, (count, size))

    def _attend(self, q_RBHX: Tensor, own_RBW: Tensor, blocks: BlockRows, plane: Tensor, window: int | None) -> Tensor:
        """Attention of the blocks to contexts, and to their own rows -> float32 [R, B, H, X]. plane: a layer's."""
        return attend_block(
            (q_RBHX.float() * self.config.softmax_scale).contiguous(),
            own_RBW.contiguous(),
            blocks.starts_R,
            blocks.counts_R,
            blocks.tables_RP,
            plane,
            blocks.longest,
            window,
        )

    def _plane(self, plane: Tensor, layer: int) -> Tensor:
        """A layer's part of every row, [pages, 64, W]."""
        width = self.config.row_width
        return plane[..., layer * width : (layer + 1) * width]

    def logits(self, normed_RD: Tensor) -> Tensor:
        """The head's inputs -> float32 [R, draft vocabulary], without DSpark's bias."""
        return linear(normed_RD.contiguous(), self._head).float()

    def biased(self, logits_RV: Tensor, before_R: Tensor) -> Tensor:
        """The logits of one position of each block, with the bias by the token before it; DFlash has none."""
        if self._w1 is None or self._w2 is None:
            return logits_RV
        return logits_RV + linear(self._w1[before_R].to(self._dtype), self._w2).float()

    def acceptance(self, normed_RD: Tensor, logits_RV: Tensor, before_R: Tensor) -> list[float]:
        """The probability that each block's draft at a position is accepted if those before it are: by the confidence
        head; without one, the probability of the drafter's own argmax. logits_RV: as `biased` returns them."""
        if self._confidence is None:
            return logits_RV.softmax(-1).amax(-1).tolist()
        weight, bias = self._confidence
        if self._w1 is not None and weight.shape[0] > normed_RD.shape[1]:
            normed_RD = torch.cat([normed_RD, self._w1[before_R].to(normed_RD.dtype)], -1)
        return (normed_RD.float() @ weight + bias).sigmoid().tolist()

    def likeliest(self, logits_RV: Tensor) -> Tensor:
        """The argmax, int64 [R], as tokens of the target's vocabulary; for any input a token."""
        found = best(logits_RV.contiguous())[0]
        return found if self._ids is None else self._ids[found]

    def whole(self, logits_V: Tensor) -> Tensor:
        """Logits over the target's vocabulary, -inf for tokens that the drafter lacks."""
        if self._ids is None:
            return logits_V
        return logits_V.new_full((self.config.vocab_size,), -torch.inf).index_copy(0, self._ids, logits_V)

    def _keys_values(self, layer: ServedLayer, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> keys, normed and not rotated, and values [T, G, X]."""
        config = self.config
        k, v = linear(x_TD, layer.kv).unflatten(-1, (2, config.num_key_value_heads, config.head_dim)).unbind(1)
        return rms_norm(k, layer.k_norm, config.rms_norm_eps), v

    def _row(self, layer: ServedLayer, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        k, v = self._keys_values(layer, x_TD)
        return heads_and_row(k, k, v, cos, sin)[1]


def block_ids(anchors_R: Tensor, config: BlockConfig) -> Tensor:
    """The tokens of the blocks, int64 [R, B]: the anchor, then mask tokens."""
    masks = torch.full((1, config.block_size - 1), config.mask_token_id, device=anchors_R.device)
    return torch.cat([anchors_R[:, None], masks.expand(len(anchors_R), -1)], 1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_norm(x.contiguous(), None, weight, eps)[1]
