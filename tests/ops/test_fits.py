"""A kernel that says it does not fit is never called, and nothing fails: so what it has to fit is said here."""

from typing import Any

import pytest
import torch

from redline.ops.all import ALL, CUDA
from redline.ops.op import Op


def refused(op: Op[Any, Any], fits: Any) -> list[str]:
    args = ((case.name, case.make(torch.Generator().manual_seed(1))) for case in op.cases() if case.small)
    return [name for name, given in args if not fits(*given)]


# `linear` is tried with weights in panels, which are a CPU's.
@pytest.mark.parametrize("op", [op for op in CUDA if op.cuda is not None], ids=lambda op: op.name)
def test_a_gpus_kernel_fits_the_sizes_that_it_is_tried_with(op: Op[Any, Any]):
    assert refused(op, op.cuda_fits) == []


@pytest.mark.parametrize("op", [op for op in ALL if op.kernel is not None], ids=lambda op: op.name)
def test_a_cpus_kernel_fits_the_sizes_that_it_is_tried_with(op: Op[Any, Any]):
    assert refused(op, op.fits) == []
