"""What `sample.draw` does, for many rows at once and without a look at the numbers: it can be recorded.

Each row is the same sums in the same order; on a CPU the draws are equal to the bit.

T rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

AT_ONCE = 32  # rows whose vocabularies lie in memory side by side: six numbers a token while they are sorted


class Odds(NamedTuple):
    """Of each row [T], as in Sampling: three float64 and two int64; and the position of its token, int64."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor  # 0: all
    seed: Tensor  # 64 bits, as `signed` gives them
    position: Tensor


def draw_rows(logits_TV: Tensor, odds: Odds, *, narrowed: bool) -> Tensor:
    """int64 [T]. narrowed: whether any row has top_k, top_p or min_p; it costs a sort of the vocabulary."""
    if logits_TV.shape[0] > AT_ONCE:
        parts = zip(logits_TV.split(AT_ONCE), *(part.split(AT_ONCE) for part in odds), strict=True)
        return torch.cat([draw_rows(rows, Odds(*its), narrowed=narrowed) for rows, *its in parts])
    weight_TV = (logits_TV / odds.temperature.float()[:, None]).softmax(-1)
    if narrowed:
        weight_TV = weight_TV * (weight_TV >= _least_kept(weight_TV, odds)[:, None])
    mass_TV = weight_TV.cumsum(-1, dtype=torch.float64)
    reached_T = uniforms(odds.seed, odds.position) * mass_TV[:, -1]
    return torch.searchsorted(mass_TV, reached_T[:, None], right=True).squeeze(-1)


def uniforms(seed_T: Tensor, position_T: Tensor) -> Tensor:
    """`sample.uniform` of each pair, float64."""
    bits_T = _mix(seed_T ^ _mix(position_T))
    return _shifted(bits_T, 11).double() * 2.0**-53


def signed(bits: int) -> int:
    """The int64 with the 64 bits of a number of any size."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(x: Tensor) -> Tensor:
    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """To the right, zeros from the left: int64 has a sign of its own."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _least_kept(weight_TV: Tensor, odds: Odds) -> Tensor:
    """`sample.least_kept` of each row, float32 [T]."""
    vocabulary = weight_TV.shape[1]
    best_TV = weight_TV.sort(-1, descending=True).values
    mass_TV = best_TV.cumsum(-1, dtype=torch.float64)
    limited_T, nucleus_T = (odds.top_k > 0) & (odds.top_k < vocabulary), odds.top_p < 1
    last_T = torch.where(limited_T, odds.top_k, torch.full_like(odds.top_k, vocabulary)) - 1
    among_T = mass_TV.gather(1, last_T[:, None]).squeeze(1)
    among_T = torch.where(odds.top_k > 0, among_T, weight_TV.sum(-1, dtype=torch.float64))
    in_nucleus_T = torch.searchsorted(mass_TV, (odds.top_p * among_T)[:, None]).squeeze(1)
    last_T = torch.where(nucleus_T, torch.minimum(in_nucleus_T, last_T), last_T)
    least_T = best_TV.gather(1, last_T[:, None]).squeeze(1) * (limited_T | nucleus_T)
    return torch.maximum(least_T, (odds.min_p * best_TV[:, 0]).float())
