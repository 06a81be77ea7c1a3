"""`redline bench decode --shape`: its flags, output, errors and saved results."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from redline.bench.step.depth import DepthCase
from redline.cli import app, main
from redline.cli.bench import round_tables, step_tables
from redline.cli.bench.round_tables import RoundsConfig, round_cases
from redline.cli.bench.step_tables import DepthConfig
from redline.errors import ConfigError

ROOT = Path(__file__).parents[2]

SMALL = ["bench", "decode", "--shape", "kimi-nano", "--layers", "4", "--context", "70", "--repeats", "1"]
KEYS = """shape gpu ranks layers physical_layers experts rows tokens_per_row context kv_dtype routing ms p10_ms p90_ms
    floor_ms expert_bytes bytes_per_s flops_per_s ops commit date versions machine cores"""


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch):
    """The CPU, whatever devices the machine has."""
    for module in (step_tables, round_tables):
        monkeypatch.setattr(module, "pick_device", lambda name: torch.device("cpu"))


def test_a_shape_is_measured_said_and_kept(tmp_path: Path):
    result = tmp_path / "decode-cpu.json"
    words = [*SMALL, "--alias", "3", "--batch", "1", "--batch", "2", "--tokens", "2", "--save", str(result)]
    for times in (1, 2):
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        assert len(json.loads(result.read_bytes())) == 2 * times, "cases are added"
    for said in (
        "4 layers run on 3 in memory",
        "floor/time",
        "mla_decode",
        "sum of ops",
        "experts read",
        "routing model",
    ):
        assert said in done.output
    assert "vLLM" not in done.output
    records = json.loads(result.read_bytes())
    assert set(records[0]) == set(KEYS.split())
    assert [(r["layers"], r["physical_layers"], r["rows"], r["tokens_per_row"]) for r in records[:2]] == [
        (4, 3, 1, 2),
        (4, 3, 2, 2),
    ]
    for record in records:
        assert record["floor_ms"] > 0
        assert record["p10_ms"] <= record["ms"] <= record["p90_ms"]
        assert all(set(op) == {"name", "us", "floor_us", "launches"} for op in record["ops"])
        # Two or more tokens choose no fewer experts than one: 3 layers x 4 experts x 4.5 bits of 3 x 320 x 128.
        assert record["expert_bytes"] >= 3 * 4 * 69_120


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--shape kimi-k9", "shape is 'kimi-k9'; expected one of kimi-k2.6, kimi-k2.6-nvfp4, "),
        ("", "give either a checkpoint folder or --shape"),
        ("models/kimi-nano --shape kimi-nano", "give either a checkpoint folder or --shape"),
        ("models/kimi-nano --kv-dtype fp9", "kv-dtype is 'fp9'; expected one of bf16, fp8, float32"),
        ("--shape kimi-nano --alias 9", "alias is 9; the model has 8 layers"),
        ("--shape kimi-nano --kv-dtype fp9", "kv-dtype is 'fp9'; expected one of bf16, fp8"),
        ("--shape kimi-k2.6 --context 64", "the step needs 594"),
    ],
)
def test_a_mistake_is_one_line_and_code_1(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["redline", "bench", "decode", *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ")
    assert says in said
    assert len(said.splitlines()) == 1


def test_what_does_not_fit_is_said_with_its_arithmetic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_tables, "free_memory", lambda _: 30 * 10**9)  # two layers, whatever the machine has
    done = CliRunner().invoke(app, ["bench", "decode", "--shape", "kimi-k2.6"])
    assert isinstance(done.exception, ConfigError)
    assert "--alias" in str(done.exception)
    assert "384 experts x 24.8 MB = 9.81 GB" in done.output


def overlap_on_a_gpu(**asked: object) -> float | None:
    """The overlap of the only case of these flags."""
    case: DepthCase
    (case,) = step_tables.cases(DepthConfig(shape="kimi-k2.6", **asked), forced=True)  # type: ignore[arg-type]
    return case.overlap


def test_routing_is_uniform_unless_it_is_asked_to_overlap():
    assert overlap_on_a_gpu() == 0.0
    assert overlap_on_a_gpu(routing="uniform") == 0.0
    assert overlap_on_a_gpu(routing="correlated") == 0.4
    assert overlap_on_a_gpu(routing="correlated", overlap=0.7) == 0.7


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"routing": "random"}, "routing is 'random'; expected uniform or correlated"),
        ({"routing": "uniform", "overlap": 0.3}, "overlap applies to --routing correlated"),
        ({"overlap": 0.3}, "overlap applies to --routing correlated"),
    ],
)
def test_routing_that_is_none_is_refused(asked: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        overlap_on_a_gpu(**asked)


def test_where_the_model_routes_nobody_else_does():
    with pytest.raises(ConfigError, match="the model's router decides"):
        step_tables.cases(DepthConfig(shape="kimi-nano", routing="uniform"), forced=False)


# ----------------------------------------------------------------------------------------------------------- rounds


ROUNDS = [*SMALL, "--draft-shape", "eagle3-mla"]


def test_rounds_of_a_shape_are_measured_said_and_kept(tmp_path: Path):
    result = tmp_path / "rounds-cpu.json"
    words = [*ROUNDS, "--batch", "1", "--batch", "2", "--k", "1", "--k", "2", "--save", str(result)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for said in ("rounds, kimi-nano", "drafter  ", "tokens/s", "idle", "added to"):
        assert said in done.output
    records = json.loads(result.read_bytes())
    more = "k accept verify_ms draft_ms baseline_ms tokens_per_s idle_share draft_head_bits drafter"
    assert all(set(record) == {*KEYS.split(), *more.split()} for record in records)
    assert [(r["rows"], r["k"], r["tokens_per_row"]) for r in records] == [(1, 1, 2), (1, 2, 3), (2, 1, 2), (2, 2, 3)]
    assert [r["accept"] for r in records] == pytest.approx([1.83, 2.43, 1.83, 2.43])
    for record in records:
        assert record["tokens_per_s"] == pytest.approx(1e3 * record["rows"] * record["accept"] / record["ms"])


def test_rounds_of_a_block_have_its_published_acceptance(tmp_path: Path):
    result = tmp_path / "rounds.json"
    words = ["bench", "decode", "--shape", "kimi-nano", "--context", "64", "--repeats", "1", "--draft-shape", "dflash"]
    done = CliRunner().invoke(app, [*words, "--save", str(result)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "dflash with its head in 16 bits" in done.output
    records = json.loads(result.read_bytes())
    assert [(record["drafter"], record["k"], record["tokens_per_row"]) for record in records] == [
        ("dflash", 3, 4), ("dflash", 5, 6), ("dflash", 7, 8),
    ]  # fmt: skip
    assert [record["accept"] for record in records] == pytest.approx([3.326, 4.442, 5.302], abs=1e-3)


def test_a_stated_length_is_of_one_k(tmp_path: Path):
    result = tmp_path / "rounds.json"
    words = [*ROUNDS, "--k", "2", "--accept", "2.88", "--draft-head-bits", "8", "--save", str(result)]
    assert CliRunner().invoke(app, words).exit_code == 0
    (record,) = json.loads(result.read_bytes())
    assert record["accept"] == pytest.approx(2.88)
    assert record["draft_head_bits"] == 8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--draft-shape eagle9", "draft-shape is 'eagle9'; expected eagle3-mla, dflash or dspark"),
        ("--draft-shape dflash --k 8", "a round of dflash has at most 256 rows and 7 draft tokens"),
        ("--draft-shape dspark --k 8", "accept is golden, which covers --k 1 to 7"),
        ("--draft-shape dspark --draft-head-bits 8", "draft-head-bits is 8; dspark has a head in 16 bits"),
        ("--draft-shape eagle3-mla --accept 2.88", "accept is 2.88, which needs one --k, but 4 were given"),
        ("--draft-shape eagle3-mla --k 6", "golden, which covers --k 1 to 5"),
        (
            "--draft-shape eagle3-mla --k 2 --accept 3.5",
            "accept is 3.5; expected a mean number of tokens per round, 1 to 3",
        ),
        ("--draft-shape eagle3-mla --k 2 --accept some", "accept is 'some'; expected a length"),
        ("--draft-shape eagle3-mla --k 16 --accept 2", "at most 256 rows and 15 draft tokens"),
        ("--draft-shape eagle3-mla --batch 257", "at most 256 rows"),
        ("--draft-shape eagle3-mla --tokens 4", "give --k"),
        ("--draft-shape eagle3-mla --draft-head-bits 4", "draft-head-bits is 4; expected 16 or 8"),
        ("--draft-head-bits 8", "--draft-head-bits applies to rounds"),
        ("--k 3", "--k applies to rounds; add --draft-shape"),
        ("--accept golden", "--accept applies to rounds"),
    ],
)
def test_rounds_that_are_none_are_refused(words: str, says: str):
    done = CliRunner().invoke(app, [*SMALL, *words.split()])
    assert isinstance(done.exception, ConfigError)
    assert re.search(says, str(done.exception))


def test_a_round_that_the_gpus_kernels_cannot_record_is_refused_by_name():
    step = DepthConfig(shape="kimi-k2.6", batch=(64,))
    with pytest.raises(
        ConfigError, match=r"64 rows with --k 4 are 320 tokens; a CUDA graph contains the decode kernels.*256"
    ):
        round_cases(RoundsConfig(step=step, draft_shape="eagle3-mla", k=(4,)), forced=True)
    fitting = round_cases(RoundsConfig(step=step, draft_shape="eagle3-mla", k=(3,)), forced=True)
    assert fitting[0].depth.tokens == 4


def test_a_drafter_is_of_a_shape_and_not_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["bench", "decode", "models/kimi-nano", "--draft-shape", "eagle3-mla"])
    assert "--draft-shape needs --shape" in str(done.exception)
