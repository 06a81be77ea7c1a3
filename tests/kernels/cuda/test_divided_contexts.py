"""When each rank reads a part of every context (divided contexts), compared with the time that it saved on two GPUs."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from redline.kernels.cuda.collectives.rank_links import RankLinks, Rooms
from redline.kernels.cuda.collectives.share_latents import divides, gain

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "divided-contexts-h200.json"
HEADS, RANK = 32, 512  # Kimi's sizes for one of two ranks
NOTHING = torch.zeros(2, dtype=torch.int32)
LINKS = RankLinks(0, 2, (0, 0), NOTHING, NOTHING, Rooms(sums=4, gathered=4, queries=4, latents=4, projected=4))


def test_it_is_decided_as_it_was_measured():
    """Except for cases in which less than 2 us a layer can be gained or lost."""
    cases = json.loads(RESULT.read_text())["cases"]
    assert len(cases) == 41
    gains = [(case["saved_us"], gain(case["rows"], HEADS, 2, case["context"] + 1)) for case in cases]
    wrong = [saved for saved, told in gains if (saved > 0) != (told > 0)]
    assert len(wrong) <= 2
    assert all(abs(saved) < 2 for saved in wrong)
    assert all(abs(told - saved) < 7 + 0.1 * abs(saved) for saved, told in gains)


def test_short_contexts_are_whole_and_long_ones_divided():
    assert not divides(LINKS, 32, HEADS, RANK, 2048)
    assert divides(LINKS, 8, HEADS, RANK, 131072)
    assert not divides(replace(LINKS, contexts="whole"), 8, HEADS, RANK, 131072)
    assert divides(replace(LINKS, contexts="divided"), 1, HEADS, RANK, 64)


def test_what_the_exchange_does_not_take_is_whole():
    assert not divides(None, 8, HEADS, RANK, 131072), "one rank"
    assert not divides(LINKS, 65, HEADS, RANK, 131072), "more queries than the receive buffer holds"
    assert not divides(LINKS, 8, HEADS, 128, 131072), "latents narrower than a slice"
