"""`redline bench prefill` without a GPU, with made-up measurements: counts, output, saved results and errors."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from redline.bench.step.prefill import PrefillCase, check, flops
from redline.cli import app, main
from redline.cli.bench import prefill_tables
from redline.errors import RedlineError
from redline.kernels.group import ALONE
from redline.ops.op import PeakRates

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RATE = 800e12  # operations per second


def stored(name: str) -> list[PrefillCase]:
    return msgspec.convert(json.loads((RESULTS / name).read_bytes())["cases"], list[PrefillCase])


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU that returns stored measurements; the value is the list of requested cases."""
    asked: list[Any] = []

    def cases(group: Any, device: torch.device, *asking: Any) -> Iterator[PrefillCase]:
        asked.append(asking)
        yield stored("prefill-two-h200.json" if ranks else "prefill-h200.json")[0]

    ranks: list[int] = []

    @contextlib.contextmanager
    def group(config: Any, count: int) -> Iterator[Any]:
        ranks.extend([count] if count > 1 else [])
        yield ALONE

    monkeypatch.setattr(prefill_tables, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(prefill_tables, "has_kernels", lambda device: True)
    monkeypatch.setattr(prefill_tables, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(prefill_tables, "measure", lambda device, working_set_bytes: PeakRates("a GPU", 4e12, RATE))
    monkeypatch.setattr(prefill_tables, "ranks_of_gpus", group)
    monkeypatch.setattr(prefill_tables, "prefill_cases", cases)
    return asked


def test_a_case_is_said_and_kept_with_its_floor_and_where_it_comes_from(a_gpu: list[Any], tmp_path: Path):
    kept = tmp_path / "prefill.json"
    words = ["bench", "prefill", "--tokens", "2048", "--tokens", "8192", "--start", "64", "--save", str(kept)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert a_gpu == [((2048, 8192), (64,), 7, RATE)]
    record = json.loads(kept.read_bytes())
    assert {"machine", "cores", "versions", "commit", "date", "gpu", "ranks", "flops_per_s"} < set(record)
    (case,) = record["cases"]
    assert case == json.loads((RESULTS / "prefill-h200.json").read_bytes())["cases"][0]
    floor, ms = flops(case["tokens"], 0)["experts"] / RATE * 1e3, case["parts"]["experts"]
    assert f"{ms:.2f} │ {floor:8.2f} │ {floor / ms:10.0%}" in done.output
    assert f"peer             vLLM 0.33 on an NVIDIA H200 (2026-11-28): {record['peer_ms']['8192']:g} ms" in done.output


def test_over_ranks_it_also_says_each_way_and_how_far_rows_are_apart(a_gpu: list[Any]):
    done = CliRunner().invoke(app, ["bench", "prefill", "--ranks", "2"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for said in ("2 ranks", "rows divided     by parts: ", "rows whole: ", "the same bits on all ranks", "gathers"):
        assert said in done.output


def test_ranks_that_do_not_agree_are_an_error_behind_the_result():
    (case, *_) = stored("prefill-two-h200.json")
    check(case)
    with pytest.raises(RedlineError, match="8192 tokens: the ranks computed different bits"):
        check(msgspec.structs.replace(case, same_bits=False))
    with pytest.raises(RedlineError, match=r"8192 tokens: a row has a relative error of 0\.7"):
        check(msgspec.structs.replace(case, apart=[0.0, 0.0, 0.7]))


def test_the_operations_of_a_longer_prompt_grow_in_attention_alone():
    first, later = flops(1024, 0), flops(1024, 8192)
    assert first["products"] == later["products"]
    assert first["experts"] == later["experts"]
    assert later["attention"] > 8 * first["attention"]
    for part in ("attention", "experts"):
        assert flops(1024, 0, ranks=2)[part] == first[part] // 2


@pytest.mark.parametrize("file", [True, False], ids=["a folder to save in", "no GPU"])
def test_what_cannot_be_done_is_one_line(
    file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(prefill_tables, "pick_device", lambda name: torch.device("cpu"))
    words = ["redline", "bench", "prefill", *(["--save", str(tmp_path)] if file else [])]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    told = f"{tmp_path}: is a folder; name a file in it" if file else "prefill is measured on an NVIDIA GPU"
    assert capsys.readouterr().err.startswith(f"error: {told}")
