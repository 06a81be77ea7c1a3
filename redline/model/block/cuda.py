"""A block drafter on a GPU: its weights in the layouts of the GPU kernels, and its passes over pages.

The arithmetic is that of `serve.ServedBlock`, with the launches of EAGLE-3's Llama-style layer (`eagle3/cuda.py`), and
nothing of it needs the host, so a round can be captured in a CUDA graph. The rows of a block are stored in the places
that follow the context, where the block's queries read them like any other row; true rows overwrite them. Tensor
parallel ranks divide the layers' heads and MLPs, and the head (`draft_shard.py`); every rank writes whole rows.

T positions whose states are given, R blocks, B positions of a block, Q = R B, D hidden, H query heads, G key heads,
X head width.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.kernels.by_chip import best
from redline.kernels.cuda.collectives.rank_links import ATTENTION, EXPERTS, Linked
from redline.kernels.cuda.collectives.rank_links import MOST_TOKENS as MOST_TOKENS_OF_RANKS
from redline.kernels.cuda.decode.dense import MOST_STREAMED, MOST_TOKENS
from redline.kernels.cuda.decode.gates import HALF, gates, gates_weight
from redline.kernels.cuda.decode.gqa import MOST_GROUP, MOST_WIDTH, attend_grouped, keep_rows
from redline.kernels.cuda.decode.head import logits_of
from redline.kernels.cuda.decode.project_out import project_out
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.cuda.linear import product
from redline.kernels.cuda.prefill.rowwise import norm_rows
from redline.kernels.group import ALONE, Group
from redline.messages.job import PAGE_TOKENS
from redline.model.block.config import BlockConfig
from redline.model.block.serve import BlockRows, block_ids
from redline.model.draft_shard import body_ranks, head_ranks
from redline.model.k2.cpu import Cut
from redline.model.k2.shard import WHOLE, Shard
from redline.ops.add_norm import rms_norm
from redline.ops.mla import angles


def check(config: BlockConfig, place: str) -> None:
    """CheckpointError, with the field and the supported values, if the GPU kernels do not support a drafter's sizes."""
    heads, most = config.num_attention_heads, config.num_key_value_heads * MOST_GROUP
    for name, value, fits, supported in (
        ("intermediate_size", config.intermediate_size, config.intermediate_size % HALF == 0, f"multiples of {HALF}"),
        ("head_dim", config.head_dim, config.head_dim <= MOST_WIDTH, f"{MOST_WIDTH} at most"),
        ("num_attention_heads", heads, heads <= most, f"{most} at most, {MOST_GROUP} for each key head"),
        ("sliding_window", config.windows, not any(config.windows), "layers without a window"),
    ):
        if not fits:
            raise CheckpointError(f"{place}: {name} is {value}; the GPU's kernels take {supported}")


class GpuBlockLayer(NamedTuple):
    """One layer. Norms are float32."""

    input_norm: Tensor
    q: Tiled
    kv: Tiled  # [2 G X, D]: keys, then values
    q_norm: Tensor
    k_norm: Tensor
    o: Tiled
    mlp_norm: Tensor
    gate_up: Tiled
    down: Tiled
    width: int  # of the MLP


