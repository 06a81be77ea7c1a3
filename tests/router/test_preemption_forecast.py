"""The expected time until a pre-empted job continues."""

import pytest

from redline.messages.delta import Preempted
from redline.messages.job import JobId
from redline.policy.steps import StepModel
from redline.router.latency_model import LatencyModel
from redline.router.preemption_forecast import ConcurrentAnswer, goes_on


def lost(short: int, again: int = 100) -> Preempted:
    return Preempted(by=JobId("other"), running=2, pages=20, lost_tokens=300, again_tokens=again, short_pages=short)


def paced() -> LatencyModel:
    """A millisecond per prompt token, 10 between two tokens of an answer, answers of 50 tokens."""
    pace = LatencyModel(StepModel(base=10.0, prompt=1.0))
    pace.answered("", 50)
    return pace


def test_where_there_are_pages_it_only_computes_again() -> None:
    assert goes_on(lost(0), [], paced()) == (0.0, pytest.approx(0.11))


def test_it_waits_for_as_many_answers_to_end_as_hold_what_it_wants() -> None:
    soon, later = ConcurrentAnswer(4, 90, 100, ""), ConcurrentAnswer(4, 10, 100, "")
    pace = paced()
    assert goes_on(lost(5), [later, soon], pace).wait_s == pytest.approx(0.1), "that answer has at most 10 tokens left"
    assert goes_on(lost(6), [later, soon], pace).wait_s == pytest.approx(0.5), "the mean time of an answer"
    assert goes_on(lost(60), [later, soon], pace).wait_s == pytest.approx(0.5), "no other answers are known"
