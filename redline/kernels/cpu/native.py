"""The CPU kernels: C++ in this folder and below, built once by the system's compiler, each cached by content and chip.

`library()` is None where there is no compiler or the build failed; `why_not()` then says it in one line, and every op
takes its reference.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from redline.limits import processors

HERE = Path(__file__).parent
SOURCES = tuple(sorted(str(path.relative_to(HERE)) for path in HERE.rglob("*.cpp")))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast", "-Wno-psabi")

# p: a pointer, l: int64, i: int32, f: float; in the order of each function's parameters.
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    "redline_linear": "plppl" + "iiii",
    "redline_add_norm": "ppppfii",
    "redline_route_experts": "pppppiiiiif",
    "redline_moe": "pppppppppp" + "iiiiiii",
    "redline_mla_qkv": "ppppppppp" + "ip" + "fiiiiiii",
    "redline_mla_decode": "ppppp" + "lpi" + "ppp" + "fiiiiiii",
    "redline_mla_prefill": "piippi" + "ppp" + "fiiiiii",
    "redline_transformer": "pppli" + "pip" + "pi" + "ppp",
    "redline_best": "plppii",
    "redline_sample": "plppii",
    "redline_step_inputs": "plppi",
    "redline_draft_fuse": "p",
    "redline_draft_pass": "p",
    "redline_draft_chain": "p",
}

_reason: str | None = None


def why_not() -> str | None:
    """One line, where `library()` is None."""
    return _reason


def threads() -> int:
    """As many as this process may run at once: a thread that its quota stops holds up those that wait for it."""
    return processors()


@functools.cache
def library() -> ctypes.CDLL | None:
    global _reason
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        missing = f"CXX is {named}, which is no program" if named else "no C++ compiler on the PATH"
        _reason = f"{missing}: the CPU runs the reference path, several times slower"
        return None
    try:
        path = cache_folder() / f"kernels-{_key(compiler)}.so"
        failure = None if path.exists() else _build(compiler, path)
        loaded = None if failure else _load(compiler, path)
    except OSError as error:  # no place to write to, or a file that cannot be loaded
        failure, loaded = str(error), None
    if loaded is None:
        _reason = f"the CPU kernels did not build ({failure}): the CPU runs the reference path, several times slower"
        return None
    for name, signature in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = [_TYPES[letter] for letter in signature]
        function.restype = None
    loaded.redline_start(ctypes.c_int(threads()))
    return loaded


def _load(compiler: str, path: Path) -> ctypes.CDLL:
    """One that cannot be loaded is made anew."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        for file in (path, *_objects(compiler, path.parent)):
            file.unlink(missing_ok=True)
        failure = _build(compiler, path)
        if failure is not None:
            raise OSError(failure) from None
        return ctypes.CDLL(str(path))


def must_build() -> bool:
    """Whether the first call of `library` would build, which takes a while: callers say so."""
    compiler = find_compiler()
    try:
        return compiler is not None and not (cache_folder() / f"kernels-{_key(compiler)}.so").exists()
    except OSError:
        return False  # and `library` says why


def pointer(x: torch.Tensor) -> int:
    """The address of a contiguous CPU tensor."""
    assert x.is_contiguous(), f"expected a contiguous tensor, got strides {x.stride()} for shape {tuple(x.shape)}"
    return x.data_ptr()


def find_compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next(filter(None, map(shutil.which, names)), None)


def cache_folder() -> Path:
    """Raises OSError where this user has none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redline"
    except RuntimeError:
        raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME to a folder of its own") from None


def with_includes(source: Path, *folders: Path) -> Iterator[Path]:
    """The file, and those of ours that it includes, itself or through others, from beside it or from `folders`."""
    yield source
    for name in re.findall(r'^\s*#\s*include "([^"]+)"', source.read_text(), re.MULTILINE):
        places = [folder / name for folder in (source.parent, *folders)]
        yield from with_includes(next(filter(Path.exists, places), places[-1]), *folders)


@functools.cache
def _key(compiler: str, sources: tuple[str, ...] = SOURCES) -> str:
    """Of the sources, the flags, the compiler and the chip."""
    digest = hashlib.sha256()
    for file in sorted({file for source in sources for file in with_includes(HERE / source, HERE)}):
        digest.update(file.read_bytes())
    digest.update(" ".join(FLAGS).encode() + _version(compiler) + _chip().encode())
    return digest.hexdigest()[:20]


@functools.cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout


def _chip() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _objects(compiler: str, folder: Path) -> list[Path]:
    """Of each source."""
    return [folder / f"kernels-{Path(source).stem}-{_key(compiler, (source,))}.o" for source in SOURCES]


def _build(compiler: str, path: Path) -> str | None:
    """Compiles, in parallel, the sources that have changed, and links; None, or the first line of what went wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    objects = _objects(compiler, path.parent)
    flags = [flag for flag in FLAGS if flag != "-shared"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        jobs: list[tuple[subprocess.Popen[bytes], Path]] = []
        for source, kept in zip(SOURCES, objects, strict=True):
            if not kept.exists():
                command = [compiler, *flags, f"-I{HERE}", "-c", "-o", f"{folder}/{kept.name}", str(HERE / source)]
                jobs.append((subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE), kept))
        outputs = [(job.communicate()[1].decode(errors="replace"), job.returncode) for job, _ in jobs]
        failed = [message for message, code in outputs if code != 0]
        if failed:
            return (failed[0].strip().splitlines() or ["no message"])[0]
        for _, kept in jobs:  # two processes that build at once end with the same files
            os.replace(f"{folder}/{kept.name}", kept)
        library_path = f"{folder}/kernels.so"
        link = subprocess.run(
            [compiler, "-shared", "-pthread", "-o", library_path, *map(str, objects)], capture_output=True, check=False
        )
        if link.returncode != 0:
            return (link.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[0]
        # On the disk before it has its name: half a library, left by a machine that went down, ends who loads it.
        with open(library_path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(library_path, path)
    return None
