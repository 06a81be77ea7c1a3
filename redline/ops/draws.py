"""Counter-based random numbers as tensors, functions of (seed, stream, position): bit-equal to those of the host.

`run.sampling.on_host` has the scalar versions. A generator with state would make an answer depend on the rest of its
batch.
"""

import torch
from torch import Tensor

VERDICT = 1 << 20  # stream of synthetic acceptance; drafting and verifying use lower numbers (run/drafting/verify.py)


def uniforms(seed_T: Tensor, position_T: Tensor) -> Tensor:
    """`on_host.uniform` of each pair, float64 [T]. seed_T: int64, in the representation of `signed`."""
    bits_T = _mix(seed_T ^ _mix(position_T))
    return _shifted(bits_T, 11).double() * 2.0**-53


def uniforms_of(seed_T: Tensor, stream_T: Tensor | int, position_T: Tensor) -> Tensor:
    """`on_host.uniform_of` of each triple, float64 [T]; all int64, seeds in the representation of `signed`."""
    stream = -1 - stream_T
    of_stream = _mix(stream) if isinstance(stream, Tensor) else _mix(torch.full_like(position_T, stream))
    return uniforms(_mix(seed_T ^ of_stream), position_T)


def signed(bits: int) -> int:
    """The int64 with the lowest 64 bits of this number."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(x: Tensor) -> Tensor:
    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Logical shift right (zeros come in from the left), although int64 is signed."""
    return (x >> count) & ((1 << (64 - count)) - 1)
