"""A checkpoint is converted to another format that its readers accept, also after interruptions."""

import fnmatch
import hashlib
import io
import json
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from redline.chat.tokenizer import Tokenizer
from redline.errors import CheckpointError, ConfigError
from redline.model.k2.checkpoint import Checkpoint, weights
from redline.model.k2.config import Int4Experts, Nvfp4Experts, Unquantized
from redline.model.k2.write import Layout, random_checkpoint, tiny_config, write_checkpoint
from redline.ops.formats import Nvfp4
from redline.quant import quantize, shard
from redline.quant.audit import Audit, Bounds, audit
from redline.quant.quantize import QuantizeResult, run
from redline.quant.read import dense
from redline.quant.settings import FORMATS, Format, Level, QuantizeConfig
from redline.quant.texts import CalibrationText

CPU = torch.device("cpu")
EXPERT = "language_model.model.layers.1.mlp.experts.3."
ELSEWHERE = {
    "vision_tower.patch_embed.proj.weight": torch.rand(3, 5).half(),
    "mm_projector.proj.0.bias": torch.rand(7).bfloat16(),
    # a layer for drafting (MTP)
    "language_model.model.layers.3.mlp.experts.0.up_proj.weight": torch.rand(32, 64).bfloat16(),
    "language_model.model.layers.1.self_attn.rotary_emb.inv_freq": torch.empty(0),
}


def source(folder: Path, quantization: Any = "int4", layout: Layout = "k25", **changes: Any) -> Path:
    """A tiny model in six shards, with additional tensors that the text model does not use."""
    random_checkpoint(folder, tiny_config(**changes), 0, quantization, layout)
    tensors = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    config = json.loads((folder / "config.json").read_text())
    write_checkpoint(folder, {**tensors, **ELSEWHERE}.items(), config, shard_bytes=90_000)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def converted(at: Path, folder: Path, **settings: Any) -> int:
    config = QuantizeConfig(source=str(at), out=str(folder), device="cpu", **settings)
    return run(config, Console(file=io.StringIO(), width=400))


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def result(folder: Path) -> QuantizeResult:
    import msgspec

    return msgspec.json.decode((folder / "quantize.json").read_bytes(), type=QuantizeResult)


def relative(given: Tensor, expected: Tensor) -> float:
    return float((given.float() - expected.float()).norm() / expected.float().norm())


LARGEST_ERROR = {"nvfp4-modelopt": 0.13, "nvfp4-ct": 0.13, "int4": 0.12, "bf16": 0.003}


@pytest.mark.parametrize(
    ("of", "to", "layout"),
    [
        ("int4", "nvfp4-modelopt", "k25"),
        ("int4", "nvfp4-ct", "k25-short"),
        ("int4", "bf16", "k2"),
        ("fp8", "nvfp4-modelopt", "k2"),
        ("fp8", "int4", "k25"),
        ("bf16", "nvfp4-ct", "k25"),
        ("bf16", "int4", "k2"),
        ("nvfp4", "bf16", "k25"),
        ("nvfp4", "int4", "k25"),
    ],
)
@pytest.mark.parametrize("level", ["fast", "search"])
def test_every_format_becomes_every_other(tmp_path: Path, of: str, to: Format, layout: Layout, level: str):
    at, out = source(tmp_path / "a", of, layout), tmp_path / "b"
    assert converted(at, out, format=to, level=level) == 0
    before, after = Checkpoint.open(at), Checkpoint.open(out)
    assert after.config.quantization == FORMATS[to]
    told = {name: error for one in result(out).shards for name, error in one.weights.items()}
    for weight in weights(before.config):
        was, now = dense(before, weight, CPU), dense(after, weight, CPU)
        if weight.kind == "expert":
            assert relative(now, was) < LARGEST_ERROR[to]
            assert told[weight.name].relative == pytest.approx(relative(now, was), rel=1e-3, abs=1e-6)
        else:
            assert torch.equal(was, now), weight.name
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert not (out / ".quantize").exists()


@pytest.mark.parametrize("to", ["nvfp4-modelopt", "int4"])
def test_errors_of_an_fp8_source_are_those_of_the_weights_that_were_rounded(tmp_path: Path, to: Format):
    at, said = source(tmp_path / "a", "fp8"), io.StringIO()
    config = QuantizeConfig(source=str(at), out=str(tmp_path / "b"), format=to, device="cpu")
    assert run(config, Console(file=said, width=400)) == 0
    errors = {name: error for one in result(tmp_path / "b").shards for name, error in one.weights.items()}
    assert set(errors) == {weight.name for weight in weights(tiny_config()) if weight.kind == "expert"}
    lines = [line for line in said.getvalue().splitlines() if " weights, error " in line]
    assert [line.split(",")[0] for line in lines] == [f"{one}_proj: 16 weights" for one in ("down", "gate", "up")]


