"""K2 on a GPU, with weights in the layouts that the GPU kernels stream.

Same model and interface as `redline.model.k2.cpu.K2`. The residual stream is float32; inputs of matmuls are bf16.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redline.kernels.cpu.blocks.transformer import TransformerOutput
from redline.kernels.cuda.block import (
    MOST_DECODED,
    GpuBlock,
    GpuMla,
    GpuMoe,
    ResidualStream,
    decode_block,
    prefill_block,
)
from redline.kernels.cuda.collectives.rank_links import MOST_TOKENS as MOST_TOKENS_OF_RANKS
from redline.kernels.cuda.collectives.rank_links import Linked
from redline.kernels.cuda.decode.choose_experts import MOST_PAIRS, SUMMED_PAIRS, notes_of
from redline.kernels.cuda.decode.dense import MOST_TOKENS
from redline.kernels.cuda.decode.embed import embed
from redline.kernels.cuda.decode.gates import gates_weight
from redline.kernels.cuda.decode.head import logits_of
from redline.kernels.cuda.layouts.records import Kind, Records, Slabs
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.cuda.prefill.rowwise import norm_rows
from redline.kernels.cuda.prefill.stream import PromptStream
from redline.kernels.group import ALONE, Group
from redline.kernels.inputs import Inputs
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import Fp8Blocks, Int4Experts, K2Config, Nvfp4Experts, Unquantized
from redline.model.k2.cpu import K2, Cut, Reader, one_layer
from redline.model.k2.forward import predicted
from redline.model.k2.shard import Shard


class GpuK2(K2):
    """The text model with weights in the layouts of the GPU kernels. Activations are bf16."""

    def __init__(
        self,
        config: K2Config,
        embedding_VD: Tensor,
        blocks: Sequence[GpuBlock],
        norm: Tensor,
        head_VD: Tiled,
        group: Group = ALONE,
    ) -> None:
        super().__init__(config, embedding_VD, (), norm, head_VD, group)
        self.gpu_blocks = blocks
        self._most_decoded = most_decoded(config, group.ranks)
        # Sums of squares for rows that are already normed.
        self._normed = torch.full((1, MOST_TOKENS), float(config.hidden_size), device=self.device)

    @property
    def recordable(self) -> bool:
        """True: a decode step of up to MOST_DECODED tokens needs nothing from the host, as CUDA graphs require."""
        return True

    def excerpt(self) -> "GpuK2":
        """A model with the first layer of each kind: it launches the same kernels as the whole model."""
        excerpt, kinds = copy.copy(self), {block.experts is None: block for block in reversed(self.gpu_blocks)}
        excerpt.gpu_blocks = list(kinds.values())
        return excerpt

    def rehearse_prompt(self, inputs: Inputs, planes: Tensor) -> None:
        """Launches the kernels of a step of as many prompt tokens; the results are not used."""
        self._prefill(inputs, planes, _Features(inputs.count, (), self))

    def forward(
        self,
        inputs: Inputs,
        planes: Tensor,
        layers: Sequence[int] = (),
        launched: Callable[[int], object] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `K2.forward`, in bf16.

        A decode-only step of up to MOST_DECODED tokens does not wait for the device, has no data-dependent shapes, and
        launches only the kernels of the ops.
        """
        features = _Features(inputs.ids_T.shape[0], layers, self)
        if inputs.ids_T.shape[0] <= self._most_decoded and not inputs.chunks:
            x = self._decode(inputs, planes, features)
        else:
            x = self._prefill(inputs, planes, features, launched)
        return x[:, : self.config.hidden_size], features.whole()

    def predict(
        self, inputs: Inputs, planes: Tensor, layers: Sequence[int] = (), asked: Sequence[int] = ()
    ) -> TransformerOutput:
        """As `K2.predict`; reading the argmax tokens waits for the device if any are requested."""
        hidden, features = self.forward(inputs, planes, layers)
        if not asked:
            return TransformerOutput([], features, lambda: hidden, lambda: hidden.new_empty(0, self.config.vocab_size))
        return predicted(hidden, features, self.logits(hidden if len(asked) == len(hidden) else hidden[list(asked)]))

    def _decode(self, inputs: Inputs, planes: Tensor, features: "_Features") -> Tensor:
        norms = [*(w.attention_norm for w in self.gpu_blocks), self.norm]
        links = self.group.links if isinstance(self.group, Linked) else None
        stream = ResidualStream(*embed(inputs.ids_T, self.embedding_VD, norms[0]))
        for layer, (w, plane) in enumerate(zip(self.gpu_blocks, planes.unbind(0), strict=True)):
            features.take(layer, stream.residual_TD)
            stream = decode_block(stream, w, inputs, plane, norms[layer + 1], _forced(inputs, layer), links)
        features.take(len(self.gpu_blocks), stream.residual_TD)
        return norm_rows(stream.residual_TD, None, self.norm, self.config.rms_norm_eps)[1]

    def _prefill(
        self,
        inputs: Inputs,
        planes: Tensor,
        features: "_Features",
        launched: Callable[[int], object] | None = None,
    ) -> Tensor:
        def embedded(rows: slice) -> Tensor:
            return self.embedding_VD[inputs.ids_T[rows]].float()

        stream = PromptStream.begin(inputs.ids_T.shape[0], embedded, self.group)
        for layer, (w, plane) in enumerate(zip(self.gpu_blocks, planes.unbind(0), strict=True)):
            stream = features.taken(layer, stream)
            stream = prefill_block(stream, w, inputs, plane, _forced(inputs, layer))
            if launched is not None:
                launched(layer + 1)
        stream = features.taken(len(self.gpu_blocks), stream)
        return stream.whole(stream.normed(self.norm, self.config.rms_norm_eps))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Normed hidden states, bf16 [R, D] -> logits float32 [R, V]."""
        assert isinstance(self.head, Tiled)
        return self.group.all_gather(logits_of(hidden_RD, self.head, self._normed))


def most_decoded(config: K2Config, ranks: int) -> int:
    """The maximum number of tokens of a step that the decode kernels support."""
    tokens, pairs = (MOST_DECODED, MOST_PAIRS) if ranks == 1 else (MOST_TOKENS_OF_RANKS, SUMMED_PAIRS)
    return min(tokens, pairs // max(config.num_experts_per_tok, 1))


class _Features:
    """The residual stream as it enters some layers, bf16 [T, layers * D]."""

    def __init__(self, tokens: int, layers: Sequence[int], model: GpuK2) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        shape = tokens, len(layers), model.config.hidden_size
        self._data = torch.empty(shape, dtype=model.dtype, device=model.device) if layers else None

    def take(self, layer: int, residual: Tensor) -> None:
        if self._data is not None and layer in self._places:
            self._data[:, self._places[layer]] = residual

    def taken(self, layer: int, stream: PromptStream) -> PromptStream:
        """Captures a layer's input. Returns the stream with its pending partial sum added, if the layer is captured."""
        if self._data is None or layer not in self._places:
            return stream
        stream = stream.added()
        self.take(layer, stream.whole(part.residual.to(self._data.dtype) for part in stream.parts))
        return stream

    def whole(self) -> Tensor | None:
        return None if self._data is None else self._data.flatten(1)


