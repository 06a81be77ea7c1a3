"""The two programs of a minute: what they make of the verbs' results."""

import json
from pathlib import Path
from typing import Any

import pytest

from redline.bench.runs import where, worth
from tests import forked

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def rate(domain: str, variant: str, times: float, length: float | None) -> dict[str, Any]:
    return {"domain": domain, "variant": variant, "times": times, "length": length}


def test_worth_is_the_mean_over_domains_and_a_round_without_drafts_is_one_token():
    rates = [rate("a", "off", 1, None), rate("a", "k3", 1.5, 3.0), rate("b", "off", 1, None), rate("b", "k3", 2.5, 4.0)]
    assert worth.worths(rates) == [("off", 1, 1), ("k3", 2, 3.5)]


def test_pictures_are_drawn_of_stored_results(tmp_path: Path):
    worth.draw(json.loads((RESULTS / "speculate-cpu.json").read_text()), tmp_path / "worth.png")
    where.draw(json.loads((RESULTS / "decode-h200.json").read_text())[-1], tmp_path / "where.png")
    for name in ("worth.png", "where.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("program", [worth, where])
def test_a_verb_that_fails_gives_its_code_and_no_picture(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    wrong = [str(tmp_path)] if program is worth else ["--shape", "nobody"]
    monkeypatch.setattr("sys.argv", ["program", *wrong, "--out", str(tmp_path / "out.json")])
    with forked.all_processes():
        assert program.main() == 1
    assert not (tmp_path / "out.png").exists()
