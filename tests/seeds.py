"""Random numbers of a test: the same in each run, whatever ran before it and on which machine.

A seed comes from the test's name. REDLINE_TEST_SEED takes the place of all of them: a number, or `fresh` for others in
each run, which a failure shows (`REDLINE_TEST_SEED=fresh make test-all` looks for what the usual numbers do not find).
"""

import os
import random
import secrets
import zlib

import torch

FRESH = "fresh"


def fresh_seed() -> int:
    """Printed, so that pytest shows it where the test fails."""
    asked = os.environ.get("REDLINE_TEST_SEED", "")
    seed = int(asked) if asked not in ("", FRESH) else secrets.randbits(31) if asked else _of_this_test()
    print(f"REDLINE_TEST_SEED={seed}")
    return seed


def fresh_generator() -> torch.Generator:
    """One with a `fresh_seed`."""
    return torch.Generator().manual_seed(fresh_seed())


def seed_globals() -> None:
    """Have the generators that all share, torch's and Python's, begin this test alike in each run."""
    seed = _of_this_test()
    torch.manual_seed(seed)
    random.seed(seed)


def _of_this_test() -> int:
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    return zlib.crc32(name.rpartition("/")[2].encode())
