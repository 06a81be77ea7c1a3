"""Bytes and FLOPs of a decode step, against counts by hand."""

from types import SimpleNamespace
from typing import cast

import torch

from redline.bench.step.checkpoint_steps import step_cost
from redline.run.runner import Runner
from tests.tiny_model import kernel_config

CONFIG = kernel_config()


def _runner() -> Runner:
    """A stub with the attributes that a step's cost needs."""
    planes = torch.zeros(1, dtype=torch.bfloat16)
    model, kv = SimpleNamespace(config=CONFIG), SimpleNamespace(planes=planes)
    return cast(Runner, SimpleNamespace(model=model, kv=kv))


def test_enough_rows_read_every_weight_but_the_embedding_once():
    embedding = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    assert abs(step_cost(_runner(), 10_000, 0).bytes - (CONFIG.weight_bytes - embedding)) < 0.01 * CONFIG.weight_bytes


def test_each_token_of_context_is_read_once_a_row():
    without, of_100 = step_cost(_runner(), 3, 0), step_cost(_runner(), 3, 100)
    # bf16 latents and rotated keys of every layer
    assert of_100.bytes - without.bytes == 3 * 100 * 2 * CONFIG.kv_width * CONFIG.num_hidden_layers


def test_each_row_multiplies_by_every_active_weight():
    active = CONFIG.active_parameters - CONFIG.vocab_size * CONFIG.hidden_size
    assert step_cost(_runner(), 5, 0).flops == 2 * 5 * active
