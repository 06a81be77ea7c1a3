"""Without kernels one log line gives the reason, and the reference path returns the same results."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import ConfigError
from redline.kernels.cpu import native
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.kernel import fallbacks
from redline.model.k2.cpu import K2
from redline.model.k2.write import random_checkpoint, tiny_config
from tests.tiny_model import job, kernel_config, load_folder, open_engine, prompt, run, run_alone, tiny_model

SLOWER = "the CPU runs the reference path, about a hundred times slower"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty kernel cache and no recorded reason; the real kernels are loaded before the cache is replaced."""
    assert native.library() is not None, native.why_not()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_reason", None)


def look_for_library() -> bool:
    """Call `library` with its memoised result cleared."""
    return native.library.__wrapped__() is not None


def compiler(tmp_path: Path, body: str) -> str:
    """An executable that the build takes for a C++ compiler."""
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def built_library() -> str:
    library = native.library()
    assert library is not None, native.why_not()
    return library._name


@pytest.mark.parametrize(
    ("said", "threads"), [("1", 1), (" 3,2", 3), ("99", 8), ("", 8), ("0", 8), ("many", 8), (None, 8)]
)
def test_threads_are_as_many_as_may_run_and_no_more_than_openmp_is_told(
    said: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native, "processors", lambda: 8)
    monkeypatch.setattr(native, "_sharing", 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert native.threads() == threads
    monkeypatch.setattr(native, "_sharing", 4)
    assert native.threads() == min(threads, 2)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not look_for_library()
    assert not native.must_build()
    assert native.why_not() == f"no C++ compiler on the PATH: {SLOWER}"


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not look_for_library()
    assert native.why_not() == f"CXX is no-such-compiler, which is not a program: {SLOWER}"


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo 'cannot find <vector>' >&2; echo more >&2; exit 1"))
    assert not look_for_library()
    assert native.why_not() == f"the CPU kernels did not build (cannot find <vector>): {SLOWER}"
    assert native.must_build()
    assert [path.name for path in (tmp_path / "cache" / "redline").iterdir()] == [native.LOCK]


def test_a_compiler_that_makes_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    body = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo nonsense > "$2"; shift; done'
    monkeypatch.setenv("CXX", compiler(tmp_path, body))
    assert not look_for_library()
    reason = native.why_not()
    assert reason is not None
    assert reason.endswith(SLOWER)
    assert len(reason.splitlines()) == 1


def test_where_no_cache_can_be_written_the_kernels_are_built_among_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A missing home directory is treated like one that is not writable."""

    def homeless(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    ours = tmp_path / f"redline-{os.getuid()}"
    (tmp_path / "cache").write_text("a file in its place")
    assert native.cache_folder() == ours
    assert ours.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert native.cache_folder() == ours
    assert native.must_build()


def test_a_temporary_folder_that_others_can_write_is_not_loaded_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "cache").write_text("a file in its place")
    native.cache_folder().chmod(0o777)
    assert not look_for_library()
    reason = native.why_not()
    assert reason is not None
    assert "can be written by others: set XDG_CACHE_HOME to a folder of your own" in reason
    assert reason.endswith(SLOWER)


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_library_that_is_none_is_built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes):
    whole = built_library()
    body = f"""
        case "$*" in *--version*) echo 1; exit;; esac
        case "$*" in *-shared*) from={whole};; *) from=/dev/null;; esac
        while [ $# -gt 0 ]; do [ "$1" = -o ] && cp "$from" "$2"; shift; done
    """
    monkeypatch.setenv("CXX", compiler(tmp_path, body))
    library = native.cache_folder() / f"kernels-{native._key(native.find_compiler())}.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(content)
    assert look_for_library(), native.why_not()
    assert library.stat().st_size == Path(whole).stat().st_size


def test_of_two_processes_one_builds_and_the_other_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    compiled = tmp_path / "compiled"
    body = f"""
        case "$*" in *--version*) echo 1; exit;; esac
        echo "$@" >> {compiled}
        case "$*" in *-shared*) from={built_library()};; *) from=/dev/null;; esac
        while [ $# -gt 0 ]; do [ "$1" = -o ] && cp "$from" "$2"; shift; done
    """
    monkeypatch.setenv("CXX", compiler(tmp_path, body))
    assert native.must_build()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: look_for_library(), range(2))) == [True, True]
    assert not native.must_build()
    assert native.why_not() is None
    assert len(compiled.read_text().splitlines()) == 1 + len(native.SOURCES) + 1  # layouts, sources, link
    left = sorted(path.suffix for path in (tmp_path / "cache" / "redline").iterdir())
    assert left == [".lock", *[".o"] * len(native.SOURCES), ".so"]


def test_a_change_compiles_the_sources_that_it_reaches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    compiled = tmp_path / "compiled"
    body = f"""
        case "$*" in
            *--version*) echo 1; exit;;
            *-fsyntax-only*) exit;;
            *-shared*) from={built_library()};;
            *) from=/dev/null; for last; do :; done; basename "$last" >> {compiled};;
        esac
        while [ $# -gt 0 ]; do [ "$1" = -o ] && cp "$from" "$2"; shift; done
    """
    here = shutil.copytree(native.HERE, tmp_path / "cpu")
    monkeypatch.setenv("CXX", compiler(tmp_path, body))
    monkeypatch.setattr(native, "HERE", here)
    for changed, reached in (
        (None, {Path(source).name for source in native.SOURCES}),
        (None, set()),
        ("linear.cpp", {"linear.cpp"}),
        ("core/norm.h", {Path(s).name for s in native.SOURCES if "core/norm.h" in (here / s).read_text()}),
    ):
        if changed:
            (here / changed).write_text((here / changed).read_text() + "// changed")
        native._digest.cache_clear()
        compiled.write_text("")
        assert look_for_library()
        assert set(compiled.read_text().split()) == reached
    assert reached


@pytest.mark.parametrize(
    ("header", "before", "after"),
    [
        ("core/kernels.h", "#pragma once", "#pragma once\n#pragma pack(1)"),
        ("blocks/blocks.h", "#pragma once", "#pragma once\n#define int64_t int32_t"),
    ],
)
def test_a_library_whose_records_lie_otherwise_is_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, header: str, before: str, after: str
):
    here = shutil.copytree(native.HERE, tmp_path / "cpu")
    (here / header).write_text((here / header).read_text().replace(before, after))
    monkeypatch.setenv("CXX", compiler(tmp_path, f'exec {native.find_compiler()} "$@"'))
    monkeypatch.setattr(native, "HERE", here)
    assert not look_for_library()
    reason = native.why_not()
    assert reason is not None
    assert re.search(r"the CPU kernels did not build \(.*error: .*the (size|place) of \w+", reason), reason
    assert [path.name for path in (tmp_path / "cache" / "redline").iterdir()] == [native.LOCK]


def test_a_caller_in_cpp_gives_every_field():
    """C++ would allow a field to be left out and set it to zero; no caller may do so."""
    for source in sorted(native.HERE.glob("blocks/*.cpp")):
        checks = ["-std=c++17", "-fsyntax-only", "-Wno-psabi", "-Wextra", "-Werror=missing-field-initializers"]
        command = [str(native.find_compiler()), *checks, f"-I{native.HERE}", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_kernel_is_declared_and_takes_a_record():
    library = native.library()
    for source in native.SOURCES:
        for name, kind in re.findall(r"redline_(\w+)\(const (\w+)& call\) \{", (native.HERE / source).read_text()):
            assert native.taken_by(name).__name__ == kind
            assert hasattr(library, f"redline_{name}")


def test_a_call_gives_every_field_and_what_it_gives_is_looked_at():
    best, x = native.function("best"), torch.zeros(2, 32)
    ids, finite = torch.empty(2, dtype=torch.int64), torch.empty(2, dtype=torch.bool)
    whole = {"x": x, "ldx": 32, "ids": ids, "finite": finite, "R": 2, "V": 32}
    best(**dict(reversed(whole.items())))
    assert (ids.tolist(), finite.tolist()) == ([0, 0], [True, True])
    with pytest.raises(TypeError, match=r"BestCall: missing \['V'\], unknown \['v'\]"):
        best(**{"v" if name == "V" else name: value for name, value in whole.items()})
    for name, value, said in (
        ("ids", finite, "BestCall.ids points to int64_t, got torch.bool"),
        ("ids", array("i", [0, 0]), "BestCall.ids points to int64_t, got torch.int32"),
        ("x", (ctypes.c_double * 64)(), "BestCall.x points to float, got torch.float64"),
        ("x", native.record("Chunk")(first=0, count=1, start=0, slot=0), "BestCall.x points to float, got Chunk"),
        ("x", x.T, "BestCall.x: expected a contiguous tensor"),
        ("R", x, "BestCall.R is a number, got a tensor"),
        ("ldx", 0.5, "BestCall: "),
        ("V", 1 << 31, "BestCall: "),
    ):
        with pytest.raises(TypeError, match=said):
            best(**{**whole, name: value})


@pytest.mark.parametrize("name", ["linear", "moe", "mla_decode", "transformer", "step_inputs"])
def test_a_call_and_a_record_have_the_same_bytes(monkeypatch: pytest.MonkeyPatch, name: str):
    """Fields given in the declared order are packed directly; in another order a record is built."""
    kind, seen = native.taken_by(name), list[bytes]()

    def kernel(call: Any) -> None:
        seen.append(call if isinstance(call, bytes) else bytes(call._obj))

    monkeypatch.setattr(native.library(), f"redline_{name}", kernel)
    values = {field: at + 1 for at, (field, *_) in enumerate(kind._fields_)}
    native.function(name)(**values)
    native.function(name)(**dict(reversed(values.items())))
    packed, whole = seen
    assert whole[: len(packed)] == packed
    assert not any(whole[len(packed) :])


@pytest.mark.parametrize("quantization", ["int4", "bf16"])
def test_the_reference_path_gives_the_tokens_of_the_kernels(
    quantization: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    random_checkpoint(tmp_path, kernel_config(), 4, quantization)  # type: ignore[arg-type]
    asked = job("asked", prompt(seed=4, length=70), max_tokens=6)
    with_kernels = run_alone(load_folder(tmp_path), asked, step_tokens=40)
    monkeypatch.setattr(native, "library", lambda: None)
    by_reference = run_alone(load_folder(tmp_path), asked, step_tokens=40)
    assert by_reference.tokens == with_kernels.tokens
    for ours, theirs in zip(by_reference.logprobs, with_kernels.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=5e-2)  # pages and what enters a product are bf16


def test_calls_of_the_reference_are_counted(monkeypatch: pytest.MonkeyPatch):
    x, weight = torch.randn(2, 8), torch.ones(8)

    def calls() -> int:
        before = fallbacks["add_norm"]
        add_norm(x.clone(), None, weight, 1e-5)
        return fallbacks["add_norm"] - before

    assert calls() == 0
    before = fallbacks["add_norm"]
    add_norm(x.clone().requires_grad_(), None, weight, 1e-5)
    assert fallbacks["add_norm"] == before + 1
    monkeypatch.setattr(native, "library", lambda: None)
    assert calls() == 1


def test_sizes_that_no_kernel_takes_run_the_reference(tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config())
    model = load_folder(tmp_path)
    fallbacks.clear()
    run_alone(model, job("asked", prompt(seed=4, length=5), max_tokens=2))
    layers = model.config.num_hidden_layers
    attention = {"mla_qkv": 2 * layers, "mla_prefill": layers, "mla_decode": layers}
    assert fallbacks == {"transformer": 2, **attention}


def test_two_models_run_at_once_in_one_process():
    def answers(model: K2, seed: int) -> list[object]:
        engine = open_engine(model)
        try:
            asked = [job(f"{n}", prompt(seed=seed + n, length=30 * n + 5), max_tokens=30) for n in range(6)]
            return list(run(engine, asked).values())
        finally:
            engine.runner.close()

    alone = [answers(tiny_model(), seed) for seed in (1, 2)]
    barrier = threading.Barrier(2)

    def beside(seed: int) -> list[object]:
        barrier.wait()
        return answers(tiny_model(), seed)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(beside, (1, 2))) == alone


@pytest.mark.parametrize("name", native.INSTRUCTION_SETS)
def test_an_instruction_set_that_is_named_is_what_the_kernels_are_compiled_for(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The library built for it has a file name of its own."""
    monkeypatch.setattr(native, "_cpu_flags", lambda: native.INSTRUCTION_SETS[name].needs)
    monkeypatch.delenv("REDLINE_CPU_ISA", raising=False)
    arguments = tmp_path / "arguments"
    body = f"""
        echo "$*" >> {arguments}
        case "$*" in *--version*) echo 1; exit;; esac
        case "$*" in *-shared*) from={built_library()};; *) from=/dev/null;; esac
        while [ $# -gt 0 ]; do [ "$1" = -o ] && cp "$from" "$2"; shift; done
    """
    monkeypatch.setenv("CXX", compiler(tmp_path, body))
    here = native._key(native.find_compiler())
    monkeypatch.setenv("REDLINE_CPU_ISA", name)
    assert native.instruction_set() == name
    assert native._key(native.find_compiler()) != here
    assert look_for_library(), native.why_not()
    compiled = [line for line in arguments.read_text().splitlines() if " -c " in line]
    assert len(compiled) == len(native.SOURCES)
    for line in compiled:
        assert set(native.INSTRUCTION_SETS[name].flags) <= set(line.split())
        assert "-march=native" not in line


@pytest.mark.parametrize(
    ("name", "has", "said"),
    [
        ("avx3", (), "REDLINE_CPU_ISA is 'avx3'; expected one of avx2, avx512, avx512bf16, or no value for the best"),
        (
            "avx512",
            ("avx2", "fma", "f16c", "bmi2"),
            "REDLINE_CPU_ISA is avx512, and this processor lacks avx512bw, avx",
        ),
        ("avx2", (), "REDLINE_CPU_ISA is avx2, and this processor lacks avx2, bmi2, f16c, fma: use a set that it has"),
    ],
)
def test_an_instruction_set_that_is_unknown_or_not_there_is_refused(
    name: str, has: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native, "_cpu_flags", lambda: frozenset(has))
    monkeypatch.setenv("REDLINE_CPU_ISA", name)
    for refused in (look_for_library, native.must_build):
        with pytest.raises(ConfigError, match=said):
            refused()


def test_the_named_instruction_set_bounds_torch_too():
    """Run in a separate process, because torch reads the setting at its first operation."""
    program = "import redline.kernels.cpu.native, torch; print(torch.backends.cpu.get_cpu_capability())"
    clean = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    command, environment = [sys.executable, "-c", program], {**clean, "REDLINE_CPU_ISA": "avx2"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.strip() in ("AVX2", "DEFAULT")  # DEFAULT on a processor without AVX2
