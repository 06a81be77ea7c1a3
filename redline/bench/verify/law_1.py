"""Law 1 on a GPU: a kernel's outputs compared with its reference's, each within the error that its arithmetic allows.

Outputs are filled with NaN, or with a value that is unlikely to be right, so that an element that a kernel does not
write is found.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from redline.kernels.cuda.decode.choose_experts import RouterChoice, choose_experts
from redline.kernels.kernel import Kernel
from redline.messages.base import Record
from redline.ops.op import Case, Op, limit_of

NOT_A_NUMBER = 1e30  # the error of an output with NaN or infinity where the reference has a number


class OutputDistance(Record, frozen=True):
    """How far one output of a kernel is from its reference's. error: relative, of norms; of integers, the share of
    those that differ, and `limit` is 0. NOT_A_NUMBER for NaN, and as the largest error."""

    op: str
    case: str
    output: int
    dtype: str
    error: float
    limit: float

    @property
    def fits(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.limit


def errors_of(kernel: Kernel[Any, Any, Any], case: Case, seed: int, device: torch.device) -> list[OutputDistance]:
    """Runs a case's kernel and reference on the device, on the same random inputs; one error for each output.

    Raises AssertionError if the kernel does not accept the case.
    """
    op = kernel.op
    with poisoned(), torch.inference_mode():
        args = arguments(case, seed, device)
        assert kernel.fits(args), f"{op.name}: the kernel does not accept the case {case.name}"
        ours, theirs = on_device(args, device), on_device(args, device)
        got, want = kernel.run(ours), op.reference(theirs)
        if op.name == "gates":
            want = _of_the_same_logits(got, want, *cast(tuple[RouterChoice | None], theirs[-1:]))
        compared = tensors((got, *_written(op, ours))), tensors((want, *_written(op, theirs)))
        found: list[OutputDistance] = []
        for place, (a, b) in enumerate(zip(*compared, strict=True)):
            if op.name in _UNDEFINED:
                a, b = _UNDEFINED[op.name](place, a, b, got, want)
            error = _apart(a, b)
            error = error if error < NOT_A_NUMBER else NOT_A_NUMBER
            limit = limit_of(op, case, b) if a.is_floating_point() else 0.0
            dtype = str(b.dtype).removeprefix("torch.")
            found.append(
                OutputDistance(op=op.name, case=case.name, output=place, dtype=dtype, error=error, limit=limit)
            )
    return found


def arguments(case: Case, seed: int, device: torch.device) -> Any:
    """The record of the op's arguments, on the device."""
    with torch.device(device):  # a GPU creates Kimi's experts in a hundredth of the time
        return on_device(case.make(torch.Generator(device).manual_seed(seed)), device)


def _apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, f"the kernel's output is {tuple(a.shape)}, the reference's {tuple(b.shape)}"
    if not a.is_floating_point():
        return float(torch.ne(a, b).sum()) / max(a.numel(), 1)
    apart = (a.double() - b.double()).masked_fill(a == b, 0)  # equal infinities do not differ
    size = b.double().masked_fill(b.double().isinf(), 0)
    return math.sqrt(float(apart.square().sum()) / max(float(size.square().sum()), 1e-60))


def on_device(value: Any, device: torch.device) -> Any:
    """A copy on the device: of tensors, and of tuples and dataclasses of tensors."""
    if isinstance(value, Tensor):
        return value.to(device) if value.device.type != device.type else value.clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: on_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    if not isinstance(value, tuple):
        return value
    copies = [on_device(each, device) for each in cast(tuple[Any, ...], value)]
    kind: Any = type(cast(object, value))
    return kind(*copies) if hasattr(kind, "_fields") else tuple(copies)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors(getattr(value, field.name))]
    items = cast(tuple[Any, ...], value) if isinstance(value, tuple) else ()
    return [t for item in items for t in tensors(item)]


@contextlib.contextmanager
def poisoned() -> Generator[None]:
    """Context manager: `torch.empty` and `torch.empty_like` return NaN, the least integer of their type, or bytes of
    255, which are NaN as f16 and bf16."""
    empty, empty_like = torch.empty, torch.empty_like
    torch.empty, torch.empty_like = _filled(empty), _filled(empty_like)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def _filled(create: Callable[..., Tensor]) -> Any:
    def poison(*args: Any, **given: Any) -> Tensor:
        x = create(*args, **given)
        if x.is_floating_point():
            return x.fill_(torch.nan)
        if x.dtype == torch.uint8:
            return x.fill_(255)
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)

    return poison


def _written(op: Op[Any, Any, Any], args: Any) -> tuple[Any, ...]:
    """The arguments that an op writes, in addition to its results."""
    return tuple(getattr(args, name) for name in op.writes)


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
    """Blocks may divide the rows in any way, and columns beyond the tokens have no meaning: only the sums are
    compared."""
    found = tensors(want)
    tokens = found[0].shape[0]
    return (a.sum(0)[:tokens], b.sum(0)[:tokens]) if place == len(found) - 1 else (a, b)


def _project_a(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    tokens = tensors(want)[0].shape[0]
    return (a.sum(0)[:tokens], b.sum(0)[:tokens]) if place == 1 else (a, b)


def _attend(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    """A split without rows leaves its latents unwritten."""
    holds = want[1] > -torch.inf
    assert place == 0 or torch.equal(got[1] > -torch.inf, holds)
    return a[holds], b[holds]


def _sort_pairs(place: int, a: Tensor, b: Tensor, got: Any, want: Any) -> tuple[Tensor, Tensor]:
    """Compares only the existing tiles, and their rows."""
    count = int(want.tiles[0, 0])
    if place == 1:
        return a[: 1 + count, :6][1:], b[: 1 + count, :6][1:]
    rows = max(int(first + rows) for _, _, _, first, _, rows, *_ in want.tiles[1 : 1 + count].tolist())
    real = b[:rows, 0] >= 0
    assert torch.equal(a[:rows, 0] >= 0, real)
    return a[:rows][real], b[:rows][real]


# Outputs of which a part has no meaning: op name -> the parts to compare.
_UNDEFINED: Mapping[str, Callable[[int, Tensor, Tensor, Any, Any], tuple[Tensor, Tensor]]] = {
    "sort_pairs": _sort_pairs,
    "embed": _squares,
    "project_out": _squares,
    "all_reduce": _squares,
    "experts_down": _squares,
    "project_a": _project_a,
    "attend": _attend,
}
