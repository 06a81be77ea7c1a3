"""Routing in a speed run: distinct experts, uniformly chosen, with the requested overlap."""

import pytest
import torch

from redline.model.k2.forced_routing import OVERLAP, distinct, draw

E, K = 384, 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("overlap", [0.0, OVERLAP, 1.0])
def test_no_token_chooses_an_expert_twice(overlap: float):
    ids = draw(generator(), 61, 2, 5, E, K, overlap)
    assert ids.shape == (61, 10, K)
    assert ids.dtype == torch.int32
    assert 0 <= int(ids.min()) <= int(ids.max()) < E
    assert bool((ids.sort(-1).values.diff(dim=-1) > 0).all())


@pytest.mark.parametrize("overlap", [0.0, OVERLAP])
def test_every_expert_is_as_likely_as_any_other(overlap: float):
    """Chi-square over the last of a row's four tokens, one row a layer, so that the draws are independent."""
    layers = 12_000
    ids = draw(generator(1), layers, 1, 4, 64, 4, overlap)[:, -1]
    counts = ids.flatten().bincount(minlength=64).double()
    expected = layers * 4 / 64
    # Four experts without replacement: each count has the variance n p (1 - p), a little less than a Poisson's.
    chi2 = float(((counts - expected) ** 2 / (expected * (1 - 4 / 64))).sum()) * 63 / 64
    assert 33 < chi2 < 104, "beyond the 0.1 % tails of 63 degrees of freedom"


def test_tokens_are_independent_without_overlap():
    ids = draw(generator(2), 4000, 1, 2, E, K)
    assert shared_experts(ids) == pytest.approx(K * K / E, abs=0.02)


@pytest.mark.parametrize("overlap", [0.2, OVERLAP, 0.8])
def test_a_row_keeps_the_experts_that_it_was_asked_to(overlap: float):
    ids = draw(generator(3), 8000, 1, 2, E, K, overlap)
    # n experts are kept, and some of the k - n others, drawn from E - n, are the same by chance.
    again = (1 - overlap) * K * ((1 - overlap) * K) / (E - overlap * K)
    assert shared_experts(ids) == pytest.approx(overlap * K + again, abs=0.05)


def test_rows_do_not_overlap_more_than_by_chance():
    ids = draw(generator(4), 4000, 2, 1, E, K, 0.9)
    assert shared_experts(ids) == pytest.approx(K * K / E, abs=0.02)


@pytest.mark.parametrize(("tokens", "independent", "correlated"), [(1, 8, 8), (4, 31.0, 22.0), (8, 59.5, 39.8)])
def test_distinct_experts_come_to_the_published_expectations(tokens: int, independent: float, correlated: float):
    """E (1 - (1 - k / E)^m), and the same with 1 + (m - 1) (1 - w) in place of m."""
    free = distinct(draw(generator(5), 2000, 1, tokens, E, K), E).double().mean().item()
    held = distinct(draw(generator(6), 2000, 1, tokens, E, K, OVERLAP), E).double().mean().item()
    assert free == pytest.approx(independent, abs=0.15)
    assert held == pytest.approx(correlated, rel=0.03)


def test_a_seed_gives_the_same_experts_and_the_next_draw_others():
    one, same = generator(7), generator(7)
    first = draw(one, 3, 2, 2, E, K, OVERLAP)
    assert torch.equal(first, draw(same, 3, 2, 2, E, K, OVERLAP))
    assert not torch.equal(first, draw(one, 3, 2, 2, E, K, OVERLAP))


def shared_experts(ids_LTk: torch.Tensor) -> float:
    """Mean number of experts that a layer's two tokens have in common."""
    first, second = ids_LTk[:, 0, :, None], ids_LTk[:, 1, None, :]
    return (first == second).sum((1, 2)).double().mean().item()
