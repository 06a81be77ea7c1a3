"""A kernel: a chip's implementation of an op, with the sizes that it supports.

A call runs the kernel if it is available, supports the sizes, and the first tensor needs no gradient. Otherwise the
op's reference runs, and the call is counted in `fallbacks`, which tests and `lab.nano_gpu` read. Kimi's sizes are
always supported.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cuda.kernel import has_kernels
from redline.ops.op import Op

P = ParamSpec("P")
A = TypeVar("A", bound=tuple[Any, ...])
R = TypeVar("R")

fallbacks: Counter[str] = Counter()  # op name -> calls of a `Kernel` in this process that ran the reference
_meaning = threading.local()


def _always(_: object) -> bool:
    return True


def _as_they_are(args: A) -> A:
    return args


@dataclass(frozen=True)
class Kernel(Generic[P, A, R]):
    """One chip's implementation of an op, with the call signature of the op.

    run: takes the op's record, with weights in this chip's layout. fits: whether `run` supports a record's sizes,
    dtypes and layouts. lay_out: converts the record of an op's test case to this chip's layout.
    """

    op: Op[P, A, R]
    run: Callable[..., R]
    chip: Literal["cpu", "cuda"]
    fits: Callable[[A], bool] = _always
    lay_out: Callable[[A], A] = _as_they_are

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The kernel's or the reference's result; takes the fields of the op's record, a tensor first."""
        record = self.op.args(*args, **kwargs)
        x = record[0]
        assert isinstance(x, Tensor), f"{self.op.name}: the first argument decides the device, got {type(x)}"
        if not x.requires_grad and self.runs_for(x) and self.fits(record):
            return self.run(record)
        fallbacks[self.op.name] += 1
        return self.op.reference(record)

    def runs_for(self, x: Tensor) -> bool:
        """Whether this chip's kernels are available for tensors like this one."""
        if getattr(_meaning, "only", False):
            return False
        if self.chip == "cuda":
            return has_kernels(x.device)
        return not x.is_cuda and native.library() is not None


@dataclass(frozen=True)
class ByChip(Generic[P, A, R]):
    """One op's kernels for both chips: a call runs the one of the chip that holds the tensors."""

    cpu: Kernel[P, A, R]
    cuda: Kernel[P, A, R]

    @property
    def op(self) -> Op[P, A, R]:
        """The op that both kernels implement."""
        return self.cpu.op

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of the kernel of the first tensor's chip; takes the fields of the op's record."""
        x = args[0]
        on_gpu = isinstance(x, Tensor) and has_kernels(x.device)
        return (self.cuda if on_gpu else self.cpu)(*args, **kwargs)


@contextlib.contextmanager
def references() -> Generator[None]:
    """Context manager: every kernel that this thread calls runs its op's reference."""
    _meaning.only = True
    try:
        yield
    finally:
        _meaning.only = False
