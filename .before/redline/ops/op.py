"""An op: what it means (reference), how it is done here (kernel), what it must cost (cost), where it is tried (cases).

One op, one file. A call takes the kernel of the tensors' device (`kernel`: CPU, `cuda`: GPU), where it could be built,
the sizes fit it and no input needs a gradient; everything else takes the reference, which is counted. Weights come as
handles (`ops.weights`, `ops.tiled`) that all understand, so they have one signature and one test holds them equal.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.cuda.kernel import has_kernels

P = ParamSpec("P")
R = TypeVar("R")

reference_calls: Counter[str] = Counter()  # op name -> calls of this process that took the reference


@dataclass(frozen=True)
class Machine:
    """What this machine can do at best, measured (see `bench.local.machine`)."""

    name: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Cost:
    """The work that no implementation can avoid: bytes that must move, operations that must happen."""

    bytes: int
    flops: int = 0

    def seconds(self, machine: Machine) -> float:
        return max(self.bytes / machine.bytes_per_s, self.flops / machine.flops_per_s)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Case:
    """Fresh random inputs of one shape. `small`: fit for an interpreter and for every test run."""

    name: str
    make: Callable[[torch.Generator], tuple[Any, ...]]
    small: bool = True
    rtol: float | None = None  # of this case, where it is not the op's


def _always(*_: object, **__: object) -> bool:
    return True


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """`fits`, `cuda_fits`: whether the kernel takes these sizes; Kimi's always do. rtol: of sums in float32.

    roundings: how often the CUDA kernel rounds to an output's format what the reference keeps in float32, beside the
    output itself, which both round.
    """

    name: str
    reference: Callable[P, R]
    kernel: Callable[P, R] | None
    cost: Callable[P, Cost]
    cases: Callable[[], Iterator[Case]]
    rtol: float = 2e-5
    fits: Callable[..., bool] = _always
    cuda: Callable[P, R] | None = None
    cuda_fits: Callable[..., bool] = _always
    roundings: int = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0]
        assert isinstance(x, Tensor), f"{self.name}: the first argument decides the device, got {type(x)}"
        if not x.requires_grad:
            if self.cuda is not None and has_kernels(x.device) and self.cuda_fits(*args, **kwargs):
                return self.cuda(*args, **kwargs)
            on_cpu = self.kernel is not None and not x.is_cuda and native.library() is not None
            if on_cpu and self.kernel is not None and self.fits(*args, **kwargs):
                return self.kernel(*args, **kwargs)
        reference_calls[self.name] += 1
        return self.reference(*args, **kwargs)


def limit_of(op: Op[Any, Any], case: Case, output: Tensor) -> float:
    """The relative error (of norms) that the CUDA kernel's arithmetic allows an output of the reference.

    Float32 sums in another order err by `rtol`. A rounding to nearest errs by at most half a step, and roundings do not
    know one another, so `roundings` of them add up as squares; sums of products carry their factors' errors on.

    What is rounded in the end was apart by that error e already. Two numbers that are e of a step apart are rounded to
    different neighbours in e of all cases, so of n numbers about e n, and by chance more, are a whole step apart.
    """
    error = op.rtol if case.rtol is None else case.rtol
    if output.dtype == torch.float32:
        return error
    step, numbers = torch.finfo(output.dtype).eps, max(output.numel(), 1)
    error = math.hypot(error, step / 2 * math.sqrt(op.roundings))
    apart = min(1.0, error / step) * numbers
    by_chance = 4 * math.sqrt(apart) + 16  # one number alone may be four times as large as most
    return math.hypot(error, step * math.sqrt((apart + by_chance) / numbers))
