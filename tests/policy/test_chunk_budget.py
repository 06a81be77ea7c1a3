"""The length of a chunk, computed by hand: 10 ms a step, 0.1 ms a prompt token, and in tests with
pairs 1 ms for 1,000.
"""

import math

import pytest

from redline.policy.chunk_budget import SHARE, Answers, PrefillLeft, chunk_tokens, work_of
from redline.policy.pairs import Work

ONE = Answers(rows=1)
LONG = PrefillLeft(5000)


def ms(work: Work) -> float:
    return 10 + 0.1 * work.prompt


def with_pairs(work: Work) -> float:
    return ms(work) + work.pairs / 1000


@pytest.mark.parametrize(
    ("step_ms", "tokens"),
    [
        (16.5 / SHARE, 64),
        (22.7 / SHARE, 64),
        (22.9 / SHARE, 128),
        (59.9 / SHARE, 448),
        (60.1 / SHARE, 500),  # the most tokens of a step, though not a whole number of pages
        (math.inf, 500),
    ],
)
def test_a_chunk_is_as_many_pages_as_there_is_time_for(step_ms: float, tokens: int) -> None:
    assert chunk_tokens(ms, 500, step_ms, ONE, [LONG]) == tokens


def test_there_is_never_more_than_there_may_be() -> None:
    assert chunk_tokens(ms, 40, 1.0, ONE, [LONG]) == 40
    assert chunk_tokens(ms, 1, 1.0, ONE, [LONG]) == 1


@pytest.mark.parametrize("most", [0, 500])
def test_where_nobody_has_a_share_nothing_is_chosen(most: int) -> None:
    assert chunk_tokens(ms, most, 1.0, ONE, [LONG], sharing=0) == most
    assert chunk_tokens(ms, most, 1.0, ONE, []) == most


def test_prompts_that_end_in_the_step_take_no_more_than_they_have() -> None:
    assert chunk_tokens(ms, 500, 30.1 / SHARE, ONE, [PrefillLeft(200)]) == 500
    assert chunk_tokens(ms, 500, 29.9 / SHARE, ONE, [PrefillLeft(200)]) == 192


def test_a_step_is_shared_as_the_planner_shares_it() -> None:
    """Half goes to shorter prompts, the shortest first; the oldest gets the rest."""
    answers = Answers(rows=3, context=700.0)
    prompts = [PrefillLeft(1000, before=100), PrefillLeft(2000), PrefillLeft(60, before=640), PrefillLeft(90)]
    work = work_of(256, prompts, answers)
    assert (work.prompt, work.rows, work.context) == (256, 3, 700.0)
    assert work.pairs == 60 * (640 + 30.5) + 68 * 34.5 + 128 * (100 + 64.5)
    assert work.expanded == 704 + 128 + 256
    assert work_of(256, [PrefillLeft(50), PrefillLeft(100)], answers).prompt == 150


def test_what_a_prompt_attends_to_is_weighed_where_it_has_a_share() -> None:
    deep = PrefillLeft(5000, before=1000)
    assert chunk_tokens(with_pairs, 500, 110 / SHARE, ONE, [deep]) == 64  # 128 of its tokens take 159 ms, 64 take 82
    # Half of 128 goes to the shorter prompt; its 64 tokens take 2 ms for pairs: 90 ms in all.
    assert chunk_tokens(with_pairs, 500, 110 / SHARE, ONE, [deep, PrefillLeft(200)]) == 128
    assert chunk_tokens(with_pairs, 500, 110 / SHARE, ONE, [deep, PrefillLeft(200)], sharing=1) == 64


def test_where_no_page_keeps_the_time_answers_wait_in_all_a_third_longer_than_by_whole_chunks() -> None:
    """Each token adds 0.1 ms for any chunk length: then a chunk is one page. If each chunk adds 40 ms in addition, a
    token adds 0.180 ms in a chunk of 500, 0.225 in one of 320, and 0.256 in one of 256.
    """
    assert chunk_tokens(ms, 500, 16.3 / SHARE, ONE, [LONG]) == 64
    assert chunk_tokens(ms, 500, 1.0, ONE, [LONG]) == 64
    assert chunk_tokens(lambda work: ms(work) + 40 * (work.prompt > 0), 500, 50.0, ONE, [LONG]) == 320


@pytest.mark.parametrize(
    ("due", "tokens"),
    [
        ([(1000, math.inf)] * 2, 64),
        ([(190, 0.1), (190, 0.1)], 64),  # both need 3.8 tokens per ms; chunks of 64 give 3.9
        # both need 3.98, the first alone 2.0: one first token is at stake, against one answer
        ([(199, 0.1), (199, 0.1)], 64),
        ([(400, 0.1), (10, 0.1)], 64),  # the same
        ([(400, 0.1), (400, 0.2)], 128),  # each needs 4.0 per ms; chunks of 128 give 5.6
        ([(400, 0.1), (400, 0.1)], 448),  # both need 8.0; chunks of 448 give 8.2
        ([(410, 0.1), (410, 0.1)], 500),  # both need 8.2; all 500 give 8.3
        ([(400, 0.1), (900, 0.1), (400, 0.2)], 448),  # the second is late in any case, and delays no other
        ([(400, 0.1), (400, -1.0), (900, 0.1)], 64),  # one is late already, one is late in any case
    ],
)
def test_more_first_tokens_that_would_be_late_than_answers_lengthen_it(
    due: list[tuple[int, float]], tokens: int
) -> None:
    prompts = [PrefillLeft(tokens, left_s=left_s / SHARE) for tokens, left_s in due]
    assert chunk_tokens(ms, 500, 16.5 / SHARE, ONE, prompts) == tokens
