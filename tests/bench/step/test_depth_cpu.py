"""The CPU's step equals the model's: the same bits as its blocks, one after another."""

from typing import Any

import pytest
import torch

from redline.bench.step.depth import Progress
from redline.bench.step.depth_cpu import CpuStep
from redline.bench.step.depth_fit import DepthMemory
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.linear import linear
from redline.model.k2.config import K2Config
from redline.model.k2.forward import block
from redline.model.k2.random_cpu import CpuWeights
from redline.model.k2.shapes import KIMI_NANO
from tests.bench.step.test_depth import depth
from tests.tiny_model import kernel_config


def build(config: K2Config, *, progress: Progress = lambda done, whole: None, **changes: Any) -> CpuStep:
    asked = {"rows": 2, "tokens": 3, "context": 70, "physical": config.num_hidden_layers, **changes}
    return CpuStep(depth(config, **asked), progress)


def test_a_step_is_the_models_blocks_one_after_another():
    config = kernel_config()
    step = build(config)
    residual, partial = step._embedding_VD[step._ids].float(), None
    for weights, plane in zip(step._blocks, [plane.clone() for plane in step._planes], strict=True):
        residual, partial = block(residual, partial, weights, step._inputs, plane)
    _, x = add_norm(residual, partial, step._norm, config.rms_norm_eps)
    assert torch.equal(step.run(), linear(x, step._head))


def test_a_step_can_be_run_again():
    step = build(kernel_config())
    first = step.run()
    assert bool(first.isfinite().all())
    assert torch.equal(step.run(), first)


def test_routing_tells_whom_the_model_chose():
    config = kernel_config()
    step = build(config)
    step.run()
    assert bool((step.routing[0] == 0).all()), "the first layer has no experts"
    ids = step.routing[1:].sort(-1).values
    assert bool((ids.diff(dim=-1) > 0).all())
    assert int(ids.max()) < config.n_routed_experts


def test_every_op_runs_on_every_layer_that_has_it_and_the_counts_are_the_steps():
    step = build(kernel_config())
    assert {stage.name: stage.count for stage in step.ops} == {
        "add_norm": 7, "mla_qkv": 3, "mla_decode": 3, "project_out": 3, "dense_mlp": 1, "route_experts": 2, "moe": 2,
        "head": 1,
    }  # fmt: skip
    for stage in step.ops:
        for layer in stage.layers or (1, 2):
            stage.run(layer)


def test_the_ops_costs_come_to_the_steps():
    """All weights are read once; the rest are activations, which are small compared with weights."""
    step = build(KIMI_NANO, rows=1, tokens=1)
    step.run()
    experts = KIMI_NANO.moe_layers * KIMI_NANO.num_experts_per_tok
    whole = depth(KIMI_NANO, context=70).cost(experts)
    bytes_ = sum(s.count * (s.cost.bytes + s.expert_cost.bytes * KIMI_NANO.num_experts_per_tok) for s in step.ops)
    flops = sum(s.count * s.cost.flops for s in step.ops)
    assert bytes_ == pytest.approx(whole.bytes, rel=0.02)
    assert flops == pytest.approx(whole.flops, rel=0.02)


def test_aliased_layers_are_fewer_in_memory_and_as_many_in_the_step():
    step = build(kernel_config(num_hidden_layers=6), physical=3)
    assert len(step._blocks) == 3
    assert step.routing.shape[0] == 6
    step.run()


def test_progress_ends_at_all_the_weights():
    told: list[tuple[int, int]] = []
    build(KIMI_NANO, physical=3, progress=lambda done, whole: told.append((done, whole)))
    whole = DepthMemory(depth(KIMI_NANO, physical=3)).weights
    assert told[-1] == (whole, whole)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_step_over_fp8_pages_moves_half_the_bytes_of_its_contexts():
    whole, half = (build(kernel_config(), kv_dtype=dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    assert torch.isfinite(half.run()).all()
    read = [next(op.cost.bytes for op in step.ops if op.name == "mla_decode") for step in (whole, half)]
    assert read[0] - read[1] == 2 * (70 + 3) * kernel_config().kv_width


def test_random_weights_keep_activations_as_large_as_they_are_and_no_two_norms_are_alike():
    random = CpuWeights(kernel_config(), torch.Generator().manual_seed(1))
    x, norms = random.normal(512, 1024), [random.norm(1024) for _ in range(2)]
    for y in (x * norms[0], x * norms[1], x @ random.weight(256, 1024).float().T):
        assert float(y.square().mean().sqrt()) == pytest.approx(1, abs=0.015)
    assert not torch.equal(*norms)
