"""The load generator's own figures: how they are made, and that the program makes and keeps all of them."""

import json
import sys
from pathlib import Path

import pytest

from redline.bench.runs import load_generator
from redline.bench.runs.load_generator import PACED, PUSHES, Errors, errors_of, figures_of, kept_up, spread_ms
from redline.bench.serving.records import Answer, Ask, Chunk, GeneratorLoad, Run
from redline.bench.serving.script import Logged


def test_an_error_is_what_the_client_says_less_what_was_sent():
    ask = Ask(max_tokens=3, text="hello", extra={"script": {"name": "0"}})
    chunks = tuple(Chunk(at=at, kind="answer", characters=4) for at in (0.151, 0.160, 0.172))
    answer = Answer(index=0, ask=ask, planned=0.0, sent=0.1, end=0.175, chunks=chunks)
    row = Logged(name="0", path="", received=7.0, events=(7.05, 7.06, 7.07), tokens=(1, 1, 1), end=7.071)
    errors = errors_of([answer], {"0": row})
    assert errors.ttft == pytest.approx([0.001])
    assert errors.itl == pytest.approx([-0.001, 0.002])
    assert errors.e2el == pytest.approx([0.004])
    assert errors.itls == pytest.approx([0.01, 0.01])


def test_the_share_of_an_itl_is_that_of_the_mean_and_single_errors_stand_beside_it():
    figures = figures_of(Errors(ttft=[0.0], itl=[0.001, -0.001, 0.0005], e2el=[0.0], itls=[0.01] * 3))
    assert figures["itl_share"] == pytest.approx(0.0167, rel=0.01)
    assert figures["itl_share_size_median"] == pytest.approx(0.1)
    assert spread_ms([-0.003, 0.001, 0.002]) == {"median": 1.0, "size_median": 2.0, "size_p99": 3.0}


def test_a_generator_without_processor_time_left_calls_itself_the_limit():
    for share, limit in ((0.3, False), (0.99, True)):
        load = GeneratorLoad(cpu_share=share, lag_p50=0.0001, lag_p99=0.0005, lag_most=0.001, late_sends=0)
        seen = kept_up(Run(began=0.0, seconds=1.0, answers=(), generator=load))
        assert seen["calls_itself_the_limit"] is limit
        assert seen["generator"]["cpu_share"] == share


@pytest.mark.slow
def test_the_program_measures_every_case_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    save = tmp_path / "load.json"
    sizes = ["--rounds", "1", "--tokens", "2000", "--paced-tokens", "5"]
    monkeypatch.setattr(sys, "argv", ["load_generator", *sizes, "--save", str(save)])
    load_generator.main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(save.read_text())
    assert len(lines) == len(PUSHES) + 1 + len(PACED)
    assert [(row["streams"], row["events_at_once"]) for row in result["full_push"]] == list(PUSHES)
    assert all(row["tokens_per_s_per_core"] > 1000 for row in result["full_push"])
    assert [(row["streams"], row["in_step"]) for row in result["paced"]["cases"]] == list(PACED)
    for row in result["paced"]["cases"]:
        assert row["all_rounds"]["logged_itl_ms"] > 0  # of 10; on a busy machine tokens come late and together
        assert set(row["quietest_round"]["ttft_error_ms"]) == {"median", "size_median", "size_p99"}
        assert isinstance(row["calls_itself_the_limit"], bool)
    assert result["commit"]
    assert result["rounds"] == 1
