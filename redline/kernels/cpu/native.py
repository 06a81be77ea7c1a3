"""The CPU kernels: C++ sources in this folder and below, compiled once with the system's compiler.

Builds are cached by content and chip. `library()` returns None if there is no compiler or the build failed; then
`why_not()` returns the reason in one line, and every op runs its reference. REDLINE_CPU_ISA selects the instruction
set; by default the kernels are compiled for everything that this processor supports.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from redline.errors import ConfigError
from redline.kernels.record import ArgumentStruct, accepted, layout_check
from redline.kernels.record import record as read_record
from redline.limits import processors

HERE = Path(__file__).parent
SOURCES = tuple(sorted(str(path.relative_to(HERE)) for path in HERE.rglob("*.cpp")))
LOCK = "build.lock"  # in the cache folder: held by the process that builds
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast", "-Wno-psabi")


class InstructionSet(NamedTuple):
    """A value of REDLINE_CPU_ISA."""

    flags: tuple[str, ...]  # compiler flags, instead of -march=native
    needs: frozenset[str]  # required flags of /proc/cpuinfo
    libraries: dict[str, str]  # environment variables that limit torch, oneDNN (which would use AMX) and MKL equally


_V3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
INSTRUCTION_SETS = {
    name: InstructionSet(
        flags, needs, {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}
    )
    for name, flags, needs, (aten, onednn, mkl) in (
        ("avx2", ("-march=x86-64-v3",), _V3, ("avx2", "AVX2", "AVX2")),
        ("avx512", ("-march=x86-64-v4",), _V4, ("avx512", "AVX512_CORE", "AVX512")),
        (
            "avx512bf16",
            ("-march=x86-64-v4", "-mavx512bf16"),
            _V4 | {"avx512_bf16"},
            ("avx512", "AVX512_CORE_BF16", "AVX512"),
        ),
    )
}

# The headers that declare kernels and their arguments; Python parses them.
HEADERS = ("core/kernels.h", "core/watch.h", "blocks/blocks.h", "blocks/draft_pass.h")

SLOWER = "the CPU runs the reference path, about a hundred times slower"

_reason: str | None = None
_sharing = 1


def why_not() -> str | None:
    """The reason, in one line, if `library()` returns None."""
    return _reason


def threads() -> int:
    """Number of threads that this process may run at once. A thread throttled by a CPU quota delays all others.

    OMP_NUM_THREADS, the limit of torch's threads, applies to these too. Waiting threads spin, so if many processes
    share few cores, one thread per process does the same work in half of the processor time.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # the first one is the outermost level
    most = int(asked) if asked.isdecimal() and int(asked) else processors()
    return max(1, min(most, processors() // _sharing))


def share_processors(processes: int) -> None:
    """Divides the threads among `processes` processes on this machine. Call it before the first call of `library`."""
    global _sharing
    _sharing = processes


def instruction_set() -> str | None:
    """The value of REDLINE_CPU_ISA; None: everything that this processor supports.

    Raises ConfigError for an unknown value, and for a set that this processor does not support.
    """
    name = os.environ.get("REDLINE_CPU_ISA", "")
    if not name:
        return None
    if name not in INSTRUCTION_SETS:
        known = ", ".join(INSTRUCTION_SETS)
        raise ConfigError(f"REDLINE_CPU_ISA is {name!r}; expected one of {known}, or no value for the best available")
    if missing := sorted(INSTRUCTION_SETS[name].needs - _cpu_flags()):
        raise ConfigError(
            f"REDLINE_CPU_ISA is {name}, and this processor lacks {', '.join(missing)}: use a set that it has, or none"
        )
    return name


def _bound_libraries() -> None:
    """Sets the libraries' limits. Torch and its libraries read them at their first computation, not at import."""
    known = INSTRUCTION_SETS.get(os.environ.get("REDLINE_CPU_ISA", ""))
    for name, value in known.libraries.items() if known is not None else ():
        os.environ.setdefault(name, value)


_bound_libraries()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, with their threads started; the first call builds them if needed.

    Raises ConfigError as `instruction_set` does.
    """
    global _reason
    instruction_set()
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        missing = f"CXX is {named}, which is not a program" if named else "no C++ compiler on the PATH"
        _reason = f"{missing}: {SLOWER}"
        return None
    try:
        path = cache_folder() / f"kernels-{_key(compiler)}.so"
        failure = None if path.exists() else _build(compiler, path)
        loaded = None if failure else _load(compiler, path)
    except OSError as error:  # no writable cache folder, or a library that cannot be loaded
        failure, loaded = str(error), None
    if loaded is None:
        _reason = f"the CPU kernels did not build ({failure}): {SLOWER}"
        return None
    for symbol in _declared(r"void (redline_\w+)\("):
        getattr(loaded, symbol).restype = None
    loaded.redline_start(ctypes.c_int(threads()))
    return loaded


def record(name: str) -> type[ArgumentStruct]:
    """The struct of this name, as declared in one of HEADERS."""
    return read_record(HERE / _declared(rf"struct ({name})\s*\{{")[name], name)


def taken_by(name: str) -> type[ArgumentStruct]:
    """The record type of this kernel's arguments, from its declaration."""
    (kind,) = _declared(rf"\bredline_{name}\(const (\w+)&")
    return record(kind)


def function(name: str) -> Callable[..., None]:
    """A kernel of the library. A call takes the fields of its record, by keyword.

    A ctypes record is made only if an argument is invalid, or if fields contain records and arrays or are given in
    another order. Otherwise the fields are packed directly: after a native call Python's data is no longer in the CPU
    caches, so every object touched costs a tenth of a microsecond.
    """
    symbol, kind = f"redline_{name}", taken_by(name)
    names = tuple(field for field, *_ in kind._fields_)
    pointers = [(names.index(field), accepted(element)) for field, element in kind.pointers.items()]
    pack = struct.Struct("".join(vars(of)["_type_"] for _, of, *_ in kind._fields_)).pack

    def call(**fields: Any) -> None:
        loaded = library()
        assert loaded is not None, why_not()
        kernel = getattr(loaded, symbol)
        if tuple(fields) == names:
            plain = list(fields.values())
            for at, dtypes in pointers:
                value = plain[at]
                of = type(value)
                if of is int:
                    continue
                if of is torch.Tensor and value.dtype in dtypes and value.is_contiguous():
                    plain[at] = value.data_ptr()
                elif value is None:
                    plain[at] = 0
                else:
                    break
            else:
                try:
                    packed = pack(*plain)
                except (TypeError, OverflowError, struct.error) as error:
                    kind(**fields)  # raises the error that names the field, if one is not a number
                    raise TypeError(f"{kind.__name__}: {error}") from None
                kernel(packed)
                return
        kernel(ctypes.byref(kind(**fields)))

    return call


def layouts() -> str:
    """C++ that compiles only if every record has the memory layout that Python computed."""
    checks = [layout_check(record(name)) for name in _declared(r"struct (\w+)\s*\{")]
    return "".join([*(f'#include "{header}"\n' for header in HEADERS), *checks])


def _declared(pattern: str) -> dict[str, str]:
    """Matches of the pattern in HEADERS, each with its header."""
    return {name: header for header in HEADERS for name in re.findall(pattern, (HERE / header).read_text())}


def _load(compiler: str, path: Path) -> ctypes.CDLL:
    """Loads the library; one that cannot be loaded is built again."""
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
    """Whether the first call of `library` would build, which takes a while; callers then print a message.

    Raises ConfigError as `instruction_set` does.
    """
    compiler = find_compiler()
    try:
        return compiler is not None and not (cache_folder() / f"kernels-{_key(compiler)}.so").exists()
    except OSError:
        return False  # `library` then reports the reason


def find_compiler() -> str | None:
    """The path of $CXX, else of the first available of g++, clang++ and c++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next(filter(None, map(shutil.which, names)), None)


def cache_folder() -> Path:
    """The user's cache, XDG_CACHE_HOME or ~/.cache; if it is not writable, a temporary folder owned by the user.
    Raises OSError if there is neither."""
    try:
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redline"
        if _writable(own):
            return own
    except RuntimeError:  # this user has no home folder
        pass
    folder = Path(tempfile.gettempdir()) / f"redline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others: set XDG_CACHE_HOME to a folder of your own")
    return folder


def _writable(folder: Path) -> bool:
    """Whether files can be created in the folder, or the folder can be created."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def with_includes(source: Path, *folders: Path) -> Iterator[Path]:
    """The file and our headers that it includes, directly or indirectly, from its own folder or from `folders`."""
    yield source
    for name in re.findall(r'^\s*#\s*include "([^"]+)"', source.read_text(), re.MULTILINE):
        places = [folder / name for folder in (source.parent, *folders)]
        yield from with_includes(next(filter(Path.exists, places), places[-1]), *folders)


def flags() -> tuple[str, ...]:
    """The compiler flags. Raises ConfigError as `instruction_set` does."""
    named = instruction_set()
    instead = ("-march=native",) if named is None else (*INSTRUCTION_SETS[named].flags, "-mtune=native")
    return tuple(one for flag in FLAGS for one in (instead if flag == "-march=native" else (flag,)))


def _key(compiler: str, sources: tuple[str, ...] = SOURCES) -> str:
    """A hash of the sources, the record layouts in Python, the flags, the compiler and the chip."""
    return _digest(compiler, sources, flags())


@functools.cache
def _digest(compiler: str, sources: tuple[str, ...], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in sorted({file for source in sources for file in with_includes(HERE / source, HERE)}):
        digest.update(file.read_bytes())
    digest.update(layouts().encode() + " ".join(flags).encode() + _version(compiler) + _chip().encode())
    return digest.hexdigest()[:20]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


@functools.cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout


def _chip() -> str:
    """The CPU properties that -march=native and -mtune=native depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _objects(compiler: str, folder: Path) -> list[Path]:
    """The object file of each source."""
    return [folder / f"kernels-{Path(source).stem}-{_key(compiler, (source,))}.o" for source in SOURCES]


def _build(compiler: str, path: Path) -> str | None:
    """Builds the library, unless another process does: then it waits for it. Returns None, or the first line of the
    error.

    Without the lock, the processes of a server with eight ranks would each compile every source."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return None if path.exists() else _compiled(compiler, path)


def _compiled(compiler: str, path: Path) -> str | None:
    """Compiles changed sources, as many at a time as there are processors, and links. Returns as `_build`.

    The check of the record layouts is compiled first; it takes a moment and has no output."""
    objects = _objects(compiler, path.parent)
    compiled_with = [*(flag for flag in flags() if flag != "-shared"), f"-I{HERE}"]
    check = [compiler, *compiled_with, "-fsyntax-only", "-x", "c++", "-"]
    checked = subprocess.run(check, input=layouts().encode(), capture_output=True, check=False)
    if checked.returncode != 0:
        return _first_error(checked.stderr)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        missing = [(source, kept) for source, kept in zip(SOURCES, objects, strict=True) if not kept.exists()]
        commands = [
            [compiler, *compiled_with, "-c", "-o", f"{folder}/{kept.name}", str(HERE / source)]
            for source, kept in missing
        ]
        with ThreadPoolExecutor(processors()) as pool:
            outputs = list(pool.map(_run, commands))
        failed = [output.stderr for output in outputs if output.returncode != 0]
        if failed:
            return _first_error(failed[0])
        for _, kept in missing:
            os.replace(f"{folder}/{kept.name}", kept)
        library_path = f"{folder}/kernels.so"
        link = subprocess.run(
            [compiler, "-shared", "-pthread", "-o", library_path, *map(str, objects)], capture_output=True, check=False
        )
        if link.returncode != 0:
            return _first_error(link.stderr)
        # Sync before renaming: a partial library left by a power failure would crash the process that loads it.
        with open(library_path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(library_path, path)
    return None


def _run(command: list[str]) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)


def _first_error(message: bytes) -> str:
    """The first line of a compiler's output that contains an error, else the first line."""
    lines = message.decode(errors="replace").strip().splitlines() or ["no message"]
    return next((line for line in lines if "error:" in line), lines[0])
