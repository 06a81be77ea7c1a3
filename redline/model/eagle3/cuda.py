"""A drafter on a GPU: its weights in the layouts of the GPU kernels, and its forward pass with paged KV.

The arithmetic is that of `serve.Served`. It runs with the same launches as a dense layer of a decode step, and tensor
parallel ranks divide it in the same way. Up to 64 rows the pass needs nothing from the host, so it can be captured in a
CUDA graph. `_Latent` and `_Grouped` implement the two kinds of attention: which KV a row writes to its page, and how
finished rows attend.

T rows of a pass, R finished rows, D hidden, H heads, S states of the target that are read.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.kernels.cpu.blocks.draft_pass import DraftPages, DraftRows
from redline.kernels.cuda.block import GpuMla
from redline.kernels.cuda.collectives.rank_links import ATTENTION, EXPERTS, Linked
from redline.kernels.cuda.collectives.rank_links import MOST_TOKENS as MOST_TOKENS_OF_RANKS
from redline.kernels.cuda.decode.absorb import absorb
from redline.kernels.cuda.decode.attend import ROPE, attend
from redline.kernels.cuda.decode.dense import MOST_STREAMED, MOST_TOKENS
from redline.kernels.cuda.decode.drafter_rows import join_rows, norm_states
from redline.kernels.cuda.decode.gates import HALF, gates, gates_weight
from redline.kernels.cuda.decode.gqa import MOST_GROUP, MOST_WIDTH, attend_grouped, keep_rows
from redline.kernels.cuda.decode.head import logits_of
from redline.kernels.cuda.decode.project_a import project_a
from redline.kernels.cuda.decode.project_out import project_out
from redline.kernels.cuda.decode.project_q import project_q
from redline.kernels.cuda.decode.unabsorb import unabsorb
from redline.kernels.cuda.layouts.tiled import PAD_K, Tiled, Tiled8, padded
from redline.kernels.cuda.linear import product
from redline.kernels.cuda.prefill.rowwise import norm_rows, rotate_heads, split_a
from redline.kernels.group import ALONE, Group
from redline.kernels.inputs import Inputs
from redline.messages.job import PAGE_TOKENS
from redline.model.draft_shard import body_ranks, head_ranks
from redline.model.eagle3.config import Eagle3Config
from redline.model.eagle3.forward import SKIP, looked_up
from redline.model.k2.cpu import Cut
from redline.model.k2.shard import WHOLE, Shard
from redline.ops.mla import angles
from redline.ops.staged import staged


def check(config: Eagle3Config, place: str) -> None:
    """CheckpointError, with the field and the supported values, if the GPU kernels do not support a drafter's size.

    config: as `Eagle3.open` returns it. place: prefix of the message.
    """
    sizes: list[tuple[str, int, bool, str]] = [
        ("intermediate_size", config.intermediate_size, config.intermediate_size % HALF == 0, f"multiples of {HALF}"),
    ]
    if config.architecture == "mla":
        rank = config.kv_lora_rank
        sizes += [
            ("kv_lora_rank", rank, rank % 64 == 0 and 64 <= rank <= 512, "multiples of 64 up to 512"),
            ("qk_rope_head_dim", config.qk_rope_head_dim, config.qk_rope_head_dim == ROPE, f"{ROPE}"),
        ]
    else:
        heads, most = config.num_attention_heads, config.num_key_value_heads * MOST_GROUP
        sizes += [
            ("head_dim", config.head_dim, config.head_dim <= MOST_WIDTH, f"{MOST_WIDTH} at most"),
            ("num_attention_heads", heads, heads <= most, f"{most} at most, {MOST_GROUP} for each key head"),
        ]
    for name, value, fits, supported in sizes:
        if not fits:
            raise CheckpointError(f"{place}: {name} is {value}; the GPU's kernels take {supported}")


class GpuServed:
    """A drafter's weights in tiles, made from its state and from the target's embedding and head.

    The GPU counterpart of `serve.Served`.
    """

    def __init__(
        self,
        config: Eagle3Config,
        state: Mapping[str, Tensor],
        embedding_VD: Tensor,
        target_head: Tiled,
        head_bits: int = 16,
        group: Group = ALONE,
    ) -> None:
        """state: by our names. head_bits: 16, or 8 to quantize the drafter's head, or its copy of the target's head.

        group: the tensor parallel ranks. They divide the head (target_head is this rank's part) and, if the ranks have
        peer access to one another's memory and the sizes divide evenly (`shard.py`), the layer. Each rank passes the
        whole state.
        """
        device, at = embedding_VD.device, "layers.0"
        reader = _Reader(state, device)
        self._config = config
        self._embedding_VD = embedding_VD
        self._fc = reader.tiled("fc.weight")
        norms = [reader.vector(f"fc_norm.{i}.weight") for i in range(len(config.layer_ids))] if config.fc_norm else []
        self._fc_norms = torch.stack(norms) if norms else None
        self._input_norm = reader.vector(f"{at}.input_layernorm.weight")
        self._hidden_norm = reader.vector(f"{at}.hidden_norm.weight")
        self._links = group.links if isinstance(group, Linked) and body_ranks(config, group.ranks) > 1 else None
        shard = WHOLE if self._links is None else Shard(group.rank, group.ranks)
        if self._links is not None:
            sent = padded(config.hidden_size, PAD_K) * MOST_TOKENS_OF_RANKS
            assert sent <= self._links.rooms.sums, "a drafter is as wide as its target, so its all-reduce fits"
        self._attention = (_Latent if config.architecture == "mla" else _Grouped)(
            config, reader, f"{at}.self_attn", shard
        )
        self._o_proj = reader.tiled(f"{at}.self_attn.o_proj.weight", cut=shard.columns)
        self._mlp_norm = reader.vector(f"{at}.post_attention_layernorm.weight")
        gate_up = reader.plain(f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight", cut=shard.rows)
        self._gates, self._width = gates_weight(None, gate_up), gate_up.shape[0] // 2
        self._down = reader.tiled(f"{at}.mlp.down_proj.weight", cut=shard.columns)
        self._norm = reader.vector("norm.weight")
        shared = config.draft_vocab_size is None
        self._group = group if head_ranks(config, group.ranks) > 1 else ALONE
        own = None if shared else Shard(self._group.rank, self._group.ranks).rows(state["lm_head.weight"].detach())
        self._head: Tiled | Tiled8
        if head_bits == 8:
            self._head = Tiled8.prepare(target_head if own is None else own, device)
        else:
            self._head = target_head if own is None else Tiled.prepare(own.to(device, torch.bfloat16))
        self.inv_freq = config.inv_freq().to(device)
        # Sums of squares for rows that are already normed: D of the head's input.
        self._normed = torch.full((1, MOST_TOKENS), float(config.hidden_size), device=device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [..., rope width / 2], of integer positions."""
        return angles(positions, self.inv_freq)

    def pages(self, tokens: Tensor, tables: Tensor) -> DraftPages:
        """The tensors that rows are looked up in.

        tokens int64 [slots, maximum length of a slot]; tables int32 [slots, pages per slot].
        """
        return DraftPages(tokens, tables, *self.angles(torch.arange(tokens.shape[1], device=self.inv_freq.device)))

    def read(self, feature_TD: Tensor, pages: DraftPages, rows: DraftRows, plane: Tensor) -> tuple[Tensor, Tensor]:
        """A pass that looks up its inputs by row -> (normed, fed), bf16 [R, D] each, of its queries."""
        return self.forward(looked_up(pages, rows), feature_TD, plane)

    def fuse(self, features_NF: Tensor, sources: Sequence[int] | None = None) -> Tensor:
        """Concatenated target states [N, S D] -> fused features bf16 [T, D], of rows `sources` or of all."""
        x = features_NF if sources is None else features_NF[staged(sources, features_NF.device)]
        x = x.to(torch.bfloat16)
        if self._fc_norms is not None:
            x = norm_states(x.contiguous(), self._fc_norms, self._eps)
        return product(x.contiguous(), self._fc, torch.bfloat16)

    @property
    def _eps(self) -> float:
        return self._config.rms_norm_eps

    def forward(self, inputs: Inputs, feature_TD: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the rows with paged KV -> (normed, fed), bf16 [R, D] each, of the rows `inputs.tokens_Q`.

        inputs has no chunks: for a prompt only KV is written, and the rows that draft are finished as queries.
        """
        assert not inputs.chunks, "rows of a drafter are finished as queries"
        x, residual = join_rows(
            *(inputs.ids_T, self._embedding_VD, self._input_norm, feature_TD.contiguous(), self._hidden_norm),
            *(inputs.tokens_Q, self._config.norm_before_residual, self._eps),
        )
        q, at_Q = self._attention.project(x, inputs, plane)
        if not residual.shape[0]:
            return residual.to(torch.bfloat16), residual.to(torch.bfloat16)
        most = MOST_STREAMED if self._links is None else MOST_TOKENS_OF_RANKS
        groups = [slice(first, first + most) for first in range(0, len(residual), most)]
        parts = [self._finish(residual[rows], q, at_Q[rows], inputs, rows, plane) for rows in groups]
        if len(parts) == 1:
            return parts[0]
        normed, fed = zip(*parts, strict=True)
        return torch.cat(normed), torch.cat(fed)

    def _finish(
        self, residual: Tensor, q: Tensor, at_Q: Tensor, inputs: Inputs, rows: slice, plane: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention, MLP and last norm of up to 256 rows (over several ranks 64; both sublayers end in an all-reduce).

        at_Q: as `project` returns it.
        """
        eps = self._eps
        y = self._attention.attend(q, at_Q, inputs, rows, plane)
        residual, x, squares = project_out(y, self._o_proj, residual, self._mlp_norm, None, self._links, ATTENTION)
        _, h, _, _ = gates(x, squares, self._gates, 0, self._width, eps)
        residual, _, _ = project_out(h, self._down, residual, self._norm, None, self._links, EXPERTS)
        residual, normed = norm_rows(residual, None, self._norm, eps)
        normed = normed[:, : self._config.hidden_size]
        return normed, normed if self._config.norm_output else residual.to(torch.bfloat16)

    def logits(self, normed_RD: Tensor) -> Tensor:
        """bf16 [R, D], normed -> float32 [R, draft vocabulary]."""
        return self._group.all_gather(logits_of(normed_RD, self._head, self._normed))


class _Reader:
    def __init__(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        self._state = state
        self._device = device

    def plain(self, *names: str, cut: Cut = lambda whole: whole) -> Tensor:
        return torch.cat([cut(self._state[name].detach()).to(self._device, torch.bfloat16) for name in names])

    def vector(self, name: str) -> Tensor:
        """In float32, in memory of its own: training may continue while the weights are served."""
        return self._state[name].detach().to(self._device, torch.float32, copy=True)

    def tiled(self, *names: str, cut: Cut = lambda whole: whole) -> Tiled:
        return Tiled.prepare(self.plain(*names, cut=cut))


class _Latent:
    """Attention of a rank's heads over latents. Every rank writes each row's latent and rotated key."""

    def __init__(self, config: Eagle3Config, reader: _Reader, at: str, shard: Shard) -> None:
        heads = config.num_attention_heads // shard.ranks
        kv_b = reader.plain(f"{at}.kv_b_proj.weight", cut=shard.rows).unflatten(0, (heads, -1))
        w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        self._scale = config.softmax_scale
        self._w = GpuMla(
            w_a=reader.tiled(f"{at}.q_a_proj.weight", f"{at}.kv_a_proj_with_mqa.weight"),
            q_norm=reader.vector(f"{at}.q_a_layernorm.weight"),
            kv_norm=reader.vector(f"{at}.kv_a_layernorm.weight"),
            w_q=reader.tiled(f"{at}.q_b_proj.weight", cut=shard.rows),
            w_uk=Tiled.prepare(w_uk.transpose(1, 2).contiguous()),
            w_uv=Tiled.prepare(w_uv.contiguous()),
            eps=config.rms_norm_eps,
        )
        # Sums of squares for rows that are already normed: 2 D of the attention's input.
        squares = 2 * config.hidden_size * (1 - config.rms_norm_eps)
        self._normed_inputs = torch.full((1, MOST_STREAMED), squares, device=w_uk.device)

    def project(self, x: Tensor, inputs: Inputs, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the rows' latents. -> rotated queries [., H, N + P], and int32 [R], the query of each finished row."""
        w = self._w
        if x.shape[0] <= MOST_STREAMED:
            squares = self._normed_inputs[:, : -(-x.shape[0] // MOST_TOKENS) * MOST_TOKENS].contiguous()
            q_a, q_squares, kv = project_a(x, squares, w.w_a, w.q_norm, w.eps)
            q = project_q(
                *(q_a, q_squares, w.w_q, w.heads, kv, w.kv_norm),
                *(inputs.cos_T, inputs.sin_T, inputs.rows_T, plane, w.eps),
            )
            return q, inputs.tokens_Q
        a = product(x, w.w_a, torch.float32)
        q_a = split_a(a, w.q_norm, w.kv_norm, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane, w.eps)
        if not inputs.tokens_Q.shape[0]:  # a prompt without drafting: only its latents are needed
            return q_a[:0], inputs.tokens_Q
        rows_R = inputs.tokens_Q.long()
        q = product(q_a[rows_R], w.w_q, torch.bfloat16).view(rows_R.shape[0], w.heads, w.width)
        q = rotate_heads(q, inputs.cos_T[rows_R], inputs.sin_T[rows_R])
        return q, torch.arange(rows_R.shape[0], dtype=torch.int32, device=x.device)

    def attend(self, q: Tensor, at_Q: Tensor, inputs: Inputs, rows: slice, plane: Tensor) -> Tensor:
        """-> bf16 [R, H V padded], of the finished rows `rows`."""
        contexts = at_Q, inputs.slots_Q[rows], inputs.lengths_Q[rows], inputs.tables
        parts = attend(absorb(q, self._w.w_uk), *contexts, plane, self._scale, _longest(inputs), SKIP)
        return unabsorb(*parts, self._w.w_uv)


class _Grouped:
    """Attention of a rank's heads with grouped keys and values. Each row writes those of all ranks, keys rotated."""

    def __init__(self, config: Eagle3Config, reader: _Reader, at: str, shard: Shard) -> None:
        self._scale = config.softmax_scale
        self._heads, self._key_heads = config.num_attention_heads // shard.ranks, config.num_key_value_heads
        self._own_key_heads = self._key_heads // shard.ranks
        self._first_key_head = shard.rank * self._own_key_heads
        self._w_q = reader.tiled(f"{at}.q_proj.weight", cut=shard.rows)
        self._w_kv = reader.tiled(f"{at}.k_proj.weight", f"{at}.v_proj.weight")

    def project(self, x: Tensor, inputs: Inputs, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the rows' keys and values. -> queries of the finished rows float32 [R, H, X], and the rows, int32."""
        kv = product(x, self._w_kv, torch.float32)
        keep_rows(kv, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane, self._key_heads)
        asked = x[inputs.tokens_Q.long()]
        q = product(asked, self._w_q, torch.float32) if len(asked) else kv.new_empty(0, self._w_q.outputs)
        return q.unflatten(1, (self._heads, -1)), inputs.tokens_Q

    def attend(self, q: Tensor, at_Q: Tensor, inputs: Inputs, rows: slice, plane: Tensor) -> Tensor:
        """-> bf16 [R, H X padded], of the finished rows `rows`."""
        given = q[rows], inputs.cos_T, inputs.sin_T, at_Q, inputs.slots_Q[rows], inputs.lengths_Q[rows]
        numbers = self._own_key_heads, self._scale, _longest(inputs), SKIP, self._first_key_head
        return attend_grouped(*given, inputs.tables, plane, *numbers)


def _longest(inputs: Inputs) -> int:
    return inputs.longest or inputs.tables.shape[1] * PAGE_TOKENS
