"""An EAGLE-3 drafter: one layer over the target's hidden states. Training and serving use the same class.

Row t reads the embedding of token x_{t+1} and the fused feature of position t, is rotated by t, and its logits predict
x_{t+2}. Training calls the differentiable methods (`fuse`, `embed`, `project`, `expand`, `finish`, `logits`) with plain
weights. After `prepare`, the same methods, and `forward` with paged KV, run through the ops. More: docs/drafters.md.

H heads, X query width, V value width (in logits: vocabulary), D hidden, W width of a row of the drafter's plane.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.kernels.by_chip import best
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.inputs import Inputs
from redline.model.draft_vocabulary import DraftVocabulary
from redline.model.drafter_file import as_stored, read_tensors, stored_names, write_folder
from redline.model.eagle3.config import Eagle3Config, default_layer_ids
from redline.model.eagle3.cuda import GpuServed
from redline.model.eagle3.forward import begun, fed_back, normed_states, side_by_side
from redline.model.eagle3.latent import cut_latent, pad_latent
from redline.model.eagle3.serve import Served
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.ops.add_norm import rms_norm
from redline.ops.gqa import heads_and_row, unfold
from redline.ops.mla import angles, cache_row, rotate_heads
from redline.ops.moe import gated

__all__ = ["Eagle3", "Eagle3Config", "default_layer_ids"]


class Eagle3(DraftVocabulary):
    """An EAGLE-3 drafter with a body of latent or of grouped-query attention."""

    def __init__(self, config: Eagle3Config) -> None:
        """Random weights from torch's generator: std 0.02, smaller for weights that write to the residual stream.

        fc is initialised to the mean of its states. The head is random until `initialise`. A reduced vocabulary is the
        first ids until `keep`.
        """
        super().__init__()
        self.config = config
        hidden, states = config.hidden_size, len(config.layer_ids)
        self.fc = nn.Linear(config.fused_width, hidden, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size, config.rms_norm_eps) for _ in range(states))
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = Norm(hidden, config.rms_norm_eps)
        self._add_head(hidden, config.draft_vocab_size, config.vocab_size)
        self._served: Served | GpuServed | None = None
        self._ids: Tensor | None = None  # of a reduced vocabulary, on the served model's device
        self._set_random()

    @torch.no_grad()
    def _set_random(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        for module in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2))
        nn.init.zeros_(self.fc.weight)
        states = self.fc.weight.unflatten(1, (-1, self.config.target_hidden_size)).unbind(1)
        for state in states:
            state.diagonal().fill_(1 / len(states))

    # Files.

    @classmethod
    def open(cls, folder: Path | str, target: K2Config) -> "Eagle3":
        """Loads a drafter from a folder, bf16 on the CPU; a padded latent is cut back to its original width.

        CheckpointError, with file, field or tensor and the reason, if it is broken or does not fit the target.
        """
        config = Eagle3Config.from_folder(folder, target)
        config.check(target, str(Path(folder) / "config.json"))
        if "lm_head.weight" in stored_names(folder) and config.draft_vocab_size is None:
            config = replace(config, draft_vocab_size=config.vocab_size)
        with torch.device("meta"):
            wanted = cls(config).state_dict()
        config, tensors = cut_latent(config, read_tensors(folder, config, wanted))
        with torch.device("meta"):
            drafter = cls(config)
        drafter.load_state_dict(tensors, assign=True)
        return drafter

    def save(self, folder: Path | str, latent: int = 0) -> None:
        """Writes config.json and model.safetensors (bf16), which `open`, vLLM and SGLang read. Creates the folder.

        latent  pads a narrower latent to this width: vLLM needs the target's width
        """
        written, tensors = pad_latent(self.config, as_stored(self.state_dict()), latent)
        write_folder(Path(folder), written.to_dict(), tensors)

    # The differentiable arithmetic. The dtype is that of the weights.

    @property
    def layer(self) -> "Layer":
        """The one layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """Concatenated target states [..., states * D], as K2.forward returns them -> fused feature [..., D]."""
        if self._served is not None:
            return self._served.fuse(features)
        features = features.to(self.fc.weight.dtype)
        return self.fc(normed_states(features, list(self.fc_norm)) if self.config.fc_norm else features)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., D]. AssertionError before `attach`."""
        assert self._embedding_VD is not None, "attach the target's embedding first"
        return F.embedding(ids, self._embedding_VD).to(self.fc.weight.dtype)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [..., rope width / 2], of integer positions."""
        if self._served is not None:
            return self._served.angles(positions)
        return angles(positions, self.config.inv_freq().to(positions.device))

    def project(self, embedding: Tensor, feature: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] each -> queries [..., H, X], rotated, and the row of the plane [..., W]."""
        layer = self.layer
        x = side_by_side(layer.input_layernorm(embedding), layer.hidden_norm(feature))
        return layer.self_attn.project(x, cos, sin)

    def expand(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Plane rows [..., W] -> keys [..., H, X] and values [..., H, V]. Scores are q . k * config.softmax_scale."""
        return self.layer.self_attn.expand(kv)

    def finish(self, attended: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's results [..., H, V] and the row's feature [..., D] -> (normed, fed), [..., D] each.

        The head reads `normed`; the next draft step takes `fed` as its feature.
        """
        layer = self.layer
        residual = begun(self.config, feature, layer.hidden_norm)
        residual = residual + layer.self_attn.o_proj(attended.flatten(-2))
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        normed = self.norm(residual)
        return normed, fed_back(self.config, normed, residual)

    def draft_logits(self, normed: Tensor) -> Tensor:
        """Normed [..., D] -> [..., draft vocabulary]. AssertionError if it needs the target's head and has none."""
        if self.config.draft_vocab_size is not None:
            return self.lm_head(normed)
        assert self._head_VD is not None, "attach the target's head first"
        return F.linear(normed, self._head_VD.to(normed.dtype))

    def logits(self, normed: Tensor) -> Tensor:
        """Normed [..., D] -> float32 [..., V] of the target's vocabulary; -inf for tokens that the drafter lacks."""
        draft = (self._served.logits(normed) if self._served is not None else self.draft_logits(normed)).float()
        ids = self._ids if self._served is not None else self.token_ids()
        if ids is None:
            return draft
        ids = ids.to(draft.device)
        return draft.new_full((*draft.shape[:-1], self.config.vocab_size), -torch.inf).index_copy(-1, ids, draft)

    def likeliest(self, normed_RD: Tensor) -> Tensor:
        """The argmax: normed [R, D] -> int64 [R], tokens of the target's vocabulary. Only after `prepare`.

        It can be captured in a CUDA graph. For any input the result is a token of the draft vocabulary.
        """
        ids_R = best(self.served.logits(normed_RD).float())[0]
        return ids_R if self._ids is None else self._ids[ids_R]

    # Serving.

    def prepare(self, model: K2, head_bits: int = 16) -> None:
        """Lays out the weights for the ops, once, on the model's device; embedding and head are shared with the model.

        head_bits  16; or 8: the drafting head is quantized (`int8_round`), which halves its bytes on a GPU

        From then on `fuse`, `angles`, `logits` and `forward` run through the ops. Training a prepared drafter does not
        change what is served: call `prepare` again.
        """
        assert model.config.hidden_size == self.config.hidden_size, "open the drafter with the target's config"
        ids = self.token_ids()
        self._ids = None if ids is None else ids.to(model.device)
        state = self.state_dict()
        if isinstance(model.head, Tiled):
            self._served = GpuServed(self.config, state, model.embedding_VD, model.head, head_bits, model.group)
        else:
            self._served = Served(self.config, state, model, head_bits)

    @property
    def served(self) -> Served | GpuServed:
        """The weights in the ops' layouts. AssertionError before `prepare`."""
        assert self._served is not None, "prepare the drafter first"
        return self._served

    def forward(self, inputs: Inputs, feature_TD: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Runs rows with paged KV -> (normed, fed) as in `finish`, for the rows of the chunks, then for the queries.

        inputs      ids_T: the next tokens x_{t+1}; cos, sin of positions t; rows_T, Chunk.start, lengths_Q of PLACES, a
                    place being t + 1. For a token in no chunk and no query, only its row of the plane is written.
        feature_TD  of positions t: fused from the target's states, or fed back
        plane       [pages, 64, W]: written at rows_T; place 0 of a slot is never read
        """
        return self.served.forward(inputs, feature_TD, plane)

    @property
    def parameter_count(self) -> int:
        """Number of the drafter's own parameters, without the attached weights of the target."""
        return sum(parameter.numel() for parameter in self.parameters())


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight over the last axis, in x's dtype."""
        return rms_norm(x, self.weight, self.eps)


class Layer(nn.Module):
    """The weights of the one layer, under the names of the file."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Mla(config) if config.architecture == "mla" else Llama(config)
        self.mlp = Mlp(hidden, config.intermediate_size)
        self.input_layernorm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)


class Mla(nn.Module):
    """Latent attention as in the target (ops/mla.py), but reading embedding and feature concatenated."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        heads, hidden, eps = config.num_attention_heads, config.hidden_size, config.rms_norm_eps
        self.sizes = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank, config.qk_rope_head_dim
        self.heads = heads
        self.q_a_proj = nn.Linear(2 * hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = Norm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * hidden, config.kv_width, bias=False)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2 D] -> rotated queries [..., H, X] and plane rows [..., W]: latent, then rotated key."""
        nope, _, rank, rope = self.sizes
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        latent, key = self.kv_a_proj_with_mqa(x).split([rank, rope], -1)
        norm = self.kv_a_layernorm
        return rotate_heads(q, nope, cos, sin), cache_row(latent, key, norm.weight, norm.eps, cos, sin)

    def expand(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Plane rows [..., W] -> keys [..., H, X] and values [..., H, V]."""
        nope, value, rank, rope = self.sizes
        latent, key = kv.split([rank, rope], -1)
        keys, values = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split([nope, value], -1)
        return torch.cat([keys, key[..., None, :].expand(*keys.shape[:-1], -1)], -1), values


class Llama(nn.Module):
    """Grouped-query attention (ops/gqa.py), reading embedding and feature concatenated."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        self.heads, self.width = config.num_attention_heads, width
        self.q_proj = nn.Linear(2 * hidden, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2 D] -> rotated queries [..., H, X] and plane rows [..., W]: rotated keys, then values."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.width)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, row = heads_and_row(q, k, v, cos, sin)
        return q, row.to(q.dtype)

    def expand(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Plane rows [..., W] -> keys and values [..., H, X], each repeated for the query heads that share it."""
        return unfold(kv, self.heads, self.width)


class Mlp(nn.Module):
    """SwiGLU of `width`."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
