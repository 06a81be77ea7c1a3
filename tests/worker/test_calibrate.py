"""What steps cost is measured before the first job, and leaves nothing behind."""

import pytest

from redline.worker.calibrate import calibrate
from redline.worker.config import Learned
from tests.tiny_model import BOTH, SUFFIX, job, open_engine, prompt, run, run_alone, tiny_model


def test_more_rows_and_more_positions_are_measured_and_cost_more_in_the_end():
    engine = open_engine(tiny_model(), speculation=BOTH)
    costs = calibrate(engine.runner, draft_tokens=7)
    engine.runner.close()
    assert (costs.rows, costs.counts) == ((1, 4, 16), (1, 2, 4, 8))
    assert costs.step_ms(16, 128) > costs.step_ms(1, 1)
    assert len(costs.draft_ms) == 3


def test_fewer_slots_or_pages_than_rows():
    engine = open_engine(tiny_model(), speculation=SUFFIX, pages=5, max_model_len=320, max_running=4)
    costs = calibrate(engine.runner, draft_tokens=3)
    engine.runner.close()
    assert (costs.rows, costs.counts, costs.draft_ms) == ((1, 4), (1, 2, 4), ())


def test_an_engine_that_was_calibrated_answers_as_one_that_was_not():
    engine = open_engine(tiny_model(), speculation=Learned(drafter="tiny"))
    asked = [job(f"{n}", prompt(seed=n, length=50), max_tokens=30) for n in range(3)]
    try:
        answers = run(engine, asked)
    finally:
        engine.runner.close()
    for one in asked:
        assert answers[one.id].tokens == run_alone(tiny_model(), one).tokens


@pytest.mark.parametrize(("longest", "drafts"), [(8, 3), (16, 15), (64, 15)])
def test_jobs_too_short_to_measure_with_are_served(longest: int, drafts: int):
    speculation = Learned(drafter="tiny", tokens=drafts)
    engine = open_engine(tiny_model(), speculation=speculation, max_model_len=longest, pages=4)
    asked = job("asked", prompt(seed=1, length=longest - 5), max_tokens=20)
    try:
        answer = run(engine, [asked])["asked"]
    finally:
        engine.runner.close()
    assert answer.tokens == run_alone(tiny_model(), asked, max_model_len=longest, pages=4).tokens
    assert len(answer.tokens) == 5
