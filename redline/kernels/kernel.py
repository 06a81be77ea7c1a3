"""A kernel: how a chip does an op, and which sizes it takes.

A call runs the kernel where it can be had, its sizes fit and its first tensor needs no gradient. Everything else takes
the op's reference, and is counted (`fallbacks`), which tests and `lab.nano_gpu` read. Kimi's sizes always fit.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.hopper.kernel import has_kernels
from redline.ops.op import Op

P = ParamSpec("P")
A = TypeVar("A", bound=tuple[Any, ...])
R = TypeVar("R")

fallbacks: Counter[str] = Counter()  # op name -> calls of a `Kernel` in this process that took the reference
_meaning = threading.local()


def _always(_: object) -> bool:
    return True


def _as_they_are(args: A) -> A:
    return args


@dataclass(frozen=True)
class Kernel(Generic[P, A, R]):
    """One chip's way of doing an op. It is called as the op is.

    run: takes the op's record, its weights in this chip's layout. fits: whether `run` takes a record's sizes, dtypes
    and layouts. lay_out: brings the record of an op's case into this chip's layout.
    """

    op: Op[P, A, R]
    run: Callable[..., R]
    chip: Literal["cpu", "hopper"]
    fits: Callable[[A], bool] = _always
    lay_out: Callable[[A], A] = _as_they_are

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The kernel's result or the reference's; takes the fields of the op's record, a tensor first."""
        record = self.op.args(*args, **kwargs)
        x = record[0]
        assert isinstance(x, Tensor), f"{self.op.name}: the first argument decides the device, got {type(x)}"
        if not x.requires_grad and self.runs_for(x) and self.fits(record):
            return self.run(record)
        fallbacks[self.op.name] += 1
        return self.op.reference(record)

    def runs_for(self, x: Tensor) -> bool:
        """Whether this chip's kernels can be had for tensors like this one."""
        if getattr(_meaning, "only", False):
            return False
        if self.chip == "hopper":
            return has_kernels(x.device)
        return not x.is_cuda and native.library() is not None


@dataclass(frozen=True)
class ByChip(Generic[P, A, R]):
    """One op's kernels for both chips: a call takes the one whose chip has the tensors."""

    cpu: Kernel[P, A, R]
    hopper: Kernel[P, A, R]

    @property
    def op(self) -> Op[P, A, R]:
        """The op that both kernels do."""
        return self.cpu.op

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of the kernel whose chip has the first tensor; takes the fields of the op's record."""
        x = args[0]
        on_hopper = isinstance(x, Tensor) and has_kernels(x.device)
        return (self.hopper if on_hopper else self.cpu)(*args, **kwargs)


@contextlib.contextmanager
def references() -> Generator[None]:
    """Inside, every kernel that this thread calls takes its op's reference, so several ops compute what they mean."""
    _meaning.only = True
    try:
        yield
    finally:
        _meaning.only = False
