"""Bytes that a round of speculative decoding must read, and its timing: on a CPU, also with the GPU's model."""

import functools
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.bench.step import rounds
from redline.bench.step.depth import DepthCase
from redline.bench.step.depth_fit import DepthMemory
from redline.bench.step.depth_record import DepthRecord, RoundRecord, append, read, round_record
from redline.bench.step.drafters import DRAFT_SHAPES, draft_costs, drafter_weights, public_drafter
from redline.bench.step.rounds import (
    RoundCase,
    RoundTiming,
    _pages,
    _Rows,
    floors,
    measure_round,
    random_drafter,
)
from redline.bench.step.trace import BusyInterval, idle_share, joined
from redline.errors import ConfigError
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.draft_shard import left_out
from redline.model.drafter import Drafter
from redline.model.eagle3.config import Eagle3Config
from redline.model.eagle3.module import Eagle3
from redline.model.k2.cpu import K2
from redline.model.k2.random_weights import ForcedK2, forced_k2, random_k2
from redline.model.k2.shapes import KIMI_K26
from redline.ops.op import Cost, PeakRates
from redline.policy.synthetic import rates_of
from redline.run.graphs.graph_recorder import Recorder
from tests.bench.step.test_depth import H200, depth
from tests.bench.step.test_depth_gpu import CONFIG as TILED
from tests.tiny_model import CPU, kernel_config

Models = tuple[K2, Drafter]


def round_case(config: Any, k: int = 3, length: float = 2.4, **changes: Any) -> RoundCase:
    of: DepthCase = depth(config, **{"tokens": 1 + k, "context": 70, "rows": 2, **changes})
    return RoundCase(depth=of, drafter=Eagle3Config.for_target(of.config), rates=rates_of(length, k, "accept"))


def kimi(k: int, **changes: Any) -> RoundCase:
    return round_case(KIMI_K26, k, 1.5, **{"rows": 1, "context": 0, **changes})


def cost(case: RoundCase) -> Cost:
    """Of all parts of a round's drafting together."""
    parts = draft_costs(case.drafter, case.depth, head_bits=case.head_bits, whole=case.whole)
    return functools.reduce(operator.add, parts)


def on_a_cpu(case: RoundCase) -> Models:
    model = random_k2(case.depth.config, case.depth.physical, 0, CPU)
    return model, random_drafter(model, case.drafter)


def forced_on_a_cpu(case: RoundCase) -> Models:
    """The GPU's model, with the references of its kernels."""
    model = forced_k2(case.depth.config, case.depth.physical, case.depth.rows * case.depth.tokens, CPU)
    model.dtype = torch.bfloat16  # its activations, as on a GPU
    return model, random_drafter(model, case.drafter)


# ----------------------------------------------------------------------------------------------------------- floors


