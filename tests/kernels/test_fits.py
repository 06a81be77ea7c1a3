"""A kernel is not called, without any error, if its `fits` returns false; these tests list the cases that must fit."""

from typing import Any

import pytest
import torch

from redline.kernels.all import CPU, CUDA
from redline.kernels.kernel import Kernel
from redline.model.eagle3.one_call import draft_chain, draft_fuse, draft_pass
from redline.model.k2.one_call import transformer

KERNELS = (*CPU, *CUDA, transformer, draft_fuse, draft_pass, draft_chain)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.op.name} {kernel.chip}")
def test_a_kernel_fits_the_sizes_that_it_is_tried_with(kernel: Kernel[Any, Any, Any]):
    args = (
        (case.name, kernel.lay_out(case.make(torch.Generator().manual_seed(1))))
        for case in kernel.op.cases()
        if case.small
    )
    assert [name for name, given in args if not kernel.fits(given)] == []
