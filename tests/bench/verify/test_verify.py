"""`redline verify FOLDER`: each kind of damage to a checkpoint is reported, with file, tensor and fix."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.bench.verify import layers as layers_module
from redline.bench.verify import verify as verify_module
from redline.bench.verify.report import VerifiedLayer, VerifyReport
from redline.bench.verify.shards import peaked
from redline.bench.verify.verify import Progress, verify
from redline.kernels.kernel import references
from redline.model.k2.checkpoint import Checkpoint, Survey, layer_weights, survey
from redline.model.k2.cpu import K2
from redline.model.k2.write import random_checkpoint, sparse_checkpoint
from redline.progress import Working
from tests.tiny_model import CPU, kernel_config

LAYER = "language_model.model.layers."
SCALE = f"{LAYER}1.mlp.experts.3.up_proj.weight_scale"
PACKED = f"{LAYER}1.mlp.experts.3.up_proj.weight_packed"
EMBEDDING = "language_model.model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "ROUNDS", 2)
    monkeypatch.setattr(layers_module, "WARM", 0)
    monkeypatch.setattr(layers_module, "WORKING_SET_BYTES", 1 << 16)
    monkeypatch.setattr(layers_module, "ROOM_BYTES", 1 << 20)


@pytest.fixture
def shards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of reading: a layer with sound tensors counts as right, without computing or timing it."""

    def right(found: Survey, number: int, *_: object) -> VerifiedLayer:
        return VerifiedLayer(layer=number, dense=not found.config.is_moe(number))

    monkeypatch.setattr(verify_module, "compute", right)
    for name in ("load_rate", "steps_of"):
        monkeypatch.setattr(verify_module, name, lambda *_: None)


def checkpoint(folder: Path, shard_bytes: int = 100_000, **given: str) -> list[Path]:
    random_checkpoint(folder, kernel_config(), shard_bytes=shard_bytes, **given)  # type: ignore[arg-type]
    return sorted(folder.glob("*.safetensors"))


def run(folder: Path, again: bool = False) -> VerifyReport:
    with Working("verify", shown=False) as working:
        return verify(folder, Progress(folder.parent / f"{folder.name}.shards.jsonl", again), CPU, working)


