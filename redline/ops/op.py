"""An op: its meaning (reference), its minimum cost (cost), the inputs that it is tested with (cases).

A `Kernel` (`redline.kernels`) implements an op on a chip; it names its op and is held equal to the reference at the
op's cases (law 1). An op knows no chip. Weights come as handles (`formats.Weight`); each chip has its own layout.
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
class PeakRates:
    """The measured peak rates of this machine (see `bench.machine`)."""

    name: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Cost:
    """The work that no implementation can avoid: bytes to move, operations to perform."""

    bytes: int
    flops: int = 0

    def seconds(self, machine: PeakRates) -> float:
        """The roofline time on this machine: bytes and operations overlap, so the slower of the two decides."""
        return max(self.bytes / machine.bytes_per_s, self.flops / machine.flops_per_s)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Case:
    """Fresh random inputs of one shape.

    make: returns the op's record. small: whether the case is fast enough for an interpreter and every test run.
    """

    name: str
    make: Callable[[torch.Generator], Any]
    small: bool = True
    rtol: float | None = None  # the relative error allowed in this case; None: the op's rtol


@dataclass(frozen=True)
class Op(Generic[P, A, R]):
    """One operation of the arithmetic, independent of any chip. Calling it with the record's fields runs the reference.

    args: the record of the op's arguments, a NamedTuple; it is defined once, and all other code reads it by name.
    writes: names of fields with tensors that a call modifies and does not return; tests compare those too.
    rtol: relative error of float32 sums that are added in another order. roundings: how many times a GPU kernel rounds
    an intermediate to the output's format that the reference keeps in float32; the output itself, which both round, is
    not counted.
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
    """The relative error (of norms) that the CUDA kernel's arithmetic allows for an output of the reference.

    Float32 sums in another order err by `rtol`. A rounding to nearest errs by at most half a step, and roundings are
    independent, so `roundings` of them add up as squares; sums of products propagate their factors' errors.

    Before the final rounding the two results already differ by that error e. Two numbers that differ by e of a step are
    rounded to different neighbours with probability e, so of n numbers about e n differ by a whole step. By chance it
    is more: each number contributes its square, the variance of this sum follows from the output's fourth moment, and
    the largest number may be among them. In products of gates and weights a few numbers make up most of the norm
    (2026-11-28: `experts_up` of one token of nano reached 4.6e-4 of the 4.0e-4 allowed by a formula that took all
    numbers to be alike).
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
