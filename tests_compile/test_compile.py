"""Every kernel that a server of Kimi K2.6 or nano launches compiles for every chip, without a GPU."""

from pathlib import Path

import pytest
from rich.console import Console

from redline.cli.kernels import BuildFlags
from redline.cli.kernels_build import run
from redline.kernels.cpu import native
from redline.kernels.cuda.chips import CHIPS


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("model", ["kimi-k2.6", "kimi-k2.6-nvfp4", "kimi-nano"])
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.arch)
def test_every_kernel_compiles(chip, model: str, kv_dtype: str, caches: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(caches / "triton"))
    monkeypatch.setattr(native, "cache_folder", lambda: caches / "cuda")
    flags = BuildFlags(shape=model, arch=chip.arch, kv_dtype=kv_dtype, max_model_len=131_072)
    assert run(flags, Console(quiet=True)) == (0 if chip.is_served else 1)
