"""A K2 of any size with random weights on a CPU, for speed measurements; the GPU counterpart is `random_gpu`.

Several layers of the model may share one layer in memory (`place`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redline.kernels.cpu.blocks.block import Block, Moe
from redline.kernels.cpu.panels import Experts, Matrix, stack_experts
from redline.model.k2.config import Int4Experts, K2Config
from redline.model.k2.cpu import K2
from redline.ops.formats import INT4_GROUP, Int4
from redline.ops.mla import MlaWeights

Progress = Callable[[int, int], object]  # (layers made, layers to make)


def random_cpu_k2(
    config: K2Config, place: Sequence[int], seed: int = 0, progress: Progress = lambda made, whole: None
) -> K2:
    """A model of this geometry, the same for the same seed. Its router is used: the CPU kernels cannot force routing.

    place     place[layer] is the index of the layer in memory that a layer of the model uses; a dense layer cannot
              share one with an MoE layer
    progress  called after each layer in memory is made
    """
    random = CpuWeights(config, torch.Generator().manual_seed(seed))
    made: dict[int, Block] = {}
    for layer, at in enumerate(place):
        if at not in made:
            made[at] = random.block(layer)
            progress(len(made), len(set(place)))
    embedding_VD = random.normal(config.vocab_size, config.hidden_size).to(torch.bfloat16)
    head = random.matrix(config.vocab_size, config.hidden_size)
    return K2(config, embedding_VD, [made[at] for at in place], random.norm(config.hidden_size), head)


class CpuWeights:
    """Weights that keep activations near 1. Every call draws a new tensor from the generator."""

    def __init__(self, config: K2Config, generator: torch.Generator) -> None:
        self._config = config
        self.generator = generator

    def normal(self, *shape: int) -> Tensor:
        """float32."""
        return torch.randn(shape, generator=self.generator)

    def norm(self, size: int) -> Tensor:
        """The weight of a norm, float32 [size]."""
        return 1 + 0.1 * self.normal(size)

    def weight(self, *shape: int) -> Tensor:
        """bf16, scaled so that a product is about as large as its input."""
        return (self.normal(*shape) * shape[-1] ** -0.5).to(torch.bfloat16)

    def matrix(self, *shape: int) -> Matrix:
        """As `weight`, in the layout for matmuls."""
        return Matrix.prepare(self.weight(*shape))

    def block(self, layer: int) -> Block:
        """All weights of a layer, with experts if this layer of the model has them."""
        c = self._config
        d, width = c.hidden_size, c.shared_intermediate_size if c.is_moe(layer) else c.intermediate_size
        return Block(
            attention_norm=self.norm(d),
            attention=self._attention(),
            o_proj=self.matrix(d, c.num_attention_heads * c.v_head_dim),
            mlp_norm=self.norm(d),
            shared_gate_up=self.matrix(2 * width, d),
            shared_down=self.matrix(d, width),
            experts=self._moe() if c.is_moe(layer) else None,
            eps=c.rms_norm_eps,
            softmax_scale=c.softmax_scale,
        )

    def _attention(self) -> MlaWeights[Matrix]:
        c = self._config
        heads = c.num_attention_heads
        return MlaWeights(
            w_a=self.matrix(c.q_lora_rank + c.kv_width, c.hidden_size),
            q_norm=self.norm(c.q_lora_rank),
            kv_norm=self.norm(c.kv_lora_rank),
            w_q=self.matrix(heads * c.qk_head_dim, c.q_lora_rank),
            w_uk=self.matrix(heads, c.kv_lora_rank, c.qk_nope_head_dim),
            w_uv=self.matrix(heads, c.v_head_dim, c.kv_lora_rank),
            eps=c.low_rank_norm_eps,
        )

    def _moe(self) -> Moe:
        c = self._config
        d, width = c.hidden_size, c.moe_intermediate_size
        return Moe(
            router=self.matrix(c.n_routed_experts, d),
            bias_E=0.1 * self.normal(c.n_routed_experts),
            gate_up=self._experts(2 * width, d),
            down=self._experts(d, width),
            chosen=c.num_experts_per_tok,
            normalise=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
            groups=c.n_group,
            chosen_groups=c.topk_group,
        )

    def _experts(self, outputs: int, inputs: int) -> Experts:
        count = self._config.n_routed_experts
        one = self._int4 if isinstance(self._config.quantization, Int4Experts) else self.weight
        return stack_experts((one(outputs, inputs) for _ in range(count)), count)

    def _int4(self, outputs: int, inputs: int) -> Int4:
        """Random codes; their standard deviation is 4.6."""
        words = outputs, inputs // 8
        packed = torch.randint(-(2**31), 2**31, words, generator=self.generator, dtype=torch.int32)
        scale = torch.full((outputs, inputs // INT4_GROUP), inputs**-0.5 / 4.6, dtype=torch.bfloat16)
        return Int4(packed, scale)
