"""The results of a step, for each of its rows."""

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from redline.messages.job import Job, JobId, PageId, Sampling
from redline.messages.step import Begin, Row, RowResult, Step, StepResult
from redline.run.runner import Runner
from redline.run.sampling.on_host import logprobs_of
from redline.run.slots import Slots
from tests.tiny_model import VOCABULARY, job, open_engine, prompt, run, run_alone, tiny_model

PROMPT = prompt(seed=20, length=400)


def test_penalties_count_what_was_generated_and_not_the_prompt():
    asked = job("asked", PROMPT, max_tokens=30, logprobs=20, presence_penalty=1.0, frequency_penalty=1.5)
    answer = run_alone(tiny_model(), asked)
    assert set(answer.tokens) & set(PROMPT)
    seen: Counter[int] = Counter()
    for token, given in zip(answer.tokens, answer.logprobs, strict=True):
        score = {other: logprob - (seen[other] and 1.0 + 1.5 * seen[other]) for other, logprob in given.top}
        best = max(score, key=score.__getitem__)
        assert score[best] > given.top[-1][1], "the best token may not be among the 20"
        assert token == best
        seen[token] += 1


def test_repetition_counts_the_prompt_too():
    plain = run_alone(tiny_model(), job("plain", PROMPT, max_tokens=1))
    assert plain.tokens[0] in PROMPT
    punished = run_alone(tiny_model(), job("punished", PROMPT, max_tokens=1, repetition_penalty=10.0))
    assert punished.tokens[0] not in PROMPT


def test_a_row_that_does_not_sample_gives_nothing():
    engine = open_engine(tiny_model())
    try:
        assert step(engine.runner, Row(slot=0, start=0, count=9, new_pages=(PageId(3),), samples=False)) == RowResult()
        sampled = engine.runner.run(Step(number=2, rows=(Row(slot=0, start=9, count=11),))).rows[0]
        assert len(sampled.tokens) == len(sampled.logprobs) == 1
    finally:
        engine.runner.close()


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 1 << 63])
def test_a_prompt_with_an_id_that_is_no_token_ends_its_own_job_only(wrong: int):
    model = tiny_model()
    good = [job("before", PROMPT[:50]), job("after", PROMPT[:70])]
    bad = Job(id=JobId("bad"), tokens=(*PROMPT[:20], wrong), pages=(), sampling=Sampling(max_tokens=4))
    engine = open_engine(model)
    try:
        answers = run(engine, [good[0], bad, good[1]])
        again = run(engine, [bad], [job("later", PROMPT[:50])])  # its slot now serves other jobs
    finally:
        engine.runner.close()
    assert answers["bad"].finish == "error"
    assert answers["bad"].error == f"token ids must be between 0 and {VOCABULARY - 1}; the prompt contains {wrong}"
    assert again["later"].tokens == answers["before"].tokens
    assert [answers[each.id] for each in good] == [run_alone(model, each) for each in good]


@pytest.mark.parametrize("broken", ["begin", "step"])
def test_a_slot_whose_job_could_not_begin_is_not_run_by_the_step_that_is_launched_already(
    broken: str, monkeypatch: pytest.MonkeyPatch
):
    """The slot's state from its previous job names pages that now belong to the cache or to other jobs."""
    engine = open_engine(tiny_model())
    runner = engine.runner
    beginning = Slots.add_pages

    def fragile(self: Slots, slot: int, pages: Sequence[int]) -> None:
        if 9 in pages:
            raise MemoryError("no room for a table")
        beginning(self, slot, pages)

    try:
        step(runner, Row(slot=0, start=0, count=20, new_pages=(PageId(3),)))
        kept = runner.kv.planes.view(torch.int16).clone()
        if broken == "begin":
            monkeypatch.setattr(Slots, "add_pages", fragile)
        sampling = Sampling(max_tokens=4)
        begin = Begin(slot=0, tokens=PROMPT[:70], prompt=70, pages=(PageId(9),), sampling=sampling, limit=74)
        rows = (Row(slot=0, start=64, count=6),)
        if broken == "step":
            monkeypatch.setattr(runner._eager, "begin", lambda _: 1 / 0)
        queued = [
            runner.launch(Step(number=2, begins=(begin,), rows=rows)),
            runner.launch(Step(number=3, rows=(Row(slot=0, start=None, count=1),))),
        ]
        if broken == "step":
            with pytest.raises(ZeroDivisionError):
                queued[0].wait()
        else:
            assert queued[0].wait().rows[0].error == "the job could not begin: no room for a table"
        assert queued[1].wait().rows[0].error is not None
        assert torch.equal(runner.kv.planes.view(torch.int16), kept), "the slot's previous job had these pages"
    finally:
        runner.close()


