"""Step times are measured before the first job, and the measurement leaves no state in the engine."""

import functools

import pytest

from redline.messages.step import CapturedShapes, Shape
from redline.policy.costs import RoundTimes
from redline.run.runner import Runner
from redline.worker.calibrate import calibrate
from redline.worker.config import Learned
from tests.tiny_model import BLOCK, BOTH, SUFFIX, job, open_engine, prompt, run, run_alone, tiny_model


def test_more_rows_and_more_positions_are_measured_and_cost_more_in_the_end():
    engine = open_engine(tiny_model(), speculation=BOTH)
    costs = calibrate(engine.runner, draft_tokens=7)
    engine.runner.close()
    assert (costs.rows, costs.counts) == ((1, 4, 16), (1, 2, 4, 8))
    assert costs.step_ms(16, 128) > costs.step_ms(1, 1)
    assert len(costs.draft_ms) == 3


def test_a_block_drafter_has_one_pass_however_many_tokens_it_drafts():
    engine = open_engine(tiny_model(), speculation=BLOCK)
    costs = calibrate(engine.runner, draft_tokens=5)
    engine.runner.close()
    assert costs.draft_once
    assert len(costs.draft_ms) == 3
    times = RoundTimes(costs)
    drafting = [times.ms(4, depth, 4) - costs.step_ms(4, 1 + depth) for depth in (1, 5)]
    assert drafting == pytest.approx([costs.step_ms(4, 1, 1, 4) - costs.step_ms(4, 1)] * 2)


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


def test_what_is_yet_to_be_recorded_is_read_off_what_is(monkeypatch: pytest.MonkeyPatch):
    """The fake measurement: a step takes a millisecond for each token of its shape."""
    ran: list[tuple[int, int, Shape | None]] = []

    def step(runner: Runner, rows: int, count: int, propose: int, shape: Shape | None) -> float:
        ran.append((rows, count, shape))
        return float(rows if shape is None else shape.rows * shape.positions)

    monkeypatch.setattr("redline.worker.calibrate._step", step)
    monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=True))
    engine = open_engine(tiny_model(), speculation=SUFFIX, max_running=64, pages=64)
    try:
        engine.runner._captured.report = CapturedShapes(
            shapes=(*(Shape(r, c, 1024) for r in (1, 4, 16) for c in (1, 8)), DEEP)
        )
        costs = calibrate(engine.runner, draft_tokens=7)
    finally:
        engine.runner.close()
    assert (costs.rows, costs.counts) == ((1, 4, 16, 64), (1, 2, 4, 8))
    *few, many = costs.target_ms
    assert few == [(r, 2.0 * r, 4.0 * r, 8.0 * r) for r in (1, 4, 16)]
    assert many == (256.0, 256.0, 256.0, 512.0), "one shape for all up to its size, and in proportion for larger ones"
    cells = {(rows, count) for rows, count, _ in ran}
    assert cells == {(1, 1), (1, 8), (4, 1), (4, 8), (16, 1), (16, 8), (64, 1), (64, 4)}


DEEP = Shape(64, 4, 1024)


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
