"""How long a chunk is, by hand: 10 ms a step and 0.1 ms a token, so 140 tokens in 24 ms and 5.8 a ms of 140."""

import math

import pytest

from redline.tune.chunks import SHARE, Due, chunk_tokens


def ms(tokens: int) -> float:
    return 10 + 0.1 * tokens


@pytest.mark.parametrize(
    ("step_ms", "tokens"),
    [
        (1, 64),  # a page in any case
        (16.4 / SHARE, 64),
        (22.7 / SHARE, 64),
        (22.9 / SHARE, 128),
        (59.9 / SHARE, 448),
        (60.1 / SHARE, 500),  # all that there may be, though it is no page
        (math.inf, 500),
    ],
)
def test_a_chunk_is_as_many_pages_as_there_is_time_for(step_ms: float, tokens: int) -> None:
    assert chunk_tokens(ms, 500, step_ms) == tokens


def test_there_is_never_more_than_there_may_be() -> None:
    assert chunk_tokens(ms, 40, 1.0) == 40
    assert chunk_tokens(ms, 1, 1.0) == 1


@pytest.mark.parametrize(
    ("due", "tokens"),
    [
        ([Due(1000, math.inf)], 64),
        ([Due(380, 0.1 / SHARE)], 64),  # 3.8 a ms; of 64 there are 3.9
        ([Due(400, 0.1 / SHARE)], 128),  # 4.0; of 128 there are 5.6
        ([Due(800, 0.1 / SHARE)], 448),  # 8.0; of 448 there are 8.2
        ([Due(820, 0.1 / SHARE)], 500),  # 8.2; of all there are 8.3
        ([Due(840, 0.1 / SHARE)], 64),  # 8.4: late in any case
        ([Due(300, -1.0)], 64),  # late already
        ([Due(5000, math.inf), Due(100, 0.1 / SHARE)], 64),  # the shorter one has half of 3.9
        ([Due(5000, math.inf), Due(200, 0.1 / SHARE)], 128),  # 2 x 2.0 a ms
        ([Due(300, math.inf), Due(400, 0.1 / SHARE)], 256),  # behind the older one 7.0; of 256 there are 7.2
    ],
)
def test_first_tokens_that_would_be_late_lengthen_it(due: list[Due], tokens: int) -> None:
    assert chunk_tokens(ms, 500, 1.0, due) == tokens
