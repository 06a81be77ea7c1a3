"""What an op must cost is what its reference multiplies: counted by torch, not by us."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from redline.ops import native
from redline.ops.all import ALL, CUDA
from redline.ops.gates import gates
from redline.ops.moe import moe
from redline.ops.op import Op
from redline.ops.step_rows import step_rows

# Stored in tiles, whose padding is multiplied too; all of it is Kimi-Nano's and these tests', as Kimi's sizes fit.
TILED = {"project_a", "project_q", "project_out", "gates", "head"}
# Their references look at every key of a chunk, or at empty parts, and go through many ops that a kernel does as one.
WASTEFUL = {"mla_prefill", "block", "transformer", "draft_pass", "draft_chain", "unabsorb"}
# They read all that they are given, and write what they return.
READ_ALL = {"linear", "add_norm", "route_experts", "best", "draw", "absorb", "unabsorb", "head"}


@pytest.mark.parametrize("op", dict.fromkeys((*ALL, *CUDA)), ids=lambda op: op.name)
def test_an_op_costs_what_its_reference_multiplies(op: Op[Any, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "library", lambda: None)  # a reference of several ops takes their references, too
    for case in itertools.islice((case for case in op.cases() if case.small), 3):
        args = case.make(torch.Generator().manual_seed(1))
        cost = op.cost(*args)
        with FlopCounterMode(display=False) as counter:
            op.reference(*copy.deepcopy(args))
        counted = counter.get_total_flops()
        if op.name in TILED:
            assert counted <= cost.flops <= 2 * counted, case.name
        elif op.name in WASTEFUL:
            assert 0.4 * counted <= cost.flops <= 1.01 * counted, case.name
        else:
            assert cost.flops == counted, case.name
        assert cost.bytes > 0, case.name


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Of arguments and results: those in tuples and in weights too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)
    elif dataclasses.is_dataclass(value):
        yield from tensors(list(vars(value).values()))


@pytest.mark.parametrize(
    "op", [op for op in dict.fromkeys((*ALL, *CUDA)) if op.name in READ_ALL], ids=lambda op: op.name
)
def test_an_op_that_reads_all_moves_its_arguments_and_its_result(op: Op[Any, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "library", lambda: None)
    for case in itertools.islice((case for case in op.cases() if case.small), 3):
        args = case.make(torch.Generator().manual_seed(1))
        moved = sum(one.nbytes for one in tensors([args, op.reference(*copy.deepcopy(args))]))
        assert op.cost(*args).bytes == moved, case.name


def test_a_token_more_costs_its_own_rows():
    g = torch.Generator().manual_seed(1)
    x, squares, w, experts, width, eps, _ = next(c for c in gates.cases() if c.name.startswith("T=8 nano")).make(g)
    logits, h, *_ = gates.reference(x, squares, w, experts, width, eps)
    more = (
        gates.cost(x, squares, w, experts, width, eps).bytes - gates.cost(x[:7], squares, w, experts, width, eps).bytes
    )
    assert more == x[7].nbytes + logits[7].nbytes + h[7, :width].nbytes

    x, up, down, *_ = next(moe.cases()).make(g)
    assert moe.cost(x, up, down, None).bytes == sum(one.nbytes for one in tensors([x, up, down, x]))

    plan, slots, results, frequencies, _, spare = next(step_rows.cases()).make(g)
    one, two = (step_rows.reference(plan, slots, results, frequencies, count, spare) for count in (1, 2))
    costs = [step_rows.cost(plan, slots, results, frequencies, count, spare).bytes for count in (1, 2)]
    assert costs[1] - costs[0] == sum(t.nbytes for t in tensors(two)) - sum(t.nbytes for t in tensors(one))
