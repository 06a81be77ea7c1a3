"""The step model: it recovers a known model from synthetic steps, and its errors on recorded ones."""

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from redline.policy.pairs import Work, expanded_of, pairs_of
from redline.policy.steps import ADDED, LATELY, UNUSUAL, StepModel, StepTimeFit, StepTimeStats, on_the_mean

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "step-times-cpu.json"
TRUE = StepModel(
    base=4.0,
    experts=18.0,
    row=0.2,
    context=3e-5,
    prompt=0.02,
    pair=1e-6,
    expand=2e-4,
    experts_of=384,
    experts_chosen=8,
)


def some_steps(count: int, seed: int = 1) -> list[Work]:
    draw = random.Random(seed)
    found: list[Work] = []
    for _ in range(count):
        rows, prompt = draw.randrange(64), draw.choice((0, 0, draw.randrange(1, 8192)))
        before = draw.randrange(20_000) if prompt else 0
        if rows or prompt:
            expanded = expanded_of(before, prompt) if prompt else 0
            found.append(Work(prompt, pairs_of(before, prompt), rows, rows * draw.randrange(100, 30_000), expanded))
    return found


def fitted(runs: Mapping[str, Sequence[tuple[Work, float]]], experts_of: int, experts_chosen: int) -> StepModel:
    """The model fitted to the runs named `fit`."""
    fit = StepTimeFit(experts_of=experts_of, experts_chosen=experts_chosen)
    for name, steps in runs.items():
        if name.startswith("fit"):
            for work, ms in steps:
                fit.add(work, ms)
    return fit.model()


def errors(model: StepModel, steps: Sequence[tuple[Work, float]]) -> dict[str, float]:
    """Errors of predictions: the mean over single steps, and of the sum of all steps."""
    predicted = [model.step_ms(work) for work, _ in steps]
    single = statistics.fmean(abs(a / ms - 1) for a, (_, ms) in zip(predicted, steps, strict=True))
    whole = sum(predicted) / sum(ms for _, ms in steps) - 1
    return {"steps": len(steps), "of_a_step": round(single, 4), "of_all": round(whole, 4)}


def read(path: Path) -> tuple[dict[str, list[tuple[Work, float]]], dict[str, Any]]:
    """The runs of a saved result, and its other fields."""
    record = json.loads(path.read_text())
    runs = {name: [(Work(*line[:-1]), line[-1]) for line in lines] for name, lines in record.pop("runs").items()}
    return runs, record


def test_runs_of_other_lengths_and_loads_are_predicted_within_a_tenth():
    """Recorded on a CPU: fitted to four loads, and tested on three with other lengths and other numbers of jobs."""
    runs, said = read(RECORDED)
    model = fitted(runs, said["experts_of"], said["experts_chosen"])
    held = {name: errors(model, steps) for name, steps in runs.items() if name.startswith("held")}
    assert len(held) == 3
    assert max(abs(each["of_all"]) for each in held.values()) <= 0.10, held
    assert sum(each["of_a_step"] for each in held.values()) / 3 <= 0.15, held


def test_what_made_the_steps_is_found_again():
    fit = StepTimeFit(experts_of=384, experts_chosen=8)
    noise = random.Random(2)
    for work in some_steps(600):
        fit.add(work, TRUE.step_ms(work) * noise.uniform(0.97, 1.03))
    model = fit.model()
    for work in some_steps(100, seed=3):
        assert model.step_ms(work) == pytest.approx(TRUE.step_ms(work), rel=0.05)


def test_a_step_in_ten_that_took_five_times_as_long_changes_little():
    fit = StepTimeFit(experts_of=384, experts_chosen=8)
    for number, work in enumerate(some_steps(600)):
        fit.add(work, TRUE.step_ms(work) * (5 if number % 10 == 0 else 1))
    model = fit.model()
    for work in some_steps(100, seed=3):
        assert model.step_ms(work) == pytest.approx(TRUE.step_ms(work), rel=0.10)


def test_hours_of_decoding_do_not_forget_what_prompts_take():
    fit = StepTimeFit(experts_of=384, experts_chosen=8)
    for work in some_steps(300):
        fit.add(work, TRUE.step_ms(work))
    for number in range(20_000):
        work = Work(rows=20 + number % 3, context=100_000)
        fit.add(work, TRUE.step_ms(work))
    prompt = Work(4096, pairs_of(0, 4096), 0, 0, 4096)
    assert fit.model().step_ms(prompt) == pytest.approx(TRUE.step_ms(prompt), rel=0.05)
    assert len(fit) < 10_000


def test_no_time_is_learnt_from_a_clock_that_stood_still():
    fit = StepTimeFit(TRUE)
    for ms in (0.0, -1.0, float("nan"), float("inf")):
        fit.add(Work(rows=1, context=100), ms)
    assert len(fit) == 0
    assert fit.model() == TRUE


def test_what_was_never_measured_stays_as_it_was_believed():
    fit = StepTimeFit(TRUE)
    for rows in range(1, 60):
        work = Work(rows=rows, context=1000 * rows)
        fit.add(work, 2 * TRUE.step_ms(work))
    model = fit.model()
    assert model.decode_ms(30, 1000) == pytest.approx(2 * TRUE.decode_ms(30, 1000), rel=0.05)
    assert model.prompt == pytest.approx(TRUE.prompt)


def test_no_coefficient_is_negative():
    fit = StepTimeFit()
    for rows in range(1, 40):
        fit.add(Work(rows=rows, context=100 * rows), 40.0 - rows)
    model = fit.model()
    assert min(model.base, model.row, model.context, model.prompt, model.pair, model.expand) >= 0


