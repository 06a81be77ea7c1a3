"""What an op must cost is what its reference multiplies: counted by torch, not by us."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from redline.kernels.kernel import references
from redline.ops.all import CPU, HOPPER
from redline.ops.op import Op

# Stored in tiles, whose padding is multiplied too; all of it is Kimi-Nano's and these tests', as Kimi's sizes fit.
TILED = {"project_a", "project_q", "project_out", "gates", "head"}
# Their references look at every key of a chunk, or at empty parts, and go through many ops that a kernel does as one.
WASTEFUL = {"mla_prefill", "block", "transformer", "draft_pass", "draft_chain", "unabsorb"}


@pytest.mark.parametrize("op", dict.fromkeys(kernel.op for kernel in (*CPU, *HOPPER)), ids=lambda op: op.name)
def test_an_op_costs_what_its_reference_multiplies(op: Op[Any, Any]):
    for case in itertools.islice((case for case in op.cases() if case.small), 3):
        args = case.make(torch.Generator().manual_seed(1))
        cost = op.cost(*args)
        with FlopCounterMode(display=False) as counter, references():
            op.reference(*copy.deepcopy(args))
        counted = counter.get_total_flops()
        if op.name in TILED:
            assert counted <= cost.flops <= 2 * counted, case.name
        elif op.name in WASTEFUL:
            assert 0.4 * counted <= cost.flops <= 1.01 * counted, case.name
        else:
            assert cost.flops == counted, case.name
        assert cost.bytes > 0, case.name
