"""A block drafter: layers of Qwen3's kind over one block of tokens, whose context is the target's hidden states.

    context = norm(fc [state | state | ...])                 of each token before the block; read by every layer
    x       = embedding of [anchor, mask, mask, ...]         the last token, whose states are not known yet
    layer:    q of x, keys and values of [context | x]; norms over each head of q and k; rope; attention to the whole
              context and the whole block; a MLP
    logits  = head(norm(x))  [+ w2(w1[token before])]        DSpark's bias, by the token drafted at the position before

One class for training and serving. Training calls the differentiable methods with plain weights; `prepare` lays the
weights out for the ops, and from then on `read` and `draft` run over pages. More: docs/drafters.md.

B positions of a block, R blocks, T tokens, D hidden, F width of the concatenated states, G key heads, H query heads,
X head width, W = 2 G X width of a layer's row in the plane, V vocabulary.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.kernels.cuda.layouts.tiled import Tiled
from redline.model.block.config import BlockConfig
from redline.model.block.cuda import GpuServedBlock
from redline.model.block.serve import ServedBlock
from redline.model.draft_vocabulary import DraftVocabulary
from redline.model.drafter_file import as_stored, read_tensors, stored_names, write_folder
from redline.model.eagle3.module import Mlp, Norm
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.ops.gqa import rotate_halves
from redline.ops.mla import angles


class BlockDrafter(DraftVocabulary):
    """A DFlash or DSpark drafter; the names in its state are those of the public files."""

    def __init__(self, config: BlockConfig) -> None:
        """Random weights from torch's generator: std 0.02, smaller for weights that write to the residual stream.

        fc is initialised to the mean of its states, the bias by the token before to zero. A reduced vocabulary is the
        first ids until `keep`.
        """
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.fused_width, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(hidden, eps)
        vocabulary = config.draft_vocab_size or config.vocab_size
        self._add_head(hidden, config.draft_vocab_size, config.vocab_size)
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, vocabulary, config.markov_rank)
        if config.confidence:
            width = hidden + (config.markov_rank if config.confidence == "hidden and token" else 0)
            self.confidence_head = ConfidenceHead(width)
        self._served: ServedBlock | GpuServedBlock | None = None
        self._set_random()

    @torch.no_grad()
    def _set_random(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * len(self.layers)))
        nn.init.zeros_(self.fc.weight)
        states = self.fc.weight.unflatten(1, (-1, self.config.target_hidden_size)).unbind(1)
        for state in states:
            state.diagonal().fill_(1 / len(states))
        if self.config.markov_rank:
            nn.init.zeros_(self.markov_head.markov_w2.weight)

    # Files.

    @classmethod
    def open(cls, folder: Path | str, target: K2Config) -> "BlockDrafter":
        """Loads a drafter from a folder, bf16 on the CPU.

        CheckpointError, with file, field or tensor and the reason, if it is broken or does not fit the target; the
        config is checked before any weight is read.
        """
        config = BlockConfig.from_folder(folder)
        config.check(target, str(Path(folder) / "config.json"))
        has_head = "lm_head.weight" in stored_names(folder)
        if has_head and config.draft_vocab_size is None:
            config = replace(config, draft_vocab_size=config.vocab_size)
        elif not has_head and config.draft_vocab_size == config.vocab_size:
            config = replace(config, draft_vocab_size=None)  # DFlash names the target's vocabulary, and has no head
        with torch.device("meta"):
            drafter = cls(config)
        drafter.load_state_dict(read_tensors(folder, config, drafter.state_dict()), assign=True)
        return drafter

    def save(self, folder: Path | str) -> None:
        """Writes config.json and model.safetensors (bf16) in the public form. Creates the folder."""
        write_folder(Path(folder), self.config.to_dict(), as_stored(self.state_dict()))

    # Training.

    @property
    def residual_scale(self) -> float:
        """The size at which a matrix that writes to the residual stream begins and moves, so that all of them together
        reach the embedding's root mean square. AssertionError before `attach`."""
        assert self._embedding_VD is not None, "attach the target's embedding first"
        squares = sum(float(rows.float().square().sum(dtype=torch.float64)) for rows in self._embedding_VD.split(8192))
        return math.sqrt(squares / self._embedding_VD.numel() / (2 * len(self.layers)))

    def matrices(self) -> list[tuple[Tensor, float]]:
        """The matrices of fc and of the layers, each with its scale: `residual_scale`, or 1."""
        scale = self.residual_scale
        found: list[tuple[Tensor, float]] = [(self.fc.weight, 1.0)]
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            writes = layer.self_attn.o_proj, layer.mlp.down_proj
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    found.append((module.weight, scale if module in writes else 1.0))
        return found

    # The differentiable arithmetic. The dtype is that of the weights.

    def context(self, features: Tensor) -> Tensor:
        """Concatenated target states [..., F] -> what every layer reads of a token before the block, [..., D]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., D]. AssertionError before `attach`."""
        assert self._embedding_VD is not None, "attach the target's embedding first"
        return F.embedding(ids, self._embedding_VD).to(self.fc.weight.dtype)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [..., X / 2], of integer positions."""
        return angles(positions, self.config.inv_freq().to(positions.device))

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Blocks of one sequence each, over its context -> the head's inputs [S, Q, D].

        x          [S, Q, D]: embeddings of the Q positions of a sequence's blocks
        context    [S, T, D], at positions 0 to T - 1
        positions  int64 [S, Q]
        seen       bool [S, Q, T + Q]: whether a query may see a token of the context, or a position of a block
        """
        places = torch.arange(context.shape[1], device=x.device).expand(len(x), -1)
        places = torch.cat([places, positions], 1)
        cos, sin = self.angles(places)
        count = x.shape[1]
        distance = positions[:, :, None] - places[:, None]
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            assert isinstance(layer, BlockLayer)
            mask = seen if window is None else seen & (distance >= 0) & (distance < window)
            normed = layer.input_layernorm(x)
            q = layer.self_attn.queries(normed, cos[:, -count:], sin[:, -count:])
            k, v = layer.self_attn.keys_values(torch.cat([context, normed], 1), cos, sin)
            times = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, mask[:, None], scale=self.config.softmax_scale)
            x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def draft_logits(self, normed: Tensor, before: Tensor) -> Tensor:
        """Normed [..., D], and the token before each drafted one, int64 [...] -> [..., draft vocabulary]."""
        if self.config.draft_vocab_size is not None:
            logits = self.lm_head(normed)
        else:
            assert self._head_VD is not None, "attach the target's head first"
            logits = F.linear(normed, self._head_VD.to(normed.dtype))
        return logits + self.markov_head(before) if self.config.markov_rank else logits

    def confidence(self, normed: Tensor, before: Tensor) -> Tensor:
        """The logit of the probability that a draft is accepted if those before it are: float32 [...]; `draft_logits`
        has the arguments. AssertionError without such a head."""
        assert self.config.confidence, "the drafter has no confidence head"
        if self.config.confidence == "hidden and token":
            normed = torch.cat([normed, self.markov_head.markov_w1(before).to(normed.dtype)], -1)
        return self.confidence_head(normed)

    # Serving.

    def prepare(self, model: K2, head_bits: int = 16) -> None:
        """Lays out the weights for the ops, once, on the model's device; embedding and head are shared with the model.

        head_bits  16: a block drafter's head has no other form
        """
        assert head_bits == 16, "worker.engine refuses other heads"
        if isinstance(model.head, Tiled):
            given = self.config, self.state_dict(), model.embedding_VD, model.head, self.token_ids(), model.group
            self._served = GpuServedBlock(*given)
        else:
            self._served = ServedBlock(self.config, self.state_dict(), model, self.token_ids())

    @property
    def served(self) -> ServedBlock | GpuServedBlock:
        """The weights in the ops' layouts. AssertionError before `prepare`."""
        assert self._served is not None, "prepare the drafter first"
        return self._served

    @property
    def parameter_count(self) -> int:
        """Number of the drafter's own parameters, without the attached weights of the target."""
        return sum(parameter.numel() for parameter in self.parameters())


class BlockLayer(nn.Module):
    """The weights of one layer, under the names of the file."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = BlockAttention(config)
        self.mlp = Mlp(hidden, config.intermediate_size)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)


class BlockAttention(nn.Module):
    """Grouped-query attention with norms over each head of queries and keys."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        self.width = width
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, hidden, bias=False)
        self.q_norm = Norm(width, config.rms_norm_eps)
        self.k_norm = Norm(width, config.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., D] -> [..., H, X], rotated."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.width)))
        return rotate_halves(q.float(), cos[..., None, :], sin[..., None, :]).to(q.dtype)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] -> keys, rotated, and values [..., G, X]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.width)))
        rotated = rotate_halves(k.float(), cos[..., None, :], sin[..., None, :]).to(k.dtype)
        return rotated, self.v_proj(x).unflatten(-1, (-1, self.width))


class MarkovHead(nn.Module):
    """DSpark's bias on the logits by the token before, of low rank."""

    def __init__(self, vocabulary: int, drafted: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        """Token ids [...] -> [..., draft vocabulary]."""
        return self.markov_w2(self.markov_w1(before))


class ConfidenceHead(nn.Module):
    """One number per drafted token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] -> float32 [...]."""
        return self.proj(features).squeeze(-1).float()
