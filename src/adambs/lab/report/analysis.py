"""From the records of a run to numbers: curves, final values, speedups, steadiness. numpy and scipy only.

How a method is compared with the baseline (``adam``), for one seed and one axis (wall clock or steps):

1.  A training-loss curve is what the slices say, joined by straight lines in log-loss (a loss falls by
    factors, not by amounts; plots of it are logarithmic). It first *reaches* a loss where it is first at or
    below it, so going up again later takes nothing back: its running minimum is what counts.
2.  The targets are the losses that the baseline has reached, as a running minimum, after 1/4, 1/2, 3/4 and
    all of its own budget. The last of them is called the baseline's final loss.
3.  The **speedup** at a target is the baseline's time to first reach it over this method's. A loss never
    reached counts as the whole budget of the method: the speedup is below that, and is flagged ``bounded``.
4.  Two numbers come of it: the geometric mean of the four, and the speedup to the final loss alone.
5.  **Steadiness** is the third: the largest ratio, at any slice after the first tenth of the steps, of the
    loss to the lowest loss so far. 1 means that the loss never rose. Speedups do not see a late jump of the
    loss; this does. It is reported as the worst over seeds.
6.  Beside them: the speedup to the baseline's lowest test error (errors are joined by plain straight lines),
    the test error when the baseline ended, and the lowest test error until then, both minus the baseline's.

Over seeds, ratios have a geometric mean and Student's t interval on their logarithms; differences have a mean
and Student's t interval. One seed has no interval. All methods are treated alike, the baseline included,
whose speedup is therefore exactly 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats  # type: ignore[import-untyped]

from adambs.lab.runs.records import Line, Run

Array = npt.NDArray[np.float64]

AXES = {"seconds": "wall clock", "step": "steps", "epoch": "epochs"}
METRICS = {
    "train_loss": "training loss",
    "train_error": "training error",
    "test_error": "test error",
    "balanced_test_error": "balanced test error",
}
"""The last is the mean over classes of the error within the class; older records do not have it."""
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
CONFIDENCE = 0.95
TEST_ERRORS = ("test_error", "balanced_test_error")
SETTLING = 0.1
"""The part of a run, from its start, that steadiness leaves out."""
LEADS = ("adambs", "adambs-loop", "adambs-exp3", "amsgrad-bs", "adambs-release")
"""Whom a headline is about: the first of these that ran."""
FLOOR = 1e-12
"""A loss below this counts as this, so that a loss of exactly 0 has a logarithm."""


@dataclass(frozen=True, eq=False)
class Series:
    """What one method did in one seed: an array for each field of the ``slice`` lines; null is NaN."""

    method: str
    seed: int
    fields: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean, lowest and highest over seeds, on the grid ``x``."""

    method: str
    x: Array
    mean: Array
    low: Array
    high: Array
    seeds: int


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; None for the interval when there is one seed only."""

    value: float
    low: float | None
    high: float | None
    seeds: int


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


@dataclass(frozen=True, eq=False)
class Analysis:
    """Everything that the report says of one run."""

    run: Run
    baseline: str
    methods: tuple[str, ...]
    """Those with at least one slice, in the order of the configuration."""
    seeds: tuple[int, ...]
    complete: bool
    """False if no seed was finished and what there is was used."""
    left_out: tuple[int, ...]
    """Seeds that were begun, not finished, and not used."""
    series: dict[str, dict[int, Series]]
    finals: dict[str, dict[str, Estimate]]
    """Method, then metric."""
    speedups: dict[str, dict[str, Speedup]] = field(default_factory=dict)
    """Method, then ``seconds`` or ``step``; empty when the baseline did not run."""
    steadiness: dict[str, float] = field(default_factory=dict)
    """Method -> its worst over seeds: how many times its lowest loss so far the loss has risen to."""
    to_lowest_error: dict[str, Speedup] = field(default_factory=dict)
    """Method -> its speedup by the clock to the baseline's lowest test error."""
    equal_time: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    """Metric of :data:`TEST_ERRORS`, then method: at the time when the baseline ended, minus the baseline's,
    paired by seed."""
    stopped_early: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    """The same of the lowest errors by that time: what one gets who stops at the right moment."""

    @property
    def metrics(self) -> dict[str, str]:
        """Those of :data:`METRICS` that were recorded, with their names for people."""
        return {name: METRICS[name] for name in next(iter(self.finals.values()))}

    def curves(self, metric: str, axis: str) -> list[Curve]:
        """One curve for each method that has this metric."""
        made = (curve(list(self.series[method].values()), metric, axis) for method in self.methods)
        return [each for each in made if each is not None]

    def title(self, method: str) -> str:
        """The method's name for people."""
        return str(self.run.methods.get(method, {}).get("title") or method)

    def last_distributions(self) -> dict[str, list[Line]]:
        """Method -> its ``distribution`` lines in the first seed that has any, by step."""
        found: dict[str, list[Line]] = {}
        for line in self.run.lines("distribution", unfinished=not self.complete):
            lines = found.setdefault(line["method"], [])
            if not lines or lines[0]["seed"] == line["seed"]:
                lines.append(line)
        return {method: found[method] for method in self.methods if method in found}


