"""Traces of sessions: generated from a seed, written, read, and refused if they are malformed."""

import json
from pathlib import Path

import msgspec
import pytest

from redline.bench.serving.traces import TOOLS, AgentTurn, Session, TraceShape, by_length, encode, read, synthesize
from redline.errors import ConfigError

SMALL = TraceShape(sessions=4, context_tokens=4000, output_tokens=40, result_tokens=200)


def tokens(session: Session) -> int:
    """Tokens of the whole history at the end, as a server without a template would count them."""
    texts = [str(message.get("content") or "") for turn in session.turns for message in turn.messages]
    return sum(map(by_length, texts)) + sum(turn.output_tokens for turn in session.turns) + by_length(json.dumps(TOOLS))


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path):
    made = synthesize(SMALL)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(encode(made))
    assert read(path) == made


def test_the_same_seed_gives_the_same_trace_and_more_sessions_change_no_other():
    assert synthesize(SMALL) == synthesize(SMALL)
    assert synthesize(msgspec.structs.replace(SMALL, sessions=2)) == synthesize(SMALL)[:2]
    assert synthesize(msgspec.structs.replace(SMALL, seed=1)) != synthesize(SMALL)


@pytest.mark.parametrize("budget", [2000, 8000, 32000])
def test_a_session_grows_to_its_budget_and_not_beyond(budget: int):
    for session in synthesize(TraceShape(sessions=3, context_tokens=budget, output_tokens=40, result_tokens=200)):
        assert 0.5 * budget < tokens(session) <= budget


def test_sessions_are_those_of_an_agent():
    for session in synthesize(SMALL):
        assert session.turns[0].messages[0]["role"] == "system"
        called: list[str] = []
        for turn, after in zip(session.turns, session.turns[1:], strict=False):
            assert turn.answer is not None
            assert turn.output_tokens >= by_length(turn.answer["content"])
            calls = [call["id"] for call in turn.answer.get("tool_calls", ())]
            called += [call["function"]["name"] for call in turn.answer.get("tool_calls", ())]
            results = [message["tool_call_id"] for message in after.messages if message["role"] == "tool"]
            assert results == calls  # every call is answered by the next turn, and nothing else is
        assert called[0] == "read_file"
        assert set(called) <= {tool["function"]["name"] for tool in TOOLS}
        assert session.turns[-1].wait_s == 0


def test_tests_take_longer_than_reading_a_file():
    waits: dict[str, list[float]] = {"run_tests": [], "read_file": []}
    for session in synthesize(TraceShape(sessions=12, tool_s=8.0)):
        for turn in session.turns[:-1]:
            for call in (turn.answer or {}).get("tool_calls", ()):
                waits.setdefault(call["function"]["name"], []).append(turn.wait_s)
    medians = {name: sorted(found)[len(found) // 2] for name, found in waits.items()}
    assert 4 < medians["run_tests"] < 16
    assert medians["read_file"] < 0.2


def test_a_budget_without_room_for_a_turn_is_refused():
    with pytest.raises(ConfigError, match="--context-tokens 100: one turn does not fit; use at least about"):
        synthesize(TraceShape(context_tokens=100))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not a valid session"),
        ('{"session": "a", "turns": []}', "line 2: `turns` is empty"),
        ('{"session": "a", "turns": [{"messages": [], "output_tokens": 1}]}', "turn 1 needs at least one message"),
        ('{"session": "a", "turns": [{"messages": [{}], "output_tokens": 1}]}', "turn 1 needs at least one message"),
        (
            '{"session": "a", "turns": [{"messages": [{"role": "user"}], "output_tokens": 0}]}',
            "turn 1: `output_tokens` must be at least 1",
        ),
        (
            '{"session": "a", "turns": [{"messages": [{"role": "user"}], "output_tokens": 1, "wait_s": -1}]}',
            "turn 1: `wait_s` must be a finite number of seconds",
        ),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path: Path, line: str, said: str):
    path = tmp_path / "trace.jsonl"
    good = Session(session="a", turns=(AgentTurn(messages=({"role": "user", "content": "x"},), output_tokens=1),))
    path.write_bytes(encode([good]) + line.encode())
    with pytest.raises(ConfigError, match=said):
        read(path)


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(ConfigError, match="contains no session"):
        read(tmp_path / "empty.jsonl")
