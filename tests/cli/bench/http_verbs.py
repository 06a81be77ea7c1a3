"""The verbs of `redline bench` over HTTP, typed in against a scripted server."""

import json
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from redline.bench.serving.records import Ask, Run
from redline.bench.serving.scripted import Scripted
from redline.bench.serving.target import Pace, Target
from redline.cli.bench import app, kept

QUICK: dict[str, Any] = {"first_s": 0.02, "gaps_s": [0.002], "tokens": 20, "thinking": 5}
BROKEN: dict[str, Any] = {"fault": "status", "status": 500}


def type_in(verb: str, server: Scripted, *words: object, script: dict[str, Any] | None = None) -> tuple[int, str]:
    """The exit code and what was said. Raises what the verb raises on purpose."""
    body = json.dumps({"script": QUICK if script is None else script})
    given = [verb, "--base-url", server.url, "--extra-body", body, "--disable-tqdm", *map(str, words)]
    done = CliRunner().invoke(app, given)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def stopped_after(loads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes in the load after so many."""
    real, ended = kept.run_load, list[Run]()

    def load(target: Target, asks: list[Ask], pace: Pace, watch: Any) -> Run:
        ended.append(real(target, asks, pace, watch))
        if len(ended) <= loads:
            return ended[-1]
        return msgspec.structs.replace(ended[-1], stopped=True, answers=())

    monkeypatch.setattr(kept, "run_load", load)