def test_one_job_that_cannot_begin_leaves_the_others_of_its_step_alone(monkeypatch: pytest.MonkeyPatch):
    beginning = Slots.begin

    def fragile(self: Slots, begin: Begin) -> None:
        if len(begin.tokens) == 51:
            raise MemoryError("no room for a table")
        beginning(self, begin)

    monkeypatch.setattr(Slots, "begin", fragile)
    good = [job("before", PROMPT[:50]), job("after", PROMPT[:70])]
    engine = open_engine(tiny_model())
    try:
        answers = run(engine, [good[0], job("bad", PROMPT[:51]), good[1]])
    finally:
        engine.runner.close()
    assert answers["bad"].error == "the job could not begin: no room for a table"
    assert [answers[each.id] for each in good] == [run_alone(tiny_model(), each) for each in good]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "wild",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3, "seeded": True, "top_k": 40},
        {},
    ],
    ids=repr,
)
def test_a_penalty_that_overflows_every_logit_is_its_own_jobs_error_and_no_token(
    wild: dict[str, Any], captured: bool, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise token V would be sampled, and the next step would read past the end of the embedding."""
    monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=captured))
    jobs = [
        job("bad", PROMPT, max_tokens=20, logprobs=None, repetition_penalty=1e-40, **wild),
        job("good", PROMPT[:70], logprobs=None),
    ]
    engine = open_engine(tiny_model())
    try:
        answers = run(engine, jobs)
    finally:
        engine.runner.close()
    assert answers["bad"].finish == "error"
    assert "leave no finite logit" in answers["bad"].error
    written = {*engine.runner.slots.tokens.flatten().tolist(), *answers["bad"].tokens}
    assert 0 <= min(written) < max(written) < VOCABULARY
    assert answers["good"] == run_alone(tiny_model(), jobs[1])


def test_rows_launched_before_the_error_was_read_touch_no_page():
    """A prompt of several chunks: its second chunk is launched before the error of the first is read."""
    model = tiny_model()
    good = job("good", PROMPT[:50], max_tokens=30)
    engine = open_engine(model, step_tokens=64)
    try:
        answers = run(engine, [good, job("bad", (*PROMPT, VOCABULARY))])
    finally:
        engine.runner.close()
    assert answers["bad"].finish == "error"
    assert answers["good"] == run_alone(model, good)


def test_a_prompts_log_probabilities_are_those_of_its_logits_made_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch):
    model, whole, asked = tiny_model(), tiny_model().logits, list[torch.Tensor]()

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(hidden)
        return whole(hidden)

    monkeypatch.setattr(model, "logits", watched)
    answer = run_alone(model, job("asked", PROMPT[:387], prompt_logprobs=5, max_tokens=1))
    assert [len(hidden) for hidden in asked] == [128, 128, 128, 2]
    at_once = whole(torch.cat(asked))
    wanted = [logprobs_of(row, token, 5) for row, token in zip(at_once, PROMPT[1:387], strict=True)]
    assert list(answer.prompt_logprobs) == wanted


def test_a_step_without_rows_is_idle():
    engine = open_engine(tiny_model())
    try:
        assert engine.runner.launch(Step(number=7)).wait().rows == ()
    finally:
        engine.runner.close()


def test_what_a_step_raises_is_raised_where_it_is_awaited():
    engine = open_engine(tiny_model())
    try:
        pending = engine.runner.launch(Step(number=1, rows=(Row(slot=99, start=0, count=1),)))
        with pytest.raises(IndexError):
            pending.wait()
        assert engine.runner.launch(Step(number=2)).wait().number == 2
    finally:
        engine.runner.close()


def test_on_a_cpu_launched_steps_run_in_their_order_once_one_is_awaited():
    engine = open_engine(tiny_model())
    runner, ran = engine.runner, list[tuple[int, str]]()
    run_step = runner.run

    def watched(step: Step) -> StepResult:
        ran.append((step.number, threading.current_thread().name))
        return run_step(step)

    runner.run = watched
    launched = [runner.launch(Step(number=number)) for number in range(3)]
    here = threading.current_thread().name
    assert not ran
    assert [launched[i].wait().number for i in (1, 0)] == [1, 0]
    assert ran == [(0, here), (1, here)]
    runner.close()
    assert ran == [(0, here), (1, here), (2, here)]
    assert launched[2].wait().number == 2


def test_the_planner_is_ahead_of_a_runner_that_runs_steps_meanwhile_and_of_no_other(monkeypatch):
    engine = open_engine(tiny_model())
    engine.planner.submit(job("a", PROMPT[:20]))
    assert not engine.runner.overlaps
    assert engine.planner.next_step() is not None
    assert engine.planner.next_step() is None
    engine.runner.close()
    monkeypatch.setattr(Runner, "overlaps", property(lambda _: True))
    ahead = open_engine(tiny_model())
    ahead.planner.submit(job("a", PROMPT[:20]))
    assert [ahead.planner.next_step() is not None for _ in range(3)] == [True, True, False]


def step(runner: Runner, row: Row) -> RowResult:
    """Run the row, as the first of a new job."""
    asked = Sampling(max_tokens=4, logprobs=0)
    begin = Begin(slot=0, tokens=PROMPT[:20], prompt=20, pages=(), sampling=asked, limit=64)
    return runner.run(Step(number=1, begins=(begin,), rows=(row,))).rows[0]
