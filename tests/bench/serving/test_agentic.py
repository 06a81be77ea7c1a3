"""Sessions replayed against a client that answers by a formula."""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from redline.bench.serving import agentic
from redline.bench.serving.agentic import Replay, ReplayPlan, fitted, replay, said
from redline.bench.serving.records import LoadRequest, TimedAnswer, Usage
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Table, Words
from redline.bench.serving.traces import AgentTurn, Session
from tests.bench.serving.answers import answer
from tests.clocks import FakeClock


class Fake:
    """Answers after `takes` seconds with texts of its own, and records the requests."""

    def __init__(self, takes: float = 0.002, fails: int = -1, **fields: Any) -> None:
        self.asked: list[LoadRequest] = []
        self.running = self.most = 0
        self._takes, self._fails, self._fields = takes, fails, fields
        self.clock = FakeClock(0.0)

    async def ask(self, ask: LoadRequest, index: int, planned: float) -> TimedAnswer:
        self.asked.append(ask)
        self.running += 1
        self.most = max(self.most, self.running)
        sent = self.clock()
        await asyncio.sleep(self._takes)
        self.running -= 1
        if index == self._fails:
            return TimedAnswer(
                index=index, ask=ask, planned=planned, sent=sent, end=self.clock(), failure="http", error="500"
            )
        usage = Usage(prompt_tokens=100 * len(ask.messages or ()), completion_tokens=10, cached_tokens=50)
        made = answer(index, planned=planned, sent=sent, usage=usage, text=f"own {index}", **self._fields)
        return msgspec.structs.replace(made, ask=ask, end=self.clock())


def session(name: str, turns: int = 3, wait_s: float = 0.0) -> Session:
    return Session(
        session=name,
        tools=({"type": "function"},),
        turns=tuple(
            AgentTurn(
                messages=({"role": "user", "content": f"{name} asks {at}"},),
                output_tokens=10 + at,
                answer={"role": "assistant", "content": f"{name} gets {at}"},
                wait_s=wait_s,
            )
            for at in range(turns)
        ),
    )


async def played(fake: Fake, sessions: list[Session], plan: ReplayPlan) -> Replay:
    with fake.clock.jumps(asyncio.get_running_loop()):
        return await replay(fake, sessions, plan)


def run(fake: Fake, sessions: list[Session], **plan: Any) -> Replay:
    return asyncio.run(played(fake, sessions, ReplayPlan(**plan)))


def contents(ask: LoadRequest) -> list[str]:
    return [message["content"] for message in ask.messages or ()]


def test_recorded_answers_make_the_same_prompts_on_every_server():
    fake = Fake()
    found = run(fake, [session("s")], extra={"ignore_eos": True})
    assert contents(fake.asked[2]) == ["s asks 0", "s gets 0", "s asks 1", "s gets 1", "s asks 2"]
    for before, after in zip(fake.asked, fake.asked[1:], strict=False):
        assert contents(after)[: len(contents(before))] == contents(before)
    assert [ask.max_tokens for ask in fake.asked] == [10, 11, 12]
    assert all(ask.tools == ({"type": "function"},) and ask.extra == {"ignore_eos": True} for ask in fake.asked)
    assert [(one.session, one.turn, one.answer.index) for one in found.turns] == [("s", 1, 0), ("s", 2, 1), ("s", 3, 2)]
    assert [(one.turns, one.whole, one.failed) for one in found.sessions] == [(3, True, False)]


def test_live_keeps_the_models_own_answers():
    fake = Fake()
    run(fake, [session("s")], mode="live")
    assert contents(fake.asked[2]) == ["s asks 0", "own 0", "s asks 1", "own 1", "s asks 2"]


def test_a_turn_waits_for_its_tool_from_the_answer_before():
    found = run(Fake(), [session("s", wait_s=0.4)], time_scale=0.1)
    times = [one.answer for one in found.turns]
    for before, after in pairwise(times):
        assert after.planned - before.end >= 0.0399
        assert (after.sent or 0.0) >= after.planned - 0.002  # an event loop's timers may fire one clock tick early
    (ended,) = found.sessions
    assert ended.waited == pytest.approx(0.08)
    assert ended.seconds >= 0.08


def test_users_take_sessions_in_turn_and_a_rate_does_not_wait_for_them():
    fake = Fake()
    found = run(fake, [session(str(at), 2) for at in range(7)], users=3)
    assert fake.most == 3
    assert len(found.turns) == 14
    fake = Fake(takes=0.2)
    found = run(fake, [session(str(at), 1) for at in range(5)], rate=200.0)
    assert fake.most == 5
    assert {one.session for one in found.turns} == set("01234")


def test_a_turn_that_fails_ends_its_session_alone():
    found = run(Fake(fails=1), [session("a"), session("b")])
    assert [(one.session, one.turns, one.whole, one.failed) for one in found.sessions] == [
        ("a", 1, False, True),
        ("b", 3, True, False),
    ]
    figures = agentic.figures(found)
    assert (figures["completed"], figures["failed"], figures["sessions_failed"]) == (4, 1, 1)


