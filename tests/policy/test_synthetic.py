"""The meaning of a configured synthetic acceptance: rates, lengths, and values that are neither."""

import pytest

from redline.errors import ConfigError
from redline.policy.synthetic import GOLDEN, length_of, rates_of, read_acceptance


def test_a_length_is_the_schedule_of_least_variance():
    assert rates_of(2.88, 3, "a") == pytest.approx((1.0, 0.88, 0.0))
    assert rates_of(1.0, 3, "a") == (0.0, 0.0, 0.0)
    assert rates_of(4.0, 3, "a") == (1.0, 1.0, 1.0)
    assert rates_of(1.5, 1, "a") == (0.5,)


@pytest.mark.parametrize("drafts", range(1, 6))
def test_the_golden_curve_is_one_of_lengths(drafts: int):
    length = GOLDEN[drafts - 1]
    assert length_of(rates_of(length, drafts, "a")) == pytest.approx(length)


def test_rates_are_taken_as_they_are_and_of_more_the_first_count():
    assert rates_of((0.83, 0.6, 0.45), 3, "a") == (0.83, 0.6, 0.45)
    assert rates_of((0.83, 0.6, 0.45), 1, "a") == (0.83,)
    assert length_of((0.83, 0.6, 0.45)) == pytest.approx(2.88)


@pytest.mark.parametrize(
    ("acceptance", "says"),
    [
        (0.9, "a is 0.9; expected a mean number of tokens per round, 1 to 4"),
        (4.01, "a is 4.01; .* 1 to 4"),
        (float("nan"), "a is nan"),
        ((0.9, 0.5), "a has 2 rates; expected 3"),
        ((0.5, 0.6, 0.1), "a is 0.5, 0.6, 0.1; expected shares from 0 to 1 that never rise"),
        ((1.2, 0.6, 0.1), "never rise"),
        ((0.5, 0.2, -0.1), "never rise"),
        ((0.5, float("nan"), 0.1), "never rise"),
    ],
)
def test_what_is_neither_is_refused(acceptance: float | tuple[float, ...], says: str):
    with pytest.raises(ConfigError, match=says):
        rates_of(acceptance, 3, "a")


def test_a_comma_makes_rates():
    assert read_acceptance("2.88", "a") == 2.88
    assert read_acceptance("0.83,0.6, 0.45", "a") == (0.83, 0.6, 0.45)
    assert read_acceptance("0.83,", "a") == (0.83,)
    for text in ("", ",", "golden", "0.8,much"):
        with pytest.raises(ConfigError, match=r"expected a length such as 2\.88, or rates"):
            read_acceptance(text, "a")
