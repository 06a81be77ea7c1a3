"""`redline bench serve` from the command line, against a server with scripted answers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from redline.bench.serving import saved
from redline.cli import app
from tests import forked
from tests.bench.serving.script import Play, Script
from tests.bench.serving.scripted import Scripted
from tests.waiting import LIMIT_S, until

NAMED = {
    "fast": Script(tokens=8, first_s=0.02, gaps_s=(0.005,), thinking=4),
    "drops": Script(tokens=8, fault="drop", after=3),
    "lies": Script(tokens=8, usage_off=9, token_ids=True),
    "slow": Script(tokens=200, gaps_s=(60.0,)),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted(Play(named=NAMED)) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("REDLINE_API_KEY", raising=False)


def prompts(folder: Path, *names: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": name, "output_tokens": 64}) + "\n" for name in names))
    return str(path)


def words(server: Scripted, path: str, many: int, *more: str) -> list[str]:
    asked = ["--dataset-name", "custom", "--dataset-path", path, "--num-prompts", str(many), "--disable-shuffle"]
    return ["bench", "serve", "--base-url", server.url, "--backend", "openai-chat", *asked, *more]


def typed(*given: str) -> Result:
    return CliRunner().invoke(app, list(given), env={"COLUMNS": "200"})


def test_a_run_is_shown_and_saved_with_what_went_wrong_by_row(server: Scripted, tmp_path: Path):
    names = ["fast"] * 6 + ["drops", "lies"]
    path, page = tmp_path / "result.json", tmp_path / "page.html"
    done = typed(
        *words(
            server, prompts(tmp_path, *names), 8, "--max_concurrency", "4", "--goodput", "ttft:1000000", "e2el:5000000"
        ),
        *("--save-result", "--result-filename", str(path), "--html", str(page), "--metadata", "gpu=none", "run=2"),
    )
    assert done.exit_code == 0, done.output
    for said in ("TTFT, to the first token", "first token of the answer", "Failures: dropped 1", "Inconsistent usage"):
        assert said in done.output
    assert "usage reports 17 output tokens, the events contained 8" in done.output
    found = json.loads(path.read_text())
    assert (found["completed"], found["failed"], found["model_id"]) == (7, 1, "scripted")
    assert (found["gpu"], found["run"], found["max_concurrency"], found["request_rate"]) == ("none", "2", 4, "inf")
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    result = saved.read(path)
    fast = [answer for answer in result.answers if answer.index < 6]
    for answer in fast:
        assert answer.sent is not None
        assert answer.sent < answer.chunks[0].at <= answer.chunks[-1].at
    assert [chunk.kind for chunk in fast[0].chunks] == ["thinking"] * 4 + ["answer"] * 8
    assert result.answers[6].failure == "dropped"
    assert [mismatch["index"] for mismatch in result.details["mismatches"]] == [7]
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


def test_where_every_request_fails_the_code_is_1(server: Scripted, tmp_path: Path):
    done = typed(*words(server, prompts(tmp_path, "drops"), 2))
    assert done.exit_code == 1
    assert "Failures: dropped 2" in done.output
    assert "requests completed" in done.output


def test_a_rate_gives_latencies_from_the_schedule_too(server: Scripted, tmp_path: Path):
    done = typed(*words(server, prompts(tmp_path, "fast"), 6, "--request-rate", "100", "--max-concurrency", "1"))
    assert done.exit_code == 0, done.output
    assert "E2EL from the schedule" in done.output
    assert "coordinated omission" in done.output


def test_latencies_that_are_named_have_their_figures_from_the_schedule_too(server: Scripted, tmp_path: Path):
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "200")
    given = (*ramp, "--max-concurrency", "1", "--percentile-metrics", "e2el")
    done = typed(*words(server, prompts(tmp_path, "fast"), 6, *given))
    assert done.exit_code == 0, done.output
    for part in ("E2EL from the schedule", "wait in the client", "50 to 200 requests/s, linear"):
        assert part in done.output
    assert "TTFT" not in done.output.replace("TTFT from", "")


def test_completions_are_asked_with_random_prompts_as_vllm_does(server: Scripted, tmp_path: Path):
    """The default dataset and backend, without any flag, are those of vLLM."""
    done = typed(
        *("bench", "serve", "--base-url", server.url, "--num-prompts", "3", "--random-input-len", "20"),
        *("--random-output-len", "5", "--save-detailed", "--result-dir", str(tmp_path)),
    )
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("openai-infqps-scripted-*.json")
    found = json.loads(path.read_text())
    assert (found["backend"], found["total_output_tokens"], len(found["itls"])) == ("openai", 15, 3)
    assert found["redline"]["dataset"]["ignore_eos"] is True


def test_ctrl_c_shows_and_saves_what_was_measured(server: Scripted, tmp_path: Path):
    path = tmp_path / "result.json"
    given = words(server, prompts(tmp_path, "fast", "slow"), 40, "--max-concurrency", "2", "--save-result")
    command = [sys.executable, "-m", "redline", *given, "--result-filename", str(path)]
    server.forget()
    process = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    try:
        until(lambda: len(server.log().requests) >= 4)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "The run ended early" in output
    assert "requests cut off" in output
    assert saved.read(path).stopped
    assert json.loads(path.read_text())["completed"] >= 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--port", "9", "--ready-check-timeout-sec", "0"], "no server at http://127.0.0.1:9"),
        (["--profile"], "--profile of vLLM is not supported here"),
        (["--preset", "nothing"], "--preset nothing: expected one of lambda"),
        (["--request-rate", "0"], "--request-rate 0: expected a number above 0"),
        (["--dataset-path", "x"], "which --dataset-name is it"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear", "--request-rate", "3"], "leave --request-rate out"),
        (["--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "2"], "above 0"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: does not exist"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics 'speed'"),
        (["--metadata", "x"], "--metadata 'x': expected KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_asked(given: list[str], says: str):
    done = typed("bench", "serve", *given)
    assert done.exit_code == 1
    assert says in str(done.exception)
    assert "\n" not in str(done.exception)


def test_help_imports_nothing_that_takes_time():
    program = (
        "import sys; from redline.cli import app; print({'numpy', 'httpx', 'torch', 'starlette'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "set()"


def test_warm_ups_for_which_there_are_no_prompts_are_told(server: Scripted):
    data = ["--dataset-name", "prefix_repetition", "--num-prompts", "10", "--num-warmups", "2", "--output-len", "4"]
    found = typed("bench", "serve", "--base-url", server.url, "--disable-tqdm", *data)
    assert "0 of 2 warm-up requests were sent" in found.output


def test_vllms_flag_against_a_template_is_taken_since_none_is_put_around_a_prompt(server: Scripted, tmp_path: Path):
    done = typed(*words(server, prompts(tmp_path, "fast"), 1, "--skip-chat-template"))
    assert done.exit_code == 0, done.output


def test_a_prompt_has_the_tokens_that_were_asked_for_as_the_server_counts_them(tmp_path: Path):
    path = tmp_path / "result.json"
    given = ["--num-prompts", "5", "--input-len", "128", "--output-len", "4", "--result-filename", str(path)]
    with Scripted(Play(tokenizes=True)) as server:
        done = typed("bench", "serve", "--base-url", server.url, *given)
    assert done.exit_code == 0, done.output
    assert "approximate" not in done.output
    prompts = {answer.usage.prompt_tokens for answer in saved.read(path).answers if answer.usage}
    assert prompts == {128}


def test_a_model_that_the_server_does_not_serve_is_one_line_that_names_those_it_serves(server: Scripted):
    done = typed("bench", "serve", "--base-url", server.url, "--model", "kimi-k9", "--num-prompts", "2")
    assert done.exit_code == 1
    assert f"--model kimi-k9: {server.url} serves scripted" in str(done.exception)