def _forced(inputs: Inputs, layer: int) -> Tensor | None:
    return None if inputs.routing is None else inputs.routing[layer]


def load(
    checkpoint: Checkpoint, device: torch.device, *, group: Group = ALONE, low_rank_norm_eps: float | None = None
) -> GpuK2:
    """As `redline.model.k2.cpu.load`: the device holds at most this rank's part of the model and one more tensor."""
    config = checkpoint.config
    reader = _Reader(checkpoint, device, low_rank_norm_eps or config.low_rank_norm_eps, Shard(group.rank, group.ranks))
    with checkpoint.read_ahead(group.rank, group.ranks):
        embedding = reader.plain("embed_tokens.weight")
        blocks = [reader.gpu_block(layer) for layer in range(config.num_hidden_layers)]
        norm = reader.vector("norm.weight")
        head = Tiled.prepare(reader.plain("lm_head.weight", reader.shard.rows))
    reader.wait()
    return GpuK2(config, embedding, blocks, norm, head, group)


def load_layer(checkpoint: Checkpoint, device: torch.device, layer: int, embedding_VD: Tensor) -> GpuK2:
    """As `redline.model.k2.cpu.load_layer`."""
    config, embedding = one_layer(checkpoint.config, layer, len(embedding_VD)), embedding_VD.to(device, torch.bfloat16)
    reader = _Reader(checkpoint, device, config.low_rank_norm_eps)
    with checkpoint.read_ahead(layer=layer):
        block = reader.gpu_block(layer)
    reader.wait()
    return GpuK2(config, embedding, [block], torch.ones(config.hidden_size, device=device), Tiled.prepare(embedding))


