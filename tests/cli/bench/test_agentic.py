"""A trace generated and replayed from the command line, against a scripted server."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redline.bench.serving import saved, traces
from redline.bench.serving.agentic import ReplayPlan, Watch, agentic_sections
from redline.bench.serving.target import ServerTarget
from redline.cli.bench import agentic_run, app
from redline.errors import ConfigError
from tests.bench.serving.scripted import Scripted
from tests.cli.bench.http_verbs import BROKEN, type_in


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    words = (
        *("--sessions", 3, "--context-tokens", 1600, "--result-tokens", 100, "--output-tokens", 12),
        *("--tool-s", 0.05, "--think-s", 0.05),
    )
    done = CliRunner().invoke(app, ["agentic", "--synthesize", str(path), *map(str, words)])
    assert done.exit_code == 0
    assert "3 sessions" in done.output
    return path


@pytest.mark.parametrize("history", ["recorded", "live"])
def test_a_trace_is_replayed_and_kept(server: Scripted, trace: Path, tmp_path: Path, history: str):
    file, page = tmp_path / "result.json", tmp_path / "page.html"
    turns = sum(len(session.turns) for session in traces.read(trace))
    server.forget()
    flags = ("--users", 3, "--time-scale", 0.1, "--history", history, "--save", file, "--html", page)
    code, said = type_in("agentic", server, trace, *flags)
    assert code == 0
    assert "E2E-normalised interactivity" in said
    assert len(server.log().requests) == turns
    found = saved.read(file)
    assert (found.figures["completed"], found.figures["sessions_completed"]) == (turns, 3)
    assert found.figures["p50_ttft_ms"] > 0
    assert found.generator is not None
    assert agentic_sections(found)
    assert "<html" in page.read_text()


def test_a_rate_of_sessions_and_an_end_by_the_clock(
    server: Scripted, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The time limit expires when two turns have been answered."""
    timeout, limits, real = asyncio.timeout, list[asyncio.Timeout](), agentic_run._replay  # pyright: ignore[reportPrivateUsage]

    def watched_timeout(seconds: float | None) -> asyncio.Timeout:
        if seconds == 77.0:
            limits.append(timeout(None))
            return limits[0]
        return timeout(seconds)

    async def timed(target: ServerTarget, sessions: Any, plan: ReplayPlan, watch: Watch) -> Any:
        def watched(done: int, running: int, failed: int) -> None:
            watch(done, running, failed)
            if done == 2:
                limits[0].reschedule(asyncio.get_running_loop().time())

        return await real(target, sessions, plan, watched)

    monkeypatch.setattr(asyncio, "timeout", watched_timeout)
    monkeypatch.setattr(agentic_run, "_replay", timed)
    file = tmp_path / "result.json"
    code, said = type_in("agentic", server, trace, "--session-rate", 50, "--max-seconds", 77, "--save", file)
    assert code == 0
    assert "The deadline was reached" in said
    found = saved.read(file)
    assert found.figures["sessions_failed"] == 0
    assert 2 <= found.figures["completed"] < sum(len(session.turns) for session in traces.read(trace))


def test_ctrl_c_keeps_the_turns_that_were_answered(
    server: Scripted, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = agentic_run._replay  # pyright: ignore[reportPrivateUsage]

    async def interrupted(target: ServerTarget, sessions: Any, plan: ReplayPlan, watch: Watch) -> Any:
        def watched(done: int, running: int, failed: int) -> None:
            watch(done, running, failed)
            if done == 2:
                task.cancel()

        task = asyncio.create_task(real(target, sessions, plan, watched))
        return await task

    monkeypatch.setattr(agentic_run, "_replay", interrupted)
    file = tmp_path / "result.json"
    code, said = type_in("agentic", server, trace, "--save", file)
    assert code == 130
    assert "stopped after" in said
    found = saved.read(file)
    assert found.stopped
    assert found.figures["completed"] == len(found.answers) == 2


def test_a_server_that_fails_every_turn_is_reported_and_ends_with_1(server: Scripted, trace: Path):
    code, said = type_in("agentic", server, trace, script=BROKEN)
    assert code == 1
    assert "Failures" in said
    assert "500" in said


def test_a_trace_without_answers_can_only_be_live(server: Scripted, tmp_path: Path):
    turn = traces.AgentTurn(messages=({"role": "user", "content": "x"},), output_tokens=4)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(traces.encode([traces.Session(session="a", turns=(turn, turn))]))
    with pytest.raises(ConfigError, match="turn 1 has no `answer`"):
        type_in("agentic", server, path)
    assert type_in("agentic", server, path, "--history", "live")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give either a trace to replay, or --synthesize FILE"),
        (("a.jsonl", "--history", "mine"), "--history 'mine': expected recorded or live"),
        (("a.jsonl", "--users", 2, "--session-rate", 1), "--users and --session-rate"),
        (("a.jsonl", "--backend", "openai"), "sessions consist of chat messages"),
        (("no_such_trace.jsonl",), "no_such_trace.jsonl: cannot be read"),
    ],
)
def test_flags_that_make_no_sense_are_named(server: Scripted, words: tuple[object, ...], said: str):
    with pytest.raises(ConfigError, match=said):
        type_in("agentic", server, *words)
