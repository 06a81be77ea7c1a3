"""The client against a server with known delays, and against one that reports wrong counts, stalls, drops and errs:
every row is right.

Times are compared with the server's log of actual send times: no event is seen before it was sent, nor sent
before its time. How much later it is seen depends on the machine; `lab.two_clients` measures that.
"""

import socket
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from redline.bench.serving.load import run_load
from redline.bench.serving.records import Failure, LoadRequest, LoadRun, TimedAnswer
from redline.bench.serving.target import LoadPace, Patience, ServerTarget
from tests.bench.serving.script import Logged
from tests.bench.serving.scripted import HOST, Scripted

PATIENCE = Patience(connect=60.0, first=60.0, silence=60.0, whole=120.0)
SHORT = Patience(connect=60.0, first=3.0, silence=3.0, whole=120.0)  # for servers that stall
EARLY_S = 1e-5  # rounding error of a clock and of a sum


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        yield server


def ask(name: str, tokens: int = 16, **script: Any) -> LoadRequest:
    messages = ({"role": "user", "content": "hello"},)
    return LoadRequest(max_tokens=tokens, messages=messages, name=name, extra={"script": {"name": name} | script})


def run(
    server: Scripted,
    asks: Sequence[LoadRequest],
    pace: LoadPace | None = None,
    patience: Patience = PATIENCE,
    **target: Any,
) -> LoadRun:
    server.forget()
    run = run_load(
        ServerTarget(base_url=server.url, model="scripted", patience=patience, **target), asks, pace or LoadPace()
    )
    assert [answer.ask.name for answer in run.answers] == [one.name for one in asks]
    return run


def check_times(answers: Sequence[TimedAnswer], log: dict[str, Logged]) -> None:
    """Each event and each end is seen after it was sent; times count from when the request was sent or received."""
    for answer in answers:
        assert answer.error is None, answer.error
        assert answer.sent is not None
        row = log[answer.ask.name]
        for piece, at in zip(answer.chunks, row.events, strict=True):
            assert piece.at - answer.sent > at - row.received - EARLY_S
        assert answer.end >= answer.chunks[-1].at
        assert all(here.at <= there.at for here, there in pairwise(answer.chunks))


@pytest.mark.parametrize("streams", [1, 8])
def test_times_are_those_of_the_servers_own_log(server: Scripted, streams: int):
    asks = [ask(str(i), tokens=20, first_s=0.03, gaps_s=[0.01, 0.004, 0.007]) for i in range(4 * streams)]
    done = run(server, asks, LoadPace(rate=40.0 * streams, burstiness=float("inf"), max_concurrency=streams))
    check_times(done.answers, log := server.named())
    for answer in done.answers:
        row = log[answer.ask.name]
        assert row.events[0] - row.received > 0.03 - EARLY_S
        assert row.events[-1] - row.events[0] > 6 * 0.021 - EARLY_S - (row.events[0] - row.received - 0.03)


def test_random_delays_and_bursts_are_seen_event_for_event(server: Scripted):
    asks = [ask(str(i), tokens=30, gaps_s=[0.002], spread_s=0.01, seed=i, burst=[1, 3, 2]) for i in range(4)]
    answers = run(server, asks, LoadPace(rate=30.0, burstiness=float("inf"))).answers
    assert all(len(answer.chunks) == 15 for answer in answers)
    check_times(answers, server.named())


def test_events_of_one_write_come_at_one_time(server: Scripted):
    (answer,) = run(server, [ask("together", tokens=12, gaps_s=[0.05], events_at_once=4)]).answers
    times = [chunk.at for chunk in answer.chunks]
    writes = [set(times[start : start + 4]) for start in (0, 4, 8)]
    assert all(len(at) == 1 for at in writes)
    assert times[-1] - times[0] > 0.02


def test_an_event_has_come_when_its_last_byte_has(server: Scripted):
    (answer,) = run(server, [ask("halves", tokens=4, gaps_s=[0.03], halves_s=0.015, first_s=0.01)]).answers
    row = server.named()["halves"]
    assert answer.error is None
    assert answer.sent is not None
    assert row.events[0] - row.received > 0.025 - EARLY_S
    check_times([answer], {"halves": row})


def test_a_slow_head_and_a_slow_first_token_are_told_apart(server: Scripted):
    (answer,) = run(server, [ask("head", head_s=0.05, first_s=0.4)]).answers
    assert answer.sent is not None
    assert answer.head is not None
    assert answer.head - answer.sent > 0.05 - EARLY_S
    assert answer.chunks[0].at - answer.sent > 0.4 - EARLY_S
    assert answer.head < answer.chunks[0].at


def test_thinking_and_answer_are_apart(server: Scripted):
    (answer,) = run(server, [ask("thinks", tokens=8, thinking=5)]).answers
    assert [chunk.kind for chunk in answer.chunks] == ["thinking"] * 5 + ["answer"] * 3
    assert answer.thinking == " the" * 5
    assert answer.text == " the" * 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.reasoning_tokens == 5


@pytest.mark.parametrize("script", [{"newline": "\r\n"}, {"comments": True}, {"token_ids": True}])
def test_other_spellings_of_a_stream_are_read(server: Scripted, script: dict[str, Any]):
    (answer,) = run(server, [ask("spelt", tokens=6, burst=[2], **script)]).answers
    assert answer.error is None
    assert answer.text == " the" * 6
    assert [chunk.characters for chunk in answer.chunks] == [8, 8, 8]
    assert [chunk.tokens for chunk in answer.chunks] == [2 if "token_ids" in script else None] * 3
    assert answer.finish == "length"


