"""If the CUDA kernels cannot run, one log line gives the reason, and the references run."""

import errno
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.kernels.cuda import driver, kernel
from redline.model.k2.load import why_not
from redline.model.k2.shapes import KIMI_NANO

CUDA = torch.device("cuda")


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with a GPU that has the properties the test sets."""
    kept = driver.why_not
    kept.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    yield monkeypatch
    kept.cache_clear()


def test_without_a_gpu_there_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    driver.why_not.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel.why_not() == "torch sees no GPU"
    assert not kernel.has_kernels(CUDA)
    driver.why_not.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (11, 0), (12, 0)])
def test_a_chip_that_the_kernels_do_not_know_takes_the_references(
    chip: pytest.MonkeyPatch, capability: tuple[int, int]
):
    chip.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = kernel.why_not()
    assert reason is not None
    assert f"NVIDIA A100 has compute capability {capability[0]}.{capability[1]}" in reason
    assert why_not(KIMI_NANO, CUDA) == reason


def test_a_compiler_that_is_not_there_is_named(chip: pytest.MonkeyPatch):
    def missing() -> None:
        raise OSError("libnvrtc.so.13 is nowhere")

    chip.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    chip.setattr(driver, "_nvrtc", missing)
    assert kernel.why_not() == "a CUDA library cannot be loaded (libnvrtc.so.13 is nowhere)"


def test_a_cpu_does_not_take_the_gpus_model(chip: pytest.MonkeyPatch):
    chip.setattr(driver, "why_not", lambda: None)
    assert why_not(KIMI_NANO, torch.device("cpu")) == "not a GPU"
    assert why_not(KIMI_NANO, CUDA) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_rank": 96}, "latents of"),
        ({"qk_rope_head_dim": 32}, "keys"),
    ],
)
def test_a_checkpoint_that_the_kernels_do_not_read_takes_the_references(
    chip: pytest.MonkeyPatch, changes: dict[str, Any], said: str
):
    chip.setattr(driver, "why_not", lambda: None)
    assert said in str(why_not(replace(KIMI_NANO, **changes), CUDA))


def test_attributes_have_the_numbers_of_cudas_header():
    """Compared with the header that comes with Triton, which the tests need anyway."""
    triton = importlib.util.find_spec("triton")
    header = Path(str(triton and triton.origin)).parent / "backends/nvidia/include/cuda.h"
    for name, number in (
        ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", driver._MAX_DYNAMIC_SHARED),
        ("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", driver._STREAM_SERIALIZATION),
    ):
        assert set(re.findall(rf"{name} *= *(\d+)", header.read_text())) == {str(number)}


@pytest.mark.parametrize(
    ("cache", "temporary", "made"),
    [("cache", "file", 1), ("file", "folder", 1), ("file/below", "folder", 1), ("file", "file", 2)],
)
def test_machine_code_is_made_where_it_cannot_be_kept(
    chip: pytest.MonkeyPatch, tmp_path: Path, cache: str, temporary: str, made: int
):
    """It is kept in the user's cache, or else in a temporary folder."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    chip.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    chip.setattr("tempfile.tempdir", str(tmp_path / temporary))
    chip.setattr(driver, "_nvrtc_version", lambda: (13, 0))
    compiled: list[str] = []

    def compile_source(_: bytes, name: str, *__: object) -> bytes:
        compiled.append(name)
        return b"code"

    chip.setattr(driver, "compile_source", compile_source)
    source = Path(kernel.__file__).parent / "decode" / "embed.cu"
    assert [driver.machine_code(source, [], "") for _ in range(2)] == [b"code", b"code"]
    assert len(compiled) == made
    assert all(path.suffix == ".cubin" for path in tmp_path.glob("cache/redline/*"))


def test_a_full_disk_leaves_no_half_of_a_kernel(chip: pytest.MonkeyPatch, tmp_path: Path):
    chip.setenv("XDG_CACHE_HOME", str(tmp_path))
    chip.setattr(driver, "_nvrtc_version", lambda: (13, 0))
    chip.setattr(driver, "compile_source", lambda *_: b"code")
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    with chip.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert driver.machine_code(Path(kernel.__file__).parent / "decode" / "embed.cu", [], "") == b"code"
    assert list((tmp_path / "redline").iterdir()) == []
