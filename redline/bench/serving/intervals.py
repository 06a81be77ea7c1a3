"""Confidence intervals of the mean of a few numbers, by Student's t or a bootstrap."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from redline.messages.base import Record

LEVEL = 0.95
LEAST = 3  # values, at least: the interval of two is too wide to be useful
BOOTSTRAP_FROM = 20  # values from which on the bootstrap is used; with fewer, Student's t is more accurate
RESAMPLES = 4000

# Student's t at 97.5 %, for 1 to 30 degrees of freedom.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.5 + LEVEL / 2)


class Interval(Record, frozen=True):
    """A mean with its 95 % confidence interval. of: number of values."""

    mean: float
    low: float
    high: float
    of: int


def interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95 % interval of the values' mean; None for fewer than LEAST values.

    With fewer than BOOTSTRAP_FROM values by Student's t, otherwise by a bias-corrected and accelerated bootstrap (BCa).
    The bootstrap's percentiles are widened by the ratio of Student's t to the normal distribution, since plain BCa is a
    little too narrow. seed: of the resampling.
    """
    many = len(values)
    if many < LEAST:
        return None
    found = np.asarray(values, dtype=np.float64)
    mean, error = float(found.mean()), float(found.std(ddof=1)) / math.sqrt(many)
    if many < BOOTSTRAP_FROM or error == 0.0:
        half = student(many - 1) * error
        return Interval(mean=mean, low=mean - half, high=mean + half, of=many)
    draws = np.random.default_rng(seed).integers(0, many, (RESAMPLES, many))
    means = np.sort(found[draws].mean(axis=1))
    below = float((means < mean).mean() + (means == mean).mean() / 2)
    bias = _NORMAL.inv_cdf(min(max(below, 1 / RESAMPLES), 1 - 1 / RESAMPLES))
    # The skewness, by the jackknife.
    jack = (found.sum() - found) / (many - 1)
    away = jack.mean() - jack
    acceleration = float((away**3).sum() / (6 * (away**2).sum() ** 1.5))
    wide = student(many - 1) * math.sqrt(many / (many - 1))
    low, high = (_at(means, bias, acceleration, side * wide) for side in (-1.0, 1.0))
    return Interval(mean=mean, low=low, high=high, of=many)


def student(freedom: int) -> float:
    """The 97.5th percentile of Student's t. freedom: degrees of freedom, at least 1."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    # An expansion in 1/freedom: accurate to four digits in this range.
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)


def _at(means: np.ndarray, bias: float, acceleration: float, z: float) -> float:
    corrected = bias + (bias + z) / (1 - acceleration * (bias + z))
    return float(np.quantile(means, _NORMAL.cdf(corrected)))
