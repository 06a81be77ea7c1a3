"""What prompts add to the steps of others, by a clock that tells what each step costs."""

import functools
from types import SimpleNamespace

import pytest

from redline.bench.runs import prompts_beside
from redline.bench.runs.prompts_beside import Turns, alone, beside
from redline.run.runner import Runner
from redline.wire.step import Step
from tests.tiny_model import open_engine, tiny_model

STEP, TOKEN = 1e-3, 1e-5  # seconds of a step, and of each prompt's token in it


def test_what_a_prompt_adds_is_what_its_chunk_costs(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=True))
    monkeypatch.setattr(prompts_beside, "clock", SimpleNamespace(perf_counter=lambda: now))
    engine = open_engine(tiny_model(), pages=64, max_running=8)
    launch, runner = engine.runner.launch, engine.runner

    def timed(step: Step) -> object:
        nonlocal now
        now += STEP + TOKEN * sum(row.count for row in step.rows if row.start is not None)
        return launch(step)

    monkeypatch.setattr(runner, "launch", timed)
    try:
        turns = Turns(engine)
        assert alone(turns, 100, 4) == pytest.approx(1 + 1)
        assert runner.chunks == 7
        for _ in range(3):
            turns.submit(50, 200)
        turns.milliseconds(20)
        chunks = runner.chunks
        step, added = beside(turns, 130, 5, every=4)
        assert step == pytest.approx(1)
        assert added == pytest.approx([1.3] * 5)
        assert runner.chunks == chunks + 5
        assert not runner.led
        turns.idle()
        assert engine.planner.idle
    finally:
        runner.close()


def test_a_job_that_is_refused_is_no_measurement():
    engine = open_engine(tiny_model())
    with pytest.raises(AssertionError, match="the job is refused"):
        Turns(engine).submit(5000, 1)
    engine.runner.close()
