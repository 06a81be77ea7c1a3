"""Answers in a small file, and many commands on the cores of one machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nano import draft_jobs
from nano.draft_jobs import Job, run_all, slots
from nano.draft_prompts import main
from nano.draft_store import pack, unpack
from redline.chat.lines import conversation
from redline.chat.template import encode
from redline.chat.tokenizer import Tokenizer
from redline.draft.corpus.corpus import Example
from redline.draft.corpus.prompts import read_prompts
from tests.clocks import FakeClock
from tests.waiting import LIMIT_S, until

FOLDER = Path(__file__).parents[2] / "models/kimi-nano"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nano.draft_prompts.WAVE", 1)
        main(["--out", str(path), "--count", "40", "--tokenizer", str(FOLDER), "--processes", "1"])
    return path


def test_the_corpus_comes_back_as_it_was(prompts: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(FOLDER)
    corpus: list[Example] = []
    for number, line in enumerate(read_prompts(prompts).prompts):
        ids = encode(conversation(line), tokenizer)
        answer = tuple(range(number, 2 * number))  # the answer to the first prompt is empty
        finish = "length" if number % 3 == 0 else "stop"
        corpus.append(
            Example(
                id=line.id, domain=line.domain, language=line.language, tokens=(*ids, *answer), prompt=len(ids),
                finish=finish, kind=line.kind,
            )
        )  # fmt: skip
    stranger = Example(id="stranger", domain="code", tokens=(1, 2), prompt=1, finish="stop")
    assert pack([*reversed(corpus), stranger], prompts, tmp_path / "answers.xz") == 39
    assert list(unpack(tmp_path / "answers.xz", prompts, FOLDER)) == corpus[1:]


def test_answers_to_other_prompts_are_refused(prompts: Path, tmp_path: Path) -> None:
    pack([], prompts, tmp_path / "answers.xz")
    (tmp_path / "other.jsonl").write_bytes(prompts.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match=r"other prompts than those of .*other.jsonl"):
        list(unpack(tmp_path / "answers.xz", tmp_path / "other.jsonl", FOLDER))


def python(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


def test_jobs_run_in_their_slots_and_a_second_time_only_those_that_failed(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    told = "import os; print(sorted(os.sched_getaffinity(0)))"
    jobs = [Job("well", python(told)), Job("badly", python("print('why'); raise SystemExit(1)"))]
    assert run_all(jobs, [(core,)], 600, tmp_path) == ["badly"]
    assert json.loads((tmp_path / "well.log").read_text()) == [core]
    assert run_all(jobs, [(core,)], 600, tmp_path) == ["badly"]
    assert (tmp_path / "well.log").read_text().count("\n") == 1
    assert (tmp_path / "badly.log").read_text() == "why\nwhy\n"


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.default_int_handler], ids=["in background", "here"])
def test_a_job_is_told_when_time_is_up_and_those_behind_it_wait_for_the_next_run(
    tmp_path: Path, disposition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if SIGINT is ignored, as in a job that a script starts in the background."""
    before = signal.signal(signal.SIGINT, disposition)
    try:
        _check_that_a_job_is_told(tmp_path, monkeypatch)
        assert signal.getsignal(signal.SIGINT) is disposition
    finally:
        signal.signal(signal.SIGINT, before)


def _check_that_a_job_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = """
import signal
try:
    print("begun", flush=True)
    signal.pause()
except KeyboardInterrupt:
    print("kept")
"""
    jobs = [Job("long", python(patient)), Job("next", python("print(1)"))]
    log, clock = tmp_path / "long.log", FakeClock()

    class Process(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            """The time limit expires once the job has begun."""
            if timeout == 3:
                until(lambda: "begun\n" in log.read_text())
                clock.advance(3)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(LIMIT_S)

    monkeypatch.setattr(draft_jobs.subprocess, "Popen", Process)
    monkeypatch.setattr(draft_jobs, "time", SimpleNamespace(monotonic=clock))
    assert run_all(jobs, [tuple(os.sched_getaffinity(0))], 3, tmp_path) == ["next"]
    assert log.read_text() == "begun\nkept\n"
    assert not (tmp_path / "next.log").exists()


def test_slots_share_all_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert [core for slot in slots(1) for core in slot] == cores
    assert slots(1_000) == [tuple(cores)]
