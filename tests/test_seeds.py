"""A test with random numbers gets the same ones in each run, unless others are requested; a failure prints the seed."""

import os
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.seeds import fresh_seed, seed_globals

FAILING = """
import random
import torch
from tests.seeds import fresh_generator, seed_globals


def test_fails():
    seed_globals()
    own = [torch.rand(3, generator=fresh_generator()).tolist() for _ in range(2)]
    print("numbers", own, torch.rand(3).tolist(), random.random())
    assert False
"""


def failure(folder: Path, **environment: str) -> tuple[str, str]:
    """The seed and the numbers, from pytest's output."""
    (folder / "test_failing.py").write_text(FAILING)
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    clean = {name: value for name, value in os.environ.items() if name != "REDLINE_TEST_SEED"}
    shown = forked.run(
        command, capture_output=True, text=True, check=False, cwd=root, env={**clean, **environment}
    ).stdout
    seeds, numbers = set(re.findall(r"^REDLINE_TEST_SEED=(\d+)$", shown, re.M)), re.search(r"^numbers .*$", shown, re.M)
    assert len(seeds) == 1, shown
    assert numbers is not None, shown
    return seeds.pop(), numbers[0]


@pytest.mark.slow
def test_a_failure_shows_its_seed_which_is_the_same_each_time_unless_others_are_asked_for(tmp_path: Path):
    seed, numbers = failure(tmp_path)
    assert failure(tmp_path, REDLINE_TEST_SEED=seed) == (seed, numbers)
    fresh, others = failure(tmp_path, REDLINE_TEST_SEED="fresh")
    assert (fresh, others) != (seed, numbers)
    assert failure(tmp_path, REDLINE_TEST_SEED=fresh) == (fresh, others)
    assert failure(tmp_path) == (seed, numbers)


def test_every_test_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REDLINE_TEST_SEED", raising=False)
    seeds = []
    for name in (
        "tests/a/test_a.py::test_one (setup)",
        "tests/a/test_a.py::test_one (call)",
        "tests/test_b.py::test_b (call)",
    ):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", name)
        seeds.append(fresh_seed())
    assert seeds[0] == seeds[1] != seeds[2]


def test_the_generators_that_all_share_begin_each_test_alike():
    first = torch.rand(3), random.random()
    seed_globals()
    assert (torch.rand(3).tolist(), random.random()) == (first[0].tolist(), first[1])


def test_no_test_takes_a_seed_that_it_does_not_show():
    found = [
        f"{path.name}: {line.strip()}"
        for path in Path(__file__).parent.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"torch\.(seed|initial_seed)\(\)|default_rng\(\)|\bRandom\(\)", line) and path != Path(__file__)
    ]
    assert found == []
