"""`eval` and `bench`: output paths are checked before the work, names are text, Ctrl-C ends in one line."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from redline.bench.quality.answering import Greedy
from redline.cli import app
from redline.cli.bench import step_tables
from redline.cli.eval import KEPT
from redline.errors import ConfigError
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.write import random_checkpoint
from redline.worker.engine import Engine, EngineCore
from tests import forked
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer

QUESTION = {"kind": "add", "messages": [{"role": "user", "content": "1 + 1?"}], "check": {"number": 2}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder with a name that looks like markup."""
    folder = tmp_path_factory.mktemp("long") / "[bold]tiny" / "[dim]m:x:"
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    Eagle3(Eagle3Config.for_target(Checkpoint.open(folder).config)).save(folder / "drafter")
    (folder / "eval").mkdir()
    lines = [{**QUESTION, "kind": kind, "check": {"number": i}} for kind in ("add", "sub") for i in range(7)]
    (folder / "eval" / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return write_tiny_tokenizer(folder)


@pytest.fixture
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test: the work has begun."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(EngineCore, "load", load)
    monkeypatch.setattr(Engine, "open", load)


def typed(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def verbs(tiny: Path) -> dict[str, list[str | Path]]:
    return {
        "eval": ["eval", tiny],
        "decode": ["bench", "decode", tiny],
        "depth": ["bench", "decode", "--shape", "kimi-nano", "--layers", "3", "--repeats", "1"],
        "speculate": ["bench", "speculate", tiny, "--draft", tiny / "drafter"],
    }


VERBS = ("eval", "decode", "depth", "speculate")


@pytest.mark.usefixtures("_no_engine")
@pytest.mark.parametrize("verb", VERBS)
def test_a_result_that_could_not_be_saved_is_said_before_the_work(
    tiny: Path, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step_tables, "_measure", None)
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "result.json"):
        done = typed(*verbs(tiny)[verb], "--save", place)
        assert isinstance(done.exception, ConfigError), done.exception
        assert "cannot be written" in str(done.exception) or "is a folder" in str(done.exception)


@pytest.mark.usefixtures("_no_engine")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--against", "nowhere"], "nowhere"),
        (["--kv-dtype", "fp9"], "kv-dtype is 'fp9'"),
        (["--sets", "nowhere"], "nowhere: contains no evaluation sets"),
    ],
)
def test_eval_looks_at_what_it_needs_before_the_work(tiny: Path, words: list[str], says: str):
    done = typed("eval", tiny, *words)
    assert isinstance(done.exception, ConfigError), done.exception
    assert says in str(done.exception)


@pytest.mark.usefixtures("_no_engine")
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("targets.json", b"[1]", "targets.json: expected {set: {kind: percent}}"),
        ("targets.json", b"{", "targets.json: expected"),
        ("more.jsonl", b'{"check": {"equals": ' + b"[" * 50_000, "more.jsonl, line 1: maximum recursion depth"),
        ("more.jsonl", b"\xff\n", "more.jsonl, line 1: "),
        ("more.jsonl", json.dumps({**QUESTION, "check": {"nubmer": 1}}).encode(), "line 1: check: .*nubmer"),
        ("more.jsonl.gz", b"\x1f\x8b\x08", "more.jsonl.gz: cannot be read"),
        ("more.jsonl.gz", b"no gzip", "more.jsonl.gz: cannot be read"),
    ],
)
def test_a_set_that_cannot_be_graded_is_named_before_the_work(
    tiny: Path, tmp_path: Path, name: str, content: bytes, says: str
):
    (tmp_path / "sums.jsonl").write_text(json.dumps(QUESTION))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        raise typed("eval", tiny, "--sets", tmp_path).exception or AssertionError


def test_eval_asks_at_most_so_many_of_each_kind_always_the_same_and_says_so(tiny: Path, tmp_path: Path):
    found: list[list[str]] = []
    for number in range(2):
        path = tmp_path / "new folder" / f"{number}.json"
        done = typed("eval", tiny, "--limit", "2", "--save", path)
        assert done.exit_code == 0, done.output
        report = json.loads(path.read_bytes())
        found.append([(verdict["kind"], verdict["why"].rpartition(" ")[2]) for verdict in report["verdicts"]])
        assert (report["limit"], report["left_out"]) == (2, 10)
        assert "at most 2 prompts per kind were used (--limit); 10 were left out" in done.output
    assert found[0] == found[1]
    assert [kind for kind, _ in found[0]] == ["add", "add", "sub", "sub"]


def test_names_with_brackets_lose_no_text(tiny: Path, tmp_path: Path):
    path = tmp_path / ("[red]" + 40 * "long") / "r[x].json"
    said = typed("eval", tiny, "--limit", "1", "--save", path).output
    assert str(tiny) in said.replace("\n", "").replace(" ", "")
    assert f"written to {path}" in said
    done = typed("bench", "decode", tiny, "--batch", "1", "--context", "8", "--repeats", "1", "--save", path)
    assert done.exit_code == 0, done.output
    assert "decode, [dim]m:x: on" in done.output


def test_ctrl_c_is_one_line_and_code_130(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Greedy, "answer", interrupt)
    monkeypatch.setattr(step_tables, "measure_decode", interrupt)
    monkeypatch.setattr(step_tables, "_measure", interrupt)
    monkeypatch.setattr("redline.bench.speculation.rates.Asker.ask", interrupt)
    monkeypatch.setattr(step_tables, "measure", interrupt)
    monkeypatch.setattr(EngineCore, "measure", lambda _: None)  # thirty floors, 3 s of CPU
    for verb, words in verbs(tiny).items():
        done = typed(*words)
        assert done.exit_code == 130, done.output
        kept = KEPT if verb == "eval" else "nothing was saved"
        assert done.output.splitlines()[-1] == f"stopped: {kept}"


HEARD = """
import threading
from redline import progress
from redline.bench.quality.answering import Greedy
from redline.cli import main

answer, line, heard = Greedy.answer, progress.Working.line, threading.Event()

def waits(*given):
    assert heard.wait(120)
    return answer(*given)

def told(working):
    said = line(working)
    if said.startswith("answers: "):
        heard.set()
    return said

progress.EVERY_S, Greedy.answer, progress.Working.line = 0.02, waits, told
main()
"""


def test_a_long_verb_is_heard_of_while_it_works(tiny: Path):
    """The real command, without a terminal; progress is printed more often, and the work waits for its first line."""
    done = forked.run(
        [sys.executable, "-c", HEARD, "eval", str(tiny)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("answers: ") and " passed" in line for line in done.stderr.splitlines())
    assert "answers: " not in done.stdout
