"""Rounding by second moments: less output error, and files that record the method."""

import io
import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from redline.errors import ConfigError
from redline.model.k2.checkpoint import Checkpoint, CheckpointWeight
from redline.model.k2.write import random_checkpoint, tiny_config
from redline.ops.formats import Nvfp4, quantize_int4
from redline.ops.moe import gated
from redline.quant import calibrate, quantize
from redline.quant.calibrate import capture
from redline.quant.gptq import damping_of, nearest, output_error, round_gptq, second_moments
from redline.quant.nvfp4 import MAX_SCALING, SEARCHED, WIDELY_SEARCHED, exact_scale, max_scale, round_nvfp4
from redline.quant.quantize import QuantizeResult, run
from redline.quant.read import dense
from redline.quant.settings import QuantizeConfig
from redline.quant.stream import through
from redline.quant.texts import CalibrationText

CPU = torch.device("cpu")


def texts(count: int = 12, length: int = 60, seed: int = 1) -> list[CalibrationText]:
    generator = torch.Generator().manual_seed(seed)
    return [
        CalibrationText("code", tuple(torch.randint(3, 512, (length,), generator=generator).tolist()))
        for _ in range(count)
    ]


def inputs(rows: int, K: int, seed: int) -> Tensor:
    """Inputs with a covariance of eigenvalues 1 / i, along axes that do not depend on the seed."""
    axes, _ = torch.linalg.qr(torch.randn(K, K, generator=torch.Generator().manual_seed(9)))
    drawn = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.arange(1, K + 1).rsqrt() @ axes.T


@pytest.mark.parametrize("kind", ["normal", "INT4"])
def test_outputs_have_less_than_two_thirds_of_max_scalings_error_on_inputs_that_were_not_seen(kind: str):
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    if kind == "INT4":
        weight = quantize_int4(weight).dequantize()
    largest = float(weight.abs().max())
    unseen = second_moments(inputs(4000, 128, seed=2))
    plain, _ = round_nvfp4(weight, max_scale(largest), MAX_SCALING)
    searched, _ = round_nvfp4(weight, exact_scale(largest), SEARCHED)
    calibrated = round_gptq(weight, second_moments(inputs(4000, 128, seed=1)), exact_scale(largest), 0.02)
    of = {
        name: output_error(weight - one.dequantize(), unseen)
        for name, one in (("plain", plain), ("searched", searched), ("calibrated", calibrated))
    }
    assert (of["calibrated"] / of["plain"]) ** 0.5 <= 0.65
    assert of["calibrated"] < 0.7 * of["searched"]
    assert torch.equal(calibrated.dequantize(torch.bfloat16).float(), calibrated.dequantize())


@pytest.mark.parametrize("rows", [32, 128, 512])
def test_few_rows_are_better_than_none(rows: int):
    """Without damping, the moments of few rows give worse outputs than a search."""
    weight = quantize_int4(torch.randn(64, 256, generator=torch.Generator().manual_seed(0))).dequantize()
    scale, unseen = exact_scale(float(weight.abs().max())), second_moments(inputs(4000, 256, seed=2))
    moments = second_moments(inputs(rows, 256, seed=1))
    searched, _ = round_nvfp4(weight, scale, SEARCHED)
    given = round_gptq(weight, moments, scale, damping_of(rows, 256))
    ours, theirs = (output_error(weight - one.dequantize(), unseen) for one in (given, searched))
    assert ours < 0.9 * theirs


