"""Choosing a worker for a job: pure functions of the known state of the workers."""

import pytest

from redline.policy.steps import StepModel
from redline.policy.targets import Targets
from redline.router.latency_model import FRESH_TOKEN_S, LatencyModel
from redline.router.placement import PlacementCandidate, PredictedPlacement, apart, beside, cheapest, predict

TARGETS = Targets(ttft_s=1.0, itl_s=0.05)


def measured(step_s: float = 0.005, row_s: float = 0.001, output: int = 100) -> LatencyModel:
    """A pace of 10,000 prompt tokens a second, with the given step time, time per row, and length of
    answers in tokens.
    """
    pace = LatencyModel(StepModel(base=1e3 * step_s, row=1e3 * row_s, prompt=0.1))
    pace.answered("", output)
    return pace


def chosen(
    tokens: int, *candidates: PlacementCandidate, pace: LatencyModel | None = None, targets: Targets = TARGETS
) -> str:
    return candidates[cheapest(predict(tokens, candidates, pace or LatencyModel(), "", targets))].worker


def test_a_conversation_returns_to_its_pages_until_more_waits_there_than_they_are_worth() -> None:
    pages, empty = PlacementCandidate("pages", 1920, 0, 3, 9999), PlacementCandidate("empty", 0, 0, 0, 9999)
    promised_nothing = Targets()

    def goes(queue: int) -> str:
        return chosen(2000, empty, pages._replace(queue=queue), targets=promised_nothing)

    assert goes(0) == "pages"
    # Computed tokens count twice, and a half for each answer that they hold up.
    beside = 0.5 * (3 * 80 - 2000)
    worth = 2 * 1920 - beside
    assert goes(int(0.99 * worth)) == "pages"
    assert goes(int(1.02 * worth)) == "empty"


def test_a_conversation_leaves_its_pages_where_answers_are_slow() -> None:
    pages, empty = PlacementCandidate("pages", 4000, 0, 20, 9999), PlacementCandidate("empty", 0, 0, 2, 9999)
    assert chosen(5000, empty, pages, pace=measured(row_s=0.0)) == "pages", "a row must not lengthen steps"
    assert chosen(5000, empty, pages, pace=measured(row_s=0.002)) == "empty", (
        "other answers would lose 0.45 of their SLO target"
    )


def test_an_answer_avoids_a_worker_that_computes_prompts() -> None:
    idle, busy = PlacementCandidate("idle", 0, 0, 5, 9999), PlacementCandidate("busy", 0, 0, 4, 9999)
    assert chosen(100, idle, busy, pace=measured()) == "busy"
    assert chosen(100, idle, busy._replace(busy=0.7), pace=measured()) == "idle"
    assert chosen(100, idle, busy._replace(busy=9.0), pace=measured()) == "idle", (
        "the worker gets more prompts than it can compute"
    )


def test_among_workers_alike_the_one_with_fewest_answers_and_of_those_the_first() -> None:
    a, b = PlacementCandidate("a", 0, 0, 2, 9999), PlacementCandidate("b", 0, 0, 1, 9999)
    for pace in (LatencyModel(), measured()):
        assert chosen(10, a, b, pace=pace) == "b"
        assert chosen(10, b, a._replace(answers=1), pace=pace) == "b"


def test_where_costs_are_as_good_as_equal_a_conversation_returns_to_its_pages() -> None:
    """As after few measured steps, if the fit finds that prompt tokens cost nothing."""
    flat = LatencyModel(StepModel(base=190.0))
    pages, empty = (
        PlacementCandidate("pages", 384, 0, 0, 9999, 0.0025),
        PlacementCandidate("empty", 0, 0, 0, 9999, 0.0020),
    )
    for pair in ((pages, empty), (empty, pages)):
        assert chosen(430, *pair, pace=flat) == "pages"
        both = predict(430, pair, flat, "", TARGETS)
        (queued,) = predict(430, [PlacementCandidate("queued", 0, 10**6, 0, 9999)], measured(), "", TARGETS)
        answers, computes = apart(both, [queued])
        assert (pair[answers].worker, computes) == ("pages", None)
        _, computes = apart([queued], both)
        assert computes is not None
        assert pair[computes].worker == "pages"


