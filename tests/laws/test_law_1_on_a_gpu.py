"""Law 1 on a GPU: every CUDA kernel = its reference, at all cases, with outputs filled with NaN first. Run by hand:

python -m pytest -m gpu tests/laws/test_law_1_on_a_gpu.py

At the end it prints how near each op's outputs came to their limits, which follow from the kernel's arithmetic
(`ops.op.limit_of`).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from redline.bench.verify.law_1 import errors_of, on_device
from redline.kernels.all import CUDA
from redline.kernels.cuda.chips import use_portable_kernels
from redline.kernels.cuda.decode.attend import attend
from redline.kernels.cuda.prefill.chunk_attention import attend_chunks
from redline.kernels.cuda.prefill.grouped import grouped_experts
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.formats import Plain
from redline.ops.op import Case
from tests.kernels.cuda.test_chunk_attention import Unfolds, chunks_of
from tests.seeds import fresh_seed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = torch.device("cuda")
CASES = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}") for kernel in CUDA for case in kernel.op.cases()
]

errors: dict[str, tuple[float, float, str]] = {}  # op and output -> the error nearest to its limit, the limit, the case


@pytest.fixture(scope="module", autouse=True)
def how_near() -> Iterator[None]:
    """Prints at the end how near each output came to its limit."""
    yield
    for name, (error, limit, case) in sorted(errors.items()):
        print(f"{name:32} {error:8.1e} of {limit:8.1e}   {case}")


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_the_cuda_kernel_is_the_reference(kernel: Kernel[Any, Any, Any], case: Case) -> None:
    seed = fresh_seed()
    found = errors_of(kernel, case, seed, DEVICE)
    for one in found:
        name = f"{one.op}: output {one.output}, {one.dtype}"
        if one.limit:
            error = one.error, one.limit, case.name
            errors[name] = max(errors.get(name, (-1.0, 1.0, "")), error, key=lambda e: e[0] / e[1])
    worst = [f"output {one.output}: {one.error:.2e} > {one.limit:.0e}" for one in found if not one.fits]
    assert not worst, f"{worst} (seed {seed})"


PORTABLE = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}")
    for kernel in (attend, grouped_experts)
    for case in kernel.op.cases()
]


@pytest.fixture
def portable() -> Iterator[None]:
    """Kernels as on a chip without wgmma."""
    use_portable_kernels(True)
    yield
    use_portable_kernels(False)


@pytest.mark.parametrize(("kernel", "case"), PORTABLE)
@pytest.mark.usefixtures("portable")
def test_the_form_without_wgmma_is_the_reference(kernel: Kernel[Any, Any, Any], case: Case) -> None:
    test_the_cuda_kernel_is_the_reference(kernel, case)


def test_attention_of_chunks_is_the_reference() -> None:
    """Short and long prompts, and chunks behind prefixes, in one step. The reference: on a CPU, in float32."""
    g, heads, nope, rope, rank, value = torch.Generator().manual_seed(fresh_seed()), 4, 128, 64, 512, 128
    sizes = [(64, 100), (64, 7), (640, 90), (64, 256), (65, 40), (64, 1), (64, 30), (65, 33), (64, 64), (3000, 300)]
    sizes += [(0, 1), (0, 700), (0, 1500), (0, 4096)]
    chunks, rows_T, tables = chunks_of(sizes, g)
    first = len(rows_T)
    plane = torch.randn(tables.numel(), PAGE_TOKENS, rank + rope, generator=g).to(torch.bfloat16)
    q = torch.randn(first, heads, nope + rope, generator=g).to(torch.bfloat16)
    w_uk, w_uv = (torch.randn(heads, *of, generator=g) * rank**-0.5 for of in ((rank, nope), (value, rank)))
    w = Unfolds(Plain(w_uk.to(torch.bfloat16)), Plain(w_uv.to(torch.bfloat16)))
    want, got = torch.empty(first, heads, value), torch.full((first, heads, value), torch.nan, device="cuda")
    given = rows_T, tables, plane
    attend_chunks(q.float(), w, 0.07, chunks, given[0], tables, plane.float(), want)
    got = got.to(torch.bfloat16)
    attend_chunks(q.cuda(), on_device(w, DEVICE), 0.07, chunks, *on_device(given, DEVICE), got)
    errors = (got.cpu().float() - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(errors.max()) < 3e-2