def holder(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def changed(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> Path:
    """Rewrites the shard that holds a tensor, after `change` has modified it in place or returned a new one."""
    file = holder(folder, name)
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    new = change(tensors[name])
    tensors[name] = tensors[name] if new is None else new
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def fill(part: Tensor, value: float) -> None:
    part.fill_(value)


def only(report: VerifyReport) -> tuple[str, str, str, str]:
    assert not report.sound
    (problem,) = report.problems
    return problem.file, problem.tensor, problem.what, problem.fix


SLOW = pytest.mark.slow
FORMATS = ["int4", "nvfp4", pytest.param("fp8", marks=SLOW), pytest.param("bf16", marks=SLOW)]


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_sound_checkpoint_is_sound_and_its_layers_are_the_references(tmp_path: Path, quantization: str):
    files = checkpoint(tmp_path / "c", quantization=quantization)
    report = run(tmp_path / "c")
    assert report.sound
    assert not report.unchecked
    assert report.bytes == sum(file.stat().st_size for file in files)
    assert [(layer.layer, layer.dense) for layer in report.layers] == [(0, True), (1, False), (2, False)]
    for layer in report.layers:
        assert layer.error is not None
        assert 0 < layer.error <= layer.limit == 1e-4
        assert layer.tokens + layer.near_ties == 12
        assert layer.tokens
    if quantization == "int4":
        weights = 2 * 8 * 3 * 32 * 64
        assert sum(report.codes) == weights
        assert max(report.codes) in report.codes[7:10]
    assert report.steps is not None
    assert report.steps.predicted_ms is None
    assert report.rates is not None
    assert [read.threads for read in report.rates.disk] == [1, 4, 8]


def test_a_layer_that_the_kernels_get_wrong_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint(tmp_path / "c")
    forward = K2.forward

    def wrong(self: K2, *args, **given):
        hidden, features = forward(self, *args, **given)
        return hidden, None if features is None else features * 1.001

    monkeypatch.setattr(K2, "forward", wrong)
    report = run(tmp_path / "c")
    assert [problem.file for problem in report.problems] == ["layer 0", "layer 1", "layer 2"]
    assert "differ from the float32 reference" in report.problems[0].what


def test_a_layer_alone_is_the_layer_of_the_model(tmp_path: Path):
    """A single layer with its own norms, experts and rotary angles computes the same as the one inside the model."""
    from redline.bench.verify.layers import _inputs, _planes
    from redline.model.k2.cpu import load, load_layer

    checkpoint(tmp_path)
    rows = torch.randn(12, 64).to(torch.bfloat16)
    whole = load(Checkpoint.open(tmp_path), CPU)
    one = load_layer(Checkpoint.open(tmp_path), CPU, 2, rows)
    inputs = _inputs(one, (), (70, 5, 64))
    _, alone = one.forward(inputs, _planes(one, inputs), (1,))
    whole._weights = whole._weights.__class__(rows, whole.blocks[2:], whole.norm, whole.head, 1e-5)
    with references():
        _, same = whole.forward(inputs, _planes(one, inputs), (1,))
    torch.testing.assert_close(alone, same, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("shards_alone")
def test_a_missing_shard(tmp_path: Path):
    files = checkpoint(tmp_path / "c")
    files[1].unlink()
    report = run(tmp_path / "c")
    file, tensor, what, fix = only(report)
    assert (file, tensor) == (files[1].name, "")
    assert what.startswith("missing shard; expected to hold ")
    assert fix.startswith("download it again: hf download OWNER/NAME " + files[1].name)
    assert any("a shard or a tensor is missing" in line for line in report.unchecked)
    assert len(report.shards) == len(files) - 1


@pytest.mark.usefixtures("shards_alone")
def test_a_truncated_shard(tmp_path: Path):
    files = checkpoint(tmp_path / "c")
    os.truncate(files[1], files[1].stat().st_size - 1)
    file, tensor, what, _ = only(run(tmp_path / "c"))
    assert file == files[1].name
    assert tensor
    assert what.startswith("truncated: the file has ")


def test_a_pointer_of_git_lfs_in_the_place_of_a_shard(tmp_path: Path):
    files = checkpoint(tmp_path / "c")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9800000000\n"
    files[2].write_text(pointer)
    file, _, what, fix = only(run(tmp_path / "c"))
    assert file == files[2].name
    assert what == f"a Git LFS pointer of {len(pointer)} bytes; expected the shard itself"
    assert fix.startswith("run `git lfs pull` in ")


@pytest.mark.usefixtures("shards_alone")
def test_two_shards_whose_names_are_swapped(tmp_path: Path):
    one, other = checkpoint(tmp_path / "c")[1:3]
    one.rename(tmp_path / "kept")
    other.rename(one)
    (tmp_path / "kept").rename(other)
    report = run(tmp_path / "c")
    assert {problem.file: problem.what.partition(";")[0] for problem in report.problems} == {
        one.name: f"holds the tensors of {other.name}",
        other.name: f"holds the tensors of {one.name}",
    }
    assert report.problems[0].fix.startswith(f"rename the file to its own name ({other.name})")


@pytest.mark.usefixtures("shards_alone")
@pytest.mark.parametrize("change", [lambda t: t.repeat(2, 1), lambda t: t.float()], ids=["shape", "dtype"])
def test_a_wrong_shape_or_dtype(tmp_path: Path, change: Callable[[Tensor], Tensor]):
    checkpoint(tmp_path / "c")
    file = changed(tmp_path / "c", SCALE, change)
    named, tensor, what, _ = only(run(tmp_path / "c"))
    assert (named, tensor) == (file.name, SCALE)
    assert what.startswith("expected BF16 [32, 2], found ")


@pytest.mark.usefixtures("shards_alone")
def test_every_wrong_tensor_is_named_and_not_only_the_first(tmp_path: Path):
    checkpoint(tmp_path / "c", shard_bytes=10_000)
    files = {
        changed(tmp_path / "c", f"{LAYER}{layer}.input_layernorm.weight", lambda t: t[:-1].clone()).name
        for layer in range(3)
    }
    assert {problem.file for problem in run(tmp_path / "c").problems} == files


@pytest.mark.usefixtures("shards_alone")
@pytest.mark.parametrize(
    ("name", "value"),
    [(SCALE, torch.nan), (EMBEDDING, torch.inf), pytest.param(EMBEDDING, -torch.inf, marks=SLOW)],
)
def test_nan_and_infinity(tmp_path: Path, name: str, value: float):
    checkpoint(tmp_path / "c")
    file = changed(tmp_path / "c", name, lambda t: fill(t[3:5, 1], value))
    report = run(tmp_path / "c")
    assert only(report)[:3] == (file.name, name, "2 numbers are NaN or infinite, the first at [3, 1]")
    assert any(line.startswith("layer 1: one of its tensors") for line in report.unchecked) == (name == SCALE)


@pytest.mark.usefixtures("shards_alone")
def test_a_scale_that_is_zero_though_its_codes_are_not(tmp_path: Path):
    checkpoint(tmp_path / "c")
    file = changed(tmp_path / "c", SCALE, lambda t: fill(t[7, 1], -0.0))
    assert only(run(tmp_path / "c"))[:3] == (
        file.name,
        SCALE,
        "1 scale is zero although the codes that it scales are not, the first at [7, 1]",
    )
    changed(tmp_path / "c", PACKED, lambda t: fill(t[7, 4:8], -0x77777778))  # 0x88888888: all zero
    assert run(tmp_path / "c").sound


@pytest.mark.usefixtures("shards_alone")
@SLOW
def test_nan_of_an_nvfp4_scale_matters_where_its_codes_do(tmp_path: Path):
    checkpoint(tmp_path / "c", quantization="nvfp4")
    codes = SCALE.removesuffix("_scale")
    file = changed(tmp_path / "c", SCALE, lambda t: fill(t.view(torch.uint8)[3, 0], 0x7F))
    assert only(run(tmp_path / "c"))[:2] == (file.name, SCALE)
    changed(tmp_path / "c", codes, lambda t: fill(t[3, :8], 0x08))
    assert run(tmp_path / "c").sound


@pytest.mark.usefixtures("shards_alone")
@pytest.mark.parametrize("garbage", [pytest.param("uniform", marks=SLOW), "two's complement"])
def test_int4_codes_that_no_weights_have(tmp_path: Path, garbage: str):
    checkpoint(tmp_path / "c")
    words = torch.randint(-(2**31), 2**31, (32, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    file = changed(tmp_path / "c", PACKED, lambda t: words if garbage == "uniform" else t ^ -0x77777778)
    named, tensor, what, _ = only(run(tmp_path / "c"))
    assert (named, tensor) == (file.name, PACKED)
    assert what.startswith("its INT4 codes are not distributed like those of weights: ")


@pytest.mark.usefixtures("shards_alone")
def test_zeros_and_blocks_of_zeros(tmp_path: Path):
    checkpoint(tmp_path / "c")
    norm, o_proj = f"{LAYER}0.input_layernorm.weight", f"{LAYER}1.self_attn.o_proj.weight"
    changed(tmp_path / "c", norm, lambda t: fill(t, 0))
    changed(tmp_path / "c", o_proj, lambda t: fill(t.flatten()[:-10], 0))
    found = {problem.tensor: problem.what for problem in run(tmp_path / "c").problems}
    assert found[norm] == "all its 128 bytes are zero"
    assert " blocks of 4,096 bytes are zero, the first at byte " in found[o_proj]


def test_holes_are_named_and_not_read(tmp_path: Path):
    sparse_checkpoint(tmp_path / "c", kernel_config(num_hidden_layers=5, vocab_size=4096), (0, 2, 4))
    assert survey(tmp_path / "c", pytest.fail).bytes
    report = run(tmp_path / "c")
    assert not report.sound
    by_layer = [problem for problem in report.problems if problem.file in ("model-00002-of-00005.safetensors",)]
    assert any(problem.what.startswith("empty: its ") and problem.tensors > 20 for problem in by_layer)
    assert any(problem.tensor == EMBEDDING for problem in report.problems)
    assert not any(layer.why_not for layer in report.layers)
    assert [layer.layer for layer in report.layers] == [0, 2, 4]
    holes = [shard for shard in report.shards if shard.file.startswith(("model-00002", "model-00004"))]
    assert all(shard.read_bytes < shard.bytes / 4 for shard in holes)


@pytest.mark.usefixtures("shards_alone")
def test_what_the_disk_cannot_read_is_a_fault_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint(tmp_path / "c")
    found = survey(tmp_path / "c", pytest.fail)
    stored, preadv = found.tensors["layers.1.mlp.experts.3.up_proj.weight_packed"], os.preadv

    def fails(file: int, buffers: list[memoryview], at: int) -> int:
        if at == stored.start and os.readlink(f"/proc/self/fd/{file}") == str(stored.file):
            raise OSError(5, "Input/output error")
        return preadv(file, buffers, at)

    monkeypatch.setattr("redline.bench.verify.shards.os.preadv", fails)
    assert only(run(tmp_path / "c"))[1:3] == (PACKED, "cannot be read: Input/output error")


def test_a_config_that_cannot_be_read_is_the_problem(tmp_path: Path):
    checkpoint(tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text("{}")
    report = run(tmp_path / "c")
    assert only(report)[0]
    assert report.unchecked == ("shards and layers: they need a valid config and index",)


def test_a_layer_that_memory_does_not_hold_is_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint(tmp_path / "c")
    monkeypatch.setattr(layers_module, "free_memory", lambda: 1000)
    report = run(tmp_path / "c")
    assert report.sound
    assert report.unchecked[0].startswith("layer 0: it needs ")
    assert report.steps is None


@pytest.mark.usefixtures("shards_alone")
def test_it_goes_on_with_the_shards_that_are_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = checkpoint(tmp_path / "c")
    read: list[str] = []
    read_shard = verify_module.read_shard

    def counted(job: str, file: Path, *given):
        if len(read) == 2 and stop:
            raise KeyboardInterrupt
        read.append(file.name)
        return read_shard(job, file, *given)

    stop = True
    monkeypatch.setattr(verify_module, "read_shard", counted)
    monkeypatch.setattr(verify_module, "processors", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c")
    assert read == [file.name for file in files[:2]]
    with (tmp_path / "c.shards.jsonl").open("ab") as torn:
        torn.write(b'{"job": "\xff"}\n{"job": "torn')
    stop = False
    report = run(tmp_path / "c")
    assert read == [file.name for file in files]
    assert report.sound
    assert report.earlier == 2
    read.clear()
    file = changed(tmp_path / "c", SCALE, lambda t: t * 1.5)
    assert run(tmp_path / "c").earlier == len(files) - 1
    assert read == [file.name]
    read.clear()
    assert run(tmp_path / "c", again=True).earlier == 0
    assert len(read) == len(files)


@pytest.mark.usefixtures("shards_alone")
@SLOW
def test_a_shard_with_a_problem_is_read_again(tmp_path: Path):
    files = checkpoint(tmp_path / "c")
    changed(tmp_path / "c", SCALE, lambda t: fill(t[0, 0], torch.nan))
    assert not run(tmp_path / "c").sound
    report = run(tmp_path / "c")
    assert not report.sound
    assert report.earlier == len(files) - 1


def test_the_peak_of_codes():
    assert peaked(torch.tensor([0, 1, 2, 3, 5, 8, 10, 12, 13, 12, 10, 8, 5, 3, 2, 3]))
    assert not peaked(torch.full((16,), 100))


def test_the_layers_weights_are_those_of_the_layer(tmp_path: Path):
    config = kernel_config()
    assert {weight.name.split(".")[1] for weight in layer_weights(config, 1)} == {"1"}


def test_a_copy_of_a_folder_is_read_though_names_sizes_and_times_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verify_module, "chosen", lambda _: [])  # no layer is computed
    files = checkpoint(tmp_path / "one" / "kimi")
    shutil.copytree(tmp_path / "one", tmp_path / "two")  # copies the times too
    lost = tmp_path / "two" / "kimi" / files[0].name
    times = lost.stat().st_atime_ns, lost.stat().st_mtime_ns
    with lost.open("r+b") as file:
        file.seek(-8192, os.SEEK_END)
        file.write(bytes(8192))
    os.utime(lost, ns=times)
    reports: list[VerifyReport] = []
    for place in ("one", "two"):  # like two commands in one folder, with the same name of the report
        with Working("verify", shown=False) as working:
            progress = Progress(tmp_path / "verify-kimi.shards.jsonl")
            reports.append(verify(tmp_path / place / "kimi", progress, CPU, working))
    assert [report.sound for report in reports] == [True, False]
    assert reports[1].earlier == 0


def test_the_command_that_mends_a_file_may_be_pasted(tmp_path: Path):
    fix = verify_module.again(tmp_path / "my models" / "a.safetensors")
    assert shlex.split(fix.partition(": ")[2]) == [
        *(
            "hf",
            "download",
            "OWNER/NAME",
            "a.safetensors",
            "--local-dir",
            str(tmp_path / "my models"),
            "--force-download",
        )
    ]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "a drafter (Eagle3DeepseekV2ForCausalLM), not a model"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "model_type is llama (LlamaForCausalLM)"),
    ],
)
def test_a_folder_that_holds_something_else_is_named_as_what_it_is(
    tmp_path: Path, config: dict[str, object], what: str
):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    [problem] = run(folder).problems
    assert problem.what.startswith(what)
    assert problem.fix == "name the folder of a model that Redline serves"