def test_a_run_that_rounds_nothing_says_so(tmp_path: Path):
    at, said = source(tmp_path / "a", "fp8"), io.StringIO()
    config = QuantizeConfig(source=str(at), out=str(tmp_path / "b"), format="bf16", device="cpu")
    assert run(config, Console(file=said, width=400)) == 0
    assert "no weight was rounded" in said.getvalue()


def test_what_is_not_asked_for_passes_through_byte_for_byte(tmp_path: Path):
    at, out = source(tmp_path / "a"), tmp_path / "b"
    converted(at, out)
    before, after = stored(at), stored(out)
    for name, value in before.items():
        if ".mlp.experts." not in name or ".layers.3." in name:
            assert after[name].dtype == value.dtype
            assert torch.equal(after[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name
    assert set(ELSEWHERE) <= set(after)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())


@pytest.mark.parametrize("to", ["nvfp4-modelopt", "nvfp4-ct"])
def test_shared_experts_and_dense_layers_are_quantised_where_that_is_asked(tmp_path: Path, to: Format):
    at, out = source(tmp_path / "a"), tmp_path / "b"
    converted(at, out, format=to, also=("shared", "dense"))
    packed = {name.removesuffix("_packed") for name, value in stored(out).items() if value.dtype == torch.uint8}
    expected = {
        f"language_model.model.{weight.name}"
        for weight in weights(tiny_config())
        if weight.kind == "expert" or (".mlp." in weight.name and weight.kind == "linear")
    }
    assert packed == expected
    before, after = Checkpoint.open(at), Checkpoint.open(out)
    for name in ("layers.0.mlp.down_proj.weight", "layers.2.mlp.shared_experts.up_proj.weight"):
        assert 0.01 < relative(after.plain(name), before.plain(name)) < LARGEST_ERROR[to]


def modules(folder: Path) -> dict[str, bool]:
    """The linear modules of a checkpoint, and whether each is quantised."""
    found = {
        re.sub(r"\.weight(_packed)?$", "", name): value.dtype == torch.uint8
        for name, value in stored(folder).items()
        if re.search(r"\.weight(_packed)?$", name) and value.ndim == 2
    }
    return {name: packed for name, packed in found.items() if not name.endswith(("mlp.gate", "embed_tokens"))}


@pytest.mark.parametrize("also", [(), ("shared",), ("dense",), ("shared", "dense")])
def test_the_config_names_what_is_not_quantised_and_nothing_else(tmp_path: Path, also: tuple[str, ...]):
    at = source(tmp_path / "a")
    converted(at, tmp_path / "modelopt", also=also)
    config = json.loads((tmp_path / "modelopt" / "config.json").read_text())
    beside = json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text())
    assert config["quantization_config"]["ignore"] == beside["quantization"]["exclude_modules"]
    assert "quantization_config" not in config["text_config"]
    for name, packed in modules(tmp_path / "modelopt").items():
        excluded = any(fnmatch.fnmatch(name, pattern) for pattern in beside["quantization"]["exclude_modules"])
        assert excluded != packed, name
    converted(at, tmp_path / "ct", format="nvfp4-ct", also=also)
    values = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    theirs = QuantizationConfig.model_validate(values)
    assert theirs.format == "nvfp4-pack-quantized"
    for name, packed in modules(tmp_path / "ct").items():
        patterns = [pattern.removeprefix("re:") for pattern in theirs.ignore or ()]
        assert any(re.match(pattern, name) for pattern in patterns) != packed, name


def test_the_library_that_owns_the_format_decodes_nvfp4_to_our_very_numbers(tmp_path: Path):
    """Law 11. A searched weight has a power of two as its scale, so neither side rounds."""
    converted(source(tmp_path / "a"), tmp_path / "b", format="nvfp4-ct")
    values = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(values).config_groups["group_0"]
    files, checkpoint = stored(tmp_path / "b"), Checkpoint.open(tmp_path / "b")
    for projection in ("gate", "up", "down"):
        at = f"{EXPERT}{projection}_proj."
        state = {name.removeprefix(at): value for name, value in files.items() if name.startswith(at)}
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        ours = checkpoint.expert(1, 3, projection)
        assert isinstance(ours, Nvfp4)
        assert torch.equal(ours.dequantize(), theirs.float())