class GpuServedBlock:
    """The GPU counterpart of `serve.ServedBlock`, with its methods for captured steps."""

    def __init__(
        self,
        config: BlockConfig,
        state: Mapping[str, Tensor],
        embedding_VD: Tensor,
        target_head: Tiled,
        ids: Tensor | None,
        group: Group = ALONE,
    ) -> None:
        """state: by the file's names, whole on every rank. target_head: this rank's part. ids: tokens of the draft
        vocabulary; None: all. group: the layers are divided if the ranks have peer access, and if the sizes divide
        evenly.
        """
        device = embedding_VD.device
        self.config = config
        self._embedding_VD, self._ids = embedding_VD, None if ids is None else ids.to(device)
        self._links = group.links if isinstance(group, Linked) and body_ranks(config, group.ranks) > 1 else None
        shard = WHOLE if self._links is None else Shard(group.rank, group.ranks)
        self._key_heads = config.num_key_value_heads // shard.ranks  # that this rank's heads read
        self._first_key_head = shard.rank * self._key_heads
        self._together = (MOST_STREAMED if self._links is None else MOST_TOKENS_OF_RANKS) // config.block_size

        def plain(*names: str, cut: Cut = lambda whole: whole) -> Tensor:
            return torch.cat([cut(state[f"{name}.weight"].detach()).to(device, torch.bfloat16) for name in names])

        def vector(name: str) -> Tensor:
            return state[f"{name}.weight"].detach().to(device, torch.float32, copy=True)

        def layer(at: str) -> GpuBlockLayer:
            gate_up = plain(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj", cut=shard.rows)
            return GpuBlockLayer(
                input_norm=vector(f"{at}.input_layernorm"),
                q=Tiled.prepare(plain(f"{at}.self_attn.q_proj", cut=shard.rows)),
                kv=Tiled.prepare(plain(f"{at}.self_attn.k_proj", f"{at}.self_attn.v_proj")),
                q_norm=vector(f"{at}.self_attn.q_norm"),
                k_norm=vector(f"{at}.self_attn.k_norm"),
                o=Tiled.prepare(plain(f"{at}.self_attn.o_proj", cut=shard.columns)),
                mlp_norm=vector(f"{at}.post_attention_layernorm"),
                gate_up=gates_weight(None, gate_up),
                down=Tiled.prepare(plain(f"{at}.mlp.down_proj", cut=shard.columns)),
                width=gate_up.shape[0] // 2,
            )

        self._fc, self._hidden_norm = Tiled.prepare(plain("fc")), vector("hidden_norm")
        self._layers = [layer(f"layers.{number}") for number in range(config.num_hidden_layers)]
        self._norm = vector("norm")
        self._group = group if head_ranks(config, group.ranks) > 1 else ALONE
        rows = Shard(self._group.rank, self._group.ranks).rows
        self._head = target_head if config.draft_vocab_size is None else Tiled.prepare(plain("lm_head", cut=rows))
        self._w1 = plain("markov_head.markov_w1") if config.markov_rank else None
        self._w2 = Tiled.prepare(plain("markov_head.markov_w2")) if config.markov_rank else None
        self.inv_freq = config.inv_freq().to(device)
        # Sums of squares for rows that are already normed: D of the head's input.
        self._normed = torch.full((1, MOST_TOKENS), float(config.hidden_size), device=device)

    def read(self, features_TF: Tensor, position_T: Tensor, rows_T: Tensor, plane: Tensor) -> None:
        """As `ServedBlock.read`."""
        fused = product(features_TF.to(torch.bfloat16).contiguous(), self._fc, torch.float32)
        context = norm_rows(fused, None, self._hidden_norm, self.config.rms_norm_eps)[1]
        cos, sin = angles(position_T, self.inv_freq)
        for number, layer in enumerate(self._layers):
            self._keep(layer, context, cos, sin, rows_T, self._plane(plane, number))

    def states(self, blocks: BlockRows, plane: Tensor) -> Tensor:
        """As `ServedBlock.states`, bf16; the blocks' rows are written to the plane. At most 256 positions together, 64
        over several ranks, whose sublayers end in an all-reduce."""
        most = self._together
        parts = [self._states(_cut(blocks, first, most), plane) for first in range(0, len(blocks.starts_R), most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _states(self, blocks: BlockRows, plane: Tensor) -> Tensor:
        config, eps, device = self.config, self.config.rms_norm_eps, blocks.starts_R.device
        count, size = len(blocks.starts_R), config.block_size
        of_block = torch.arange(size, device=device)
        position_RB = blocks.starts_R[:, None] + of_block
        used_RB = of_block < blocks.counts_R[:, None]
        place_RB = position_RB * used_RB
        page_RB = torch.gather(blocks.tables_RP, 1, place_RB // PAGE_TOKENS).long()
        spare_Q = blocks.spare_page * PAGE_TOKENS + torch.arange(count * size, device=device) % PAGE_TOKENS
        row_RB = torch.where(used_RB, page_RB * PAGE_TOKENS + place_RB % PAGE_TOKENS, spare_Q.view(count, size))
        cos, sin = angles(position_RB.flatten(), self.inv_freq)
        query_Q = torch.arange(count * size, dtype=torch.int32, device=device)
        slots_Q = query_Q // size
        lengths_Q = (blocks.starts_R + blocks.counts_R).clamp_min(1).int().repeat_interleave(size)
        residual = self._embedding_VD[block_ids(blocks.anchors_R, config).flatten()].float()
        for number, layer in enumerate(self._layers):
            own = self._plane(plane, number)
            normed = norm_rows(residual, None, layer.input_norm, eps)[1]
            q = product(normed, layer.q, torch.float32).unflatten(1, (-1, config.head_dim))
            self._keep(layer, normed, cos, sin, row_RB.flatten(), own)
            y = attend_grouped(
                *(rms_norm(q, layer.q_norm, eps).contiguous(), cos, sin, query_Q, slots_Q, lengths_Q, blocks.tables_RP),
                *(own, self._key_heads, config.softmax_scale, blocks.longest + size, 0, self._first_key_head),
            )
            residual, x, squares = project_out(y, layer.o, residual, layer.mlp_norm, None, self._links, ATTENTION)
            h = gates(x, squares, layer.gate_up, 0, layer.width, eps)[1]
            residual = project_out(h, layer.down, residual, self._norm, None, self._links, EXPERTS)[0]
        normed = norm_rows(residual, None, self._norm, eps)[1]
        return normed[:, : config.hidden_size].unflatten(0, (count, size))

    def logits(self, normed_RD: Tensor) -> Tensor:
        """As `ServedBlock.logits`; all ranks must call it."""
        return self._group.all_gather(logits_of(normed_RD.contiguous(), self._head, self._normed))

    def biased(self, logits_RV: Tensor, before_R: Tensor) -> Tensor:
        """As `ServedBlock.biased`."""
        if self._w1 is None or self._w2 is None:
            return logits_RV
        return logits_RV + product(self._w1[before_R], self._w2, torch.float32)

    def likeliest(self, logits_RV: Tensor) -> Tensor:
        """As `ServedBlock.likeliest`."""
        found = best(logits_RV.contiguous())[0]
        return found if self._ids is None else self._ids[found]

    def _keep(
        self, layer: GpuBlockLayer, x_TD: Tensor, cos: Tensor, sin: Tensor, rows_T: Tensor, plane: Tensor
    ) -> None:
        """Stores the rows of these inputs."""
        config = self.config
        k, v = product(x_TD, layer.kv, torch.float32).unflatten(1, (2, -1, config.head_dim)).unbind(1)
        kv = torch.cat([rms_norm(k, layer.k_norm, config.rms_norm_eps), v], 1).flatten(1)
        keep_rows(kv, cos, sin, rows_T, plane, config.num_key_value_heads)

    def _plane(self, plane: Tensor, layer: int) -> Tensor:
        """A layer's part of every row, [pages, 64, 2 G X]."""
        width = self.config.row_width
        return plane[..., layer * width : (layer + 1) * width]


def _cut(blocks: BlockRows, first: int, count: int) -> BlockRows:
    rows = slice(first, first + count)
    return blocks._replace(
        anchors_R=blocks.anchors_R[rows],
        starts_R=blocks.starts_R[rows],
        counts_R=blocks.counts_R[rows],
        tables_RP=blocks.tables_RP[rows],
    )