def test_a_worker_with_free_pages_is_preferred_to_one_that_would_forget_others_for_it() -> None:
    full, free = PlacementCandidate("full", 64, 0, 0, 0), PlacementCandidate("free", 0, 0, 0, 9999)
    assert chosen(1000, full, free) == "free"
    assert chosen(1000, full._replace(cached=512), free) == "full"


def expected(
    worker: str, cached: int, queue: int = 0, answers: int = 0, tokens: int = 4000, targets: Targets = TARGETS
) -> PredictedPlacement:
    (found,) = predict(tokens, [PlacementCandidate(worker, cached, queue, answers, 9999)], measured(), "", targets)
    return found


def test_a_prompt_whose_pages_fit_nowhere_now_is_computed_where_it_is_answered() -> None:
    """A transfer needs pages on both workers. If neither has room, the prompt would be computed, given up and computed
    again.
    """

    def one(worker: str, room: int, queue: int = 0) -> PredictedPlacement:
        (found,) = predict(4000, [PlacementCandidate(worker, 0, queue, 0, 9999, room=room)], measured(), "", TARGETS)
        return found

    roomy, full, busy = one("d", 4000), one("e", 3999), one("f", 4000, queue=10)
    for here, there, goes in (
        ([roomy, full], [full], (0, 0)),
        ([full, roomy], [full], (1, 0)),
        ([full, full], [roomy], (0, 0)),
        ([full, full], [full, busy], (0, 1)),  # that prefill worker may wait until pages are free on the decode worker
        ([full, full], [full], (0, None)),
        ([full, full], [full, full], (0, None)),
    ):
        assert apart(here, there) == goes


def test_a_prompt_goes_to_those_that_compute_prompts_unless_little_of_it_is_left_where_the_answer_is() -> None:
    nothing, most = expected("d", 0), expected("e", 3900)
    assert apart([nothing, nothing], [expected("p", 0)]) == (0, 0)
    assert apart([nothing, most], [expected("p", 0)]) == (1, None), "only 100 tokens are uncached"
    assert apart([nothing, most], [expected("p", 3900)]) == (1, 0), (
        "the prefill worker has the same pages cached, and no answers to hold up"
    )
    assert apart([nothing, expected("e", 3500, answers=9)], [expected("p", 3000)])[1] == 0, "9 answers would wait"
    assert apart([nothing, nothing], [expected("p", 0, queue=9000)]) == (0, None), "the prefill worker has a long queue"
    assert apart([nothing, nothing], [expected("p", 0, queue=9000), expected("q", 0)]) == (0, 1)
    assert apart([expected("d", 0, answers=4), expected("e", 0, answers=2)], [expected("p", 0)]) == (1, 0)
    assert apart([expected("d", 0, answers=1), nothing], []) == (1, None)


@pytest.mark.parametrize(("answers", "waits"), [(1, True), (40, False)])
def test_answers_near_their_promise_are_not_held_up_for_a_first_token_that_has_time(answers: int, waits: bool) -> None:
    """With 40 decode rows the inter-token latency is 46 ms; the target is 50."""
    promised = Targets(ttft_s=3.0, itl_s=0.05)
    here = expected("d", 2000, answers=answers, targets=promised)
    there = expected("p", 2000, queue=5000, targets=promised)
    assert (apart([here], [there])[1] is None) == waits


def test_a_first_token_that_is_late_anyway_is_not_bought_with_the_answers_of_others() -> None:
    """In the prefill queue the prompt would wait for 12 s, with a TTFT target of 1.5 s; on a worker with
    30 answers it would start at once and take 2 s, but then all of these answers would miss their target.
    """
    promised = Targets(ttft_s=1.5, itl_s=0.05)
    here = expected("d", 0, answers=30, tokens=20_000, targets=promised)
    assert apart([here], [expected("p", 0, queue=100_000, tokens=20_000, targets=promised)]) == (0, 0)


