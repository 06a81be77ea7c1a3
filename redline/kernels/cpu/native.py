"""The CPU kernels: C++ in this folder and below, built once by the system's compiler, each cached by content and chip.

`library()` is None where there is no compiler or the build failed; `why_not()` then says it in one line, and every op
takes its reference. REDLINE_CPU_ISA names the instruction set that they are compiled for; without it they are compiled
for all that this processor has.
"""

import ctypes
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
from pathlib import Path
from typing import Any, NamedTuple

import torch

from redline.errors import ConfigError
from redline.kernels.record import Record, accepted, layout_check
from redline.kernels.record import record as read_record
from redline.limits import processors

HERE = Path(__file__).parent
SOURCES = tuple(sorted(str(path.relative_to(HERE)) for path in HERE.rglob("*.cpp")))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast", "-Wno-psabi")


class InstructionSet(NamedTuple):
    """A value of REDLINE_CPU_ISA."""

    flags: tuple[str, ...]  # of the compiler, in the place of -march=native
    needs: frozenset[str]  # flags of /proc/cpuinfo
    libraries: dict[str, str]  # environment variables that bound torch, oneDNN (which would use AMX) and MKL alike


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

# Where kernels and what they take are declared, and Python reads them.
HEADERS = ("core/kernels.h", "core/watch.h", "blocks/blocks.h", "blocks/draft_pass.h")

SLOWER = "the CPU runs the reference path, about a hundred times slower"

_reason: str | None = None
_sharing = 1


def why_not() -> str | None:
    """One line, where `library()` is None."""
    return _reason


def threads() -> int:
    """As many as this process may run at once: a thread that its quota stops holds up those that wait for it.

    OMP_NUM_THREADS, which bounds torch's own, bounds these too: threads that wait for one another spin, so where many
    processes share few cores one thread each does the same in half the processor time.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # the first of nested levels
    most = int(asked) if asked.isdecimal() and int(asked) else processors()
    return max(1, min(most, processors() // _sharing))


def share_processors(processes: int) -> None:
    """As many processes as this compute side by side; said before `library` is first called, it divides the threads."""
    global _sharing
    _sharing = processes


def instruction_set() -> str | None:
    """What REDLINE_CPU_ISA names; None: all that this processor has.

    Raises ConfigError for a value that is unknown, and for a set that this processor lacks.
    """
    name = os.environ.get("REDLINE_CPU_ISA", "")
    if not name:
        return None
    if name not in INSTRUCTION_SETS:
        known = ", ".join(INSTRUCTION_SETS)
        raise ConfigError(f"REDLINE_CPU_ISA is {name!r}; expected one of {known}, or no value for the best there is")
    if missing := sorted(INSTRUCTION_SETS[name].needs - _cpu_flags()):
        raise ConfigError(
            f"REDLINE_CPU_ISA is {name}, and this processor lacks {', '.join(missing)}: name a set that it has, or none"
        )
    return name


def _bound_libraries() -> None:
    """Torch and what it calls read these when they first compute, which no import does."""
    known = INSTRUCTION_SETS.get(os.environ.get("REDLINE_CPU_ISA", ""))
    for name, value in known.libraries.items() if known is not None else ():
        os.environ.setdefault(name, value)


_bound_libraries()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The built kernels, with their threads started; the first call builds them where that is to be done.

    Raises ConfigError as `instruction_set` does.
    """
    global _reason
    instruction_set()
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        missing = f"CXX is {named}, which is no program" if named else "no C++ compiler on the PATH"
        _reason = f"{missing}: {SLOWER}"
        return None
    try:
        path = cache_folder() / f"kernels-{_key(compiler)}.so"
        failure = None if path.exists() else _build(compiler, path)
        loaded = None if failure else _load(compiler, path)
    except OSError as error:  # no place to write to, or a file that cannot be loaded
        failure, loaded = str(error), None
    if loaded is None:
        _reason = f"the CPU kernels did not build ({failure}): {SLOWER}"
        return None
    for symbol in _declared(r"void (redline_\w+)\("):
        getattr(loaded, symbol).restype = None
    loaded.redline_start(ctypes.c_int(threads()))
    return loaded


def record(name: str) -> type[Record]:
    """The struct of this name, as one of HEADERS declares it."""
    return read_record(HERE / _declared(rf"struct ({name})\s*\{{")[name], name)


def taken_by(name: str) -> type[Record]:
    """The record that this kernel takes, as its declaration says."""
    (kind,) = _declared(rf"\bredline_{name}\(const (\w+)&")
    return record(kind)


