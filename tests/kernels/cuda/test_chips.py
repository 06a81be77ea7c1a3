"""Which GPUs have kernels, and which kernels a model launches on each: found without a GPU."""

from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from redline.kernels.cuda import chips, driver
from redline.kernels.cuda.chips import CHIPS, HOPPER, built_for, chip, refusal
from redline.kernels.cuda.kernel import launched_by
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.config import K2Config
from redline.model.k2.shapes import shape
from redline.run.graphs.absent import pieces_of

NANO = Path(__file__).parents[3] / "models" / "kimi-nano"
BY_ARCH = {each.arch: each for each in CHIPS}


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((9, 0), None),
        ((10, 0), None),
        ((10, 3), None),
        ((12, 0), "a block has 99 KB of shared memory, and the CUDA kernels need up to 227"),
        ((8, 0), "it lacks the bulk copies of the CUDA kernels, which are for H100, H200 (9.0), B200, GB200 (10.0)"),
        ((11, 0), "the CUDA kernels are for H100, H200 (9.0)"),
    ],
)  # fmt: skip
def test_a_gpu_without_kernels_is_refused_with_the_reason(capability: tuple[int, int], reason: str | None) -> None:
    said = refusal("some GPU", capability)
    if reason is None:
        assert said is None
    else:
        assert said is not None
        assert said.startswith("some GPU has compute capability {}.{}".format(*capability))
        assert reason in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose chip it is")
def test_without_a_gpu_kernels_are_a_hoppers_unless_they_are_built_for_another() -> None:
    assert chip() == HOPPER
    with built_for(BY_ARCH["sm_100a"]):
        assert chip().products == "B200, GB200"
    assert chip() == HOPPER


def test_a_hopper_may_take_the_forms_of_other_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "_present", lambda: HOPPER)
    chips.use_portable_kernels(True)
    try:
        assert not chip().warpgroup_mma
        assert chip().arch == "sm_90a"
    finally:
        chips.use_portable_kernels(False)
    assert chip() == HOPPER


def launched(
    model: str, arch: str, monkeypatch: pytest.MonkeyPatch, drafter: Eagle3Config | None = None
) -> dict[tuple[str, str], int]:
    """The CUDA C++ kernels that a server of this model would launch: source and macros -> bytes of shared memory."""
    found: dict[tuple[str, str], int] = {}

    def record(path: Path, name: str, options: object, arguments: object, grid: object, threads: int, shared: int):
        found[path.name, str(options)] = shared

    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: None)
    with built_for(BY_ARCH[arch]), launched_by(record), torch.inference_mode():
        for piece in pieces_of(shape(model), 16, 4, 8192, torch.bfloat16, drafter, 8):
            piece()
    return found


@pytest.mark.parametrize("model", ["kimi-k2.6", "kimi-k2.6-nvfp4", "kimi-nano"])
def test_a_chip_without_wgmma_launches_no_kernel_that_has_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, blackwell = (launched(model, arch, monkeypatch) for arch in ("sm_90a", "sm_100a"))

    def has_wgmma(source: str, macros: str) -> bool:
        return source == "attend_warpgroups.cu" or (source == "grouped.cu" and "WEIGHT_STAGES" in macros)

    def warpgroups(found: dict[tuple[str, str], int]) -> set[str]:
        return {source for source, macros in found if has_wgmma(source, macros)}

    assert "grouped.cu" in warpgroups(hopper)
    assert not warpgroups(blackwell)
    assert len(blackwell) > 30
    assert max(blackwell.values()) <= BY_ARCH["sm_100a"].block_shared


def test_with_a_drafter_its_kernels_are_launched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Eagle3Config.from_folder(NANO.with_name("kimi-nano-eagle3"), K2Config.from_folder(NANO))
    with_it, without = (launched("kimi-nano", "sm_90a", monkeypatch, each) for each in (drafter, None))
    assert without.keys() < with_it.keys()
    assert {source for source, _ in with_it} - {source for source, _ in without} == {"keep_drafts.cu", "read_rows.cu"}


def test_the_cache_has_a_place_for_each_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_source(text: bytes, name: str, headers: object, options: list[str]) -> bytes:
        compiled.append(next(option for option in options if option.startswith("-arch")))
        return compiled[-1].encode()

    monkeypatch.setattr(driver, "compile_source", compile_source)
    monkeypatch.setattr(driver, "_nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(driver.native, "cache_folder", lambda: tmp_path)
    source = driver.HERE / "step" / "best.cu"
    for _ in range(2):
        for each in CHIPS:
            assert driver.machine_code(source, ["-DWIDTH=4"], "", each) == f"-arch={each.arch}".encode()
    assert compiled == [f"-arch={each.arch}" for each in CHIPS], "each is compiled once"
    assert chips.building() is None
