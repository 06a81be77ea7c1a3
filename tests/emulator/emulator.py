"""Runs a CUDA kernel's source on the CPU, for tests, with the system's C++ compiler and `emulate.h`.

A test's launches are routed to it inside `emulation()`.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from redline.kernels.cpu import native
from redline.kernels.cuda import driver
from redline.kernels.cuda.kernel import launched_by
from redline.kernels.record import ArgumentStruct, layout_check

HERE = Path(__file__).parent
INCLUDED = HERE, driver.HERE / "blocks"  # include folders of the sources
COMMON = ("emulate.cpp", "emulate_products.cpp")  # compiled once, and linked with every kernel
FLAGS = ("-std=c++17", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-DREDLINE_EMULATE", "-ffp-contract=off")

_seeds = itertools.count(1)
_one_at_a_time = threading.Lock()  # a library can emulate one block at a time


def emulation() -> AbstractContextManager[None]:
    """Context manager: launches of this thread run on the CPU, thousands of times slower than on a GPU; for tests."""
    return launched_by(run)


def run(
    source: Path,
    name: str,
    options: Sequence[str],
    arguments: ArgumentStruct,
    grid: tuple[int, int],
    threads: int,
    shared: int,
) -> None:
    """Runs the whole grid, block by block, with a different order of threads and copies each time.

    Takes the arguments of a `cuda.kernel.Launch`. Raises RuntimeError with the kernel's fault, and if there is no
    compiler or the source does not compile.
    """
    message = ctypes.create_string_buffer(400)
    function = getattr(_library(source, tuple(options), type(arguments)), f"run_{name}")
    room = len(message)
    with _one_at_a_time:
        failed = function(ctypes.byref(arguments), *grid, threads, shared, next(_seeds), message, room)
    if failed:
        raise RuntimeError(f"{source.name} {name}: {message.value.decode()}")


@functools.cache
def _library(source: Path, options: tuple[str, ...], args: type[ArgumentStruct]) -> ctypes.CDLL:
    """The library of a kernel that takes `args`. Raises RuntimeError if its source has another layout for them."""
    return ctypes.CDLL(str(_built(source, ("-O1", "-shared", *options), ".so", _common(), layout_check(args))))


@functools.cache
def _common() -> tuple[Path, ...]:
    return tuple(_built(HERE / name, ("-O3", "-c"), ".o") for name in COMMON)


def _built(source: Path, options: tuple[str, ...], suffix: str, linked: Sequence[Path] = (), behind: str = "") -> Path:
    """The path of the compiled source, cached by its content and its linked files.

    behind: C++ that is appended to the source.
    """
    compiler = native.find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler on the PATH: CUDA kernels cannot be emulated")
    digest = hashlib.sha256(" ".join((compiler, *FLAGS, *options, *(path.name for path in linked))).encode())
    digest.update(behind.encode())
    for file in sorted(set(native.with_includes(source, *INCLUDED))):
        digest.update(file.read_bytes())
    path = native.cache_folder() / f"emulated-{source.stem}-{digest.hexdigest()[:20]}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _others_wait(path.with_suffix(".lock")):
            if path.exists():
                return path
            partial = path.with_suffix(f".{os.getpid()}")
            language = ["-x", "c++", "-", "-x", "none", *map(str, linked)]
            included = [f"-I{folder}" for folder in INCLUDED]
            command = [compiler, *FLAGS, *options, *included, "-o", str(partial), *language]
            text = f'#include "{source}"\n{behind}'
            built = subprocess.run(command, input=text, capture_output=True, check=False, text=True)
            if built.returncode:
                raise RuntimeError(f"{source.name} does not compile:\n{built.stderr[:4000]}")
            os.replace(partial, path)
    return path


@contextlib.contextmanager
def _others_wait(lock: Path) -> Generator[None]:
    """Context manager: other processes that need the same program wait for this one to compile it.

    Ranks reach each kernel at the same time."""
    with open(lock, "w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    lock.unlink(missing_ok=True)  # the program exists now, so other holders of this lock file do not matter
