"""An op: what it means (reference), how it is done here (kernel), what it must cost (cost), where it is tried (cases).

One op, one file. A call takes the kernel of the tensors' device (`kernel`: CPU, `cuda`: GPU), where it could be built,
the sizes fit it and no input needs a gradient; everything else takes the reference, which is counted. Weights come as
handles (`ops.weights`, `ops.tiled`) that all understand, so they have one signature and one test holds them equal.
"""

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
    """`fits`, `cuda_fits`: whether the kernel takes these sizes; Kimi's always do."""

    name: str
    reference: Callable[P, R]
    kernel: Callable[P, R] | None
    cost: Callable[P, Cost]
    cases: Callable[[], Iterator[Case]]
    rtol: float = 2e-5
    fits: Callable[..., bool] = _always
    cuda: Callable[P, R] | None = None
    cuda_fits: Callable[..., bool] = _always

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
