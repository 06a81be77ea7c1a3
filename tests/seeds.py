"""Random numbers of a test: the same in each run, after any other tests and on any machine.

A seed is derived from the test's name, and a test has one seed for all of its generators. REDLINE_TEST_SEED replaces
all seeds: with a number, or with `fresh` for new ones in each run, which a failure prints (`REDLINE_TEST_SEED=fresh
make test-all` finds errors that the usual numbers do not).
"""

import functools
import os
import random
import secrets
import zlib

import torch

FRESH = "fresh"


def fresh_seed() -> int:
    """A new seed, printed, so that pytest shows it if the test fails."""
    seed = _seed()
    print(f"REDLINE_TEST_SEED={seed}")
    return seed


def fresh_generator() -> torch.Generator:
    """A generator with a `fresh_seed`."""
    return torch.Generator().manual_seed(fresh_seed())


def seed_globals() -> None:
    """Seed the global generators of torch and Python, so that each run of this test gets the same numbers, or those of
    REDLINE_TEST_SEED; a seed that no later run would choose is printed.
    """
    seed = fresh_seed() if os.environ.get("REDLINE_TEST_SEED") == FRESH else _seed()
    torch.manual_seed(seed)
    random.seed(seed)


def _seed() -> int:
    asked = os.environ.get("REDLINE_TEST_SEED", "")
    if asked not in ("", FRESH):
        return int(asked)
    return _random(_of_this_test()) if asked else _of_this_test()


@functools.lru_cache(1)
def _random(test: int) -> int:
    """A random seed, the same from the first call of a test to its last. test: distinguishes tests."""
    return secrets.randbits(31)


def _of_this_test() -> int:
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    return zlib.crc32(name.rpartition("/")[2].encode())