def test_independent_inputs_leave_nothing_to_make_good():
    """Then each weight is rounded to the nearest value, with the searched scales."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    searched, _ = round_nvfp4(weight, 0.25, WIDELY_SEARCHED)
    assert torch.equal(round_gptq(weight, torch.eye(64), 0.25, 0.1).dequantize(), searched.dequantize())


def test_an_input_that_is_always_zero_costs_nothing_and_breaks_nothing():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    x = inputs(500, 64, seed=1)
    x[:, 5] = 0.0
    given = round_gptq(weight, second_moments(x), exact_scale(float(weight.abs().max())), 0.1).dequantize()
    assert given.isfinite().all()
    assert (given - weight)[:, 5].abs().max() < 0.5
    assert not round_gptq(weight, torch.zeros(64, 64), 0.25, 0.1).dequantize().isnan().any()


def test_the_nearest_is_the_nearest():
    y = torch.linspace(0, 9, 1001)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal((nearest(y) - y).abs(), (y[:, None] - grid).abs().amin(1))


def test_second_moments_give_the_error_of_the_outputs():
    x, difference = torch.randn(50, 16), torch.randn(8, 16)
    expected = (x @ difference.T).square().sum() / 50
    assert output_error(difference, second_moments(x)) == pytest.approx(expected.item(), rel=1e-5)


def test_what_an_expert_read_is_found_again(tmp_path: Path):
    random_checkpoint(tmp_path / "a", tiny_config())
    checkpoint = Checkpoint.open(tmp_path / "a")
    found = capture(checkpoint, texts(), tmp_path / "inputs", CPU)
    stored = load_file(tmp_path / "inputs" / "layer-00002.safetensors")
    rows = stored["x"][(stored["ids"] == 5).any(1)].float()
    assert len(rows) > 100
    x, seen = found.of(checkpoint, CheckpointWeight("layers.2.mlp.experts.5.gate_proj.weight", (32, 64), "expert"), CPU)
    assert seen == len(rows)
    assert torch.equal(x, rows)
    down = CheckpointWeight("layers.2.mlp.experts.5.down_proj.weight", (64, 32), "expert")
    gate, up = (
        dense(checkpoint, CheckpointWeight(down.name.replace("down", name), (32, 64), "expert"), CPU)
        for name in ("gate", "up")
    )
    assert torch.equal(found.of(checkpoint, down, CPU)[0], gated(rows @ gate.T, rows @ up.T))
    shared, every = found.of(
        checkpoint, CheckpointWeight("layers.1.mlp.shared_experts.up_proj.weight", (32, 64), "linear"), CPU
    )
    assert every == len(shared) == 12 * 60
    assert set(load_file(tmp_path / "inputs" / "layer-00000.safetensors")) == {"x"}


def converted(at: Path, out: Path, given: list[CalibrationText], **settings: object) -> int:
    values = {"source": str(at), "out": str(out), "device": "cpu", "level": "calibrated", **settings}
    return run(QuantizeConfig(**values), Console(file=io.StringIO(), width=200), given)  # pyright: ignore


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    random_checkpoint(folder, tiny_config())
    return folder


@pytest.mark.parametrize("to", ["nvfp4-modelopt", "nvfp4-ct"])
def test_a_calibrated_checkpoint_has_scales_for_activations_and_says_so(tmp_path: Path, source: Path, to: str):
    assert converted(source, tmp_path / "b", texts(), format=to, also=("shared", "dense")) == 0
    files = {name: value for path in (tmp_path / "b").glob("*.safetensors") for name, value in load_file(path).items()}
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    suffix = "input_scale" if to == "nvfp4-modelopt" else "input_global_scale"
    at = "language_model.model.layers.2.mlp.experts.5."
    assert torch.equal(files[f"{at}gate_proj.{suffix}"], files[f"{at}up_proj.{suffix}"])
    found = capture(Checkpoint.open(source), texts(), tmp_path / "inputs", CPU)
    for projection, shape in (("up", (32, 64)), ("down", (64, 32))):
        weight = CheckpointWeight(f"layers.2.mlp.experts.5.{projection}_proj.weight", shape, "expert")
        x, _ = found.of(Checkpoint.open(source), weight, CPU)
        scale = files[f"{at}{projection}_proj.{suffix}"]
        most = float(scale) * 2688 if to == "nvfp4-modelopt" else 2688 / float(scale)
        assert most == pytest.approx(float(x.abs().max()), rel=1e-5)
        assert tuple(scale.shape) == (() if to == "nvfp4-modelopt" else (1,))
    if to == "nvfp4-modelopt":
        assert config["quant_algo"] == "NVFP4"
        assert config["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4
    else:
        assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    after = Checkpoint.open(tmp_path / "b")
    gate, up = after.expert(2, 5, "gate"), after.expert(2, 5, "up")
    assert isinstance(gate, Nvfp4)
    assert isinstance(up, Nvfp4)
    assert torch.equal(gate.scale, up.scale)


@pytest.mark.parametrize(("of", "to"), [("nvfp4-modelopt", "nvfp4-ct"), ("nvfp4-ct", "nvfp4-modelopt")])
def test_another_layout_keeps_scales_of_activations_and_of_an_fp8_cache(tmp_path: Path, source: Path, of: str, to: str):
    for made in (of, to):
        converted(source, tmp_path / made, texts(), format=made, kv_scales=True)
    assert converted(tmp_path / of, tmp_path / "b", [], format=to, level="search") == 0
    given, expected = (
        {name: value for path in (tmp_path / at).glob("*.safetensors") for name, value in load_file(path).items()}
        for at in ("b", to)
    )
    assert set(given) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(given[name].float(), value.float(), rtol=1e-6, atol=0, msg=name)
    for name in ("config.json", "hf_quant_config.json"):
        one, other = (tmp_path / at / name for at in ("b", to))
        assert one.exists() == other.exists()
        assert not one.exists() or one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("to", ["nvfp4-modelopt", "nvfp4-ct"])
def test_scales_of_an_fp8_cache_are_those_of_the_largest_that_attention_kept(tmp_path: Path, source: Path, to: str):
    assert converted(source, tmp_path / "b", texts(), format=to, kv_scales=True) == 0
    files = {name: value for path in (tmp_path / "b").glob("*.safetensors") for name, value in load_file(path).items()}
    checkpoint = Checkpoint.open(source)
    largest = [0.0] * checkpoint.config.num_hidden_layers

    def listen(layer: int, x: Tensor, ids: Tensor | None, kept: Tensor) -> None:
        assert kept.shape == (60, checkpoint.config.kv_width)
        largest[layer] = max(largest[layer], float(kept.abs().max()))

    for text in texts():
        through(checkpoint, [text], CPU, listen)
    scales = {name: value for name, value in files.items() if name.endswith(("k_scale", "v_scale"))}
    assert len(scales) == 2 * len(largest)
    for layer, most in enumerate(largest):
        assert most > 0
        for kind in "kv":
            name = f"{kind}_proj.{kind}_scale" if to == "nvfp4-modelopt" else f"{kind}_scale"
            scale = scales[f"language_model.model.layers.{layer}.self_attn.{name}"]
            assert tuple(scale.shape) == (() if to == "nvfp4-modelopt" else (1,))
            assert 448 * float(scale) == pytest.approx(most, rel=1e-6)
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert {"num_bits": 8, "type": "float", "dynamic": False}.items() <= config["kv_cache_scheme"].items()
    if to == "nvfp4-modelopt":
        beside = json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())
        assert beside["quantization"]["kv_cache_quant_algo"] == "FP8"
    else:
        read = QuantizationConfig.model_validate(config)
        assert read.kv_cache_scheme is not None
        assert read.kv_cache_scheme.num_bits == 8
    assert Checkpoint.open(tmp_path / "b").config.kv_width == checkpoint.config.kv_width
    with pytest.raises(ConfigError, match="begun with kv_scales"):
        converted(source, tmp_path / "b", texts(), format=to)
    with pytest.raises(ConfigError, match="kv_scales: level search reads no texts"):
        run(QuantizeConfig(source=str(source), out=str(tmp_path / "c"), kv_scales=True), Console(file=io.StringIO()))


def test_each_weight_says_what_its_outputs_lost_and_rare_experts_are_counted(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    import msgspec

    monkeypatch.setattr(calibrate, "SEEN", 180)
    monkeypatch.setattr("redline.quant.convert.SEEN", 180)
    converted(source, tmp_path / "b", texts())
    result = msgspec.json.decode((tmp_path / "b" / "quantize.json").read_bytes(), type=QuantizeResult)
    rows = {name: row for one in result.shards for name, row in one.weights.items()}
    assert 0 < sum(row.searched for row in rows.values()) < len(rows)
    for name, row in rows.items():
        assert row.seen is not None
        assert row.searched == (row.seen < 180), name
        assert row.output is not None
        assert row.output_to_max_scaling is not None
        assert row.output_to_max_scaling < (1.0 if row.searched else 0.75)


def test_a_calibrated_run_that_was_killed_goes_on_without_reading_the_texts_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    converted(source, tmp_path / "whole", texts())
    passes: list[str] = []
    through = calibrate.through
    monkeypatch.setattr(calibrate, "through", lambda *rest: (passes.append("pass"), through(*rest))[1])

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(quantize, "write_shard", killed)
        with pytest.raises(Killed):
            converted(source, tmp_path / "b", texts())
    assert converted(source, tmp_path / "b", texts()) == 0
    assert passes == ["pass"]
    for path in (tmp_path / "whole").glob("model*"):
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(ConfigError, match="begun with texts"):
        converted(source, tmp_path / "b", texts(seed=2))


def test_texts_are_for_the_calibrated_level_alone(tmp_path: Path, source: Path):
    with pytest.raises(ConfigError, match="calibrated needs texts"):
        converted(source, tmp_path / "b", [])
    with pytest.raises(ConfigError, match="search reads no texts"):
        converted(source, tmp_path / "b", texts(), level="search")
    with pytest.raises(ConfigError, match="calibrated is for NVFP4"):
        converted(source, tmp_path / "b", texts(), format="bf16")