def analyse(run: Run, *, baseline: str = "adam") -> Analysis:
    """Everything at once. Raises ValueError when the run has no slice at all.

    A run that names its own baseline, as a tuned one does, is compared with that.
    """
    baseline = str(run.config.get("baseline", baseline))
    complete = bool(run.finished)
    series = read_series(run, unfinished=not complete)
    if not series:
        raise ValueError(f"{run.path} has no measurement yet: run its command again, it goes on by itself")
    seeds = tuple(sorted({seed for by_seed in series.values() for seed in by_seed}))
    left_out = tuple(seed for seed in sorted(run.seeds) if complete and seed not in run.finished)
    metrics = [name for name in METRICS if name != "balanced_test_error" or _recorded(series, name)]
    finals = {
        method: {name: mean([each[name][-1] for each in by_seed.values()]) for name in metrics}
        for method, by_seed in series.items()
    }
    found = Analysis(run, baseline, tuple(series), seeds, complete, left_out, series, finals)
    for method, by_seed in series.items():
        found.steadiness[method] = float(np.max([steadiness(each) for each in by_seed.values()]))
        theirs = series.get(baseline, {})
        pairs = [(theirs[seed], own) for seed, own in by_seed.items() if seed in theirs]
        if not pairs:
            continue
        found.speedups[method] = {axis: speedup(pairs, axis) for axis in ("seconds", "step")}
        found.to_lowest_error[method] = speedup_to_lowest_error(pairs)
        for metric in TEST_ERRORS:
            if metric in metrics:
                ends, lows = (each.setdefault(metric, {}) for each in (found.equal_time, found.stopped_early))
                ends[method] = mean([_behind(*pair, metric) for pair in pairs])
                lows[method] = mean([_behind_at_lowest(*pair, metric) for pair in pairs])
    return found


def _recorded(series: dict[str, dict[int, Series]], metric: str) -> bool:
    return any(np.isfinite(each[metric]).any() for by_seed in series.values() for each in by_seed.values())


def analyse_all(runs: list[Run], baseline: str) -> tuple[list[Analysis], list[str]]:
    """The analyses of the runs that have any measurement, and why the others have none."""
    if not runs:
        raise ValueError("runs must hold at least one run")
    analyses, empty = [], []
    for run in runs:
        try:
            analyses.append(analyse(run, baseline=baseline))
        except ValueError as error:
            empty.append(str(error))
    if not analyses:
        raise ValueError("; ".join(empty))
    return analyses, empty


def read_series(run: Run, *, unfinished: bool = False) -> dict[str, dict[int, Series]]:
    """Method -> seed -> what it did, methods in the configuration's order."""
    lines: dict[str, dict[int, list[Line]]] = {}
    for line in run.lines("slice", unfinished=unfinished):
        lines.setdefault(line["method"], {}).setdefault(line["seed"], []).append(line)
    order = [name for name in run.config.get("methods", []) if name in lines]
    order += [name for name in lines if name not in order]
    return {
        method: {seed: _series(method, seed, rows) for seed, rows in sorted(lines[method].items())}
        for method in order
    }


def _series(method: str, seed: int, lines: list[Line]) -> Series:
    names = (*AXES, *METRICS, "test_loss", "examples", "ess", "variance_reduction")
    return Series(
        method, seed, {name: np.array([_number(each.get(name)) for each in lines]) for name in names}
    )


def _number(value: Any) -> float:
    """NaN for what was not measured, and for the huge loss that the runner writes of a diverged run."""
    return math.nan if value is None or float(value) >= 1e299 else float(value)


# ---------------------------------------------------------------------------------------------- curves


