"""The verbs of `redline bench` over HTTP, run against a scripted server."""

import heapq
import json
import math
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from redline.bench.serving.records import LoadRequest, LoadRun, TimedAnswer
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.cli.bench import app, kept
from tests.bench.serving.scripted import Scripted

QUICK: dict[str, Any] = {"first_s": 0.0, "gaps_s": [0.0], "tokens": 20, "thinking": 5}
FIRST_S = 0.02  # seconds until the first event of a `timed` answer
BROKEN: dict[str, Any] = {"fault": "status", "status": 500}


def type_in(verb: str, server: Scripted, *words: object, script: dict[str, Any] | None = None) -> tuple[int, str]:
    """The exit code and the output. Re-raises the verb's own exceptions."""
    body = json.dumps({"script": QUICK if script is None else script})
    given = [verb, "--base-url", server.url, "--extra-body", body, "--disable-tqdm", *map(str, words)]
    done = CliRunner().invoke(app, given)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def timed(gaps_s: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the times of answers, so that they are equal on every machine: the first event FIRST_S after the
    request, and the others one per gaps_s[server address]. Without a schedule requests wait for a free place."""
    real = kept.run_load

    def load(target: ServerTarget, asks: list[LoadRequest], pace: LoadPace, watch: Any) -> LoadRun:
        run, answers = real(target, asks, pace, watch), list[TimedAnswer]()
        free = [0.0] * (pace.max_concurrency or len(asks))
        for answer in run.answers:
            sent = heapq.heappop(free) if math.isinf(pace.rate) else answer.planned
            ats = [sent + FIRST_S + place * gaps_s[target.base_url] for place in range(len(answer.chunks))]
            chunks = [msgspec.structs.replace(chunk, at=at) for chunk, at in zip(answer.chunks, ats, strict=True)]
            end = ats[-1] if ats else sent + FIRST_S
            heapq.heappush(free, end)
            begun = dict.fromkeys(("planned", "taken", "connected", "sent"), sent)
            answers.append(msgspec.structs.replace(answer, **begun, head=sent, chunks=tuple(chunks), end=end))
        seconds = max(answer.end for answer in answers) - min(answer.planned for answer in answers)
        return msgspec.structs.replace(run, seconds=seconds, answers=tuple(answers))

    monkeypatch.setattr(kept, "run_load", load)


def stopped_after(loads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates Ctrl-C during the load that follows the first `loads` ones."""
    real, ended = kept.run_load, list[LoadRun]()

    def load(target: ServerTarget, asks: list[LoadRequest], pace: LoadPace, watch: Any) -> LoadRun:
        ended.append(real(target, asks, pace, watch))
        if len(ended) <= loads:
            return ended[-1]
        return msgspec.structs.replace(ended[-1], stopped=True, answers=())

    monkeypatch.setattr(kept, "run_load", load)
