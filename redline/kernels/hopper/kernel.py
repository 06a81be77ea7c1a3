"""A CUDA kernel: CUDA C++ beside its op, compiled when first used, launched on the tensors' device.

On a GPU NVRTC compiles it, once for each chip and content: the machine code is kept in `~/.cache/redline`. Tests run
the same source on a CPU, thread by thread: their emulator, which is not shipped, takes launches over (`launched_by`).

A kernel takes one struct by value, which its source declares and `launch_record` reads from there. Its sizes are
macros, so every variant is a program of its own.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.kernels.hopper import driver
from redline.kernels.record import Record, layout_check, record

HERE = Path(__file__).parent
# source, name, options, arguments, grid, threads of a block, bytes of its shared memory
Launch = Callable[[Path, str, Sequence[str], Record, tuple[int, int], int, int], None]
_emulating = threading.local()
# Of a Hopper multiprocessor, as CUDA's programming guide has them for compute capability 9.0.
SM_THREADS, SM_BLOCKS, SM_SHARED, BLOCK_SHARED = 2048, 32, 228 << 10, 1 << 10


@dataclass(frozen=True)
class CudaKernel:
    """source: of this folder. args: the struct that the kernel takes, of `launch_record`. shared: bytes of shared
    memory of a block. THREADS is defined for the source."""

    source: str
    name: str
    args: type[Record]
    defines: Mapping[str, int | str] = field(hash=False)
    shared: int
    threads: int = 512

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """The compiler's flags: every macro, in the order of their names."""
        defines = {**self.defines, "THREADS": self.threads}
        return tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))

    @functools.cached_property
    def path(self) -> Path:
        """The source's file."""
        return HERE / self.source

    def at_once(self, multiprocessors: int) -> int:
        """Blocks that lie on the chip together at most, by threads and shared memory; registers are not counted."""
        on_one = min(SM_BLOCKS, SM_THREADS // self.threads, SM_SHARED // (self.shared + BLOCK_SHARED))
        return multiprocessors * on_one

    @functools.cached_property
    def _function(self) -> driver.Function:
        return driver.Function(self.path, self.name, self.options, self.shared, layout_check(self.args))

    def launch(self, arguments: Record, grid: int, grid_y: int = 1, *, overlap: bool = True) -> None:
        """On torch's current stream. overlap: it may begin before the kernel in front of it has ended, and then waits
        for that with `wait_for_previous_grid` before it reads what that wrote.

        Blocks that wait for other ranks must all lie on the chip at once: one that is not there yet sends nothing, and
        those that wait for it do not leave. That is asserted as far as `at_once` knows it. As to registers, one block
        a multiprocessor always has them (112 blocks of `experts_down`); 64 tokens of `sum_ranks` are 896 blocks of 128
        threads, 7 on a multiprocessor, which 72 registers a thread allow.

        Raises TypeError for a record of another struct than the kernel takes.
        """
        if type(arguments) is not self.args:
            raise TypeError(f"{self.name} takes {self.args.__name__}, got {type(arguments).__name__}")
        if grid == 0:
            return
        if self.defines.get("RANKS", 1) != 1:
            most = self.at_once(_multiprocessors())
            assert grid * grid_y <= most, (
                f"{self.name}: {grid * grid_y} blocks wait for other ranks, {most} lie at once"
            )
        if emulating():
            launch: Launch = _emulating.launch
            launch(self.path, self.name, self.options, arguments, (grid, grid_y), self.threads, self.shared)
        else:
            self._function.launch(arguments, (grid, grid_y), self.threads, self.shared, overlap=overlap)


@functools.cache
def _multiprocessors() -> int:
    """Of the current device; an H100's and an H200's where there is none."""
    if not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class LaunchRecord(Record):
    """A kernel's arguments. Raises TypeError, as every record does, and for a tensor that is not on a GPU while nothing
    emulates one."""

    def __init__(self, **values: Any) -> None:
        if not emulating():
            for name, value in values.items():
                if isinstance(value, Tensor) and not value.is_cuda:
                    raise TypeError(f"{type(self).__name__}.{name}: a CUDA kernel was given a CPU tensor")
        super().__init__(**values)


def launch_record(source: str, name: str) -> type[Record]:
    """The struct `name` of a source of this folder, as `record` reads it."""
    return record(HERE / source, name, LaunchRecord)


@contextlib.contextmanager
def launched_by(launch: Launch) -> Generator[None]:
    """Inside, launches of this thread are given to `launch`, and tensors may be a CPU's."""
    _emulating.launch = launch
    try:
        yield
    finally:
        _emulating.launch = None


def emulating() -> bool:
    """Whether launches of this thread go to an emulator."""
    return getattr(_emulating, "launch", None) is not None


def has_kernels(device: torch.device) -> bool:
    """Whether CUDA kernels run for tensors of this device; `why_not` says why they do not."""
    return emulating() or (device.type == "cuda" and why_not() is None)


def why_not() -> str | None:
    """One line, where a GPU's kernels cannot be used."""
    return driver.why_not()