def curve(series: Sequence[Series], metric: str, axis: str) -> Curve | None:
    """Mean and range over seeds on a common grid; None when no seed has this metric.

    The grid is the slices' own when all seeds share it (steps, epochs); else it is even, and ends where the
    first seed ends, so that every point is a mean over all seeds. Between slices a loss is interpolated in
    its logarithm, anything else as it is. Slices without a number (null) are left out.
    """
    known = [(each[axis][ok], each[metric][ok]) for each in series if (ok := np.isfinite(each[metric])).any()]
    if not known:
        return None
    first = known[0][0]
    if all(np.array_equal(x, first) for x, _ in known):
        grid, values = first, np.stack([y for _, y in known])
    else:
        start, end = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
        grid = np.linspace(start, max(start, end), max(2, 2 * len(first) - 1))
        values = np.stack([_interpolate(grid, x, y, log=metric.endswith("_loss")) for x, y in known])
    name = series[0].method
    return Curve(name, grid, values.mean(0), values.min(0), values.max(0), len(known))


def _interpolate(grid: Array, x: Array, y: Array, *, log: bool) -> Array:
    return np.exp(np.interp(grid, x, _log(y))) if log else np.interp(grid, x, y)


# -------------------------------------------------------------------------------------------- intervals


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
    return _exp(mean(logs)) if logs else Estimate(math.nan, None, None, 0)


def half_width(error: float, freedom: float) -> float:
    """Half of a 95 % interval by Student's t, from the standard error and its degrees of freedom."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error


def _exp(logs: Estimate) -> Estimate:
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    return Estimate(math.exp(logs.value), low, high, logs.seeds)


# --------------------------------------------------------------------------------------------- speedup


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
        _ratio(baseline, own, "seconds", "test_error", _lowest(baseline["test_error"]))
        for baseline, own in pairs
    )
    found = geometric_mean([ratio.value for ratio in ratios])
    return Speedup(pairs[0][1].method, "seconds", (ratios,), (found,), found)


def _behind(baseline: Series, own: Series, metric: str) -> float:
    """How much larger than the baseline's final error this method's was at that time."""
    then = float(np.interp(baseline["seconds"][-1], own["seconds"], own[metric]))
    return then - float(baseline[metric][-1])


def _behind_at_lowest(baseline: Series, own: Series, metric: str) -> float:
    """The same of the lowest errors that either had shown by then."""
    in_time = own["seconds"] <= baseline["seconds"][-1]
    return _lowest(own[metric][in_time]) - _lowest(baseline[metric])


def _lowest(errors: Array) -> float:
    """NaN if none is a number."""
    known = errors[np.isfinite(errors)]
    return float(known.min()) if len(known) else math.nan


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
    return _exp(Estimate(center, center - half, center + half, fewest))


# ------------------------------------------------------------------------------------------ steadiness


def steadiness(series: Series) -> float:
    """The largest ratio, after the first tenth of the steps, of the loss to the lowest loss so far.

    At least 1. Infinite when a loss was not a number, NaN when nothing was measured after the first tenth.
    """
    logs, steps = _log(series["train_loss"]), series["step"]
    lowest = np.minimum.accumulate(logs)
    rises = (logs - np.where(np.isfinite(lowest), lowest, 0))[steps > SETTLING * steps[-1]]
    return float(np.exp(rises.max())) if len(rises) else math.nan


# ------------------------------------------------------------------------------------ reaching a loss


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
    logs = _log(losses)
    last = int(np.searchsorted(times, time, side="right")) - 1
    lowest = np.min(logs[: last + 1], initial=np.inf)
    if last + 1 < len(times) and times[last] < time and np.isfinite(logs[last : last + 2]).all():
        lowest = min(lowest, np.interp(time, times[last : last + 2], logs[last : last + 2]))
    return float(np.exp(lowest))


def first_reached(times: Array, losses: Array, target: float) -> float | None:
    """When the curve through the slices, straight in the logarithm, is first at or below ``target``."""
    goal = math.log(max(target, FLOOR))
    # exp and log of a target may come back one bit lower than the slice that it was taken from.
    return first_reached_linearly(times, _log(losses), goal + 4 * np.finfo(float).eps * max(1.0, abs(goal)))


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


def _log(losses: Array) -> Array:
    """The logarithms; of what is not a number, infinity: it reaches nothing."""
    return np.log(np.maximum(np.where(np.isnan(losses), np.inf, losses), FLOOR))
