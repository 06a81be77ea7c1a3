"""Generation rates with speculative decoding: all tokens over all seconds, and no rate above its floor."""

from collections.abc import Sequence

import pytest

from redline.bench.speculation.rates import Asker, Question, Rate, VariantOutcome, bench_rates, mean_times


class Scripted(Asker):
    """Gives prepared outcomes, one at a time."""

    def __init__(self, *outcomes: VariantOutcome) -> None:
        self._outcomes = iter(outcomes)

    def ask(self, questions: Sequence[Question]) -> VariantOutcome:
        return next(self._outcomes)


def rates(off: list[VariantOutcome], fast: list[VariantOutcome]) -> dict[str, Rate]:
    askers = {"off": Scripted(*off), "k3": Scripted(*fast)}
    found = bench_rates(askers, [Question("code", (1, 2))], 1, len(off))
    return {rate.variant: rate for rate in found}


def test_a_rate_is_all_tokens_over_all_seconds():
    off = [VariantOutcome(1.0, 100, [], 0.5), VariantOutcome(0.1, 20, [], 0.05)]
    found = rates(off, [VariantOutcome(0.5, 100, [], 0.25), VariantOutcome(0.3, 20, [], 0.05)])
    assert found["off"].tokens_per_s == 120 / 1.1
    assert found["k3"].tokens_per_s == 120 / 0.8
    assert found["k3"].times == pytest.approx(1.1 / 0.8)
    assert found["k3"].floor_tokens_per_s == 120 / 0.3
    assert found["k3"].above is None


def test_a_rate_above_its_floor_is_no_speed_and_says_why():
    found = rates([VariantOutcome(1.0, 100, [], 0.5)] * 2, [VariantOutcome(0.00004, 100, [], 0.25)] * 2)
    assert (found["k3"].tokens_per_s, found["k3"].times) == (None, None)
    assert found["k3"].above == "2,500,000 tokens/s measured, above the floor's 400"
    assert mean_times(list(found.values())) == {("off", 1): 1}


def test_where_no_drafts_are_above_the_floor_nothing_is_compared_with_them():
    found = rates([VariantOutcome(0.1, 100, [], 0.5)], [VariantOutcome(0.5, 100, [], 0.25)])
    assert found["k3"].tokens_per_s == 200
    assert found["k3"].times is None
    assert "without drafts" in str(found["k3"].above)


def test_where_the_machine_was_not_measured_a_rate_has_no_floor():
    found = rates([VariantOutcome(1.0, 100, [])], [VariantOutcome(0.5, 100, [])])
    assert found["k3"].times == 2
    assert found["k3"].floor_tokens_per_s is None
