"""Means over seeds, with their 95 % intervals by Student's t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; None for the interval when there is one seed only."""

    value: float
    low: float | None
    high: float | None
    seeds: int


def mean(values: Sequence[float]) -> Estimate:
    """The mean with its 95 % interval by Student's t."""
    data = np.asarray(values, dtype=float)
    center = float(data.mean())
    if len(data) < 2 or not math.isfinite(center):
        return Estimate(center, None, None, len(data))
    half = half_width(float(data.std(ddof=1)) / math.sqrt(len(data)), len(data) - 1)
    return Estimate(center, center - half, center + half, len(data))


def geometric_mean(values: Sequence[float]) -> Estimate:
    """The geometric mean with its 95 % interval by Student's t on the logarithms; NaNs are left out."""
    logs = [math.log(value) for value in values if not math.isnan(value)]
    return exp_of(mean(logs)) if logs else Estimate(math.nan, None, None, 0)


def half_width(error: float, freedom: float) -> float:
    """Half of a 95 % interval by Student's t, from the standard error and its degrees of freedom."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error


def exp_of(logs: Estimate) -> Estimate:
    """A geometric mean, from the mean of the logarithms."""
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    return Estimate(math.exp(logs.value), low, high, logs.seeds)
