"""Compiles the kernels of work that is about to run, in threads, before it runs.

A server that compiles a kernel when it is first launched compiles one after another: Kimi-Nano and its drafter spent
60 s of their first start on an NVIDIA H200 so, and prompts of a new length waited seconds later.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from redline import clock
from redline.kernels.cuda.chips import Chip, built_for
from redline.kernels.cuda.driver import Function, machine_code
from redline.kernels.cuda.kernel import compiled_by, launched_by
from redline.kernels.record import ArgumentStruct, layout_check

MOST_THREADS = 16

_log = logging.getLogger(__name__)


def compile_ahead(pieces: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compiles the kernels that the pieces launch, as many at a time as there are processor cores.

    The pieces are called inside captures of CUDA graphs that are discarded, so the device runs none of their work: they
    may read tensors that were never written, and must not wait for the device. A piece that fails, or a kernel that
    does not compile, is logged: the launch itself will report it.
    """
    from redline.kernels.cuda.triton.ahead import compiled_in  # Triton is imported only on use

    began, stream, count = clock.perf_counter(), torch.cuda.Stream(device), 0
    functions: dict[Function, Future[None]] = {}
    with ThreadPoolExecutor(threads(), "compile") as pool:

        def submit(function: Function) -> None:
            if function not in functions:
                functions[function] = pool.submit(function.compile)

        with torch.cuda.stream(stream), compiled_in(pool), compiled_by(submit):
            one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            torch.mm(one, one)  # creates cuBLAS's handle, which a capture must not
            torch.cuda.synchronize(device)
            for piece in pieces:
                _captured_and_discarded(piece)
                count += 1
            torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    failed = [error for future in functions.values() if (error := future.exception()) is not None]
    for error in failed:
        _log.warning("a kernel does not compile: %s", error)
    _log.info("compiled the kernels of %d steps in %.1f s", count, clock.perf_counter() - began)


class Compiled(NamedTuple):
    """A kernel's machine code. variant: its macros or constants. shared: bytes of shared memory per block."""

    kernel: str
    variant: str
    shared: int
    cubin: bytes


def compile_for(
    target: Chip, pieces: Iterable[Callable[[], object]], done: Callable[[int, int], object] = lambda made, whole: None
) -> list[Compiled]:
    """Compiles the kernels that the pieces launch for a chip that need not be in this machine, into the caches that a
    worker reads. Nothing is launched, so the pieces' tensors may be on the meta device.

    done: called with the number of CUDA C++ kernels that are compiled, and of all. Raises CudaError, or an error of
    Triton, if a kernel does not compile.
    """
    from redline.kernels.cuda.triton.ahead import compiled_in  # Triton is imported only on use

    cubins: dict[tuple[str, str], tuple[int, Future[bytes]]] = {}
    with ThreadPoolExecutor(threads(), "compile") as pool:

        def record(
            path: Path,
            name: str,
            options: Sequence[str],
            arguments: ArgumentStruct,
            grid: tuple[int, int],
            threads: int,
            shared: int,
        ) -> None:
            key = f"{path.parent.name}/{path.name}", " ".join(options)
            if key not in cubins:
                check = layout_check(type(arguments))
                cubins[key] = shared, pool.submit(machine_code, path, options, check, target)

        with built_for(target), compiled_in(pool, target) as launched, launched_by(record):
            for piece in pieces:
                piece()
            for number, (_, cubin) in enumerate(cubins.values(), 1):
                cubin.result()
                done(number, len(cubins))
    made = [Compiled(*key, shared, cubin.result()) for key, (shared, cubin) in cubins.items()]
    by_hash = {kernel.hash: kernel for kernel in (each() for each in launched)}
    others = {each.metadata.target.arch for each in by_hash.values()} - {
        10 * target.capability[0] + target.capability[1]
    }
    assert not others, f"Triton compiled for {others} in place of {target.arch}"
    made += [
        Compiled(f"triton/{kernel.metadata.name}", _constants(kernel), kernel.metadata.shared, kernel.asm["cubin"])
        for kernel in by_hash.values()
    ]
    return sorted(made, key=lambda each: each[:2])


def _constants(kernel: Any) -> str:
    """The constants that a Triton kernel is compiled with, by name."""
    names, constants = kernel.src.fn.arg_names, kernel.src.constants
    found = {names[place[0]]: value for place, value in constants.items() if len(place) == 1}
    sizes = {**found, "num_warps": kernel.metadata.num_warps, "num_stages": kernel.metadata.num_stages}
    return " ".join(f"{name}={value}" for name, value in sorted(sizes.items()))


def threads() -> int:
    """The number of kernels to compile at a time."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def _captured_and_discarded(piece: Callable[[], object]) -> None:
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # never instantiated
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        piece()
    except Exception as error:
        _log.info("kernels are compiled when they are first launched: %s", error, exc_info=error)
    finally:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():  # an aborted or an empty capture
            warnings.simplefilter("ignore")
            graph.capture_end()
        graph.reset()
