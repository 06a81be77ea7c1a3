"""`redline simulate`: its output as a table, as JSON and as a page, and its errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redline.cli import app
from redline.errors import ConfigError

TRACE = "chat:40@4,documents:40@1"


def said(*words: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "160"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_each_choice_of_roles_is_a_line_and_has_its_time():
    text = said(TRACE, "--gpus", "32", "--roles", "auto", "--roles", "1:3", "--price", "2")
    assert "cost of 1,000 good" in text
    assert "auto: over time" in text
    assert "1:3: over time" in text
    assert "1 : 3" in text
    assert "GPU-h" in said("chat:20@2", "--gpus", "8")


def test_json_is_all_that_is_printed_and_says_what_was_asked():
    told = json.loads(said(TRACE, "--gpus", "16", "--roles", "both", "--goodput", "ttft:1", "--json"))
    assert told["targets"] == {"": [0.001, 0.05]}
    assert told["worker"]["name"] == "kimi-8xh200"
    assert told["provenance"]["machine"]
    (run,) = told["runs"]
    assert run["gpus"] == 16
    assert run["good"] == 0 < run["requests"]
    assert run["cost"] == pytest.approx(16 * 80 / 3600, abs=0.01)


def test_the_page_stands_alone(tmp_path: Path):
    page = tmp_path / "page.html"
    said("chat:20@2", "--gpus", "16", "--roles", "both", "--html", str(page))
    text = page.read_text()
    assert "Prefill workers" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert 'src="' not in text


def test_the_page_is_written_though_nobody_reads_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.html"

    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("redline.cli.simulate_run._show", closed)
    words = ["simulate", "chat:20@2", "--gpus", "16", "--roles", "both", "--html", str(page)]
    CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert "Prefill workers" in page.read_text()


def test_a_made_trace_that_is_kept_is_played_again_alike(tmp_path: Path):
    kept = tmp_path / "trace.jsonl"
    made = json.loads(said(TRACE, "--gpus", "16", "--roles", "both", "--keep-trace", str(kept), "--json"))
    again = json.loads(said(str(kept), "--gpus", "16", "--roles", "both", "--json"))
    for name in ("requests", "prompt_tokens", "output_tokens", "classes"):
        assert made["runs"][0][name] == again["runs"][0][name]


def test_half_the_time_is_twice_the_load():
    slow, fast = (
        json.loads(said("chat:60@4", "--gpus", "16", "--roles", "both", "--time-scale", scale, "--json"))["runs"][0]
        for scale in ("1", "0.5")
    )
    assert fast["requests"] == slow["requests"]
    assert fast["seconds"] == slow["seconds"] / 2
    assert fast["cost"] == pytest.approx(slow["cost"] / 2, abs=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat:x@4"], "expected KIND:SECONDS@RATE such as chat:600@20; kinds: chat, documents, agents"),
        (["chat:10@4,talk:10@1"], "'talk:10@1'"),
        (["chat:0.1@4"], "give at least one second"),
        (["nowhere.jsonl"], "cannot be read"),
        (["chat:10@1", "--gpus", "12"], "a worker of kimi-8xh200 has 8; give a multiple"),
        (["chat:10@1", "--roles", "3:6"], "P:D with 8 workers in total"),
        (["chat:10@1", "--roles", "8:0"], "at least one for decode"),
        (["chat:10@1", "--goodput", "tpot:20"], r"expected \[CLASS.\]NAME:MS"),
        (["chat:10@1", "--goodput", "ttft:0"], r"expected \[CLASS.\]NAME:MS"),
        (["chat:10@1", "--worker", "tpu"], "kimi-8xh200"),
        (["chat:900000@1"], "--time-scale"),
    ],
)
def test_a_wrong_word_is_told_what_is_right(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
