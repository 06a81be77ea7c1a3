"""A test over random numbers that fails says which they were, and fails again over the same ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

FAILING = """
import torch
from tests.seeds import fresh_generator


def test_fails():
    print("numbers", torch.rand(3, generator=fresh_generator()).tolist())
    assert False
"""


def failure(folder: Path, **environment: str) -> tuple[str, str]:
    """What pytest shows: the seed, and the numbers."""
    (folder / "test_failing.py").write_text(FAILING)
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    clean = {name: value for name, value in os.environ.items() if name != "REDLINE_TEST_SEED"}
    shown = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**clean, "PYTHONPATH": str(root), **environment}
    ).stdout
    seed, numbers = re.search(r"^REDLINE_TEST_SEED=(\d+)$", shown, re.M), re.search(r"^numbers .*$", shown, re.M)
    assert seed is not None, shown
    assert numbers is not None, shown
    return seed[1], numbers[0]


def test_a_failure_shows_its_seed_and_the_seed_repeats_it(tmp_path: Path):
    seed, numbers = failure(tmp_path)
    assert failure(tmp_path, REDLINE_TEST_SEED=seed) == (seed, numbers)
    assert failure(tmp_path)[0] != seed


def test_no_test_takes_a_seed_that_it_does_not_show():
    found = [
        f"{path.name}: {line.strip()}"
        for path in Path(__file__).parent.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"torch\.(seed|initial_seed)\(\)|default_rng\(\)|\bRandom\(\)", line) and path != Path(__file__)
    ]
    assert found == []
