"""An op: what it means (reference), how it is done here (kernel), what it must cost (cost), where it is tried (cases).

One op, one file. A call takes the native kernel for tensors on a CPU, where the kernels were built, the sizes fit them
and no input needs a gradient; everything else takes the reference, which is counted. Weights come as handles
(`ops.weights`) that both understand, so the two have one signature and one test holds them equal.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from redline.ops import native

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
    """`fits`: whether the kernel takes these sizes; Kimi's always do."""

    name: str
    reference: Callable[P, R]
    kernel: Callable[P, R]
    cost: Callable[P, Cost]
    cases: Callable[[], Iterator[Case]]
    rtol: float = 2e-5
    fits: Callable[..., bool] = _always

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0]
        assert isinstance(x, Tensor), f"{self.name}: the first argument decides the device, got {type(x)}"
        if x.is_cuda or x.requires_grad or native.library() is None or not self.fits(*args, **kwargs):
            reference_calls[self.name] += 1
            return self.reference(*args, **kwargs)
        return self.kernel(*args, **kwargs)