def test_costs_are_seconds_where_nothing_is_promised() -> None:
    (found,) = predict(1000, [PlacementCandidate("a", 200, 300, 0, 9999)], LatencyModel())
    assert found.first_token_s == pytest.approx(1100 * FRESH_TOKEN_S)
    assert found.computing_cost_s == pytest.approx(1900 * FRESH_TOKEN_S), "its own time, and that of later prompts"
    assert found.held_up_cost_s == pytest.approx(0.5 * 800 * FRESH_TOKEN_S), "a possible answer is held up"


GPU = StepModel(base=1.5, experts=9.0, row=0.03, prompt=0.0064, experts_of=384, experts_chosen=8)


def on_a_gpu() -> LatencyModel:
    """Steps of four layers of Kimi's widths on one GPU: a step of 64 tokens reads three quarters of all experts."""
    pace = LatencyModel(GPU)
    pace.step_tokens = 8192
    for _ in range(9):
        pace.answered("", 100)
    return pace


def test_a_short_prompt_costs_a_step_that_reads_nearly_all_experts() -> None:
    promised = Targets(ttft_s=0.376, itl_s=0.005)
    short, long = (
        predict(tokens, [PlacementCandidate("d", 0, 0, 8, 99_999)], on_a_gpu(), "", promised)[0] for tokens in (64, 512)
    )
    assert short.own_s > 0.5 * long.own_s, "the long prompt has eight times the tokens"
    (waits,) = predict(64, [PlacementCandidate("p", 0, 9000, 0, 99_999)], on_a_gpu(), "", promised)
    assert waits.first_token_s == pytest.approx(9000 * on_a_gpu().token_s(GPU) + 1e-3 * GPU.prompt_ms(0, 64, 8192))
    assert apart([short], [waits]) == (0, 0), "answers must not be held up for a first token that is not urgent"


def test_answers_that_are_late_are_cared_for_where_a_prompt_can_go_elsewhere() -> None:
    """Tokens are 6 ms apart with a target of 5. If only two mixed workers were available, late answers would weigh no
    more than their time.
    """
    promised = Targets(ttft_s=0.376, itl_s=0.005)
    (late,) = predict(512, [PlacementCandidate("d", 0, 0, 28, 99_999)], on_a_gpu(), "", promised)
    assert late.between_s > 0.005
    assert late.care_cost_s > 5 * late.held_up_cost_s
    (busy,) = predict(512, [PlacementCandidate("p", 0, 40_000, 0, 99_999)], on_a_gpu(), "", promised)
    assert busy.first_token_s > late.first_token_s
    assert apart([late], [busy]) == (0, 0)
    assert late.cost_s < late.beside_cost_s


def test_behind_a_prompt_come_more_where_prompts_are_computed_most_of_the_time() -> None:
    idle, half, most = (
        predict(4000, [PlacementCandidate("p", 0, 0, 0, 99_999, busy)], measured(), "", Targets(ttft_s=9.0))[
            0
        ].computing_cost_s
        for busy in (0.0, 0.5, 0.99)
    )
    assert 1.4 * idle < half < most < 9 * idle


def test_what_holds_answers_up_counts_more_where_each_makes_steps_longer() -> None:
    flat, steep = (
        predict(4000, [PlacementCandidate("d", 0, 0, 8, 99_999)], measured(step_s, row_s))[0].held_up_cost_s
        for step_s, row_s in ((0.01, 0.0), (0.002, 0.001))
    )
    assert steep > 2.5 * flat


def test_a_queue_for_prompts_is_no_crowd_where_answers_are() -> None:
    assert beside(3, 0, 2.0, 60.0) == 3
    assert beside(3, 4, 2.0, 0.0) == beside(3, 4, 2.0, 1.0) == 7, "the prompts arrive before an answer ends"
    assert beside(3, 60, 2.0, 60.0) == 5, "one arrives each second, and its answer takes two"
    assert beside(0, 60, 0.0, 60.0) == 0
