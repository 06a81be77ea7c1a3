"""Our benchmark client and vLLM's own agree on a server with known delays. `make test-peers`: vLLM is gigabytes."""

from pathlib import Path

import pytest

from redline.bench.runs.two_clients import LIMIT, compare, measure

PYTHON = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"


def test_every_figure_agrees_within_two_per_cent():
    rounds = measure(PYTHON, 3)
    apart = compare(rounds)
    print(apart)
    assert apart == pytest.approx(dict.fromkeys(apart, 0.0), abs=LIMIT)
