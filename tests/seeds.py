"""Tests over other numbers each time: a failure shows the seed, and REDLINE_TEST_SEED repeats it."""

import os
import secrets

import torch


def fresh_seed() -> int:
    """Printed, so that pytest shows it where the test fails."""
    seed = int(os.environ.get("REDLINE_TEST_SEED") or secrets.randbits(31))
    print(f"REDLINE_TEST_SEED={seed}")
    return seed


def fresh_generator() -> torch.Generator:
    return torch.Generator().manual_seed(fresh_seed())
