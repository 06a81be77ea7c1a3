"""The Triton row ops against their references: in Triton's interpreter if there is no GPU."""

import copy
from typing import Any

import pytest
import torch

from redline.kernels.by_chip import checksum, checksums
from redline.kernels.cuda.decode.drafter_rows import join_rows, norm_states
from redline.kernels.cuda.decode.gqa import attend_grouped, keep_rows
from redline.kernels.cuda.patches import add_layer_norm, attend_patches
from redline.kernels.cuda.prefill.attend_blocks import attend_blocks
from redline.kernels.cuda.prefill.rowwise import norm_rows, rotate_heads, split_a, swiglu
from redline.kernels.kernel import Kernel
from redline.ops.op import Case
from tests.seeds import fresh_generator

KERNELS: tuple[Kernel[Any, Any, Any], ...] = (
    *(norm_rows, split_a, rotate_heads, swiglu),
    *(norm_states, join_rows, keep_rows, attend_grouped),
    *(add_layer_norm, attend_patches, attend_blocks),
    checksum.cuda,
    checksums.cuda,
)
CASES = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}")
    for kernel in KERNELS
    for case in kernel.op.cases()
    if case.small
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="law 1 on a GPU has the same cases")
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_triton_is_the_reference(kernel: Kernel[Any, Any, Any], case: Case):
    args = case.make(fresh_generator())
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    got, want = kernel.run(kernel.op.args(*ours)), kernel.op.reference(kernel.op.args(*theirs))
    tensors = [x for x in (got if isinstance(got, tuple) else (got,)) + ours if isinstance(x, torch.Tensor)]
    wanted = [x for x in (want if isinstance(want, tuple) else (want,)) + theirs if isinstance(x, torch.Tensor)]
    for a, b in zip(tensors, wanted, strict=True):
        if not a.is_floating_point():
            assert torch.equal(a, b)
            continue
        a, b = a.double(), b.double()
        assert torch.equal(a.isnan(), b.isnan())  # rows of pages that must not be read
        assert (a - b).nan_to_num().norm() <= 5e-3 * b.nan_to_num().norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="law 1 on a GPU has the same case")
def test_fp8_rows_are_the_references_but_where_rounding_parts_them():
    case = next(case for case in split_a.op.cases() if "fp8" in case.name)
    args = case.make(torch.Generator().manual_seed(3))
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    split_a.run(split_a.op.args(*ours))
    split_a.op.reference(split_a.op.args(*theirs))
    a, b = (
        plane.view(torch.uint8).int().flatten(0, 1)[rows]
        for rows, plane in ((ours[5], ours[6]), (theirs[5], theirs[6]))
    )
    assert int((a - b).abs().max()) <= 1
    assert int((a != b).sum()) <= a.numel() // 100
    assert int((b & 127 == 126).sum()) > 0, "no value saturates"
