"""What `on_host.sample_each` does, from numbers that only the device knows, so that it can be recorded.

T rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cpu.sample import sample


class Odds(NamedTuple):
    """How each row is drawn, [T] each: the fields of its Sampling, float64 and int64, and the position of its token."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor  # 0: all
    seed: Tensor  # 64 bits, as `signed` gives them
    position: Tensor


def sample_rows(logits_TV: Tensor, odds: Odds, *, narrowed: bool) -> Tensor:
    """The token of each row, int64 [T]; -1 where nothing can be drawn.

    narrowed: whether any row has top_k, top_p or min_p.
    """
    u_T = uniforms(odds.seed, odds.position)
    columns = odds.temperature, odds.top_p, odds.min_p, odds.top_k.double(), u_T
    return sample(logits_TV, torch.stack(columns, 1), narrowed)


def uniforms(seed_T: Tensor, position_T: Tensor) -> Tensor:
    """`on_host.uniform` of each pair, float64 [T]. seed_T: as `signed` gives them, int64."""
    bits_T = _mix(seed_T ^ _mix(position_T))
    return _shifted(bits_T, 11).double() * 2.0**-53


def signed(bits: int) -> int:
    """The int64 that has the lowest 64 bits of this number."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(x: Tensor) -> Tensor:
    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shifted to the right with zeros from the left, although int64 has a sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)