def expert_kind(config: K2Config) -> Kind:
    """The record format of the routed experts."""
    match config.quantization:
        case Int4Experts():
            return "INT4"
        case Nvfp4Experts():
            return "NVFP4"
        case Unquantized() | Fp8Blocks():
            return "BF16"


class _Reader(Reader):
    def tiled(self, *names: str, cut: Cut = lambda whole: whole) -> Tiled:
        return Tiled.prepare(torch.cat([self.plain(name, cut) for name in names]))

    def gpu_block(self, layer: int) -> GpuBlock:
        config = self._checkpoint.config
        at = f"layers.{layer}"
        is_moe = config.is_moe(layer)
        mlp = f"{at}.mlp.shared_experts" if is_moe else f"{at}.mlp"
        gate_up = torch.cat([self.plain(f"{mlp}.{name}_proj.weight", self.shard.rows) for name in ("gate", "up")])
        down = self.plain(f"{mlp}.down_proj.weight", self.shard.columns)
        return GpuBlock(
            attention_norm=self.vector(f"{at}.input_layernorm.weight"),
            attention=self.gpu_attention(f"{at}.self_attn"),
            o_proj=self.tiled(f"{at}.self_attn.o_proj.weight", cut=self.shard.columns),
            mlp_norm=self.vector(f"{at}.post_attention_layernorm.weight"),
            gates=gates_weight(self.router(f"{at}.mlp.gate") if is_moe else None, gate_up),
            width=down.shape[1],
            down=Slabs.prepare(down) if is_moe else Tiled.prepare(down),
            experts=self.gpu_moe(layer) if is_moe else None,
            eps=config.rms_norm_eps,
            softmax_scale=config.softmax_scale,
        )

    def gpu_attention(self, at: str) -> GpuMla:
        w_uk, w_uv = self.unfolding(at)
        return GpuMla(
            w_a=self.tiled(f"{at}.q_a_proj.weight", f"{at}.kv_a_proj_with_mqa.weight"),
            q_norm=self.vector(f"{at}.q_a_layernorm.weight"),
            kv_norm=self.vector(f"{at}.kv_a_layernorm.weight"),
            w_q=self.tiled(f"{at}.q_b_proj.weight", cut=self.shard.rows),
            w_uk=Tiled.prepare(w_uk),
            w_uv=Tiled.prepare(w_uv),
            eps=self._eps,
        )

    def gpu_moe(self, layer: int) -> GpuMoe:
        config = self._checkpoint.config
        hidden, count = config.hidden_size, config.n_routed_experts
        width = config.moe_intermediate_size // self.shard.ranks
        kind = expert_kind(config)
        up = Records.empty("up", count, 2 * width, hidden, self._device, kind)
        down = Records.empty("down", count, hidden, width, self._device, kind)
        for expert in range(count):
            up.put(expert, self.expert(layer, expert, ("gate", "up")))
            down.put(expert, self.expert(layer, expert, ("down",)))
        bias = self.vector(f"layers.{layer}.mlp.gate.e_score_correction_bias")
        notes = notes_of(count, bias.device)
        c = config
        return GpuMoe(bias, up, down, c.num_experts_per_tok, c.norm_topk_prob, c.routed_scaling_factor, notes)
