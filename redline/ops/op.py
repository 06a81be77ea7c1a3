"""An op: what it means (reference), what it must cost (cost), where it is tried (cases).

How a chip does it is a `Kernel` (`redline.kernels`), which names its op and is held equal to the reference at the op's
cases (law 1). An op knows no chip. Weights come as handles (`formats.Weight`), which each chip lays out in its own way.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
A = TypeVar("A", bound=tuple[Any, ...])
R = TypeVar("R")


@dataclass(frozen=True)
class Machine:
    """What this machine can do at best, measured (see `bench.machine`)."""

    name: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Cost:
    """The work that no implementation can avoid: bytes that must move, operations that must happen."""

    bytes: int
    flops: int = 0

    def seconds(self, machine: Machine) -> float:
        """The least time on this machine: bytes and operations overlap, so the slower of the two decides."""
        return max(self.bytes / machine.bytes_per_s, self.flops / machine.flops_per_s)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Case:
    """Fresh random inputs of one shape.

    make: returns the op's record. small: whether an interpreter and every test run have the time for it.
    """

    name: str
    make: Callable[[torch.Generator], Any]
    small: bool = True
    rtol: float | None = None  # the relative error that this case may have; None: the op's


@dataclass(frozen=True)
class Op(Generic[P, A, R]):
    """One operation of the arithmetic, apart from any chip. A call takes the record's fields, and is the reference.

    args: the record of what a call takes, a NamedTuple; it is written once, and all else reads it by name.
    writes: names of the fields whose tensors a call changes and does not return; tests compare those too.
    rtol: relative error of sums in float32 that are added up in another order. roundings: how often a GPU's kernel
    rounds to an output's format what the reference keeps in float32, beside the output itself, which both round.
    """

    name: str
    args: Callable[P, A]
    reference: Callable[[A], R]
    cost: Callable[[A], Cost]
    cases: Callable[[], Iterator[Case]]
    rtol: float = 2e-5
    roundings: int = 0
    writes: tuple[str, ...] = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The reference's result; takes the fields of the record."""
        return self.reference(self.args(*args, **kwargs))


def limit_of(op: Op[Any, Any, Any], case: Case, output: Tensor) -> float:
    """The relative error (of norms) that the CUDA kernel's arithmetic allows an output of the reference.

    Float32 sums in another order err by `rtol`. A rounding to nearest errs by at most half a step, and roundings are
    independent, so `roundings` of them add up as squares; sums of products carry their factors' errors on.

    What is rounded in the end was apart by that error e already. Two numbers that are e of a step apart are rounded to
    different neighbours in e of all cases, so of n numbers about e n are a whole step apart. By chance it is more: each
    counts by its square, whose variance follows from the output's fourth moment, and the largest number may be among
    them. Products of gates and weights have few numbers that make up most of the norm (2026-11-28: `experts_up` of one
    token of nano at 4.6e-4 of 4.0e-4, while all numbers were taken to be alike).
    """
    error = op.rtol if case.rtol is None else case.rtol
    if output.dtype == torch.float32:
        return error
    step, numbers = torch.finfo(output.dtype).eps, max(output.numel(), 1)
    error = math.hypot(error, step / 2 * math.sqrt(op.roundings))
    apart = min(1.0, error / step) * numbers
    square = output.double().masked_fill(~output.double().isfinite(), 0).square().flatten()
    mean = float(square.mean().clamp(min=1e-300)) if output.numel() else 1.0
    moment, largest = (
        (float(square.square().mean()) / mean**2, float(square.max()) / mean) if output.numel() else (1, 1)
    )
    by_chance = 4 * math.sqrt(apart * moment) + max(largest, 16)
    return math.hypot(error, step * math.sqrt((apart + by_chance) / numbers))
