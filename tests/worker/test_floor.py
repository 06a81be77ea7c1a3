"""A worker's step time floor: the model's sizes as work, and rates measured at start."""

import logging
from dataclasses import replace

import pytest
import torch

from redline.bench.step.depth import DepthCase
from redline.kernels.cpu import native
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.eagle3.config import Eagle3Config
from redline.model.eagle3.module import Eagle3
from redline.model.k2.shapes import KIMI_K26
from redline.policy.floor import StepContents
from redline.worker import floor
from redline.worker.floor import measure, step_work

ONE = StepContents(positions=1, heads=1)


def test_kimis_step_of_one_token_by_hand() -> None:
    work = step_work(KIMI_K26, torch.bfloat16)
    attention = 7168 * (1536 + 576) + 1536 * (1 + 64 * 192) + 512 * (1 + 64 * 256) + 64 * 128 * 7168
    layers = 61 * (attention + 2 * 7168) + 7168 + 3 * 7168 * 18432 + 60 * (3 * 7168 * 2048 + 384 * 7169)
    assert work.weight_bytes == 2 * layers
    assert work.head_bytes == 2 * 163840 * 7168
    chosen = 60 * 8 * 3 * 7168 * 2048
    assert work.bytes(ONE) == pytest.approx(2 * layers + 2 * 163840 * 7168 + chosen * 4.5 / 8)
    assert work.operations(ONE) == 2 * (layers + chosen + 163840 * 7168)
    assert work.latent_bytes == 61 * 576 * 2
    assert (work.pair_ops, work.prompt_pair_ops) == (2 * 61 * 64 * (2 * 512 + 64), 2 * 61 * 64 * (192 + 128))


@pytest.mark.parametrize("ranks", [1, 4])
def test_it_is_the_floor_of_redline_bench_decode(ranks: int) -> None:
    rows, tokens, context = 8, 4, 1000
    depth = DepthCase(
        shape="kimi-k2.6", config=KIMI_K26, physical=12, rows=rows, tokens=tokens, context=context,
        kv_dtype=torch.float8_e4m3fn, overlap=None, ranks=ranks,
    )  # fmt: skip
    experts = 60 * 384 * (1 - (1 - 8 / 384) ** (rows * tokens))
    pairs = rows * (tokens * context + tokens * (tokens + 1) / 2)
    counted = StepContents(rows * tokens, rows * tokens, rows * (context + tokens), pairs)
    ours, theirs = step_work(KIMI_K26, torch.float8_e4m3fn, ranks), depth.cost(experts)
    assert ours.bytes(counted) == pytest.approx(theirs.bytes, rel=1e-9)
    assert ours.operations(counted) == pytest.approx(theirs.flops, rel=1e-9)


@pytest.mark.parametrize(("head_bits", "own"), [(16, 1000), (8, 1000), (16, None)])
def test_a_drafters_pass_reads_all_but_what_fuses_the_targets_states(head_bits: int, own: int | None) -> None:
    target = replace(KIMI_K26, hidden_size=64, num_attention_heads=2, vocab_size=2000, intermediate_size=96)
    config = replace(Eagle3Config.for_target(target), draft_vocab_size=own)
    with torch.device("meta"):
        drafter = Eagle3(config)
    work = step_work(target, torch.bfloat16, drafter=drafter, head_bits=head_bits)
    named = {name: each.numel() for name, each in drafter.named_parameters() if each.dim() > 1}
    fused, head = named.pop("fc.weight"), named.pop("lm_head.weight", 2000 * 64)
    assert fused == 3 * 64 * 64
    assert work.draft_bytes == 2 * sum(named.values()) + head * head_bits / 8
    two = step_work(target, torch.bfloat16, 2, drafter, head_bits, draft_ranks=2)
    into = {name: named.pop(name) for name in list(named) if "q_a_proj" in name or "kv_a_proj" in name}
    assert len(into) == 2
    divided = 2 * sum(named.values()) + head * head_bits / 8
    assert two.draft_bytes == 2 * sum(into.values()) + divided / 2
    on_a_cpu = step_work(target, torch.bfloat16, 2, drafter, head_bits)
    assert on_a_cpu.draft_bytes == work.draft_bytes, "each rank holds the whole drafter"


@pytest.mark.parametrize("own", [1000, None])
def test_ranks_divide_what_a_block_drafter_reads(own: int | None) -> None:
    """But for keys and values, the bias by the token before, and everything if the heads do not divide evenly."""
    target = replace(KIMI_K26, hidden_size=64, num_attention_heads=4, vocab_size=2000, intermediate_size=96)
    config = BlockConfig.for_target(
        target, layer_ids=(2, 3), num_hidden_layers=2, mask_token_id=1, draft_vocab_size=own
    )
    for fits, each in ((True, config), (False, replace(config, num_key_value_heads=1))):
        with torch.device("meta"):
            drafter = BlockDrafter(each)
        named = {name: one.numel() for name, one in drafter.named_parameters() if one.dim() > 1}
        assert named.pop("fc.weight") == 2 * 64 * 64
        named.pop("markov_head.markov_w1.weight")
        head = named.pop("lm_head.weight", 2000 * 64)
        one, two = (step_work(target, torch.bfloat16, n, drafter, draft_ranks=n) for n in (1, 2))
        assert one.draft_once
        assert one.draft_bytes == 2 * (sum(named.values()) + head)
        divided = [size for name, size in named.items() if "q_proj" in name or "o_proj" in name or ".mlp." in name]
        assert one.draft_bytes - two.draft_bytes == head + (sum(divided) if fits else 0)


def test_the_machine_is_measured_and_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    small = replace(KIMI_K26, hidden_size=64, num_attention_heads=2, vocab_size=2000, intermediate_size=96,
                    num_hidden_layers=2, n_routed_experts=8, moe_intermediate_size=32)  # fmt: skip
    found = measure(step_work(small, torch.bfloat16), torch.device("cpu"))
    assert found is not None
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e8 < found.ops_per_s < 1e15 * native.threads()
    assert torch.get_num_threads() == before


def test_a_device_that_has_no_room_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(floor, "read_rate", full)
    with caplog.at_level(logging.WARNING, floor.__name__):
        assert measure(step_work(KIMI_K26, torch.bfloat16), torch.device("cpu")) is None
    assert "no room" in caplog.text
