"""Runs a CUDA kernel's source on the CPU, for tests: the system's compiler, and `emulate.h`."""

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from redline.ops import native

HERE = Path(__file__).parent
FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE", "-DREDLINE_EMULATE", "-ffp-contract=off")

_seeds = itertools.count(1)


def run(
    source: Path,
    name: str,
    options: Sequence[str],
    arguments: ctypes.Structure,
    grid: tuple[int, int],
    threads: int,
    shared: int,
) -> None:
    """Raises RuntimeError with what the kernel did wrong. Every run draws another order of threads and copies."""
    message = ctypes.create_string_buffer(400)
    function = getattr(_library(source, tuple(options)), f"run_{name}")
    room = len(message)
    if function(ctypes.byref(arguments), *grid, threads, shared, next(_seeds), message, room):
        raise RuntimeError(f"{source.name} {name}: {message.value.decode()}")


@functools.cache
def _library(source: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    compiler = native.find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler on the PATH: CUDA kernels cannot be emulated")
    digest = hashlib.sha256(" ".join((compiler, *FLAGS, *options)).encode())
    for file in sorted([*HERE.glob("*.cuh"), *HERE.glob("*.h"), *source.parent.glob("*.cuh"), source]):
        digest.update(file.read_bytes())
    path = native.cache_folder() / f"emulated-{source.stem}-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, *options, f"-I{HERE}", "-x", "c++", "-o", str(partial), str(source)]
        built = subprocess.run(command, capture_output=True, check=False, text=True)
        if built.returncode:
            raise RuntimeError(f"{source.name} does not compile:\n{built.stderr[:4000]}")
        os.replace(partial, path)
    return ctypes.CDLL(str(path))
