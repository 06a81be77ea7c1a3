"""Law 1 on a GPU: every CUDA kernel = its reference, at all cases, with outputs filled with NaN first. Run by hand:

python -m pytest -m gpu tests/laws/test_law_1_on_a_gpu.py

At the end it prints how near each op's outputs came to their limits, which follow from the kernel's arithmetic
(`ops.op.limit_of`).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.kernels.all import HOPPER
from redline.kernels.hopper.decode.choose_experts import RouterChoice, choose_experts
from redline.kernels.hopper.prefill.chunk_attention import attend_chunks
from redline.kernels.inputs import Chunk
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.formats import Plain
from redline.ops.op import Case, Op, limit_of
from tests.seeds import fresh_seed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Op name -> the arguments that it writes, in addition to its results.
CASES = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}") for kernel in HOPPER for case in kernel.op.cases()
]

errors: dict[str, tuple[float, float, str]] = {}  # op and output -> the error nearest to its limit, the limit, the case


@pytest.fixture(scope="module", autouse=True)
def how_near() -> Iterator[None]:
    """Prints at the end how near each output came to its limit."""
    yield
    for name, (error, limit, case) in sorted(errors.items()):
        print(f"{name:32} {error:8.1e} of {limit:8.1e}   {case}")


def on_gpu(value: Any) -> Any:
    """A copy on the GPU: of tensors, and of tuples and dataclasses of tensors."""
    if isinstance(value, Tensor):
        return value.cuda() if not value.is_cuda else value.clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: on_gpu(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    if hasattr(value, "_fields"):
        return type(value)(*map(on_gpu, value))
    return tuple(map(on_gpu, value)) if isinstance(value, tuple) else value


def written(op: Op[Any, Any, Any], args: Any) -> list[Any]:
    return [getattr(args, name) for name in op.writes]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors(getattr(value, field.name))]
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple) else []


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that are not written stay NaN, or the least integer of their type."""
    empty = torch.empty

    def poison(*args: Any, **given: Any) -> Tensor:
        x = empty(*args, **given)
        if x.is_floating_point():
            return x.fill_(torch.nan)
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)

    monkeypatch.setattr(torch, "empty", poison)


@pytest.mark.parametrize(("kernel", "case"), CASES)
@pytest.mark.usefixtures("poisoned")
def test_the_cuda_kernel_is_the_reference(kernel: Kernel[Any, Any, Any], case: Case) -> None:
    op = kernel.op
    seed = fresh_seed()
    with torch.device("cuda"):  # a GPU creates Kimi's experts in a hundredth of the time
        args = case.make(torch.Generator("cuda").manual_seed(seed))
    assert kernel.fits(args), "the kernel does not accept this case"
    ours, theirs = on_gpu(args), on_gpu(args)
    with torch.inference_mode():
        got, want = kernel.run(ours), op.reference(theirs)
        torch.cuda.synchronize()
        if op.name == "gates":
            want = _of_the_same_logits(got, want, *theirs[-1:])
    compared = tensors((got, *written(op, ours))), tensors((want, *written(op, theirs)))
    worst: list[str] = []
    for place, (a, b) in enumerate(zip(*compared, strict=True)):
        if op.name in UNDEFINED:
            a, b = UNDEFINED[op.name](place, a, b, got, want)
        if a.is_floating_point():
            apart = (a.double() - b.double()).masked_fill(a == b, 0)  # equal infinities do not differ
            error = float(apart.norm() / b.double().masked_fill(b.double().isinf(), 0).norm().clamp(min=1e-30))
            limit = limit_of(op, case, b)
            name = f"{op.name}: output {place}, {str(b.dtype).removeprefix('torch.')}"
            errors[name] = max(errors.get(name, (-1.0, 1.0, "")), (error, limit, case.name), key=lambda e: e[0] / e[1])
            if not error <= limit:
                worst.append(f"output {place}: relative error {error:.2e} > {limit:.0e}")
        elif not torch.equal(a, b):
            worst.append(f"output {place}: {int((a != b).sum())} of {a.numel()} differ")
    assert not worst, f"{worst} (seed {seed})"


def _of_the_same_logits(got: Any, want: Any, choice: RouterChoice | None) -> Any:
    """Reference experts are chosen from the kernel's own logits: two scores closer than rounding may change places."""
    if choice is None:
        return want
    c = choice
    pairs = choose_experts.op.reference(
        choose_experts.op.args(got[0], c.bias_E, c.chosen, c.normalise, c.scale, c.forced_TK)
    )
    return *want[:3], dataclasses.replace(pairs, ready=want[3].ready)


def _squares(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    """Blocks may divide the rows in any way, and columns beyond the tokens have no meaning: only the
    sums are compared.
    """
    tokens = tensors(want)[0].shape[0]
    return (a.sum(0)[:tokens], b.sum(0)[:tokens]) if place == tensors(want).__len__() - 1 else (a, b)


def _project_a(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    tokens = tensors(want)[0].shape[0]
    return (a.sum(0)[:tokens], b.sum(0)[:tokens]) if place == 1 else (a, b)


def _attend(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    """A split without rows leaves its latents unwritten."""
    holds = want[1] > -torch.inf
    assert place == 0 or torch.equal(got[1] > -torch.inf, holds)
    return a[holds], b[holds]


def _sort_pairs(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    """Compare only the existing tiles, and their rows."""
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
    "all_reduce": _squares,
    "experts_down": _squares,
    "project_a": _project_a,
    "attend": _attend,
}


@dataclasses.dataclass
class Unfolds:
    w_uk: Plain
    w_uv: Plain


def test_attention_of_chunks_behind_prefixes_is_the_reference() -> None:
    """Chunks with as many tokens before them are computed together. The reference: one by one, on a CPU, in float32."""
    g, heads, nope, rope, rank, value, pages = torch.Generator().manual_seed(fresh_seed()), 4, 128, 64, 512, 128, 12
    sizes = [(64, 100), (64, 7), (640, 90), (64, 256), (65, 40), (64, 1), (64, 30), (65, 33), (64, 64)]
    plane = torch.randn(pages * len(sizes), PAGE_TOKENS, rank + rope, generator=g).to(torch.bfloat16)
    tables = torch.randperm(pages * len(sizes), generator=g).to(torch.int32).view(-1, pages)
    chunks, rows, first = [], [], 0
    for slot, (start, count) in enumerate(sizes):
        position = torch.arange(start, start + count)
        rows.append(tables[slot, position // PAGE_TOKENS].long() * PAGE_TOKENS + position % PAGE_TOKENS)
        chunks.append(Chunk(first, count, start, slot))
        first += count
    q = torch.randn(first, heads, nope + rope, generator=g).to(torch.bfloat16)
    w_uk, w_uv = (torch.randn(heads, *of, generator=g) * rank**-0.5 for of in ((rank, nope), (value, rank)))
    w = Unfolds(Plain(w_uk.to(torch.bfloat16)), Plain(w_uv.to(torch.bfloat16)))
    want, got = torch.empty(first, heads, value), torch.full((first, heads, value), torch.nan, device="cuda")
    given = torch.cat(rows), tables, plane
    attend_chunks(q.float(), w, 0.07, chunks, given[0], tables, plane.float(), want)
    got = got.to(torch.bfloat16)
    attend_chunks(q.cuda(), on_gpu(w), 0.07, chunks, *on_gpu(given), got)
    errors = (got.cpu().float() - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(errors.max()) < 3e-2
