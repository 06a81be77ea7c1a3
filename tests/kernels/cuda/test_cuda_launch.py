"""A CUDA kernel's arguments are one struct in its source. A record with another layout or other fields is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.kernels.cpu import native
from redline.kernels.cuda import driver
from redline.kernels.cuda import kernel as kernel_module
from redline.kernels.cuda.kernel import HERE, CudaKernel, LaunchRecord, launch_record, launched_by
from redline.kernels.record import ArgumentStruct, layout_check, record
from tests.emulator.emulator import emulation

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="emulation needs a C++ compiler")
EMBED = launch_record("decode/embed.cu", "EmbedLaunch")


def given(**others: Any) -> dict[str, Any]:
    """Arguments for one token of 128 columns, with a table row of ones."""
    floats = {name: torch.ones(1, 128) for name in ("gamma", "residual")}
    bf16 = {name: torch.ones(1, 128).to(torch.bfloat16) for name in ("table", "x")}
    return {**floats, **bf16, "ids": torch.zeros(1).long(), "squares": torch.zeros(1, 8), "tokens": 1, **others}


def kernel(args: type[ArgumentStruct]) -> CudaKernel:
    sizes = {"HIDDEN": 128, "HIDDEN_PADDED": 128}
    return CudaKernel("decode/embed.cu", "embed", args, sizes, shared=0, threads=256)


@needs_compiler
def test_a_kernel_runs_with_the_record_that_its_source_declares():
    values = given()
    with emulation():
        kernel(EMBED).launch(EMBED(**values), 1)
    assert values["squares"].tolist() == [[128.0] + [0.0] * 7]


@needs_compiler
@pytest.mark.parametrize(
    ("declared", "instead", "said"),
    [
        ("const u16* table;", "u32 table;", "the size of EmbedLaunch.table"),
        ("float* residual;", "u64 residual, other;", "the place of EmbedLaunch.x"),
        ("u32 tokens;", "u32 tokens; u64 more;", "the size of EmbedLaunch"),
        ("const u64* ids;", "", "the size of EmbedLaunch"),
    ],
)
def test_a_record_of_another_layout_is_refused_where_a_kernel_is_loaded(
    tmp_path: Path, declared: str, instead: str, said: str
):
    """As if the source had changed after a record was read from it."""
    text = (HERE / "decode" / "embed.cu").read_text()
    assert declared in text
    (tmp_path / "embed.cu").write_text(text.replace(declared, instead))
    other = record(tmp_path / "embed.cu", "EmbedLaunch", LaunchRecord)
    values = dict.fromkeys((name for name, *_ in other._fields_), 0)
    with emulation(), pytest.raises(RuntimeError, match=f"(?s)embed.cu does not compile.*{said}"):
        kernel(other).launch(other(**values), 1)


def test_a_record_of_another_kernel_is_refused():
    other = launch_record("decode/absorb.cu", "AbsorbLaunch")
    arguments = other(q=None, weight=None, absorbed=None, tokens=0, heads=0)
    with pytest.raises(TypeError, match="embed takes EmbedLaunch, got AbsorbLaunch"):
        kernel(EMBED).launch(arguments, 1)


def test_a_field_that_is_missing_unknown_or_of_another_type_is_named():
    for change, said in (
        ({"gama": None}, r"missing \[\], unknown \['gama'\]"),
        ({"table": torch.ones(1, 128)}, "EmbedLaunch.table points to u16, got torch.float32"),
        ({"ids": torch.zeros(1).int()}, "EmbedLaunch.ids points to u64, got torch.int32"),
        ({"gamma": torch.ones(128, 2)[:, 0]}, "EmbedLaunch.gamma: expected a contiguous tensor"),
        ({"tokens": torch.ones(1)}, "EmbedLaunch.tokens is a number"),
    ):
        with emulation(), pytest.raises(TypeError, match=said):
            EMBED(**given(**change))
    values = given()
    del values["squares"]
    with emulation(), pytest.raises(TypeError, match=r"EmbedLaunch: missing \['squares'\]"):
        EMBED(**values)


def test_a_tensor_of_the_cpu_is_refused_unless_it_is_emulated():
    with pytest.raises(TypeError, match="a CUDA kernel was given a CPU tensor"):
        EMBED(**given())
    with emulation():
        assert EMBED(**given()).tokens == 1


@pytest.mark.parametrize(("version", "by_another_name"), [((12, 8), True), ((13, 3), True), ((13, 4), False)])
def test_the_layout_is_asserted_behind_the_source_and_is_part_of_the_cubins_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, int], by_another_name: bool
):
    """For NVRTC before 13.4, which lacks __builtin_offsetof, the assertion uses an expression of its front end."""
    compiled: list[bytes] = []

    def compile_source(text: bytes, *_: object) -> bytes:
        compiled.append(text)
        return b"code"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(driver, "_nvrtc_version", lambda: version)
    monkeypatch.setattr(driver, "compile_source", compile_source)
    source, check = HERE / "decode" / "embed.cu", layout_check(EMBED)
    for behind in (check, check, check.replace("== 56", "== 64")):
        driver.machine_code(source, [], behind)
    assert len(compiled) == len(list((tmp_path / "redline").iterdir())) == 2
    assert compiled[0].startswith(source.read_bytes())
    assert compiled[0].decode().endswith(check)
    assert (b"__INTADDR__" in compiled[0]) == by_another_name


def test_every_cuda_source_declares_structs_with_names_of_their_own():
    """Names of structs are unique, so that a record or an error message identifies its kernel."""
    names = [
        line.split()[1]
        for path in sorted(HERE.glob("*/*.cu*"))
        for line in path.read_text().splitlines()
        if line.startswith("struct ") and line.split()[1].endswith(("Launch", "Arguments"))
    ]
    assert len(names) == len(set(names)) >= 17
    assert all(name.endswith("Launch") for name in names)


@pytest.mark.parametrize(
    ("threads", "shared", "on_one"), [(128, 16, 16), (512, 0, 4), (512, 227 << 10, 1), (512, 100 << 10, 2), (32, 0, 32)]
)
def test_no_more_blocks_wait_for_other_ranks_than_lie_on_the_chip_at_once(threads: int, shared: int, on_one: int):
    launched: list[tuple[int, int]] = []
    sizes = {"HIDDEN": 128, "HIDDEN_PADDED": 128}
    one, two = (
        CudaKernel("decode/embed.cu", "embed", EMBED, {**sizes, "RANKS": ranks}, shared, threads) for ranks in (1, 2)
    )
    assert two.at_once(132) == 132 * on_one
    most = two.at_once(kernel_module._multiprocessors())
    with launched_by(lambda source, name, options, arguments, grid, *_: launched.append(grid)):
        arguments = EMBED(**given())
        two.launch(arguments, most // 2, 2)
        one.launch(arguments, most + 1)
        with pytest.raises(
            AssertionError, match=f"embed: {most + 1} blocks wait for other ranks, but only {most} are resident at once"
        ):
            two.launch(arguments, most + 1)
    assert launched == [(most // 2, 2), (most + 1, 1)]
