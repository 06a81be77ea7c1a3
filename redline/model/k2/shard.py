"""Which part of each weight a tensor parallel rank holds: its heads, its slice of every MLP's width, its head rows.

Replicated on all ranks: norms, the down-projections of attention, the router, the embedding. They are a twentieth of
the bytes that a one-token step reads. In steps of few tokens each rank reads only a part of the down-projections, if
that saves more than an all-reduce costs (`project_a`); prefill reads them whole.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from redline.errors import ConfigError
from redline.kernels.cuda.collectives.rank_links import Rooms
from redline.kernels.cuda.collectives.rank_links import rooms_of as rooms_of_sizes
from redline.kernels.cuda.layouts.tiled import PAD_K, padded
from redline.model.k2.config import K2Config, Nvfp4Experts
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP, Int4, Nvfp4

RANKS = 1, 2, 4, 8
ROW_WORDS = 4  # the all-gather of logits moves 16 bytes at a time


class Shard(NamedTuple):
    """A rank's position: `rank` of `ranks`, from 0."""

    rank: int = 0
    ranks: int = 1

    def rows(self, weight: Tensor) -> Tensor:
        """[N / ranks, ...] of [N, ...]: a view, so only this part of a mapped file is read."""
        return self._part(weight, 0)

    def columns(self, weight: Tensor) -> Tensor:
        """[..., K / ranks] of [..., K]: a view."""
        return self._part(weight, weight.dim() - 1)

    def expert_rows(self, weight: Tensor | Int4 | Nvfp4) -> Tensor | Int4 | Nvfp4:
        """As `rows`, for a weight in any format."""
        return _of_parts(weight, self.rows)

    def expert_columns(self, weight: Tensor | Int4 | Nvfp4) -> Tensor | Int4 | Nvfp4:
        """As `columns`, for a weight in any format; quantisation groups are not split."""
        return _of_parts(weight, self.columns)

    def _part(self, weight: Tensor, axis: int) -> Tensor:
        size = weight.shape[axis] // self.ranks
        assert size * self.ranks == weight.shape[axis], f"{list(weight.shape)} in {self.ranks} parts"
        return weight.narrow(axis, self.rank * size, size)


WHOLE = Shard()


def _of_parts(weight: Tensor | Int4 | Nvfp4, part: Callable[[Tensor], Tensor]) -> Tensor | Int4 | Nvfp4:
    match weight:
        case Int4():
            return Int4(part(weight.packed), part(weight.scale))
        case Nvfp4():
            return Nvfp4(part(weight.codes), part(weight.scales), weight.scale)
        case Tensor():
            return part(weight)


def part_of(config: K2Config, ranks: int) -> K2Config:
    """The geometry of one rank's part, with divided sizes reduced. Vocabulary and embedding stay whole."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        moe_intermediate_size=config.moe_intermediate_size // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )


def head_left_out(config: K2Config, ranks: int) -> int:
    """Number of head parameters that a rank does not hold; `part_of` counts the whole vocabulary."""
    head = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return head - head // ranks


def weight_bytes(config: K2Config, ranks: int) -> int:
    """Bytes of one rank's weights; `K2Config.weight_bytes` is that of the whole model."""
    return part_of(config, ranks).weight_bytes - 2 * head_left_out(config, ranks)


def rooms_of(config: K2Config, ranks: int) -> Rooms:
    """Sizes of the regions that each rank of a GPU group owns in the other ranks' inboxes."""
    c = config
    sizes = c.num_attention_heads // ranks, c.kv_lora_rank, c.qk_rope_head_dim
    return rooms_of_sizes(padded(c.hidden_size, PAD_K), c.vocab_size // ranks, *sizes, c.q_lora_rank + c.kv_width)


def check_ranks(config: K2Config, ranks: int) -> None:
    """Raises ConfigError, with the possible numbers, if the model cannot be divided over `ranks` ranks."""
    faults = {each: _fault(config, each) for each in RANKS}
    if ranks not in RANKS or faults[ranks] is not None:
        possible = ", ".join(str(each) for each in RANKS if faults[each] is None)
        reason = faults.get(ranks) or "the number of GPUs of a host is a power of two"
        raise ConfigError(f"engine.ranks is {ranks}; expected one of {possible} for this model: {reason}")


def _fault(config: K2Config, ranks: int) -> str | None:
    if ranks == 1:
        return None
    group = NVFP4_GROUP if isinstance(config.quantization, Nvfp4Experts) else INT4_GROUP
    divided = {
        "num_attention_heads": (config.num_attention_heads, 1),
        "moe_intermediate_size": (config.moe_intermediate_size, group),
        "intermediate_size": (config.intermediate_size, group),
        "vocab_size": (config.vocab_size, ROW_WORDS),
    }
    for name, (size, unit) in divided.items():
        if size % (ranks * unit):
            of = f" in groups of {unit}" if unit > 1 else ""
            return f"{name} is {size}, which {ranks} ranks cannot share evenly{of}"
    return None
