"""How many times as fast as the baseline a method reached what the baseline has reached."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adambs.lab.report.estimates import Estimate, exp_of, geometric_mean, half_width
from adambs.lab.report.series import FLOOR, Array, Series, log_of

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Of the baseline's budget: the losses that it has reached then are the targets."""


@dataclass(frozen=True)
class Ratio:
    """The speedup of one seed at one target. NaN when the baseline was never better than at its start."""

    seed: int
    target: float
    """A loss or an error."""
    baseline: float
    """When the baseline first reached ``target``."""
    own: float
    """When this method did; its whole budget when it did not."""
    reached: bool

    @property
    def value(self) -> float:
        """Baseline's time over own time: an upper bound when not ``reached``."""
        return self.baseline / self.own if self.baseline > 0 and self.own > 0 else math.nan


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as the baseline, on one axis, to one or more targets."""

    method: str
    axis: str
    ratios: tuple[tuple[Ratio, ...], ...]
    """For each target, one for each seed."""
    at: tuple[Estimate, ...]
    """For each target, the geometric mean over seeds."""
    overall: Estimate
    """The geometric mean of all."""

    @property
    def last(self) -> "Speedup":
        """To the last target alone: of :data:`FRACTIONS`, the baseline's final loss."""
        return Speedup(self.method, self.axis, self.ratios[-1:], self.at[-1:], self.at[-1])

    def bounded(self, index: int | None = None) -> bool:
        """Whether some seed never reached the loss (of one target, or any): the number is an upper bound."""
        chosen = self.ratios if index is None else (self.ratios[index],)
        return any(not ratio.reached for ratios in chosen for ratio in ratios)

    @property
    def missed(self) -> int:
        """How many (target, seed) pairs were not reached."""
        return sum(not ratio.reached for ratios in self.ratios for ratio in ratios)

    @property
    def verdict(self) -> str:
        """What may be said of it: one of a few fixed phrases."""
        low, high = self.overall.low, self.overall.high
        if math.isnan(self.overall.value):
            return "cannot be told"
        if low is None or high is None:
            return "one seed"
        if high < 1:
            return "slower"
        if low <= 1:
            return "no significant difference"
        return "undecided" if self.bounded() else "faster"


def speedup(pairs: Sequence[tuple[Series, Series]], axis: str) -> Speedup:
    """The speedup of a method from (baseline, method) of each seed."""
    by_seed = [_ratios(baseline, own, axis) for baseline, own in pairs]
    ratios = tuple(zip(*by_seed, strict=True))
    at = tuple(geometric_mean([ratio.value for ratio in row]) for row in ratios)
    overall = geometric_mean([_seed_mean(row) for row in by_seed])
    return Speedup(pairs[0][1].method, axis, ratios, at, overall)


def speedup_to_lowest_error(pairs: Sequence[tuple[Series, Series]]) -> Speedup:
    """The speedup by the clock to the baseline's lowest test error, from (baseline, method) of each seed."""
    ratios = tuple(
        _ratio(baseline, own, "seconds", "test_error", lowest(baseline["test_error"]))
        for baseline, own in pairs
    )
    found = geometric_mean([ratio.value for ratio in ratios])
    return Speedup(pairs[0][1].method, "seconds", (ratios,), (found,), found)


def across(speedups: Sequence[Speedup]) -> Estimate:
    """The geometric mean over several runs, each counting once, with its 95 % interval over their seeds.

    The runs' means are independent, and each has a variance of its own: Student's t with the degrees of
    freedom of Welch and Satterthwaite.
    """
    logs = [np.log([_seed_mean(row) for row in zip(*each.ratios, strict=True)]) for each in speedups]
    center = float(np.mean([each.mean() for each in logs]))
    fewest = min(len(each) for each in logs)
    if fewest < 2 or not math.isfinite(center):
        return Estimate(math.exp(center), None, None, fewest)
    variances = np.array([each.var(ddof=1) / len(each) for each in logs])
    total = float(variances.sum())
    half = 0.0
    if total > 0:
        freedom = total**2 / sum(v**2 / (len(each) - 1) for v, each in zip(variances, logs, strict=True))
        half = half_width(math.sqrt(total) / len(logs), freedom)
    return exp_of(Estimate(center, center - half, center + half, fewest))


def _seed_mean(row: Sequence[Ratio]) -> float:
    logs = [math.log(ratio.value) for ratio in row if not math.isnan(ratio.value)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _ratios(baseline: Series, own: Series, axis: str) -> tuple[Ratio, ...]:
    times, losses = baseline[axis], baseline["train_loss"]
    targets = (lowest_by(times, losses, fraction * float(times[-1])) for fraction in FRACTIONS)
    return tuple(_ratio(baseline, own, axis, "train_loss", target) for target in targets)


def _ratio(baseline: Series, own: Series, axis: str, metric: str, target: float) -> Ratio:
    reached = first_reached if metric.endswith("_loss") else first_reached_linearly
    theirs, ours = (reached(each[axis], each[metric], target) for each in (baseline, own))
    return Ratio(
        own.seed,
        target,
        math.nan if theirs is None else theirs,
        float(own[axis][-1]) if ours is None else ours,
        ours is not None,
    )


def lowest_by(times: Array, losses: Array, time: float) -> float:
    """The running minimum at ``time`` of the curve through the slices."""
    logs = log_of(losses)
    last = int(np.searchsorted(times, time, side="right")) - 1
    least = np.min(logs[: last + 1], initial=np.inf)
    if last + 1 < len(times) and times[last] < time and np.isfinite(logs[last : last + 2]).all():
        least = min(least, np.interp(time, times[last : last + 2], logs[last : last + 2]))
    return float(np.exp(least))


def first_reached(times: Array, losses: Array, target: float) -> float | None:
    """When the curve through the slices, straight in the logarithm, is first at or below ``target``."""
    goal = math.log(max(target, FLOOR))
    # exp and log of a target may come back one bit lower than the slice that it was taken from.
    return first_reached_linearly(times, log_of(losses), goal + 4 * np.finfo(float).eps * max(1.0, abs(goal)))


def first_reached_linearly(times: Array, values: Array, target: float) -> float | None:
    """When the straight lines through the slices are first at or below ``target``; None if never."""
    below = np.flatnonzero(values <= target)
    if not math.isfinite(target) or not len(below):
        return None
    k = int(below[0])
    if k == 0 or not math.isfinite(values[k - 1]):
        return float(times[k])
    part = (values[k - 1] - target) / (values[k - 1] - values[k])
    return float(times[k - 1] + part * (times[k] - times[k - 1]))


def lowest(errors: Array) -> float:
    """The smallest, NaN if none is a number."""
    known = errors[np.isfinite(errors)]
    return float(known.min()) if len(known) else math.nan
