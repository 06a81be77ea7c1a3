"""The cost of an op is the number of products of its reference, counted by torch, and the bytes that it reads and
writes.
"""

import copy
import itertools
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from redline.kernels.all import CPU, CUDA
from redline.kernels.cuda.decode.gates import gates
from redline.kernels.cuda.step.step_rows import step_rows
from redline.kernels.kernel import references
from redline.model.eagle3.one_call import draft_chain, draft_fuse, draft_pass
from redline.model.k2.one_call import transformer
from redline.ops.moe import moe
from redline.ops.op import Case, Op

OPS = tuple(dict.fromkeys(kernel.op for kernel in (*CPU, *CUDA, transformer, draft_fuse, draft_pass, draft_chain)))

# Weights stored in tiles, with padding that is multiplied too. Kimi's sizes have no padding; those of Kimi-Nano and of
# these tests do.
TILED = {"project_a", "project_q", "project_out", "gates", "head", "head_8"}
# Ops with references that read every key of a chunk, or empty parts, and use many torch ops in place of one kernel.
WASTEFUL = {"mla_prefill", "transformer", "draft_pass", "draft_chain", "unabsorb", "attend_blocks", "block_attention"}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_costs_what_its_reference_multiplies(op: Op[Any, Any, Any]):
    for case in itertools.islice((case for case in op.cases() if case.small), 3):
        args = case.make(torch.Generator().manual_seed(1))
        cost = op.cost(args)
        # torch counts the products of its attention in this form only
        with FlopCounterMode(display=False) as counter, references(), sdpa_kernel(SDPBackend.MATH):
            op.reference(op.args(*copy.deepcopy(args)))
        counted = counter.get_total_flops()
        if op.name in TILED:
            assert counted <= cost.flops <= 2 * counted, case.name
        elif op.name in WASTEFUL:
            assert 0.4 * counted <= cost.flops <= 1.01 * counted, case.name
        else:
            assert cost.flops == counted, case.name
        assert cost.bytes > 0, case.name


# Ops that read all of their inputs once and write all of their outputs once.
WHOLE = {
    "linear",
    "add_norm",
    "route_experts",
    "best",
    "absorb",
    "unabsorb",
    "head",
    "head_8",
    "sample",
    "checksum",
    "checksums",
}


def small(op: Op[Any, Any, Any]) -> list[tuple[Case, tuple[Any, ...]]]:
    """The op's small cases with their inputs."""
    g = torch.Generator().manual_seed(1)
    return [(case, case.make(g)) for case in op.cases() if case.small]


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in `value`, including those inside weights."""
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors(part)]
    if is_dataclass(value):
        return tensors(tuple(vars(value).values()))
    return [value] if isinstance(value, torch.Tensor) else []


def size(*values: Any) -> int:
    """Bytes of all tensors, each counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors(values)}.values())


@pytest.mark.parametrize("op", [op for op in OPS if op.name in WHOLE], ids=lambda op: op.name)
def test_an_op_moves_what_it_reads_and_writes(op: Op[Any, Any, Any]):
    for case, args in small(op):
        assert op.cost(args).bytes == size(args, op.reference(args)), case.name


def test_gates_read_a_weight_and_activations_and_write_logits_and_a_hidden_row():
    for case, (x, squares, w, experts, width, *rest) in small(gates.op):
        logits, h, *_ = gates.op.reference(gates.op.args(x, squares, w, experts, width, *rest))
        whole = size(x, squares, w, logits, h[:, :width])
        assert gates.op.cost(gates.op.args(x, squares, w, experts, width, *rest)).bytes == whole, case.name


def test_experts_move_tokens_in_and_out_and_the_weights_that_were_chosen():
    for case, (x, shared_gate_up, shared_down, routed, *rest) in small(moe):
        chosen = 0
        if routed is not None:
            part = len(routed.ids_TK.unique()) / routed.down.shape[0]
            chosen = size(routed.ids_TK, routed.weights_TK) + part * size(routed.gate_up, routed.down)
        whole = 2 * x.nbytes + size(shared_gate_up, shared_down) + chosen
        assert moe.cost(moe.args(x, shared_gate_up, shared_down, routed, *rest)).bytes == whole, case.name


def test_a_steps_beginning_moves_its_plan_and_inputs_and_four_words_of_a_row():
    """These are a slot's length and limit, and the length and number of positions at the start of its result."""
    for case, args in small(step_rows.op):
        plan = args[0]
        made = step_rows.op.reference(args)
        assert step_rows.op.cost(args).bytes == size(plan, made) + len(plan) * 4 * 8, case.name
