"""What is asked where roles are steered, and how it is counted; no server is needed for either."""

import pytest

from redline.bench.runs.steer_served import PHASES, Due, Setting, Turn, differences, schedule, told
from redline.bench.serving.records import Answer, Ask, Chunk, Usage

SETTING = Setting(slow=2.0, seconds=10.0, window_s=8.0)  # 6 s and 12 ms are promised
FIRST, SECOND = PHASES


def turn(*answered: tuple[str, float, float]) -> Turn:
    """Of each request: its phase, seconds to its first token, and between it and the eleventh, which is the last."""
    requests, answers = list[Due](), list[Answer]()
    for index, (phase, first_s, rest_s) in enumerate(answered):
        ask = Ask(max_tokens=11, ids=(1,))
        chunks = [Chunk(at=first_s, kind="answer", characters=1, tokens=1)]
        chunks += [Chunk(at=first_s + rest_s, kind="answer", characters=9, tokens=10)]
        usage = Usage(completion_tokens=11)
        requests.append(Due(0.0, phase, ask))
        answers.append(Answer(index=index, ask=ask, planned=0.0, sent=0.0, chunks=tuple(chunks), usage=usage))
    return Turn(requests, answers, ())


def test_a_seed_makes_the_same_requests_and_a_slow_machine_is_asked_less() -> None:
    once, again, fast = (schedule(Setting(slow, 10.0, 8.0), 7, 1000) for slow in (2.0, 2.0, 1.0))
    assert once == again
    assert schedule(SETTING, 8, 1000) != once
    assert [due.at_s for due in once] == sorted(due.at_s for due in once)
    assert {due.phase for due in once} == set(PHASES)
    assert all((due.phase == FIRST) == (due.at_s <= 10.0) for due in once)
    assert len(fast) == pytest.approx(2 * len(once), abs=2)


def test_a_request_is_good_that_keeps_both_promises() -> None:
    one = turn((FIRST, 5.9, 0.119), (FIRST, 6.1, 0.01), (FIRST, 0.1, 0.121), (SECOND, 0.1, 0.1))
    found = told([one, one], SETTING)
    assert (found[FIRST]["requests"], found[FIRST]["good"], found[FIRST]["good_per_s"]) == (6, 2, 0.1)
    assert (found[FIRST]["ttft_kept"], found[FIRST]["tpot_kept"]) == (4, 4)
    assert (found[SECOND]["good"], found["all"]["good"], found["all"]["good_per_s"]) == (2, 4, 0.1)


def test_what_steering_brings_is_told_of_each_request_beside_the_same_without() -> None:
    good, bad = (FIRST, 0.1, 0.1), (FIRST, 9.9, 0.1)
    steered, fixed = turn(good, good, good, bad), turn(bad, good, bad, bad)
    found = differences([steered], [fixed], SETTING)
    assert set(found) == {FIRST, "all"}
    assert found[FIRST]["good_per_s_more"] == pytest.approx(0.2)  # two more in ten seconds
    assert found[FIRST]["low"] < 0.2 < found[FIRST]["high"]
