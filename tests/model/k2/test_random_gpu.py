"""Random weights for the GPU's kernels keep the magnitude of activations about constant through all layers."""

from dataclasses import replace

import pytest

from redline.model.k2.config import Int4Experts, Nvfp4Experts, Quantization, Unquantized
from redline.model.k2.random_gpu import random_gpu_k2
from redline.model.k2.shapes import KIMI_NANO
from tests.tiny_model import CPU


@pytest.mark.parametrize("quantization", [Int4Experts(), Nvfp4Experts("ModelOpt"), Unquantized()], ids=repr)
def test_an_experts_output_is_about_as_large_as_its_input(quantization: Quantization):
    config = replace(KIMI_NANO, num_hidden_layers=2, n_routed_experts=4, vocab_size=64, quantization=quantization)
    experts = random_gpu_k2(config, range(2), CPU).gpu_blocks[1].experts
    assert experts is not None
    for records in (experts.up, experts.down):
        gain = records.dense(0).float().std().item() * records.inputs**0.5
        assert 0.7 < gain < 1.43, "scales are powers of two, so the gain may be off by sqrt(2)"
