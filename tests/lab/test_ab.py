"""The measurements of a round, the verdicts on its ratios, and the results read from the programs for a GPU."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import ab
from lab.ab import (
    PREFILL,
    STEPS,
    Case,
    Figure,
    Result,
    Spread,
    decode_rate,
    prefill_ms,
    prefill_rate,
    prefill_words,
    progress_of,
    results,
    rotated,
    spread,
    step_ms,
)
from lab.trees import ROOT, Tree
from redline.errors import ConfigError, RedlineError
from tests.lab.fake_tree import fake_model, fake_tree
from tests.test_house import flags

RESULTS = ROOT / "benchmarks" / "results"
DONE = b"data: [DONE]\n\n"


def chunk(count: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n' % count


def result(after: float, control: float, goal: float = 0.02) -> Result:
    return Result(Figure("decode", goal), 100.0, Spread(0.9, after, 1.1), Spread(0.9, control, 1.1))


def test_a_stream_tells_how_far_it_was_however_its_bytes_were_cut():
    whole = chunk(0) + chunk(1) + chunk(2) + DONE
    cuts = [(float(k), whole[k : k + 7]) for k in range(0, len(whole), 7)]
    assert [count for _, count in progress_of(cuts, 2)] == [1, 2]
    assert progress_of([(1.0, chunk(1)), (2.0, chunk(2) + chunk(3) + DONE)], 3) == [(1.0, 1), (2.0, 3)]


def test_a_stream_that_is_not_whole_is_no_measurement():
    for stream in ([(1.0, chunk(1))], [(1.0, chunk(1) + DONE)], [(1.0, b"HTTP/1.1 503 busy")]):
        with pytest.raises(RedlineError, match=r"^a stream ended with \d of 2 tokens"):
            progress_of(stream, 2)


def test_decoding_counts_from_when_all_have_begun():
    early = [(1.0, chunk(1)), (2.0, chunk(2)), (3.0, chunk(3)), (4.0, chunk(4) + DONE)]
    late = [(2.0, chunk(1)), (3.0, chunk(2)), (4.0, chunk(3)), (5.0, chunk(4) + DONE)]
    assert decode_rate([early, late], 4) == pytest.approx((8 - 3) / 3.0)
    assert decode_rate([early], 4) == pytest.approx(1.0)
    assert prefill_rate([[(0.75, chunk(1) + DONE)]], 2000, began=0.25) == pytest.approx(4000)
    with pytest.raises(RedlineError, match="all at once"):
        decode_rate([[(1.0, chunk(4) + DONE)]], 4)


def test_ratios_are_taken_within_a_round():
    """A machine that becomes half as fast in the second round changes no ratio."""
    figure = Figure("decode", 0.02)
    rounds = [{"decode": {"A": 100.0, "B": 99.0, "C": 100.0}}, {"decode": {"A": 50.0, "B": 49.5, "C": 50.0}}]
    [found] = results([figure], rounds)
    assert (found.after, found.control) == (Spread(0.99, 0.99, 0.99), Spread(1.0, 1.0, 1.0))
    assert found.rate == 75.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert spread([1.5]) == Spread(1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("after", "control", "verdict", "proved"),
    [
        (0.985, 1.01, "within 2%", True),
        (0.97, 1.0, "SLOWER by 3.0%; the goal is 2%", False),
        (1.05, 1.0, "FASTER by 5.0%; the goal is 2%", True),
        (1.0, 1.03, "unclear: the control is 3.0% off; take more rounds, or a quiet machine", False),
    ],
)
def test_a_verdict_needs_a_control_that_could_show_it(after: float, control: float, verdict: str, proved: bool):
    found = result(after, control)
    assert (found.verdict, found.proved) == (verdict, proved)
    assert verdict in ab.table([found])


def test_everyone_comes_first_in_turn():
    assert [rotated("ABC", turn) for turn in range(4)] == [list(order) for order in ("ABC", "BCA", "CAB", "ABC")]


def test_the_steps_that_bench_decode_saves_are_read(tmp_path: Path):
    """As measured on a GPU: the cases in the README."""
    cases = json.loads((RESULTS / "decode-h200.json").read_text())
    names = "layers", "physical_layers", "context", "kv_dtype", "ranks"
    shown = [case for case in cases if tuple(case[name] for name in names) == (61, 12, 1024, "bf16", 1)]
    saved = tmp_path / "steps.json"
    saved.write_text(json.dumps(shown))
    assert {tokens: round(ms, 1) for tokens, ms in step_ms(saved).items()} == {1: 9.1, 4: 18.0, 8: 28.9, 32: 84.1}
    assert list(STEPS) == [1, 4, 8, 32]
    assert prefill_ms(RESULTS / "prefill-h200.json") == 20.146


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"rows": 1}]', '{"cases": []}'])
def test_a_file_of_something_else_is_one_clear_line(text: str, tmp_path: Path):
    saved = tmp_path / "saved.json"
    saved.write_text(text)
    for reader in (step_ms, prefill_ms):
        with pytest.raises(ConfigError, match=f"^{re.escape(str(saved))}: expected "):
            reader(saved)


def test_the_measurement_of_prefill_is_found_wherever_it_lies(tmp_path: Path):
    assert prefill_words(Tree("here", ROOT, "")) == ["redline", "bench", "prefill"]
    places = {
        "benchmarks": ["benchmarks.prefill_layer"],
        "redline/bench/gpu": ["redline.bench.gpu.prefill_layer"],
        None: None,
    }
    for number, (place, words) in enumerate(places.items()):
        assert prefill_words(Tree("tree", fake_tree(tmp_path / str(number), prefill=place), "")) == words


def test_the_command_line_has_what_a_gpu_is_asked_for():
    assert {word for word in ab.DECODE.split() if word.startswith("--")} | {"--batch", "--save"} <= flags()[
        "bench decode"
    ]
    assert {"--tokens", "--save"} <= flags()["bench prefill"]


def measured(tmp_path: Path, words: list[str], **after: Any) -> tuple[int, dict[str, Any]]:
    pair = [str(fake_tree(tmp_path / "before", pace_s=0.01)), str(fake_tree(tmp_path / "after", **after))]
    saved = tmp_path / "ab.json"
    code = ab.main([*pair, f"--model={fake_model(tmp_path / 'model')}", f"--save={saved}", *words])
    return code, json.loads(saved.read_text())


async def _at_their_times(port: int, prompts: Sequence[Sequence[int]], new: int) -> list[ab.Arrivals]:
    """What comes from a fake tree, at the times that its events name."""
    streams = [b"".join(part for _, part in stream) for stream in await STREAMS(port, prompts, new)]
    named = re.compile(rb'data: .*"at": ([0-9.]+)}\n\n(?:data: \[DONE\]\n\n)?')
    return [[(float(event[1]), event[0]) for event in named.finditer(stream)] for stream in streams]


STREAMS = ab._streams


def test_a_tree_that_is_twice_as_slow_on_a_cpu_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    cases = (Case(Figure("decode, batch 2", 0.25), 2, 20, 8), Case(Figure("prefill", 0.25), 1, 50, 1))
    monkeypatch.setattr(ab, "CASES", cases)
    monkeypatch.setattr(ab, "_streams", _at_their_times)
    monkeypatch.setattr(ab, "clock", SimpleNamespace(perf_counter=lambda: 0.0))
    code, record = measured(tmp_path, ["--rounds=2"], pace_s=0.02)
    assert code == 1
    decode = record["figures"][0]
    assert decode["after"]["median"] == pytest.approx(0.5)
    assert decode["control"]["median"] == pytest.approx(1.0)
    assert len(record["tokens_per_s"]) == 2
    assert set(record["tokens_per_s"][0]["prefill"]) == {"A", "B", "C"}
    assert "SLOWER by" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "code"), [(1.005, 0), (1.015, 1), (0.9, 0)])
def test_on_a_gpu_programs_of_both_trees_run_in_turns(factor: float, code: int, tmp_path: Path):
    found, record = measured(tmp_path, ["--device=cuda", "--rounds=2"], factor=factor)
    assert found == code
    names = [figure.name for figure in (*STEPS.values(), PREFILL)]
    assert [figure["name"] for figure in record["figures"]] == names
    assert all(figure["after"]["median"] == pytest.approx(1 / factor, abs=1e-3) for figure in record["figures"])
    assert all(figure["control"]["median"] == 1.0 for figure in record["figures"])
    assert [figure["goal"] for figure in record["figures"]] == [0.01, 0.01, 0.01, 0.02, 0.02]
    assert record["figures"][0]["tokens_per_s"] == pytest.approx(1000 / 9, abs=0.1)


def test_a_tree_without_the_program_of_prefill_proves_nothing_about_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, record = measured(tmp_path, ["--device=cuda", "--rounds=1"], prefill=None)
    assert code == 1
    assert [figure["name"] for figure in record["figures"]] == [figure.name for figure in STEPS.values()]
    assert "NOT MEASURED" in capsys.readouterr().out


def test_a_program_that_fails_on_a_gpu_says_why(tmp_path: Path):
    pair = [fake_tree(tmp_path / name) for name in ("before", "after")]
    (pair[1] / "redline" / "__main__.py").write_text("raise SystemExit('error: 83.1 GB are free, 102 GB are needed')")
    with pytest.raises(RedlineError, match=r"redline bench decode ended with status 1: error: 83.1 GB are free"):
        ab.main([*map(str, pair), "--device=cuda"])
