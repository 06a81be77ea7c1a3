# pyright: basic
"""Triton's kernels compiled in threads before they are launched (`compile_ahead.py`)."""

import contextlib
import functools
import re
import subprocess
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from redline.kernels.cuda.chips import Chip

WARP = 32  # threads


class _Absent:
    """In place of Triton's driver: a chip that need not be in this machine."""

    def __init__(self, chip: Chip) -> None:
        major, minor = chip.capability
        self._number = -10 * major - minor  # Triton keeps a target for each: those of chips that are here begin at 0
        self._target = GPUTarget("cuda", 10 * major + minor, WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_in(pool: Executor, target: Chip | None = None) -> Generator[list[Callable[[], Any]]]:
    """Context manager: kernels that are launched are compiled in the pool instead, in the whole process.

    target: compile for this chip, and raise the compiler's errors at the end; None: for the current device, and leave a
    kernel that does not compile for its launch to report. Yields a list, to which a call is added for each launch: it
    returns the compiled kernel.
    """
    run, made = JITFunction.run, list[Callable[[], Any]]()

    @functools.wraps(run)
    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        kernel: Any = run(self, *args, grid=grid, warmup=True, **how)
        made.append(lambda: kernel.result() if hasattr(kernel, "future") else kernel)
        return kernel

    active = driver._active
    JITFunction.run = compile_only
    if target is not None:
        driver._active = _Absent(target)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with triton.AsyncCompileMode(pool, ignore_errors=target is None):
            yield made
    finally:
        JITFunction.run = run
        driver._active = active


def resource_usage(cubin: Path) -> tuple[int, int]:
    """Registers per thread and bytes of stack, where spilled registers are, of a file with one kernel."""
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, f"cuobjdump prints no resource usage: {printed[:200]!r}"
    return int(found[1]), int(found[2])
