# pyright: basic
"""Triton's kernels compiled in threads before they are launched (`compile_ahead.py`)."""

import contextlib
import functools
from collections.abc import Generator
from concurrent.futures import Executor
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def compiled_in(pool: Executor) -> Generator[None]:
    """Context manager: kernels that are launched are compiled in the pool instead, in the whole process. A kernel that
    does not compile is left for its launch to report."""
    run = JITFunction.run

    @functools.wraps(run)
    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **how)

    JITFunction.run = compile_only
    try:
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        JITFunction.run = run
