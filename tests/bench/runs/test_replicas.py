"""The program that measures the HTTP side with several replicas: its figures, and that it serves, loads and keeps."""

import json
import sys
from pathlib import Path

import pytest

from redline.bench.runs import replicas
from redline.bench.runs.replicas import compared, figures_of


def run(per_s: float, api: float, supervisor: float = 0.0) -> dict[str, float]:
    return {"per_s": per_s, "api_us": api, "supervisor_us": supervisor, "worker_us": 10.0, "client_us": 10.0}


def test_a_rate_stands_beside_what_all_cores_would_give() -> None:
    figures = figures_of([run(15_000, 80.0), run(10_000, 70.0), run(12_000, 90.0)], cores=2)
    assert (figures["per_s"], figures["all_cores_per_s"], figures["one_core_per_s"]) == (12_000, 20_000, 12_500)
    assert figures["share_of_all_cores"] == 0.6


def test_ratios_are_of_neighbours() -> None:
    told = compared({1: [run(10, 10.0), run(20, 10.0), run(30, 10.0)], 2: [run(20, 9.0, 2.0)] * 3}, cores=2)
    assert (told["1"]["ratio"], told["2"]["ratio"], told["2"]["ratios"]) == (1.0, 1.0, [2.0, 1.0, 0.667])
    assert told["2"]["api_us_ratio"] == 1.1


@pytest.mark.slow
def test_it_serves_loads_and_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "replicas.json"
    sizes = ["--replicas", "2", "--rounds", "1", "--requests", "100", "--tokens", "50"]
    monkeypatch.setattr(sys, "argv", ["replicas", *sizes, "--save", str(save)])
    replicas.main()
    assert len(capsys.readouterr().out.splitlines()) == 2
    result = json.loads(save.read_text())
    for case in ("requests", "tokens"):
        assert result[case]["2"]["per_s"] > 0
        assert result[case]["2"]["ratios"] == [1.0]
    assert result["commit"]
