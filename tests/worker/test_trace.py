"""Traces: one line per job is appended; if a line is lost, no answer is."""

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from redline.errors import ConfigError
from redline.messages.delta import Delta
from redline.messages.job import JobId
from redline.worker.trace import Trace
from tests.fakes import make_job


def tell(trace: Trace, id: str, **delta: object) -> None:
    trace.sending([Delta(job=JobId(id), **delta)])  # type: ignore[arg-type]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_a_line_has_tokens_and_the_rounds_that_verified_drafts(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    trace = Trace(path)
    trace.hear(make_job("a", (1, 2, 3)))
    tell(trace, "a", tokens=(4,))
    tell(trace, "a", tokens=(5, 6), proposed=3, accepted=1)
    tell(trace, "a", tokens=(7,))
    assert lines(path) == [], "a job that continues elsewhere must not have a line yet"
    tell(trace, "a", tokens=(8,), proposed=2, accepted=0, finish="stop")
    trace.close()
    assert lines(path) == [
        {"id": "a", "tokens": [1, 2, 3, 4, 5, 6, 7, 8], "prompt": 3, "finish": "stop", "rounds": [[4, 3, 1], [7, 2, 0]]}
    ]


def test_a_trace_goes_on_where_the_last_one_ended_and_only_its_owner_reads_it(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    for id in "ab":
        trace = Trace(path)
        trace.hear(make_job(id, (1,)))
        tell(trace, id, finish="aborted")
        tell(trace, id, finish="aborted")
        trace.close()
    assert [line["id"] for line in lines(path)] == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere/trace.jsonl: cannot write a trace: No such file"):
        Trace(tmp_path / "nowhere" / "trace.jsonl")


def test_lost_lines_are_told_once_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The disk is full in the middle of a line, still full at the next, and then has room again."""
    path = tmp_path / "trace.jsonl"
    trace = Trace(path)
    write, room = os.write, [5, 0]

    def full(file: int, data: bytes) -> int:
        left = room.pop(0) if room else len(data)
        if not left:
            raise OSError(28, "No space left on device")
        return write(file, data[:left])

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.ERROR):
        for id, more in (("a", []), ("b", [0]), ("c", [])):
            room += more
            trace.hear(make_job(id, (1,)))
            tell(trace, id, finish="length")
    trace.close()
    part, whole = path.read_text().splitlines()
    assert part == '{"id"'
    assert json.loads(whole)["id"] == "c"
    assert len(caplog.records) == 1
    assert "traces are being lost" in caplog.text
