"""The verb `verify`: its verdict, its report and its exit code, over a folder and over a server."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redline.bench.verify import layers
from redline.cli import app
from redline.errors import ConfigError
from redline.model.k2.write import random_checkpoint
from tests.cli.servers import MODELS, says, server, stream
from tests.tiny_model import kernel_config


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ROUNDS", 2)
    monkeypatch.setattr(layers, "WORKING_SET_BYTES", 1 << 16)
    monkeypatch.setattr(layers, "ROOM_BYTES", 1 << 20)


def run(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, words)], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_the_verdict_comes_first_then_file_tensor_and_fix(tmp_path: Path):
    random_checkpoint(tmp_path / "kimi", kernel_config(), shard_bytes=100_000)
    save = tmp_path / "report.json"
    code, text = run(tmp_path / "kimi", "--save", save)
    assert code == 0
    assert text.startswith(f"{tmp_path / 'kimi'}: sound: ")
    assert json.loads(save.read_text())["sound"] is True
    shard = sorted((tmp_path / "kimi").glob("*.safetensors"))[1]
    shard.unlink()
    code, text = run(tmp_path / "kimi", "--save", save)
    assert code == 1
    lines = text.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'kimi'}: BROKEN: 1 problem in 1 file; ")
    at = lines.index(shard.name)
    assert lines[at + 1].startswith("  missing shard; expected to hold ")
    assert lines[at + 2].startswith("  fix: download it again: ")
    assert [problem["file"] for problem in json.loads(save.read_text())["problems"]] == [shard.name]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "either a checkpoint's FOLDER or --server URL"),
        (["folder", "--server", "x"], "either a checkpoint's FOLDER or --server URL"),
        (["--server", "x"], "--server needs --requests FILE"),
        (["folder", "--requests", "x"], "--requests is for --server only"),
        (["/nowhere/at/all"], "/nowhere/at/all: no such folder"),
        ([__file__], "a file; expected a model's folder"),
        (["."], "config.json: missing: the folder is empty; expected a model's folder"),
    ],
)
def test_what_does_not_go_together_is_said(words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=why):
        run(*words)


def test_a_servers_tool_calls_are_counted(tmp_path: Path):
    requests = tmp_path / "samples.jsonl"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["a"]}}}]
    requests.write_text(3 * (json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": tools}) + "\n"))
    delta = {"tool_calls": [{"index": i, "id": f"f:{i}", "function": part} for i, part in enumerate(CALLS)]}
    chunks = stream({"choices": [{"delta": delta}]}, {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    answer = says(chunks, kind="text/event-stream")
    with server(answer, says(MODELS)) as (url, asked):
        known = url.replace("http://", "http://user:secret@") + "/v1"
        code, text = run("--server", known, "--requests", requests, "--save", tmp_path / "r.json")
    assert code == 1
    assert "secret" not in text + (tmp_path / "r.json").read_text()
    assert text.startswith(f"fake at {url}: 3 of 6 calls are valid; 3 requests")
    assert "arguments do not fit the schema: 3" in text
    assert "finish reasons: tool_calls 3" in text
    assert "0 of 3 answers" in text
    assert asked[0]["tools"] == tools
    counts = json.loads((tmp_path / "r.json").read_text())["counts"]
    assert (counts["calls"], counts["valid"], counts["with_calls"], counts["accurate"]) == (6, 3, 3, 0)


CALLS = [{"name": "f", "arguments": '{"a": 1}'}, {"name": "f", "arguments": "{}"}]


def test_an_address_that_is_none_is_named_with_its_flag(tmp_path: Path):
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"messages": []}')
    with pytest.raises(ConfigError, match=r"--server 'http://\[': expected an address"):
        run("--server", "http://[", "--requests", requests, "--save", tmp_path / "r.json")
