"""A CUDA kernel: C++ beside its op, compiled when first used, launched on the tensors' device.

On a GPU NVRTC compiles it, once for each chip and content: the machine code is kept in `~/.cache/redline`. Tests run
the same source on a CPU, thread by thread (`emulator.py`), inside `emulation()`.

A kernel takes one struct by value. Its sizes are macros, so every variant is a program of its own.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.ops.cuda import driver, emulator

HERE = Path(__file__).parent
_emulating = threading.local()


@dataclass(frozen=True)
class Kernel:
    """source: of `ops/`. shared: bytes of shared memory of a block. THREADS is defined for the source."""

    source: str
    name: str
    defines: Mapping[str, int | str] = field(hash=False)
    shared: int
    threads: int = 512

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        defines = {**self.defines, "THREADS": self.threads}
        return tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))

    @functools.cached_property
    def path(self) -> Path:
        return HERE.parent / self.source

    @functools.cached_property
    def _function(self) -> driver.Function:
        return driver.Function(self.path, self.name, self.options, self.shared)

    def launch(self, arguments: ctypes.Structure, grid: int, grid_y: int = 1, *, overlap: bool = True) -> None:
        """On torch's current stream. overlap: it may begin before the kernel in front of it has ended, and then waits
        for that with `wait_for_previous_grid` before it reads what that wrote."""
        if grid == 0:
            return
        if emulating():
            emulator.run(self.path, self.name, self.options, arguments, (grid, grid_y), self.threads, self.shared)
        else:
            self._function.launch(arguments, (grid, grid_y), self.threads, self.shared, overlap=overlap)


def address(x: Tensor | None) -> int:
    """Of a contiguous tensor, on a GPU or under emulation; 0 for None."""
    if x is None:
        return 0
    assert x.is_contiguous(), f"expected a contiguous tensor, got strides {x.stride()} for shape {tuple(x.shape)}"
    assert x.is_cuda or emulating(), "a CUDA kernel was given a CPU tensor"
    return x.data_ptr()


@contextlib.contextmanager
def emulation() -> Generator[None]:
    """Inside, launches of this thread run on the CPU: for tests, thousands of times slower."""
    _emulating.on = True
    try:
        yield
    finally:
        _emulating.on = False


def emulating() -> bool:
    return getattr(_emulating, "on", False)


def has_kernels(device: torch.device) -> bool:
    """Whether CUDA kernels run for tensors of this device; `why_not` says why they do not."""
    return emulating() or (device.type == "cuda" and why_not() is None)


def why_not() -> str | None:
    """One line, where a GPU's kernels cannot be used."""
    return driver.why_not()


def structure(name: str, pointers: str = "", ints: str = "", floats: str = "") -> type[ctypes.Structure]:
    """A struct of the fields named, in this order: pointers, int32s, float32s; as the kernel's source declares it."""
    fields: list[tuple[str, Any]] = [(field, ctypes.c_void_p) for field in pointers.split()]
    fields += [(field, ctypes.c_int) for field in ints.split()]
    fields += [(field, ctypes.c_float) for field in floats.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})
