"""Repeated reads of the same pages on this machine's CPU: the report, for any duration of the reads."""

import pytest
import torch

from lab.tiers_repeated import off, repeated
from redline.model.k2.shapes import shape


def test_each_number_of_pages_is_told_with_what_its_thread_computed() -> None:
    found = repeated(shape("kimi-nano"), torch.device("cpu"), pages=(1, 3), repeats=3)
    assert list(found) == ["1", "3"]
    for one in found.values():
        assert one["count"] == 3
        assert one["all"]["ms"] > 0
        assert one["computed"]["ms"] >= 0  # the system may account the CPU time after the thread has continued
        assert one["waited_of_all"] >= 0


def test_how_far_single_ones_are_off_their_median() -> None:
    assert off([8.0, 10.0, 20.0]) == {"ms": 10.0, "off_median": pytest.approx(0.25), "off_p90": 0.5}
