"""What `on_host.sample_each` does, from numbers that only the device knows, so that it can be recorded.

T rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cpu.sample import sample
from redline.ops.draws import uniforms


class Odds(NamedTuple):
    """How each row is drawn, [T] each: the fields of its Sampling, float64 and int64, and the position of its token."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor  # 0: all
    seed: Tensor  # 64 bits, as `ops.draws.signed` gives them
    position: Tensor


def sample_rows(logits_TV: Tensor, odds: Odds, *, narrowed: bool) -> Tensor:
    """The token of each row, int64 [T]; -1 where nothing can be drawn.

    narrowed: whether any row has top_k, top_p or min_p.
    """
    u_T = uniforms(odds.seed, odds.position)
    columns = odds.temperature, odds.top_p, odds.min_p, odds.top_k.double(), u_T
    return sample(logits_TV, torch.stack(columns, 1), narrowed)
