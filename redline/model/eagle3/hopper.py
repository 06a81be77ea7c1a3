"""A drafter with latent attention on a GPU: its weights in the layouts of the GPU's kernels, and its pass over pages.

The arithmetic is that of `serve.Served`, in the launches of a decode step's dense layer. Up to 64 rows that pass takes
nothing from the host, so it can be recorded.

T rows of a pass, R of them that are finished, D hidden, S states of the target that are read.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from redline.kernels.cpu.blocks.draft_pass import DraftPages, DraftRows
from redline.kernels.hopper.block import GpuMla
from redline.kernels.hopper.decode.absorb import absorb
from redline.kernels.hopper.decode.attend import attend
from redline.kernels.hopper.decode.dense import MOST_STREAMED, MOST_TOKENS
from redline.kernels.hopper.decode.drafter_rows import join_rows, norm_states
from redline.kernels.hopper.decode.gates import gates, gates_weight
from redline.kernels.hopper.decode.head import logits_of
from redline.kernels.hopper.decode.project_a import project_a
from redline.kernels.hopper.decode.project_out import project_out
from redline.kernels.hopper.decode.project_q import project_q
from redline.kernels.hopper.decode.unabsorb import unabsorb
from redline.kernels.hopper.layouts.tiled import Tiled
from redline.kernels.hopper.linear import product
from redline.kernels.hopper.prefill.rowwise import norm_rows, rotate_heads, split_a
from redline.kernels.inputs import Inputs
from redline.model.eagle3.config import Eagle3Config
from redline.model.eagle3.forward import SKIP, looked_up
from redline.ops.mla import angles
from redline.ops.staged import staged
from redline.wire.job import PAGE_TOKENS


class GpuServed:
    """A drafter's weights in tiles, made from its state and from the embedding and the head of its target.

    What `serve.Served` does, for latent attention alone.
    """

    recordable = True  # a pass takes nothing from the host

    def __init__(
        self, config: Eagle3Config, state: Mapping[str, Tensor], embedding_VD: Tensor, target_head: Tiled
    ) -> None:
        """state: by our names. AssertionError where the drafter's attention is not latent."""
        assert config.architecture == "mla", "the GPU's kernels serve drafters with latent attention"
        device, at = embedding_VD.device, "layers.0"

        def plain(*names: str) -> Tensor:
            return torch.cat([state[name].detach().to(device, torch.bfloat16) for name in names])

        def vector(name: str) -> Tensor:
            return state[name].detach().to(device, torch.float32, copy=True)

        self._config = config
        self._embedding_VD = embedding_VD
        self._fc = Tiled.prepare(plain("fc.weight"))
        norms = [vector(f"fc_norm.{i}.weight") for i in range(len(config.layer_ids))] if config.fc_norm else []
        self._fc_norms = torch.stack(norms) if norms else None
        self._input_norm = vector(f"{at}.input_layernorm.weight")
        self._hidden_norm = vector(f"{at}.hidden_norm.weight")
        kv_b = plain(f"{at}.self_attn.kv_b_proj.weight").unflatten(0, (config.num_attention_heads, -1))
        w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        self._attention = GpuMla(
            w_a=Tiled.prepare(plain(f"{at}.self_attn.q_a_proj.weight", f"{at}.self_attn.kv_a_proj_with_mqa.weight")),
            q_norm=vector(f"{at}.self_attn.q_a_layernorm.weight"),
            kv_norm=vector(f"{at}.self_attn.kv_a_layernorm.weight"),
            w_q=Tiled.prepare(plain(f"{at}.self_attn.q_b_proj.weight")),
            w_uk=Tiled.prepare(w_uk.transpose(1, 2).contiguous()),
            w_uv=Tiled.prepare(w_uv.contiguous()),
            eps=config.rms_norm_eps,
        )
        self._o_proj = Tiled.prepare(plain(f"{at}.self_attn.o_proj.weight"))
        self._mlp_norm = vector(f"{at}.post_attention_layernorm.weight")
        self._gates = gates_weight(None, plain(f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"))
        self._down = Tiled.prepare(plain(f"{at}.mlp.down_proj.weight"))
        self._norm = vector("norm.weight")
        self._head = target_head if config.draft_vocab_size is None else Tiled.prepare(plain("lm_head.weight"))
        self.inv_freq = config.inv_freq().to(device)
        # Sums of squares of rows whose norm is divided out already: 2 D of the attention's input, D of the head's.
        d = config.hidden_size
        self._normed_inputs = torch.full((1, MOST_STREAMED), 2 * d * (1 - config.rms_norm_eps), device=device)
        self._normed = torch.full((1, MOST_TOKENS), float(d), device=device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [..., rope width / 2], of integer positions."""
        return angles(positions, self.inv_freq)

    def pages(self, tokens: Tensor, tables: Tensor) -> DraftPages:
        """What rows are looked up in.

        tokens int64 [slots, the longest a slot can be]; tables int32 [slots, pages per slot].
        """
        return DraftPages(tokens, tables, *self.angles(torch.arange(tokens.shape[1], device=self.inv_freq.device)))

    def read(self, feature_TD: Tensor, pages: DraftPages, rows: DraftRows, plane: Tensor) -> tuple[Tensor, Tensor]:
        """A pass whose rows are looked up -> (normed, fed), bf16 [R, D] each, of its queries."""
        return self.forward(looked_up(pages, rows), feature_TD, plane)

    def fuse(self, features_NF: Tensor, sources: Sequence[int] | None = None) -> Tensor:
        """The target's states side by side [N, S D] -> fused features bf16 [T, D], of rows `sources` or of all."""
        x = features_NF if sources is None else features_NF[staged(sources, features_NF.device)]
        x = x.to(torch.bfloat16)
        if self._fc_norms is not None:
            x = norm_states(x.contiguous(), self._fc_norms, self._eps)
        return product(x.contiguous(), self._fc, torch.bfloat16)

    @property
    def _eps(self) -> float:
        return self._config.rms_norm_eps

    def forward(self, inputs: Inputs, feature_TD: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Rows over pages -> (normed, fed), bf16 [R, D] each, of the rows `inputs.tokens_Q`.

        inputs has no chunks: a prompt's rows are written, and only those that draft are finished, as queries.
        """
        assert not inputs.chunks, "rows of a drafter are finished as queries"
        x, residual = join_rows(
            *(inputs.ids_T, self._embedding_VD, self._input_norm, feature_TD.contiguous(), self._hidden_norm),
            *(inputs.tokens_Q, self._config.norm_before_residual, self._eps),
        )
        q, tokens_Q = self._queries(x, inputs, plane)
        if not residual.shape[0]:
            return residual.to(torch.bfloat16), residual.to(torch.bfloat16)
        parts = [
            self._finish(residual[rows], q, tokens_Q[rows], inputs, rows, plane) for rows in _groups(residual.shape[0])
        ]
        if len(parts) == 1:
            return parts[0]
        normed, fed = zip(*parts, strict=True)
        return torch.cat(normed), torch.cat(fed)

    def _queries(self, x: Tensor, inputs: Inputs, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the rows' latents. -> rotated queries [., H, N + P], and which of them each finished row takes."""
        w = self._attention
        if x.shape[0] <= MOST_STREAMED:
            squares = self._normed_inputs[:, : -(-x.shape[0] // MOST_TOKENS) * MOST_TOKENS].contiguous()
            q_a, q_squares, kv = project_a(x, squares, w.w_a, w.q_norm, self._eps)
            q = project_q(
                *(q_a, q_squares, w.w_q, w.heads, kv, w.kv_norm),
                *(inputs.cos_T, inputs.sin_T, inputs.rows_T, plane, w.eps),
            )
            return q, inputs.tokens_Q
        a = product(x, w.w_a, torch.float32)
        q_a = split_a(a, w.q_norm, w.kv_norm, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane, w.eps)
        if not inputs.tokens_Q.shape[0]:  # a prompt that nobody drafts from: its latents are all
            return q_a[:0], inputs.tokens_Q
        rows_R = inputs.tokens_Q.long()
        q = product(q_a[rows_R], w.w_q, torch.bfloat16).view(rows_R.shape[0], w.heads, w.width)
        q = rotate_heads(q, inputs.cos_T[rows_R], inputs.sin_T[rows_R])
        return q, torch.arange(rows_R.shape[0], dtype=torch.int32, device=x.device)

    def _finish(
        self, residual: Tensor, q: Tensor, tokens_Q: Tensor, inputs: Inputs, rows: slice, plane: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention, MLP and last norm of up to 64 rows."""
        w, eps = self._attention, self._eps
        longest = inputs.longest or inputs.tables.shape[1] * PAGE_TOKENS
        contexts = tokens_Q, inputs.slots_Q[rows], inputs.lengths_Q[rows], inputs.tables
        parts = attend(absorb(q, w.w_uk), *contexts, plane, self._config.softmax_scale, longest, SKIP)
        residual, x, squares = project_out(unabsorb(*parts, w.w_uv), self._o_proj, residual, self._mlp_norm)
        _, h, _, _ = gates(x, squares, self._gates, 0, self._config.intermediate_size, eps)
        residual, _, _ = project_out(h, self._down, residual, self._norm)
        residual, normed = norm_rows(residual, None, self._norm, eps)
        normed = normed[:, : self._config.hidden_size]
        return normed, normed if self._config.norm_output else residual.to(torch.bfloat16)

    def logits(self, normed_RD: Tensor) -> Tensor:
        """bf16 [R, D], normed -> float32 [R, draft vocabulary]."""
        return logits_of(normed_RD, self._head, self._normed)


def _groups(rows: int) -> list[slice]:
    """The finished rows, in parts that the kernels of a decode step take."""
    return [slice(first, min(first + MOST_STREAMED, rows)) for first in range(0, rows, MOST_STREAMED)]
