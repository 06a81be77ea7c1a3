"""How read bandwidth and multiplication rates are measured."""

import pytest
import torch

from redline.kernels import rates
from tests.clocks import FakeClock


def test_a_format_that_the_chip_has_no_instructions_for_is_tried_on_small_matrices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    for bf16, whole, best in ((0.02, [0.1], 0.1), (0.001, [0.1, 0.05], 0.05)):
        left = iter([0.001, bf16, *whole])  # float32 small, bf16 small, and then the full-size measurements
        monkeypatch.setattr(rates, "_seconds", lambda *_, left=left: next(left))
        assert rates.product_rate(torch.device("cpu"), 1, side=64) == 2 * 64**3 / best
        assert next(left, None) is None
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("seconds", "best", "times"), [(0.02, 0.001, 2), (0.005, 0.1, 13)])
def test_a_way_that_takes_ten_times_as_long_is_run_twice(seconds: float, best: float, times: int) -> None:
    clock, calls = FakeClock(), 0

    def work() -> torch.Tensor:
        nonlocal calls
        calls += 1
        clock.advance(seconds)
        return torch.empty(0)

    with clock.installed():
        assert rates._seconds(work, torch.device("cpu"), 5, best) == pytest.approx(seconds)
    assert calls == times


def test_one_slow_run_does_not_make_rounds_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = 0.0, iter([1.0, 0.03])  # the warm-up, and a run disturbed by other processes
    calls: list[float] = []

    def work() -> torch.Tensor:
        nonlocal now
        calls.append(next(took, 0.001))
        now += calls[-1]
        return torch.empty(0)

    monkeypatch.setattr(rates.clock, "perf_counter", lambda: now)
    assert rates._seconds(work, torch.device("cpu"), 5) == pytest.approx(0.001)
    assert len(calls) == 3 + 5 * 10, "ten milliseconds a round"