def test_the_completions_dialect_is_timed_alike(server: Scripted):
    asks = [
        LoadRequest(max_tokens=10, text="hello", name=str(i), extra={"script": {"name": str(i), "gaps_s": [0.01]}})
        for i in range(4)
    ]
    done = run(server, asks, backend="openai")
    assert {row.path for row in server.named().values()} == {"/v1/completions"}
    check_times(done.answers, server.named())


FAULTS: list[tuple[str, dict[str, Any], Failure, int]] = [
    ("an HTTP error", {"fault": "status", "status": 500}, "http", 0),
    ("too many requests", {"fault": "status", "status": 429}, "http", 0),
    ("never a head", {"fault": "stall", "after": -1}, "stalled", 0),
    ("never a token", {"fault": "stall", "after": 0}, "stalled", 0),
    ("stalls", {"fault": "stall", "after": 3}, "stalled", 3),
    ("stalls at the end", {"fault": "stall", "after": 99}, "stalled", 16),
    ("closes for an answer", {"fault": "drop", "after": -1}, "dropped", 0),
    ("drops", {"fault": "drop", "after": 3}, "dropped", 3),
    ("resets", {"fault": "reset", "after": 3}, "dropped", 3),
    ("drops in an event", {"fault": "cut", "after": 3}, "dropped", 3),
    ("no JSON", {"fault": "not_json", "after": 3}, "malformed", 3),
    ("no HTTP", {"fault": "not_http"}, "malformed", 0),
    ("an error in the stream", {"fault": "error", "after": 3}, "server", 3),
    ("ends too soon", {"fault": "short", "after": 3}, "malformed", 3),
]


def test_every_fault_is_told_in_its_row_and_the_rows_beside_it_stay_right(server: Scripted):
    asks: list[LoadRequest] = []
    for name, script, _, _ in FAULTS:
        asks += [ask(name, **({"gaps_s": [0.005]} | script)), ask(f"beside {name}", gaps_s=[0.005])]
    done = run(server, asks, LoadPace(max_concurrency=8), SHORT)
    rows = {answer.ask.name: answer for answer in done.answers}
    wrong = {
        name: (rows[name].failure, len(rows[name].chunks), rows[name].error)
        for name, _, failure, tokens in FAULTS
        if rows[name].failure != failure or len(rows[name].chunks) < tokens or not rows[name].error
    }
    assert not wrong
    for name, script, _, _ in FAULTS:
        beside = rows[f"beside {name}"]
        assert beside.error is None
        assert beside.text == " the" * 16
        if "status" in script:
            assert rows[name].status == script["status"]
            assert "as the script wants it" in (rows[name].error or "")
    check_times([answer for name, answer in rows.items() if name.startswith("beside")], server.named())


def test_nobody_there_is_refused():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    target = ServerTarget(base_url=f"http://{HOST}:{port}", model="scripted", patience=PATIENCE)
    done = run_load(target, [ask("refused")] * 3, LoadPace())
    assert [answer.failure for answer in done.answers] == ["refused"] * 3


def test_a_kept_connection_that_the_server_has_closed_meanwhile_harms_no_request(server: Scripted):
    asks = [ask(f"{i}", tokens=2, **({"fault": "drop", "after": 1} if i % 2 else {})) for i in range(10)]
    answers = run(server, asks, LoadPace(max_concurrency=1)).answers
    assert [answer.failure for answer in answers] == [None, "dropped"] * 5


def test_usage_that_lies_or_is_absent_is_kept_as_it_came(server: Scripted):
    lies, absent, right = run(server, [ask("lies", usage_off=7), ask("absent", usage=False), ask("right")]).answers
    assert lies.usage is not None
    assert lies.usage.completion_tokens == 23
    assert absent.usage is None
    assert right.usage is not None
    assert right.usage.completion_tokens == 16
    assert all(len(answer.chunks) == 16 for answer in (lies, absent, right))


def test_an_empty_answer_is_no_failure_and_has_no_chunk(server: Scripted):
    empty = {"script": {"name": "empty", "tokens": 0}}
    messages = ({"role": "user", "content": "hello"},)
    asks = [LoadRequest(max_tokens=8, messages=messages, name="empty", extra=empty), ask("beside")]
    answer, beside = run(server, asks).answers
    assert answer.error is None
    assert answer.chunks == ()
    assert answer.finish == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert beside.text == " the" * 16


def test_an_answer_that_is_not_streamed_is_one_chunk(server: Scripted):
    (answer,) = run(server, [ask("whole", fault="plain", first_s=0.02)]).answers
    assert answer.error is None
    assert [(chunk.characters, chunk.kind) for chunk in answer.chunks] == [(64, "answer")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_stream_without_its_last_word_is_an_answer_all_the_same(server: Scripted):
    (answer,) = run(server, [ask("no [DONE]", fault="no_done")]).answers
    assert answer.text == " the" * 16
    assert answer.finish == "length"


def test_a_schedule_that_a_slow_server_holds_up_is_measured_from_its_plan(server: Scripted):
    """Coordinated omission: one slow request delays those after it, and their rows must show it."""
    asks = [ask("long", tokens=2, gaps_s=[0.4]), *(ask(f"behind {i}", tokens=2) for i in range(4))]
    answers = run(server, asks, LoadPace(rate=50.0, burstiness=float("inf"), max_concurrency=1)).answers
    for number, answer in enumerate(answers[1:], 1):
        assert answer.sent is not None
        # planned by the schedule, independent of the clock
        assert answer.planned == pytest.approx(number / 50, abs=0.021)
        assert answer.sent > answers[0].end - EARLY_S, "it has waited"
