"""Compiles the kernels of work that is about to run, in threads, before it runs.

A server that compiles a kernel when it is first launched compiles one after another: Kimi-Nano and its drafter spent
60 s of their first start on an NVIDIA H200 so, and prompts of a new length waited seconds later.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from redline import clock
from redline.kernels.hopper.driver import Function
from redline.kernels.hopper.kernel import compiled_by

MOST_THREADS = 16

_log = logging.getLogger(__name__)


def compile_ahead(pieces: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compiles the kernels that the pieces launch, as many at a time as there are processor cores.

    The pieces are called inside captures of CUDA graphs that are discarded, so the device runs none of their work: they
    may read tensors that were never written, and must not wait for the device. A piece that fails, or a kernel that
    does not compile, is logged: the launch itself will report it.
    """
    from redline.kernels.hopper.triton.ahead import compiled_in  # Triton is imported only on use

    began, stream, count = clock.perf_counter(), torch.cuda.Stream(device), 0
    functions: dict[Function, Future[None]] = {}
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "compile") as pool:

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