@pytest.mark.parametrize(("k", "gigabytes"), [(1, 3.68), (2, 7.06), (3, 10.43)])
def test_kimis_drafter_reads_what_the_public_one_does(k: int, gigabytes: float):
    assert cost(kimi(k)).bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_reads_its_part_of_the_drafter_and_every_row_of_its_context(ranks: int):
    one, each = kimi(2, context=1024), kimi(2, context=1024, ranks=ranks)
    assert cost(one).bytes - cost(each).bytes == 2 * 2 * left_out(one.drafter, ranks)
    measured = replace(each, whole=True)
    head = 163_840 * 7168
    assert cost(one).bytes - cost(measured).bytes == 2 * 2 * (head - head // ranks)
    assert cost(each).flops < cost(measured).flops < cost(one).flops


def test_a_drafter_that_ranks_cannot_share_is_read_whole_but_for_its_head():
    one, each = kimi(2), kimi(2, ranks=8)
    odd = {"drafter": replace(one.drafter, num_attention_heads=12, num_key_value_heads=12)}
    assert cost(replace(each, **odd)) == cost(replace(each, whole=True, **odd))


def test_a_head_in_8_bits_is_half_of_its_bytes_less_its_scales():
    whole, rounded = kimi(2), replace(kimi(2), head_bits=8)
    assert cost(whole).bytes - cost(rounded).bytes == 2 * 163_840 * (7168 - 4)
    assert cost(whole).flops == cost(rounded).flops


@pytest.mark.parametrize("shape", DRAFT_SHAPES)
def test_a_drafters_weights_are_its_matrices(shape: str):
    config = public_drafter(shape, kernel_config())
    drafter = BlockDrafter(config) if isinstance(config, BlockConfig) else Eagle3(config)
    matrices = {name: one.numel() for name, one in drafter.named_parameters() if one.dim() > 1}
    matrices.pop("confidence_head.proj.weight", None)  # one row
    assert drafter_weights(config) == sum(matrices.values())


def block_round(shape: str, target: Any = KIMI_K26, k: int = 7, **changes: Any) -> RoundCase:
    of: DepthCase = depth(target, **{"tokens": 1 + k, "context": 70, "rows": 2, **changes})
    return RoundCase(depth=of, drafter=public_drafter(shape, of.config), rates=rates_of(1.7, k, "accept"))


def test_kimis_block_drafters_have_the_public_sizes():
    dflash, dspark = (public_drafter(shape, KIMI_K26) for shape in ("dflash", "dspark"))
    assert isinstance(dflash, BlockConfig)
    assert (dflash.num_attention_heads, dflash.num_key_value_heads, dflash.head_dim) == (64, 8, 128)
    assert (dflash.intermediate_size, dflash.mask_token_id, dflash.drafts) == (18_432, 163_838, 7)
    assert drafter_weights(dflash) / 1e9 == pytest.approx(3.48, abs=0.01)
    assert isinstance(dspark, BlockConfig)
    assert (dspark.num_attention_heads, dspark.markov_rank, dspark.confidence) == (56, 256, "hidden and token")
    with pytest.raises(ConfigError, match="draft-shape is 'eagle'; expected eagle3-mla, dflash or dspark"):
        public_drafter("eagle", KIMI_K26)


def test_a_block_is_read_once_and_its_bias_for_every_draft():
    head = 2 * 163_840 * 7168
    few, many = (cost(block_round("dflash", k=k, context=0)) for k in (3, 7))
    assert few.bytes == many.bytes == 2 * drafter_weights(block_round("dflash").drafter) + head
    few, many = (cost(block_round("dspark", k=k, context=0)) for k in (3, 7))
    assert many.bytes - few.bytes == 4 * 2 * 163_840 * 256
    two = cost(block_round("dspark", k=7, context=0, ranks=2))
    assert many.bytes - two.bytes == head // 2 + 2 * left_out(public_drafter("dspark", KIMI_K26), 2)
    behind = [cost(block_round("dspark", k=7, context=1000, ranks=ranks)) for ranks in (1, 2)]
    rows = 2 * 1000 * 3 * 2 * 8 * 128 * 2
    assert behind[0].bytes - many.bytes == rows
    assert behind[1].bytes - two.bytes == rows // 2, "a rank reads its own key heads"


def test_the_floor_of_a_round_is_that_of_its_parts():
    slow = PeakRates("slow", 1e9, 1e15)
    case = kimi(3, context=1024)
    verify, draft = floors(case, 480.0, slow)
    assert verify == pytest.approx(case.depth.cost(480.0).bytes / 1e6)
    assert draft == pytest.approx(cost(case).bytes / 1e6)
    assert draft > floors(kimi(3), 480.0, slow)[1], "the drafter's context is read too"


def test_memory_has_the_drafter_and_what_rows_grow_by():
    case = kimi(3, context=1024, physical=12)
    plain = DepthMemory(case.depth)
    whole = DepthMemory(case.depth, 4 * drafter_weights(case.drafter), case.reach(30) - 1028)
    assert whole.whole - plain.whole > 4 * 1.84e9
    assert any("drafter" in line for line in whole.explain())
    assert not any("drafter" in line for line in plain.explain())
    assert whole.layers_that_fit(100 * 10**9) <= plain.layers_that_fit(100 * 10**9)
    assert DepthMemory(case.depth, 0, 1000).kv > plain.kv


# ----------------------------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("k", [1, 3])
def test_rounds_on_a_cpu_verify_all_drafts_and_accept_as_they_are_told(k: int):
    case = round_case(kernel_config(), k, 1.7, context=64)
    timing = measure_round(*on_a_cpu(case), case, repeats=12)
    assert timing.tokens == pytest.approx(1.7, abs=0.35)
    assert 0 < timing.verify_ms < timing.ms
    assert 0 < timing.draft_ms < timing.ms
    assert timing.baseline_ms > 0
    assert timing.p10_ms <= timing.ms <= timing.p90_ms
    assert timing.idle_share is None


@pytest.mark.parametrize("shape", ["dflash", "dspark"])
def test_rounds_of_a_block_verify_all_of_its_drafts(shape: str):
    case = block_round(shape, kernel_config(), 3)
    timing = measure_round(*on_a_cpu(case), case, repeats=12)
    assert timing.tokens == pytest.approx(1.7, abs=0.35)
    assert 0 < timing.draft_ms < timing.ms
    record = round_record(case, timing, H200)
    assert (record.drafter, record.ops[1].launches) == (shape, 1)


def test_rounds_of_the_gpus_model_read_the_experts_that_were_drawn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rounds, "WARM_UP", 0)  # the references are slow
    case = round_case(TILED, 2, 2.0, rows=1, context=70, physical=2, overlap=1.0)
    model, drafter = forced_on_a_cpu(case)
    timing = measure_round(model, drafter, case, repeats=2)
    assert timing.experts == 3 * 4, "all tokens of a row are routed to the experts of the first"
    assert timing.tokens == 2.0


