"""Law 1 on a GPU: every CUDA kernel = its reference, at all cases, outputs poisoned first. Run by hand:

python -m pytest -m gpu tests/laws/test_law_1_on_a_gpu.py
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.ops.all import CUDA
from redline.ops.op import Case, Op
from tests.seeds import fresh_seed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Op name -> the arguments that it writes, beside what it returns.
WRITES = {"project_q": (9,), "split_a": (6,), "step_rows": (1, 2), "settle_rows": (3, 4)}
RTOL = {torch.bfloat16: 6e-3, torch.float16: 3e-3, torch.float8_e4m3fn: 4e-2, torch.float32: 2e-3}
LIMITS = {"grouped_experts": 4e-3}  # float32 sums of pairs that are bf16, of BF16 experts through an h that is bf16
CASES = [pytest.param(op, case, id=f"{op.name}: {case.name}") for op in CUDA for case in op.cases()]


def on_gpu(value: Any) -> Any:
    """A copy there: of tensors, tuples and dataclasses of them."""
    if isinstance(value, Tensor):
        return value.cuda() if not value.is_cuda else value.clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: on_gpu(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return tuple(map(on_gpu, value)) if isinstance(value, tuple) else value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors(getattr(value, field.name))]
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple) else []


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written stays NaN, or the least integer of its type."""
    empty = torch.empty

    def poison(*args: Any, **given: Any) -> Tensor:
        x = empty(*args, **given)
        if x.is_floating_point():
            return x.fill_(torch.nan)
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)

    monkeypatch.setattr(torch, "empty", poison)


@pytest.mark.parametrize(("op", "case"), CASES)
@pytest.mark.usefixtures("poisoned")
def test_the_cuda_kernel_is_the_reference(op: Op[Any, Any], case: Case) -> None:
    assert op.cuda is not None
    seed = fresh_seed()
    args = case.make(torch.Generator().manual_seed(seed))
    assert op.cuda_fits(*args), "a case that the kernel does not take"
    ours, theirs = on_gpu(args), on_gpu(args)
    with torch.inference_mode():
        got, want = op.cuda(*ours), op.reference(*theirs)
        torch.cuda.synchronize()
    written = WRITES.get(op.name, ())
    compared = tensors((got, *(ours[i] for i in written))), tensors((want, *(theirs[i] for i in written)))
    worst: list[str] = []
    for place, (a, b) in enumerate(zip(*compared, strict=True)):
        if op.name in UNDEFINED:
            a, b = UNDEFINED[op.name](place, a, b, got, want)
        if a.is_floating_point():
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)
            limit = case.rtol or LIMITS.get(op.name) or RTOL[b.dtype]
            if not error <= limit:
                worst.append(f"output {place}: relative error {error:.2e} > {limit:.0e}")
        elif not torch.equal(a, b):
            worst.append(f"output {place}: {int((a != b).sum())} of {a.numel()} differ")
    assert not worst, f"{worst} (seed {seed})"


def _squares(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    """Blocks share the rows as they like, and columns beyond the tokens say nothing: only the sums are compared."""
    tokens = tensors(want)[0].shape[0]
    return (a.sum(0)[:tokens], b.sum(0)[:tokens]) if place == tensors(want).__len__() - 1 else (a, b)


def _project_a(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    tokens = tensors(want)[0].shape[0]
    return (a.sum(0)[:tokens], b.sum(0)[:tokens]) if place == 1 else (a, b)


def _attend(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    """A split without rows leaves its latents unwritten."""
    holds = want[1] > -torch.inf
    if place == 0:
        return a[holds].float(), b[holds].float()
    assert torch.equal(got[1] > -torch.inf, holds)
    return a[holds], b[holds]


def _sort_pairs(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    """Only the tiles that exist, and their rows."""
    count = int(want.tiles[0, 0])
    if place == 1:
        return a[: 1 + count, :6][1:], b[: 1 + count, :6][1:]
    rows = max(int(first + rows) for _, _, _, first, _, rows, *_ in want.tiles[1 : 1 + count].tolist())
    real = b[:rows, 0] >= 0
    assert torch.equal(a[:rows, 0] >= 0, real)
    return a[:rows][real], b[:rows][real]


UNDEFINED = {
    "sort_pairs": _sort_pairs,
    "embed": _squares,
    "project_out": _squares,
    "experts_down": _squares,
    "project_a": _project_a,
    "attend": _attend,
}