def function(name: str) -> Callable[..., None]:
    """A kernel of the library. A call takes the fields of its record, by keyword.

    A record is made where something has to be refused, and for fields that hold records and arrays or come in another
    order. All else is packed as it comes: between two calls Python finds the caches full of weights, and then whatever
    it touches costs a tenth of a microsecond.
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
                    kind(**fields)  # says which field, where it is no number
                    raise TypeError(f"{kind.__name__}: {error}") from None
                kernel(packed)
                return
        kernel(ctypes.byref(kind(**fields)))

    return call


def layouts() -> str:
    """C++ that compiles where every record lies in memory as Python has it, and nowhere else."""
    checks = [layout_check(record(name)) for name in _declared(r"struct (\w+)\s*\{")]
    return "".join([*(f'#include "{header}"\n' for header in HEADERS), *checks])


def _declared(pattern: str) -> dict[str, str]:
    """What the pattern finds in HEADERS, and in which."""
    return {name: header for header in HEADERS for name in re.findall(pattern, (HERE / header).read_text())}


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
    """Whether the first call of `library` would build, which takes a while: callers say so.

    Raises ConfigError as `instruction_set` does.
    """
    compiler = find_compiler()
    try:
        return compiler is not None and not (cache_folder() / f"kernels-{_key(compiler)}.so").exists()
    except OSError:
        return False  # and `library` says why


def find_compiler() -> str | None:
    """The path of $CXX, or else of the first of g++, clang++ and c++ that there is."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next(filter(None, map(shutil.which, names)), None)


def cache_folder() -> Path:
    """The user's cache, XDG_CACHE_HOME or ~/.cache; where that cannot be written, a temporary folder of the user's own.
    Raises OSError where there is neither."""
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
    """Whether files can be made in it, or it can be made."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def with_includes(source: Path, *folders: Path) -> Iterator[Path]:
    """The file, and those of ours that it includes, itself or through others, from beside it or from `folders`."""
    yield source
    for name in re.findall(r'^\s*#\s*include "([^"]+)"', source.read_text(), re.MULTILINE):
        places = [folder / name for folder in (source.parent, *folders)]
        yield from with_includes(next(filter(Path.exists, places), places[-1]), *folders)


def flags() -> tuple[str, ...]:
    """Of the compiler. Raises ConfigError as `instruction_set` does."""
    named = instruction_set()
    instead = ("-march=native",) if named is None else (*INSTRUCTION_SETS[named].flags, "-mtune=native")
    return tuple(one for flag in FLAGS for one in (instead if flag == "-march=native" else (flag,)))


def _key(compiler: str, sources: tuple[str, ...] = SOURCES) -> str:
    """A hash of the sources, the records as Python has them, the flags, the compiler and the chip."""
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
    """What -march=native and -mtune=native depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _objects(compiler: str, folder: Path) -> list[Path]:
    """The object file of each source."""
    return [folder / f"kernels-{Path(source).stem}-{_key(compiler, (source,))}.o" for source in SOURCES]


def _build(compiler: str, path: Path) -> str | None:
    """Compiles, in parallel, the sources that have changed, and links; None, or the first line of what went wrong.

    Before that the records' layouts are compiled, which takes a moment and makes nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    objects = _objects(compiler, path.parent)
    compiled_with = [*(flag for flag in flags() if flag != "-shared"), f"-I{HERE}"]
    check = [compiler, *compiled_with, "-fsyntax-only", "-x", "c++", "-"]
    checked = subprocess.run(check, input=layouts().encode(), capture_output=True, check=False)
    if checked.returncode != 0:
        return _first_error(checked.stderr)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        jobs: list[tuple[subprocess.Popen[bytes], Path]] = []
        for source, kept in zip(SOURCES, objects, strict=True):
            if not kept.exists():
                command = [compiler, *compiled_with, "-c", "-o", f"{folder}/{kept.name}", str(HERE / source)]
                jobs.append((subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE), kept))
        outputs = [(job.communicate()[1], job.returncode) for job, _ in jobs]
        failed = [message for message, code in outputs if code != 0]
        if failed:
            return _first_error(failed[0])
        for _, kept in jobs:  # two processes that build at once end with the same files
            os.replace(f"{folder}/{kept.name}", kept)
        library_path = f"{folder}/kernels.so"
        link = subprocess.run(
            [compiler, "-shared", "-pthread", "-o", library_path, *map(str, objects)], capture_output=True, check=False
        )
        if link.returncode != 0:
            return _first_error(link.stderr)
        # On the disk before it has its name: half a library, left by a machine that went down, ends who loads it.
        with open(library_path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(library_path, path)
    return None


def _first_error(message: bytes) -> str:
    """The line of a compiler's output that calls itself an error, else the first."""
    lines = message.decode(errors="replace").strip().splitlines() or ["no message"]
    return next((line for line in lines if "error:" in line), lines[0])
