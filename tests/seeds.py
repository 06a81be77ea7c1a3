"""Random numbers of a test: the same in each run, whatever ran before it and on which machine.

A seed comes from the test's name, and a test has one, however many generators it makes. REDLINE_TEST_SEED takes the
place of all of them: a number, or `fresh` for others in each run, which a failure shows (`REDLINE_TEST_SEED=fresh make
test-all` looks for what the usual numbers do not find).
"""

import functools
import os
import random
import secrets
import zlib

import torch

FRESH = "fresh"


def fresh_seed() -> int:
    """Printed, so that pytest shows it where the test fails."""
    seed = _seed()
    print(f"REDLINE_TEST_SEED={seed}")
    return seed


def fresh_generator() -> torch.Generator:
    """One with a `fresh_seed`."""
    return torch.Generator().manual_seed(fresh_seed())


def seed_globals() -> None:
    """Have the generators that all share, torch's and Python's, begin this test alike in each run, or with the seed
    that REDLINE_TEST_SEED asks for; one that no later run would find is printed."""
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
    """A random seed, the same from the first call of a test to its last. test: what tells it from the next one."""
    return secrets.randbits(31)


def _of_this_test() -> int:
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    return zlib.crc32(name.rpartition("/")[2].encode())
