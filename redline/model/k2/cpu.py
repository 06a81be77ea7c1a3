"""The K2 model: embeddings, blocks of latent attention and experts, a head.

A block is two sublayers. Each takes the normed residual stream and returns its partial sum; the next sublayer's norm
adds it to the residual (`add_norm`), also across blocks. With tensor parallelism an all-reduce comes between the two.

T tokens of a step, D hidden, H heads, P rope, R rows whose next token is requested, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.kernels.by_chip import linear
from redline.kernels.cpu.blocks.block import Block, Moe
from redline.kernels.cpu.blocks.transformer import Transformer, TransformerArgs, TransformerOutput
from redline.kernels.cpu.panels import Matrix, Stack, above_one_another
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.group import ALONE, Group
from redline.kernels.inputs import Inputs
from redline.model.k2.checkpoint import Checkpoint, Projection
from redline.model.k2.config import K2Config
from redline.model.k2.forward import forward
from redline.model.k2.one_call import transformer
from redline.model.k2.shard import WHOLE, Shard, check_ranks
from redline.model.k2.staging import Staging
from redline.ops.formats import Int4, Nvfp4
from redline.ops.mla import MlaWeights

Cut = Callable[[Tensor], Tensor]  # selects a rank's part of a weight


class K2:
    """The text model on one device, with weights in the layouts of its ops.

    config  of the whole model, even if blocks and head are one rank's parts
    dtype   of activations: float32 on a CPU, bf16 on a GPU
    group   the tensor parallel ranks
    """

    def __init__(
        self,
        config: K2Config,
        embedding_VD: Tensor,
        blocks: Sequence[Block],
        norm: Tensor,
        head: Matrix | Tiled,
        group: Group = ALONE,
    ) -> None:
        self.config = config
        self.group = group
        self.embedding_VD = embedding_VD
        self.norm = norm
        self.head = head
        self._weights = Transformer(embedding_VD, tuple(blocks), norm, head, config.rms_norm_eps)
        self.device = embedding_VD.device
        self.dtype = self._weights.dtype  # of activations
        self._inv_freq = config.inv_freq().to(self.device)

    def add_features(self, rows: int) -> None:
        """Appends `rows` rows to the embedding: the feature table, for embeddings that are not of the vocabulary. Must
        be called before a drafter is prepared."""
        vocabulary, width = self.embedding_VD.shape
        assert vocabulary == self.config.vocab_size, "the model has a feature table already"
        embedding = self.embedding_VD.new_zeros(vocabulary + rows, width)
        embedding[:vocabulary] = self.embedding_VD
        self.embedding_VD = embedding
        self._weights = replace(self._weights, embedding_VD=embedding)

    @property
    def feature_table(self) -> Tensor:
        """Rows of the embedding [rows, D] behind the vocabulary: token id `vocab_size + r` reads row r."""
        return self.embedding_VD[self.config.vocab_size :]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The layers' weights for the references and the CPU kernels; empty in the GPU's own model."""
        return self._weights.blocks

    @property
    def recordable(self) -> bool:
        """Whether a decode step needs nothing from the host, so that it can be captured in a CUDA graph.

        The references read values on the host, so on a GPU they cannot be captured; on a CPU a captured step is a plain
        call.
        """
        return self.device.type == "cpu"

    def angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, P / 2], of integer positions [T]."""
        angle = positions_T.float()[:, None] * self._inv_freq
        return angle.cos(), angle.sin()

    def predict(
        self, inputs: Inputs, planes: Tensor, layers: Sequence[int] = (), asked: Sequence[int] = ()
    ) -> TransformerOutput:
        """Runs the step through the model and returns the next tokens after the rows `asked` (indices into the step).

        planes  [layers, pages, 64, kv width], read, and written at rows_T
        layers  layers whose input states are captured, by vLLM's and SGLang's ids: k is the input of layer k (0: the
                embedding), and the number of layers is the input of the last norm
        """
        if self.group.ranks > 1:
            return forward(TransformerArgs(planes, self._weights, inputs, layers, asked), self.group)
        return transformer(planes, self._weights, inputs, layers, asked)

    def forward(
        self,
        inputs: Inputs,
        planes: Tensor,
        layers: Sequence[int] = (),
        launched: Callable[[int], object] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`predict` without next tokens: (normed last hidden state [T, D], captured states [T, layers * D]).

        The captured states are the residual stream at the input of each of `layers`; None if `layers` is empty.
        launched: called with the number of layers launched so far, for prompts launched layer by layer; on a CPU all
        layers run in one call.
        """
        out = self.predict(inputs, planes, layers)
        return out.hidden(), out.features

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Normed hidden states [R, D] -> logits float32 [R, V]."""
        return self.group.all_gather(linear(hidden_RD, self.head).float())

    def whole_head(self) -> Tensor:
        """The whole head bf16 [V, D], gathered from all ranks; all must call this."""
        return self.group.all_gather(self.head.dense().T.float()).T.to(torch.bfloat16)


def load(
    checkpoint: Checkpoint, device: torch.device, *, group: Group = ALONE, low_rank_norm_eps: float | None = None
) -> K2:
    """Copies a checkpoint onto a device, tensor by tensor; peak anonymous memory is the model plus one tensor.

    group              tensor parallel ranks: only this rank's part of the model is read
    low_rank_norm_eps  replaces the config's, for comparison with transformers, which always uses 1e-6

    CheckpointError if a norm or the router contains a number that is not finite.
    """
    config = checkpoint.config
    reader = Reader(checkpoint, device, low_rank_norm_eps or config.low_rank_norm_eps, Shard(group.rank, group.ranks))
    with checkpoint.read_ahead(group.rank, group.ranks):
        embedding = reader.plain("embed_tokens.weight")
        blocks = [reader.block(layer) for layer in range(config.num_hidden_layers)]
        norm, head = reader.vector("norm.weight"), reader.matrix("lm_head.weight", cut=reader.shard.rows)
    reader.wait()
    return K2(config, embedding, blocks, norm, head, group)


def load_layer(checkpoint: Checkpoint, device: torch.device, layer: int, embedding_VD: Tensor) -> K2:
    """A model of one layer of a checkpoint: tokens are rows of the given embedding [V, D], which is also the head.

    The last norm has no weight, so `K2.forward(inputs, planes, (1,))` returns the layer's output for the rows. Raises
    CheckpointError as `load` does.
    """
    config, embedding = one_layer(checkpoint.config, layer, len(embedding_VD)), embedding_VD.to(device, torch.bfloat16)
    reader = Reader(checkpoint, device, config.low_rank_norm_eps)
    with checkpoint.read_ahead(layer=layer):
        block = reader.block(layer)
    reader.wait()
    return K2(config, embedding, [block], torch.ones(config.hidden_size, device=device), Matrix.prepare(embedding))


def one_layer(config: K2Config, layer: int, vocabulary: int) -> K2Config:
    """The config of a model that consists of one layer of another model."""
    dense = not config.is_moe(layer)
    return replace(config, num_hidden_layers=1, first_k_dense_replace=int(dense), vocab_size=vocabulary)


class Reader:
    """Reads a checkpoint's tensors onto a device. `at` is a prefix of logical names, such as `layers.3.self_attn`."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, low_rank_norm_eps: float, shard: Shard = WHOLE
    ) -> None:
        """shard: this rank's part of the weights that are divided. ConfigError if they cannot be divided."""
        check_ranks(checkpoint.config, shard.ranks)
        self.shard = shard
        self._checkpoint = checkpoint
        self._device = device
        self._eps = low_rank_norm_eps
        self._staging = Staging(device) if device.type == "cuda" else None

    def wait(self) -> None:
        """Waits until everything read so far is on the device."""
        if self._staging is not None:
            self._staging.wait()

    def plain(self, name: str, cut: Cut = lambda whole: whole) -> Tensor:
        """The tensor of this logical name, or the part that `cut` selects: bf16, copied from the view of the file."""
        part = cut(self._checkpoint.plain(name))
        if self._staging is None:
            return part.to(self._device, torch.bfloat16, copy=True)
        return self._staging.put(part).to(torch.bfloat16)

    def vector(self, name: str) -> Tensor:
        """A norm or a bias in float32. CheckpointError if a number is not finite."""
        return self._finite(name, self._checkpoint.plain(name).to(self._device, torch.float32, copy=True))

    def router(self, at: str) -> Tensor:
        """The router's weights, bf16 [experts, D]. CheckpointError if a number is not finite."""
        return self._finite(f"{at}.weight", self.plain(f"{at}.weight"))

    def _finite(self, name: str, weight: Tensor) -> Tensor:
        """The weight. CheckpointError for NaN or infinity: a router with such numbers may leave the logits finite."""
        if not weight.isfinite().all():
            raise CheckpointError(f"{name}: expected finite numbers, found NaN or infinity")
        return weight

    def matrix(self, *names: str, cut: Cut = lambda whole: whole) -> Matrix:
        """Weights [N, K] over the same inputs, each cut, stacked along N."""
        parts = [self._moved(cut(self._checkpoint.plain(name))).to(torch.bfloat16) for name in names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        prepared = Matrix.prepare(whole)
        if prepared.data is whole and self._staging is None and len(parts) == 1:  # it may still be a view of the file
            return Matrix(whole.clone(), prepared.outputs, panels=False)
        return prepared

    def block(self, layer: int) -> Block:
        """All weights of this layer."""
        config = self._checkpoint.config
        at = f"layers.{layer}"
        mlp = f"{at}.mlp"
        shared = f"{mlp}.shared_experts" if config.is_moe(layer) else mlp
        return Block(
            attention_norm=self.vector(f"{at}.input_layernorm.weight"),
            attention=self.attention(f"{at}.self_attn"),
            o_proj=self.matrix(f"{at}.self_attn.o_proj.weight", cut=self.shard.columns),
            mlp_norm=self.vector(f"{at}.post_attention_layernorm.weight"),
            shared_gate_up=self.matrix(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight", cut=self.shard.rows),
            shared_down=self.matrix(f"{shared}.down_proj.weight", cut=self.shard.columns),
            experts=self.moe(layer) if config.is_moe(layer) else None,
            eps=config.rms_norm_eps,
            softmax_scale=config.softmax_scale,
        )

    def unfolding(self, at: str) -> tuple[Tensor, Tensor]:
        """W_UK transposed, [H, R, N], and W_UV [H, V, R], bf16. H heads of this rank, R latent width, N query width
        without rope, V value width."""
        config = self._checkpoint.config
        kv_b = self.plain(f"{at}.kv_b_proj.weight", self.shard.rows)
        kv_b = kv_b.unflatten(0, (config.num_attention_heads // self.shard.ranks, -1))
        w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        return w_uk.transpose(1, 2).contiguous(), w_uv.contiguous()

    def attention(self, at: str) -> MlaWeights[Matrix]:
        """The attention's weights; down-projections of queries and latents are stacked."""
        w_uk, w_uv = self.unfolding(at)
        return MlaWeights(
            w_a=self.matrix(f"{at}.q_a_proj.weight", f"{at}.kv_a_proj_with_mqa.weight"),
            q_norm=self.vector(f"{at}.q_a_layernorm.weight"),
            kv_norm=self.vector(f"{at}.kv_a_layernorm.weight"),
            w_q=self.matrix(f"{at}.q_b_proj.weight", cut=self.shard.rows),
            w_uk=Matrix.prepare(w_uk),
            w_uv=Matrix.prepare(w_uv),
            eps=self._eps,
        )

    def moe(self, layer: int) -> Moe:
        """The router and the routed experts of this layer, without the shared expert."""
        config = self._checkpoint.config
        at = f"layers.{layer}.mlp.gate"
        gate_up, down = Stack(config.n_routed_experts), Stack(config.n_routed_experts)
        for expert in range(config.n_routed_experts):
            gate_up.put(expert, self.expert_parts(layer, expert, ("gate", "up")))
            down.put(expert, self.expert_parts(layer, expert, ("down",)))
        return Moe(
            router=Matrix.prepare(self.router(at)),
            bias_E=self.vector(f"{at}.e_score_correction_bias"),
            gate_up=gate_up.whole,
            down=down.whole,
            chosen=config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            groups=config.n_group,
            chosen_groups=config.topk_group,
        )

    def expert(self, layer: int, expert: int, projections: Sequence[Projection]) -> Tensor | Int4 | Nvfp4:
        """One routed expert's projections, this rank's part of each, stacked along the outputs: [N, K], INT4 or NVFP4
        if stored so, else bf16."""
        return above_one_another(self.expert_parts(layer, expert, projections))

    def expert_parts(self, layer: int, expert: int, projections: Sequence[Projection]) -> list[Tensor | Int4 | Nvfp4]:
        """As `expert`, but a list of the projections; on a CPU they are views of the file if its layout allows."""
        cut = self.shard.expert_columns if "down" in projections else self.shard.expert_rows
        return [self._there(cut(self._checkpoint.expert(layer, expert, each))) for each in projections]

    def _there(self, weight: Tensor | Int4 | Nvfp4) -> Tensor | Int4 | Nvfp4:
        """The weight on the device."""
        match weight:
            case Int4(packed, scale):
                return Int4(self._moved(packed), self._moved(scale))
            case Nvfp4(codes, scales, scale):
                return Nvfp4(self._moved(codes), self._moved(scales), self._moved(scale))
            case Tensor():
                return self._moved(weight).to(torch.bfloat16)

    def _moved(self, part: Tensor) -> Tensor:
        """The tensor on the device; the same tensor if it is already there."""
        return part.to(self._device) if self._staging is None else self._staging.put(part)