def test_both_layouts_of_nvfp4_decode_to_the_same_numbers(tmp_path: Path):
    at = source(tmp_path / "a")
    for to in ("nvfp4-modelopt", "nvfp4-ct"):
        converted(at, tmp_path / to, format=to)
    one, other = Checkpoint.open(tmp_path / "nvfp4-modelopt"), Checkpoint.open(tmp_path / "nvfp4-ct")
    for weight in weights(one.config):
        assert torch.equal(dense(one, weight, CPU), dense(other, weight, CPU))


@pytest.mark.parametrize("level", ["fast", "search"])
@pytest.mark.parametrize(("of", "to"), [("nvfp4-modelopt", "nvfp4-ct"), ("nvfp4-ct", "nvfp4-modelopt")])
def test_one_layout_of_nvfp4_becomes_the_other_and_nothing_is_rounded(
    tmp_path: Path, of: Format, to: Format, level: Level
):
    at, settings = source(tmp_path / "a"), {"level": level, "also": ("shared",)}
    for made in (of, to):
        converted(at, tmp_path / made, format=made, **settings)
    assert converted(tmp_path / of, tmp_path / "b", format=to) == 0
    given, expected = stored(tmp_path / "b"), stored(tmp_path / to)
    assert set(given) == set(expected)
    for name, value in expected.items():
        bytes_of = [one.reshape(-1).view(torch.uint8) for one in (given[name], value)]
        if name.endswith("_scale_2"):  # stored as the reciprocal of the reciprocal
            torch.testing.assert_close(given[name], value, rtol=1e-6, atol=0)
        else:
            assert torch.equal(*bytes_of), name
    assert (tmp_path / "b" / "config.json").read_bytes() == (tmp_path / to / "config.json").read_bytes()
    assert (tmp_path / "b" / "hf_quant_config.json").exists() == (to == "nvfp4-modelopt")
    assert not any(one.weights for one in result(tmp_path / "b").shards)


