"""The GPU's step and its ops on a CPU, with references instead of the kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from redline.bench.step.depth import Progress
from redline.bench.step.depth_fit import DepthMemory
from redline.bench.step.depth_gpu import GpuStep
from redline.model.k2.shapes import KIMI_NANO
from tests.bench.step.test_depth import depth
from tests.tiny_model import CPU

CONFIG = replace(KIMI_NANO, hidden_size=512, num_hidden_layers=4)  # its weights are whole tiles of the kernels


def build(*, progress: Progress = lambda done, whole: None, **changes: Any) -> GpuStep:
    return GpuStep(depth(CONFIG, **{"context": 70, "physical": 4, **changes}), progress, CPU)


def test_every_op_runs_on_every_layer_that_has_it():
    step = build(rows=2, tokens=2, physical=3)
    ids = step.run()
    assert ids.shape == (4,)
    assert torch.equal(step.run(), ids)
    for stage in step.ops:
        for layer in stage.layers or (1, 2):
            stage.run(layer)


def test_the_ops_costs_come_to_the_steps():
    """All weights are read once; the rest are activations, which are small compared with weights."""
    step, chosen = build(), CONFIG.num_experts_per_tok
    whole = depth(CONFIG, context=70).cost(CONFIG.moe_layers * chosen)
    bytes_ = sum(s.count * (s.cost.bytes + s.expert_cost.bytes * chosen) for s in step.ops)
    assert bytes_ == pytest.approx(whole.bytes, rel=0.03)
    assert sum(s.count * s.cost.flops for s in step.ops) == pytest.approx(whole.flops, rel=0.03)


@pytest.mark.parametrize("rows", [1, 40], ids=["pair by pair", "grouped"])
def test_an_expert_is_read_once(rows: int):
    step = build(rows=rows)
    assert sum(stage.expert_cost.bytes for stage in step.ops) == depth(CONFIG).expert_bytes


def test_progress_ends_at_all_the_weights():
    told: list[tuple[int, int]] = []
    build(progress=lambda done, whole: told.append((done, whole)))
    whole = DepthMemory(depth(CONFIG)).weights
    assert told == [(whole * made // 4, whole) for made in (1, 2, 3, 4)]


def test_two_cases_share_a_model():
    first = build(rows=1)
    case = depth(CONFIG, context=70, physical=4, rows=2)
    second = GpuStep(case, lambda done, whole: pytest.fail("weights are created again"), CPU, like=first)
    assert second.parts[1] is first.parts[1]
    assert second.run().shape == (2,)
    assert [id(block) for block in second.parts[2]] == [id(block) for block in first.parts[2]]
