"""A K2 of any size with random weights, made on the GPU in the kernels' layouts, for speed measurements.

The time of a step does not depend on the values of the weights. Several layers of the model may share one layer in
memory (`place`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redline.kernels.cuda.block import GpuBlock, GpuMla, GpuMoe
from redline.kernels.cuda.decode.choose_experts import notes_of
from redline.kernels.cuda.decode.gates import gates_weight
from redline.kernels.cuda.layouts.records import Records, Slabs
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.group import ALONE, Group
from redline.model.k2.config import K2Config
from redline.model.k2.cuda import GpuK2, expert_kind
from redline.model.k2.shard import part_of

Progress = Callable[[int, int], object]  # (layers made, layers to make)


def random_gpu_k2(
    config: K2Config,
    place: Sequence[int],
    device: torch.device,
    seed: int = 0,
    progress: Progress = lambda made, whole: None,
    group: Group = ALONE,
) -> GpuK2:
    """A model of this geometry with random weights on the device, the same for the same seed.

    place     place[layer] is the index of the layer in memory that a layer of the model uses; a dense layer cannot
              share one with an MoE layer
    progress  called after each layer in memory is made
    group     tensor parallel ranks; this rank's part of the model is made. Replicated weights may differ among ranks,
              which does not affect speed
    """
    random = _Random(part_of(config, group.ranks), device, seed)
    made: dict[int, GpuBlock] = {}
    count = len(set(place))
    for layer, at in enumerate(place):
        if at not in made:
            made[at] = random.block(config.is_moe(layer))
            progress(len(made), count)
    blocks = [made[at] for at in place]
    embedding = random.normal(config.vocab_size, config.hidden_size, spread=1.0)
    head = random.tiled(config.vocab_size // group.ranks, config.hidden_size)
    return GpuK2(config, embedding, blocks, random.norm(config.hidden_size), head, group)


class _Random:
    def __init__(self, config: K2Config, device: torch.device, seed: int) -> None:
        self._config = config
        self._device = device
        # The meta device has no generator, and no values.
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, spread: float | None = None) -> Tensor:
        """bf16; the default standard deviation keeps a product's output about as large as its input."""
        whole = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return whole.normal_(0, shape[-1] ** -0.5 if spread is None else spread, generator=self._generator)

    def norm(self, size: int) -> Tensor:
        return torch.rand(size, device=self._device, generator=self._generator) + 0.5

    def tiled(self, *shape: int) -> Tiled:
        return Tiled.prepare(self.normal(*shape))

    def block(self, is_moe: bool) -> GpuBlock:
        c = self._config
        width = c.moe_intermediate_size * c.n_shared_experts if is_moe else c.intermediate_size
        router = self.normal(c.n_routed_experts, c.hidden_size) if is_moe else None
        down = self.normal(c.hidden_size, width)
        return GpuBlock(
            attention_norm=self.norm(c.hidden_size),
            attention=self.attention(),
            o_proj=self.tiled(c.hidden_size, c.num_attention_heads * c.v_head_dim),
            mlp_norm=self.norm(c.hidden_size),
            gates=gates_weight(router, self.normal(2 * width, c.hidden_size)),
            width=width,
            down=Slabs.prepare(down) if is_moe else Tiled.prepare(down),
            experts=self.moe() if is_moe else None,
            eps=c.rms_norm_eps,
            softmax_scale=c.softmax_scale,
        )

    def attention(self) -> GpuMla:
        c = self._config
        heads, rank, rope = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
        return GpuMla(
            w_a=self.tiled(c.q_lora_rank + rank + rope, c.hidden_size),
            q_norm=self.norm(c.q_lora_rank),
            kv_norm=self.norm(rank),
            w_q=self.tiled(heads * (c.qk_nope_head_dim + rope), c.q_lora_rank),
            w_uk=self.tiled(heads, rank, c.qk_nope_head_dim),
            w_uv=self.tiled(heads, c.v_head_dim, rank),
            eps=c.low_rank_norm_eps,
        )

    def moe(self) -> GpuMoe:
        c = self._config
        experts, hidden, width = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        bias = 0.1 * torch.randn(experts, device=self._device, generator=self._generator)
        kind = expert_kind(c)
        up = self.records(Records.empty("up", experts, 2 * width, hidden, self._device, kind))
        down = self.records(Records.empty("down", experts, hidden, width, self._device, kind))
        notes = notes_of(experts, bias.device)
        return GpuMoe(bias, up, down, c.num_experts_per_tok, c.norm_topk_prob, c.routed_scaling_factor, notes)

    def records(self, records: Records) -> Records:
        """Random codes, and scales (of one power of two) that make a product's output about as large as its input.

        The standard deviation of codes times scales from 1 to 2 is 7.
        """
        if records.kind == "BF16":
            for expert in records.data:
                expert.view(torch.bfloat16).normal_(0, records.inputs**-0.5, generator=self._generator)
            return records
        if records.kind == "NVFP4":
            return self.nvfp4(records)
        code_bytes = 8 * records.form.inputs
        exponent = round(-torch.tensor(7.0 * records.inputs**0.5).log2().item())
        for expert in records.data:
            expert.random_(0, 256, generator=self._generator)
            scales = expert[..., code_bytes:]
            mantissa = scales[..., 0::2] & 127  # of a bf16: the low byte comes first
            scales[..., 0::2] = mantissa | ((127 + exponent & 1) << 7)
            scales[..., 1::2] = 127 + exponent >> 1
        return records

    def nvfp4(self, records: Records) -> Records:
        """Block scales from 1 to 1.875; the standard deviation of codes times scales is 4.2."""
        part = records.form.part
        for expert in records.data:
            expert.random_(0, 256, generator=self._generator)
            scales, tail = expert[..., 8 * part : 9 * part], expert[..., 9 * part :]
            scales.copy_(scales & 7 | 0x38)  # keeps the e4m3 mantissa and sets the exponent of 1
            whole = torch.full((4,), 1 / (4.2 * records.inputs**0.5), device=self._device)
            tail.copy_(whole.view(torch.uint8).expand_as(tail))
        return records