def test_the_card_describes_the_result_and_keeps_that_of_the_source(tmp_path: Path):
    at = source(tmp_path / "tiny", "fp8")
    (at / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n\nIts experts are FP8.\n")
    converted(at, tmp_path / "b", format="int4")
    text = (tmp_path / "b" / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n---\n\n# tiny in INT4")
    for part in (
        "| group size | 32 weights |",
        "| quantised | routed experts |",
        "| in bf16 | attention, dense layers, embeddings, head, norms,",
        f"| made from | tiny, FP8 in blocks of 128 x 128, fingerprint {Checkpoint.open(at).fingerprint[:16]} |",
        "- down_proj: 16 weights, error 0.",
        "    redline serve FOLDER",
    ):
        assert part in text
    assert text.endswith("# The card of the source\n\n# Tiny\n\nIts experts are FP8.\n")
    assert "transformers" not in text
    converted(at, tmp_path / "c", format="nvfp4-ct", also=("shared",))
    text = (tmp_path / "c" / "README.md").read_text()
    assert "| quantised | routed experts, shared experts |" in text
    assert "transformers 5.24 drops `weight_global_scale`" in text


def test_int4_is_read_by_the_library_that_owns_it(tmp_path: Path):
    converted(source(tmp_path / "a", "bf16"), tmp_path / "b", format="int4")
    values = json.loads((tmp_path / "b" / "config.json").read_text())["text_config"]["quantization_config"]
    scheme = QuantizationConfig.model_validate(values).config_groups["group_0"]
    files = stored(tmp_path / "b")
    state = {name.removeprefix(f"{EXPERT}up_proj."): v for name, v in files.items() if f"{EXPERT}up_proj." in name}
    theirs = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    ours = Checkpoint.open(tmp_path / "b").expert(1, 3, "up")
    assert not isinstance(ours, Tensor)
    assert torch.equal(ours.dequantize(torch.bfloat16), theirs)


@pytest.mark.parametrize("to", list(FORMATS))
def test_transformers_reads_the_new_config(tmp_path: Path, to: Format):
    converted(source(tmp_path / "a", "fp8"), tmp_path / "b", format=to)
    theirs = AutoConfig.from_pretrained(tmp_path / "b")
    assert (theirs.model_type, theirs.text_config.n_routed_experts) == ("kimi_k25", 8)


@pytest.mark.parametrize("level", ["fast", "search"])
def test_gate_and_up_share_their_tensor_scale_wherever_they_lie(tmp_path: Path, level: str):
    at = tmp_path / "a"
    random_checkpoint(at, tiny_config(), quantization="bf16")
    tensors = stored(at)
    config = json.loads((at / "config.json").read_text())
    tensors[f"{EXPERT}up_proj.weight"] *= 5
    write_checkpoint(at, sorted(tensors.items(), key=lambda one: ".up_proj." in one[0]), config, shard_bytes=60_000)
    index = json.loads((at / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[f"{EXPERT}gate_proj.weight"] != index[f"{EXPERT}up_proj.weight"]
    converted(at, tmp_path / "b", level=level)
    after = Checkpoint.open(tmp_path / "b")
    for layer in (1, 2):
        for expert in range(8):
            gate, up, down = (after.expert(layer, expert, name) for name in ("gate", "up", "down"))
            assert isinstance(gate, Nvfp4)
            assert isinstance(up, Nvfp4)
            assert isinstance(down, Nvfp4)
            assert torch.equal(gate.scale, up.scale)
            assert level == "search" or not torch.equal(gate.scale, down.scale)


# ------------------------------------------------------------------------------------------------------- resuming


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


class Killed(BaseException):
    """Not caught by anything, like a kill."""


def test_a_kill_at_any_byte_loses_the_shard_in_the_making_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at = source(tmp_path / "a")
    converted(at, tmp_path / "whole")
    expected = files_of(tmp_path / "whole")
    total = sum(len(content) for name, content in expected.items() if name.endswith(".safetensors"))
    assert len([name for name in expected if name.endswith(".safetensors")]) >= 4
    out, budget = tmp_path / "b", 0

    class Stops:
        """SHA-256 that raises Killed after a number of bytes: each byte of a shard passes through it after it was
        written.
        """

        def __init__(self) -> None:
            self.inner = hashlib.sha256()

        def update(self, part: Any) -> None:
            nonlocal budget
            budget -= len(part)
            if budget < 0:
                raise Killed
            self.inner.update(part)

        def hexdigest(self) -> str:
            return self.inner.hexdigest()

    fake = namedtuple("fake", "sha256 file_digest")(Stops, hashlib.file_digest)
    kills, before = 0, set[str]()
    for step in range(3, 100, 7):
        budget = total * step // 100  # more each time: finished shards are not written again
        with monkeypatch.context() as patch:
            patch.setattr(shard, "hashlib", fake)
            try:
                assert converted(at, out) == 0
                break
            except Killed:
                kills += 1
        there = {path.name for path in out.glob("model-*.safetensors")}
        assert before <= there
        assert not (out / "model.safetensors.index.json").exists()
        before = there
    assert kills >= 2
    assert {name: files_of(out).get(name) for name in expected} == expected


def test_a_finished_shard_that_was_damaged_is_made_again_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at, out = source(tmp_path / "a"), tmp_path / "b"
    converted(at, out)
    expected = files_of(out)
    damaged = out / "model-00002-of-00006.safetensors"
    damaged.write_bytes(expected[damaged.name][:-1] + b"?")
    made: list[str] = []
    write = quantize.write_shard
    monkeypatch.setattr(quantize, "write_shard", lambda path, *rest: (made.append(path.name), write(path, *rest))[1])
    assert converted(at, out) == 0
    assert made == [damaged.name]
    assert files_of(out) == expected
    assert converted(at, out) == 0
    assert made == [damaged.name]


def test_what_is_there_survives_a_check_that_was_interrupted_and_a_repair_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    at, out = source(tmp_path / "a"), tmp_path / "b"
    converted(at, out)
    expected = files_of(out)
    made: list[str] = []
    write = quantize.write_shard
    monkeypatch.setattr(quantize, "write_shard", lambda path, *rest: (made.append(path.name), write(path, *rest))[1])

    def killed(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(quantize, "measured", killed)
        with pytest.raises(Killed):
            converted(at, out)
    assert converted(at, out) == 0
    assert made == []
    damaged = out / "model-00002-of-00006.safetensors"
    damaged.write_bytes(b"?")
    with monkeypatch.context() as patch:
        usage = namedtuple("usage", "total used free")
        patch.setattr("redline.disk.shutil.disk_usage", lambda _: usage(10**9, 0, 10))
        with pytest.raises(ConfigError, match="1 shards take"):
            converted(at, out)
    assert converted(at, out) == 0
    assert made == [damaged.name]
    assert files_of(out) == expected


def test_a_folder_of_another_job_is_refused_and_stays(tmp_path: Path):
    at, out = source(tmp_path / "a"), tmp_path / "b"
    converted(at, out)
    expected = files_of(out)
    for settings in ({"level": "fast"}, {"format": "nvfp4-ct"}, {"also": ("shared",)}):
        with pytest.raises(ConfigError, match=rf"b: begun with {next(iter(settings))}"):
            converted(at, out, **settings)
    other = source(tmp_path / "other", n_routed_experts=4)
    with pytest.raises(ConfigError, match="begun with fingerprint"):
        converted(other, out)
    with pytest.raises(ConfigError, match="contains a checkpoint"):
        converted(at, other)
    assert files_of(out) == expected


def test_a_disk_without_room_is_refused_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at, out = source(tmp_path / "a"), tmp_path / "b"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("redline.disk.shutil.disk_usage", lambda _: usage(10**9, 0, 300_000))
    with pytest.raises(ConfigError, match=r"6 shards take .* and 300 kB are free"):
        converted(at, out)
    assert not list(out.glob("*.safetensors"))


def test_a_weight_that_is_no_number_is_named(tmp_path: Path):
    at = source(tmp_path / "a", "bf16")
    tensors, config = stored(at), json.loads((at / "config.json").read_text())
    tensors[f"{EXPERT}down_proj.weight"][2, 3] = torch.nan
    write_checkpoint(at, tensors.items(), config)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.3.down_proj.weight: expected finite numbers"):
        converted(at, tmp_path / "b")


def test_what_makes_no_sense_is_refused(tmp_path: Path):
    int4, nvfp4 = source(tmp_path / "a"), source(tmp_path / "n", "nvfp4")
    for at, settings, message in (
        (int4, {"format": "int4"}, "stored as int4 already"),
        (nvfp4, {}, "stored as nvfp4-modelopt already"),
        (nvfp4, {"format": "nvfp4-ct", "also": ("shared",)}, "keeps what the source has quantised"),
        (int4, {"format": "bf16", "also": ("shared",)}, "only its routed experts"),
        (int4, {"also": ("attention",)}, "expected shared or dense"),
        (int4, {"workers": 0}, "workers is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            converted(at, tmp_path / "b", **settings)
    with pytest.raises(ConfigError, match="is the source"):
        converted(int4, int4)
    odd = source(tmp_path / "odd", "bf16", hidden_size=72)
    with pytest.raises(ConfigError, match="hidden_size is 72; needs a multiple of 16"):
        converted(odd, tmp_path / "b")


def test_a_weight_beyond_its_bound_is_named_and_the_exit_code_is_one(tmp_path: Path):
    at, said = source(tmp_path / "a"), io.StringIO()
    config = QuantizeConfig(source=str(at), out=str(tmp_path / "b"), device="cpu", most_weight_error=0.07)
    for _ in range(2):  # also if the folder is complete already
        assert run(config, Console(file=said, width=400)) == 1
    assert said.getvalue().count("weight error of layers.1.mlp.experts.") >= 2
    Checkpoint.open(tmp_path / "b")


def test_kimi_nano_in_nvfp4_is_near_its_teacher_in_both_layouts(tmp_path: Path):
    """The reduced set of eight texts. `docs/benchmarks.md` has the result for the whole set."""
    nano, found = Path(__file__).parents[2] / "models" / "kimi-nano", list[Audit]()
    prompts = [
        json.loads(line)["messages"][0]["content"] for line in (nano / "eval" / "hand.jsonl").read_text().splitlines()
    ]
    tokenizer = Tokenizer.open(nano)
    texts = [CalibrationText("hand", tuple(tokenizer.encode(prompt))) for prompt in prompts if len(prompt) > 60][:8]
    assert sum(len(text.tokens) for text in texts) > 100
    for to in ("nvfp4-modelopt", "nvfp4-ct"):
        assert converted(nano, tmp_path / to, format=to) == 0
        found.append(audit(Checkpoint.open(nano), Checkpoint.open(tmp_path / to), texts, Bounds(), CPU))
    for one in found:
        assert max(row.error for row in one.weights) < 0.075
        assert one.domains[-1].kl < 0.05
    assert found[0].domains == found[1].domains


def test_workers_change_nothing(tmp_path: Path):
    at = source(tmp_path / "a")
    for workers in (1, 3):
        converted(at, tmp_path / str(workers), workers=workers)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")


def test_the_formats_are_those_that_the_model_reads():
    assert {
        "nvfp4-modelopt": Nvfp4Experts("ModelOpt"),
        "nvfp4-ct": Nvfp4Experts("compressed-tensors"),
        "int4": Int4Experts(),
        "bf16": Unquantized(),
    } == FORMATS