def test_a_prompts_time_is_that_of_its_steps():
    for cached, uncached, chunk in ((0, 1000, 256), (640, 2048, 512), (64, 100, 8192)):
        took, done = 0.0, 0
        while done < uncached:
            size = min(chunk, uncached - done)
            work = Work(size, pairs_of(cached + done, size), 3, 6000, expanded_of(cached + done, size))
            took, done = took + TRUE.step_ms(work), done + size
        assert TRUE.prompt_ms(cached, uncached, chunk, rows=3, context=2000) == pytest.approx(took)
    assert TRUE.prompt_ms(100, 0, 256) == 0


def test_where_one_step_in_five_takes_eight_times_as_long_the_mean_of_many_is_told():
    """As on a shared machine: a fit by relative errors gives the usual time of a step, but an answer takes the sum."""
    draw, fit, steps = random.Random(5), StepTimeFit(experts_of=384, experts_chosen=8), list[tuple[Work, float]]()
    for work in some_steps(3000):
        steps.append((work, TRUE.step_ms(work) * draw.choice((1, 1, 1, 1, 8))))
        fit.add(*steps[-1])
    usual = fit.model()
    mean = on_the_mean(usual, steps)
    for prompts in (True, False):
        some = [each for each in steps if bool(each[0].prompt) == prompts]
        took_ms = sum(ms for _, ms in some)
        assert sum(usual.step_ms(work) for work, _ in some) < 0.7 * took_ms
        assert sum(mean.step_ms(work) for work, _ in some) == pytest.approx(took_ms, rel=0.25)


def test_the_newest_steps_say_how_far_the_mean_is_from_what_is_usual():
    some = some_steps(600)
    slower = [(work, 3 * TRUE.step_ms(work)) for work in some[-2 * LATELY * 3 :]]
    model = on_the_mean(TRUE, [*((work, TRUE.step_ms(work)) for work in some), *slower])
    for work, _ in slower:
        assert model.step_ms(work) == pytest.approx(3 * TRUE.step_ms(work), rel=0.01)
    assert on_the_mean(TRUE, []) == TRUE
    assert on_the_mean(TRUE, slower[:2]) == TRUE


def summed(works: list[Work], took: list[float]) -> StepTimeStats:
    sums = StepTimeStats()
    sums.experts_of, sums.experts_chosen = TRUE.experts_of, TRUE.experts_chosen
    for work, ms in zip(works, took, strict=True):
        sums.add(work, ms)
    return sums


def test_sums_find_what_steps_take_and_say_nothing_of_none():
    assert StepTimeStats().model() is None
    draw, works = random.Random(2), some_steps(600, 3)
    found = summed(works, [TRUE.step_ms(work) * draw.uniform(0.95, 1.05) for work in works]).model()
    assert found is not None
    for work in some_steps(200, 4):
        assert found.step_ms(work) == pytest.approx(TRUE.step_ms(work), rel=0.12)
    for cached, uncached in ((0, 64), (0, 2000), (8000, 100), (20_000, 1000)):
        assert found.prompt_ms(cached, uncached, 8192) == pytest.approx(
            TRUE.prompt_ms(cached, uncached, 8192), rel=0.15
        )


def test_sums_follow_a_machine_that_becomes_slower_by_the_mean_of_what_happens():
    """Every tenth step takes five times as long: many steps together take 1.4 times the usual time."""
    works = some_steps(400, 5)
    found = summed(works * 2, [TRUE.step_ms(w) for w in works] + [2 * TRUE.step_ms(w) for w in works]).model()
    assert found is not None
    assert found.step_ms(works[0]) == pytest.approx(2 * TRUE.step_ms(works[0]), rel=0.1)
    alike = [Work(rows=4, context=4000)] * 200
    uneven = summed(alike, [(5.0 if place % 10 == 9 else 1.0) for place in range(200)]).model()
    assert uneven is not None
    assert uneven.step_ms(alike[0]) == pytest.approx(1.4, rel=0.25)


def test_where_all_prompts_were_alike_what_is_cached_is_not_taken_for_work():
    works = [Work(8192, pairs_of(0, 8192), 0, 0, 8192)] * 50 + [Work(rows=8, context=8000)] * 50
    found = summed(works, [TRUE.step_ms(work) for work in works]).model()
    assert found is not None
    assert found.prompt_ms(0, 8192, 8192) == pytest.approx(TRUE.step_ms(works[0]), rel=0.02)
    assert found.prompt_ms(8000, 192, 8192) < 0.3 * found.prompt_ms(0, 8192, 8192)


def test_a_step_in_which_kernels_were_compiled_is_no_pace():
    works = [Work(rows=4, context=4000)] * 40
    took = [1.0] * 20 + [20_000.0] + [1.0] * 19
    found = summed(works, took).model()
    assert found is not None
    assert found.step_ms(works[0]) < 1 + UNUSUAL / 20


def test_sums_are_solved_anew_only_once_so_many_steps_have_come():
    sums, work = StepTimeStats(), Work(rows=1)
    for place in range(ADDED):
        sums.add(work, 2.0)
        assert sums.model() is not None, place
    for _ in range(ADDED):
        sums.add(work, 2.0)
    before = sums.model()
    for _ in range(ADDED - 1):
        sums.add(work, 9.0)
        assert sums.model() is before
    sums.add(work, 9.0)
    assert sums.model() is not before


def test_times_that_are_none_are_left_out_of_sums():
    sums = StepTimeStats()
    for ms in (0.0, -1.0, float("nan"), float("inf")):
        sums.add(Work(rows=1), ms)
    assert sums.model() is None
