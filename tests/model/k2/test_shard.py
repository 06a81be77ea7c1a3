"""A rank's weights: parts that make up the whole model, in less memory."""

from dataclasses import replace

import pytest
import torch

from redline.errors import ConfigError
from redline.model.k2.shapes import KIMI_K26, KIMI_NANO
from redline.model.k2.shard import Shard, check_ranks, part_of
from redline.ops.formats import Int4, quantize_int4
from redline.run.fit import MemorySizes


def test_the_parts_of_all_ranks_side_by_side_are_the_weight() -> None:
    weight = torch.randn(8, 256).bfloat16()
    shards = [Shard(rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([shard.rows(weight) for shard in shards]), weight)
    assert torch.equal(torch.cat([shard.columns(weight) for shard in shards], 1), weight)
    packed = quantize_int4(weight)
    parts = [shard.expert_columns(packed) for shard in shards]
    assert all(isinstance(part, Int4) for part in parts)
    whole = torch.cat([part.dequantize() for part in parts if isinstance(part, Int4)], 1)
    assert torch.equal(whole, packed.dequantize())


@pytest.mark.parametrize(
    ("ranks", "change", "named"),
    [
        (3, {}, "expected one of 1, 2, 4 for this model"),
        (8, {}, "num_attention_heads is 4"),
        (
            4,
            {"moe_intermediate_size": 96},
            "moe_intermediate_size is 96, which 4 ranks cannot share evenly in groups of 32",
        ),
        (2, {"vocab_size": 4098}, "vocab_size is 4098"),
    ],
)
def test_what_ranks_cannot_share_evenly_is_refused_by_name(ranks: int, change: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_ranks(replace(KIMI_NANO, **change), ranks)


def test_kimi_comes_apart_into_eight() -> None:
    for ranks in (1, 2, 4, 8):
        check_ranks(KIMI_K26, ranks)
    assert part_of(KIMI_K26, 8).num_attention_heads == 8


def test_a_rank_of_eight_counts_an_eighth_of_the_experts_and_all_of_the_embedding() -> None:
    one, eighth = MemorySizes(KIMI_K26).weight_bytes, MemorySizes(KIMI_K26, ranks=8).weight_bytes
    assert one / 8 < eighth < one / 8 + 6e9, "a twentieth of the model's dense bytes is replicated on every rank"
