"""A CUDA kernel: CUDA C++ next to its op, compiled on first use, launched on the tensors' device.

On a GPU it is compiled by NVRTC, once per chip and content; the machine code is cached in `~/.cache/redline`. Tests run
the same source on a CPU, thread by thread, in an emulator that is not shipped and that replaces launches
(`launched_by`).

A kernel takes one struct by value, declared in its source and parsed by `launch_record`. Its sizes are macros, so every
variant is compiled separately.
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

from redline.kernels.cuda import driver
from redline.kernels.cuda.chips import HOPPER, chip
from redline.kernels.record import ArgumentStruct, layout_check, record

HERE = Path(__file__).parent
# source, name, options, arguments, grid, threads per block, bytes of shared memory per block
Launch = Callable[[Path, str, Sequence[str], ArgumentStruct, tuple[int, int], int, int], None]
_emulating = threading.local()
_compiling = threading.local()
BLOCK_SHARED = 1 << 10  # shared memory that the system keeps for each resident block


@dataclass(frozen=True)
class CudaKernel:
    """source: in this folder. args: the kernel's argument struct, from `launch_record`. shared: bytes of shared memory
    per block. The macro THREADS is defined for the source."""

    source: str
    name: str
    args: type[ArgumentStruct]
    defines: Mapping[str, int | str] = field(hash=False)
    shared: int
    threads: int = 512

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """The compiler's flags: every macro, sorted by name."""
        defines = {**self.defines, "THREADS": self.threads}
        return tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))

    @functools.cached_property
    def path(self) -> Path:
        """The path of the source file."""
        return HERE / self.source

    def at_once(self, multiprocessors: int) -> int:
        """Maximum number of resident blocks on the chip, by threads and shared memory; registers are not counted."""
        has = chip()
        return multiprocessors * min(
            has.sm_blocks, has.sm_threads // self.threads, has.sm_shared // (self.shared + BLOCK_SHARED)
        )

    @functools.cached_property
    def _function(self) -> driver.Function:
        return driver.Function(self.path, self.name, self.options, self.shared, layout_check(self.args))

    def launch(self, arguments: ArgumentStruct, grid: int, grid_y: int = 1, *, overlap: bool = True) -> None:
        """Launches on torch's current stream. overlap: the kernel may begin before the preceding one has ended, and
        then calls `wait_for_previous_grid` before it reads that one's results.

        Blocks that wait for other ranks must all be resident at the same time: a block that has not started sends
        nothing, and blocks that wait for it do not exit. This is asserted as far as `at_once` can tell. Registers
        always suffice for one block per multiprocessor (112 blocks of `experts_down`); `all_reduce` of 64 tokens is 896
        blocks of 128 threads, 7 per multiprocessor, which 72 registers per thread allow.

        Raises TypeError for a record of another struct than the kernel takes.
        """
        if type(arguments) is not self.args:
            raise TypeError(f"{self.name} takes {self.args.__name__}, got {type(arguments).__name__}")
        if grid == 0:
            return
        if self.defines.get("RANKS", 1) != 1:
            most = self.at_once(_multiprocessors())
            assert grid * grid_y <= most, (
                f"{self.name}: {grid * grid_y} blocks wait for other ranks, but only {most} are resident at once"
            )
        if emulating():
            launch: Launch = _emulating.launch
            launch(self.path, self.name, self.options, arguments, (grid, grid_y), self.threads, self.shared)
        elif (compile_later := getattr(_compiling, "submit", None)) is not None:
            compile_later(self._function)
        else:
            self._function.launch(arguments, (grid, grid_y), self.threads, self.shared, overlap=overlap)


@functools.cache
def _multiprocessors() -> int:
    """The number of multiprocessors of the current device; that of an H100 and an H200 if there is none."""
    if not torch.cuda.is_available():
        return HOPPER.multiprocessors
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class LaunchRecord(ArgumentStruct):
    """A kernel's arguments. Raises TypeError, as every record does, and for a tensor that is not on a GPU outside
    emulation."""

    def __init__(self, **values: Any) -> None:
        if not emulating():
            for name, value in values.items():
                if isinstance(value, Tensor) and not value.is_cuda:
                    raise TypeError(f"{type(self).__name__}.{name}: a CUDA kernel was given a CPU tensor")
        super().__init__(**values)


def launch_record(source: str, name: str) -> type[ArgumentStruct]:
    """The struct `name` of a source in this folder, as parsed by `record`."""
    return record(HERE / source, name, LaunchRecord)


@contextlib.contextmanager
def launched_by(launch: Launch) -> Generator[None]:
    """Context manager: launches of this thread are passed to `launch`, and tensors may be on the CPU."""
    _emulating.launch = launch
    try:
        yield
    finally:
        _emulating.launch = None


@contextlib.contextmanager
def compiled_by(submit: Callable[[driver.Function], object]) -> Generator[None]:
    """Context manager: this thread launches nothing; each function that it would launch is passed to `submit`."""
    _compiling.submit = submit
    try:
        yield
    finally:
        _compiling.submit = None


def emulating() -> bool:
    """Whether launches of this thread are passed to an emulator."""
    return getattr(_emulating, "launch", None) is not None


def has_kernels(device: torch.device) -> bool:
    """Whether CUDA kernels run for tensors of this device; `why_not` returns the reason if they do not."""
    return emulating() or (device.type == "cuda" and why_not() is None)


def why_not() -> str | None:
    """The reason, in one line, if the GPU kernels cannot be used."""
    return driver.why_not()