def test_given_experts_are_those_that_the_model_reads():
    case = round_case(TILED, 1, 1.0, rows=1, physical=2)
    model, drafter = forced_on_a_cpu(case)
    assert isinstance(model, ForcedK2)
    hidden: list[torch.Tensor] = []
    for experts in ((0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6, 7)):
        model.routing[:] = torch.tensor(experts, dtype=torch.int32)
        torch.manual_seed(0)
        kv, tables = _pages(model, drafter, case, repeats=1)
        rows = _Rows(model, kv, case, tables, 1, Recorder(CPU), drafter)
        rows._shared.slots.tokens.fill_(7)
        rows.run()
        assert rows._step._features is not None
        hidden.append(rows._step._features.clone())
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.equal(hidden[0], hidden[2])


def test_rows_that_do_not_do_what_was_asked_are_no_measurement():
    case = round_case(kernel_config(), 2, 3.0)
    model, drafter = on_a_cpu(case)
    with torch.inference_mode():
        kv, tables = _pages(model, drafter, case, repeats=4)
        rows = _Rows(model, kv, case, tables, 4, Recorder(CPU), drafter)
        for _ in range(4):
            rows.run()
            rows.note()
        assert rows.accepted(case.rates) == 3.0
        with pytest.raises(AssertionError, match="3 tokens per round, but the rates give 1"):
            rows.accepted((0.0, 0.0))
        rows._shared.standing.drafted[0] = 0
        rows.run()
        rows.note()
        with pytest.raises(AssertionError, match="positions instead of 3"):
            rows.accepted(case.rates)


# ---------------------------------------------------------------------------------------------------------- records


def test_a_record_of_a_round_is_that_of_a_step_and_more(tmp_path: Path):
    case = kimi(3, context=1024, physical=12, rows=8)
    timing = RoundTiming(20.0, 19.0, 21.0, 17.0, 2.9, 16.0, 0.1, 60 * 170.0, 1.5, None)
    record = round_record(case, timing, H200)
    assert (record.k, record.tokens_per_row, record.rows, record.accept) == (3, 4, 8, 1.5)
    assert record.tokens_per_s == pytest.approx(8 * 1.5 / 0.020)
    assert record.times == pytest.approx(1.5 * 16 / 20)
    verify, draft = record.ops
    assert record.floor_ms == pytest.approx((verify.floor_us + draft.floor_us) / 1e3)
    assert (verify.us, draft.us, draft.launches) == (17_000, 2_900, 3)
    assert isinstance(record.cores, int)
    path = tmp_path / "rounds.json"
    append(path, record)
    append(path, record)
    assert read(path, RoundRecord) == [record, record]
    with pytest.raises(ConfigError, match="expected a list of measured steps"):
        read(path, DepthRecord)


def test_idle_is_what_no_interval_covers():
    busy = joined([BusyInterval(0, 4), BusyInterval(2, 5), BusyInterval(6, 10)])
    assert busy == [BusyInterval(0, 5), BusyInterval(6, 10)]
    assert idle_share(busy) == pytest.approx(0.1)
