"""The minimum time of a step, computed by hand."""

import pytest

from redline.policy.floor import StepContents, StepFloor, StepWork

# 8 experts, of which a position chooses 2; two layers of 4 heads and latents of 10 + 2 values.
WORK = StepWork(
    weight_bytes=1000, head_bytes=300, expert_bytes=800, experts_of=8, experts_chosen=2, latent_bytes=48,
    position_ops=700, head_ops=300, pair_ops=352, prompt_pair_ops=160, draft_bytes=90, draft_ops=90,
)  # fmt: skip


def test_one_row_reads_the_weights_its_own_experts_and_its_context() -> None:
    step = StepContents(positions=1, heads=1, context=11, pairs=11)
    assert WORK.bytes(step) == 1000 + 300 + 800 * 2 / 8 + 11 * 48
    assert WORK.operations(step) == 700 + 300 + 11 * 352


def test_rows_share_weights_and_some_experts() -> None:
    two = StepContents(positions=2, heads=2, context=22, pairs=22)
    assert WORK.bytes(two) == pytest.approx(1000 + 300 + 800 * (1 - (6 / 8) ** 2) + 22 * 48)
    assert WORK.operations(two) == 2 * (700 + 300) + 22 * 352


def test_a_prompts_chunk_that_samples_nothing_leaves_the_head_alone() -> None:
    chunk = StepContents(positions=4, context=4, prompt_pairs=10)
    assert WORK.bytes(chunk) == pytest.approx(1000 + 800 * (1 - (6 / 8) ** 4) + 4 * 48)
    assert WORK.operations(chunk) == 4 * 700 + 10 * 160


def test_each_pass_reads_the_drafter_once_for_all_its_rows() -> None:
    without, drafted = StepContents(positions=2, heads=2), StepContents(positions=2, heads=2, passes=3, drafted=5)
    assert WORK.bytes(drafted) - WORK.bytes(without) == 3 * 90
    assert WORK.operations(drafted) - WORK.operations(without) == 5 * 90


def test_the_slower_of_reading_and_computing_decides() -> None:
    step = StepContents(positions=1, heads=1)
    read, computed = WORK.bytes(step), WORK.operations(step)
    assert StepFloor(WORK, bytes_per_s=1.0, ops_per_s=1e9).seconds(step) == read
    assert StepFloor(WORK, bytes_per_s=1e9, ops_per_s=1.0).seconds(step) == computed
