"""Law 1: kernel = reference within the op's tolerance, on new random inputs, with outputs filled with NaN first."""

import copy
from typing import Any

import pytest
import torch

from redline.kernels.all import CPU
from redline.kernels.cpu import native
from redline.kernels.kernel import Kernel, references
from redline.model.eagle3.one_call import draft_chain, draft_fuse, draft_pass
from redline.model.k2.one_call import transformer
from redline.ops.op import Case, Op
from tests.seeds import fresh_seed

KERNELS = (*CPU, transformer, draft_fuse, draft_pass, draft_chain)
CASES = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}")
    for kernel in KERNELS
    for case in kernel.op.cases()
    if case.small
]


def written(op: Op[Any, Any, Any], args: Any) -> list[Any]:
    return [getattr(args, name) for name in op.writes]


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list):
        return [torch.tensor(value)]
    if callable(value):
        return tensors(value())
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple) else []


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_kernel_is_reference(kernel: Kernel[Any, Any, Any], case: Case) -> None:
    assert native.library() is not None, native.why_not()
    seed = fresh_seed()
    args = case.make(torch.Generator().manual_seed(seed))
    ours, theirs = kernel.lay_out(copy.deepcopy(args)), copy.deepcopy(args)
    assert kernel.fits(ours), "the kernel does not accept this case"
    poison(kernel.op.name, ours)
    got, want = kernel.run(ours), kernel.op.reference(theirs)
    compared = tensors((got, *written(kernel.op, ours))), tensors((want, *written(kernel.op, theirs)))
    for a, b in zip(*compared, strict=True):
        if a.is_floating_point():
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)
            limit = case.rtol or (4e-3 if a.dtype == torch.bfloat16 else kernel.op.rtol)
            assert error <= limit, f"relative error {error:.2e} > {limit:.0e} (seed {seed})"
        else:
            assert torch.equal(a, b), f"seed {seed}"


FUSED = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}")
    for kernel in KERNELS
    for case in kernel.op.cases()
    if kernel.op.rtol == 0 and "float32 pages" in case.name
]


@pytest.mark.parametrize(("kernel", "case"), FUSED)
def test_several_ops_in_one_call_are_what_their_references_are(kernel: Kernel[Any, Any, Any], case: Case) -> None:
    """The test above compares such a kernel bit for bit with the single kernels in sequence; this one compares it with
    the ops' references. Over float32 pages both compute with the same numbers: only the order of sums differs.
    """
    seed = fresh_seed()
    args = case.make(torch.Generator().manual_seed(seed))
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    got = kernel.run(ours)
    with references():
        want = kernel.op.reference(theirs)
    compared = tensors((got, *written(kernel.op, ours))), tensors((want, *written(kernel.op, theirs)))
    assert any(a.is_floating_point() for a in compared[0])
    for a, b in zip(*compared, strict=True):
        if a.is_floating_point():
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)
            assert error <= 1e-4, f"relative error {error:.2e} (seed {seed})"


def poison(op: str, args: Any) -> None:
    """Fills with NaN the arguments that an op writes completely; token 0 of mla_decode's output belongs to a prompt and
    is kept.
    """
    if op == "step_inputs":
        args.into.inputs.cos_T.fill_(torch.nan)
        args.into.inputs.sin_T.fill_(torch.nan)
    if op == "mla_prefill":
        args.out_CHV.fill_(torch.nan)
    if op == "mla_decode":
        args.out_THV[1:].fill_(torch.nan)
