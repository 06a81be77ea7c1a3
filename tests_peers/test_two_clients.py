"""Our benchmark client and vLLM's own agree on one server. `make test-peers`: vLLM is gigabytes."""

from pathlib import Path

from lab.two_clients import HELD, KEYS, compare, measure, measure_served, off_the_log, too_far

PYTHON = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
MODEL = Path(__file__).parents[1] / "models" / "kimi-nano"


def test_every_figure_agrees_on_a_server_with_known_delays_and_ours_is_that_of_its_log():
    rounds, logs = measure(PYTHON, 3)
    print(compare(rounds), logs)
    assert not too_far(rounds, KEYS)
    assert not off_the_log(logs)


def test_times_and_rates_agree_on_a_model_that_is_served():
    rounds = measure_served(PYTHON, 7, MODEL)
    print(compare(rounds))
    assert not too_far(rounds, HELD)
