"""Who gets a job: pure functions over what is known of the workers."""

import pytest

from redline.route.choose import ANSWER_TOKENS, FRESH_TOKEN_S, Candidate, Pace, Predicted, apart, cheapest, predict


def chosen(tokens: int, *candidates: Candidate) -> str:
    return candidates[cheapest(predict(tokens, candidates, FRESH_TOKEN_S))].worker


def test_a_conversation_returns_to_its_pages_until_more_waits_there_than_they_are_worth() -> None:
    pages, empty = Candidate("pages", 1920, 0, 3, 9999), Candidate("empty", 0, 0, 0, 9999)
    assert chosen(2000, empty, pages) == "pages"
    assert chosen(2000, empty, pages._replace(queue=2 * 1920 - 3 * ANSWER_TOKENS - 1)) == "pages"
    assert chosen(2000, empty, pages._replace(queue=2 * 1920 - 3 * ANSWER_TOKENS + 1)) == "empty"


def test_among_workers_alike_the_one_with_fewest_answers_and_of_those_the_first() -> None:
    a, b = Candidate("a", 0, 0, 2, 9999), Candidate("b", 0, 0, 1, 9999)
    assert chosen(10, a, b) == "b"
    assert chosen(10, b, a._replace(answers=1)) == "b"


def test_a_worker_with_free_pages_is_preferred_to_one_that_would_forget_others_for_it() -> None:
    full, free = Candidate("full", 64, 0, 0, 0), Candidate("free", 0, 0, 0, 9999)
    assert chosen(1000, full, free) == "free"
    assert chosen(1000, full._replace(cached=512), free) == "full"


def test_a_pace_follows_what_is_measured() -> None:
    pace = Pace()
    assert pace.token_s == FRESH_TOKEN_S
    for _ in range(50):
        pace.computed(1000, 1.0)
    assert pace.token_s == pytest.approx(1e-3)
    for _ in range(50):
        pace.computed(100, 0.3)
    assert pace.token_s == pytest.approx(3e-3, rel=0.05)


def expected(worker: str, cached: int, queue: int = 0, answers: int = 0, tokens: int = 4000) -> Predicted:
    (found,) = predict(tokens, [Candidate(worker, cached, queue, answers, 9999)], FRESH_TOKEN_S)
    return found


def test_a_prompt_goes_to_those_that_compute_prompts_unless_little_of_it_is_left_where_the_answer_is() -> None:
    nothing, most = expected("d", 0), expected("e", 3900)
    assert apart([nothing, nothing], [expected("p", 0)]) == (0, 0)
    assert apart([nothing, most], [expected("p", 0)]) == (1, None), "100 tokens are left"
    assert apart([nothing, most], [expected("p", 3900)]) == (1, 0), "as many there, where nobody is held up"
    assert apart([nothing, expected("e", 3500, answers=9)], [expected("p", 2000)])[1] == 0, "9 would wait"
    assert apart([nothing, nothing], [expected("p", 0, queue=9000)]) == (0, None), "others wait there"
    assert apart([nothing, nothing], [expected("p", 0, queue=9000), expected("q", 0)]) == (0, 1)
    assert apart([expected("d", 0, answers=4), expected("e", 0, answers=2)], [expected("p", 0)]) == (1, 0)
    assert apart([expected("d", 0, answers=1), nothing], []) == (1, None)


def test_an_answer_that_is_held_up_counts_half() -> None:
    """Of 500 tokens beside nine answers: (2 x 500 + 9 x 64) x (1 + 9 / 2) = 8,668; elsewhere 4,676 and what waits."""
    beside = expected("d", 3500, answers=9)
    assert apart([beside], [expected("p", 2000, queue=3_900)]) == (0, 0)
    assert apart([beside], [expected("p", 2000, queue=4_100)]) == (0, None)