def test_what_was_measured_is_kept_when_time_is_over_or_when_it_is_stopped():
    sessions = [session("a", 50)]
    late = run(Fake(takes=0.02), sessions, deadline=0.1)
    assert late.out_of_time
    assert not late.stopped
    assert 1 <= len(late.turns) < 50
    assert late.cut == 1

    async def stopped() -> Replay:
        fake = Fake(takes=0.02)
        with fake.clock.jumps(asyncio.get_running_loop()):
            task = asyncio.create_task(replay(fake, sessions, ReplayPlan()))
            await asyncio.sleep(0.1)
            task.cancel()
            return await task

    found = asyncio.run(stopped())
    assert found.stopped
    assert 1 <= len(found.turns) < 50
    assert not found.sessions[0].whole
    assert not found.sessions[0].failed


def call(name: str, arguments: str = "{}", id: str = "own") -> dict[str, Any]:
    return {"id": id, "name": name, "arguments": arguments}


def test_an_answer_becomes_the_historys_next_message():
    calls = (call("read", '{"a": 1}'), call("broken", "{"), call("list", "[]"), call("", "{}"))
    message = said(answer(calls=calls, text="I look", thinking="hm"))
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["read"]
    assert (message["content"], message["reasoning_content"]) == ("I look", "hm")
    plain = said(answer(text="done", thinking="hm"))
    assert plain == {"role": "assistant", "content": "done"}


def test_tool_results_fit_the_calls_that_the_model_made():
    results = [{"role": "tool", "tool_call_id": f"t{at}", "content": f"result {at}"} for at in range(2)]
    user = {"role": "user", "content": "go on"}

    def fit(*ids: str) -> list[Any]:
        history = [{"role": "assistant", "content": "", "tool_calls": [{"id": one} for one in ids]}]
        return [one.get("tool_call_id") or one["content"] for one in fitted([*results, user], history)]

    assert fit("t0", "t1") == ["t0", "t1", "go on"]
    assert fit("x", "y") == ["x", "y", "go on"]
    assert fit("x") == ["x", "Result of a tool:\nresult 1", "go on"]
    assert fit("x", "y", "z") == ["x", "y", "z", "go on"]  # an empty result closes the third call
    assert fitted([user], []) == [user]


def test_interactivity_is_the_p90_of_seconds_per_token_inverted():
    answers = [answer(at, at=(0.5, 1.0 * at), usage=Usage(completion_tokens=10)) for at in range(1, 12)]
    # seconds per token: 0.1 to 1.1 in equal steps, so P90 is 1.0
    assert agentic.interactivity(answers) == pytest.approx(1 / 1.0)
    assert agentic.interactivity([]) is None


def test_the_hit_share_is_of_tokens_and_of_those_who_say_so():
    one = answer(usage=Usage(prompt_tokens=1000, completion_tokens=5, cached_tokens=900))
    other = answer(usage=Usage(prompt_tokens=100, completion_tokens=5, cached_tokens=0))
    silent = answer(usage=Usage(prompt_tokens=100, completion_tokens=5))
    assert agentic.hit_share([one, other, silent]) == pytest.approx(900 / 1100)
    assert agentic.hit_share([silent]) is None


def test_answers_are_grouped_by_powers_of_two():
    answers = [answer(usage=Usage(prompt_tokens=tokens, completion_tokens=5)) for tokens in (1, 512, 513, 1024, 1025)]
    assert [(name, len(group)) for name, group in agentic.by_context(answers)] == [
        ("1 to 1", 1),
        ("257 to 512", 1),
        ("513 to 1,024", 2),
        ("1,025 to 2,048", 1),
    ]


def result(found: Replay) -> BenchResult:
    details = msgspec.to_builtins(agentic.details_of(found))
    answers = tuple(one.answer for one in found.turns)
    return BenchResult(
        kind="agentic", figures=agentic.figures(found), details=details, answers=answers, stopped=found.stopped
    )


def test_a_result_says_turns_contexts_sessions_and_failures():
    found = run(Fake(fails=21), [session("a", 20), session("b", 2), session("c", 2)])
    sections = agentic.agentic_sections(result(found))
    totals, turns, contexts, failures = [one for one in sections if isinstance(one, Table)]
    assert ("sessions ended by a failed turn", "1") in totals.rows
    assert [row[:2] for row in turns.rows] == [
        ("1", "3"),
        ("2", "2"),
        ("3", "1"),
        ("4", "1"),
        ("5 to 8", "4"),
        ("9 to 16", "8"),
        ("17 to 20", "4"),
    ]
    assert sum(int(row[1]) for row in contexts.rows) == 23
    assert failures.rows == (("b", "21", "http", "500"),)
    plots = [one for one in sections if isinstance(one, Plot)]
    assert [len(one.series[0].x) for one in plots] == [23, 23, 2]


def test_a_result_without_any_answer_still_says_so():
    sections = agentic.agentic_sections(result(run(Fake(fails=0), [session("a")])))
    assert not [one for one in sections if isinstance(one, Plot)]
    assert any(isinstance(one, Table) and one.title == "Failures" for one in sections)


def test_time_that_was_over_is_said():
    found = run(Fake(takes=0.02), [session("a", 50)], deadline=0.1)
    assert any(
        isinstance(one, Words) and "1 unfinished turns" in one.text for one in agentic.agentic_sections(result(found))
    )
