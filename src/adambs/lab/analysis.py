"""From the records of a run to numbers, and from those to words: curves, final values, speedups. numpy only.

How **speedup** is defined, for one seed, one axis (wall clock or steps) and one method:

1.  A training-loss curve is what the slices say, joined by straight lines in log-loss (a loss falls by
    factors, not by amounts; plots of it are logarithmic). It first *reaches* a loss where it is first at or
    below it, so going up again later takes nothing back: its running minimum is what counts.
2.  The targets are the losses that the baseline (``adam``) has reached, as a running minimum, after 1/4, 1/2,
    3/4 and all of its own budget.
3.  The speedup at a target is the baseline's time to first reach it over this method's. A loss never
    reached counts as the whole budget of the method: the speedup is below that, and is flagged ``bounded``.
4.  The headline is the geometric mean of the four, then over seeds, with a bootstrap interval over seeds.

All methods are treated alike, the baseline included, whose speedup is therefore exactly 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from adambs.lab.records import Line, Run

Array = npt.NDArray[np.float64]

AXES = {"seconds": "wall clock", "step": "steps", "epoch": "epochs"}
METRICS = {"train_loss": "training loss", "train_error": "training error", "test_error": "test error"}
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
ENOUGH_SEEDS = 3
RESAMPLES = 10_000
LEADS = ("adambs", "adambs-exp3", "amsgrad-bs", "adambs-release")
"""Whom a headline is about: the first of these that ran."""
FLOOR = 1e-12
"""A loss below this counts as this, so that a loss of exactly 0 has a logarithm."""

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom; beyond, the table's last one is kept.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.306, 2.2622, 2.2281, 2.201, 2.1788, 2.1604,
      2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.093)  # fmt: skip


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
    """A number with its 95 % interval, or None for the interval when there are too few seeds."""

    value: float
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True)
class Ratio:
    """The speedup of one seed at one target. NaN when the baseline was never better than at its start."""

    seed: int
    target: float
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
    """How many times as fast as the baseline, on one axis."""

    method: str
    axis: str
    ratios: tuple[tuple[Ratio, ...], ...]
    """For each of :data:`FRACTIONS`, one for each seed."""
    at: tuple[Estimate, ...]
    """For each of :data:`FRACTIONS`, the geometric mean over seeds."""
    overall: Estimate
    """The geometric mean of all."""

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
            return "too few seeds"
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
    equal_time: dict[str, Estimate] = field(default_factory=dict)
    """Method's test error at the time when the baseline ended, minus the baseline's, paired by seed."""
    stopped_early: dict[str, Estimate] = field(default_factory=dict)
    """The same of the lowest test errors by that time: what who stops at the right moment gets."""

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
    """Everything at once. Raises ValueError when the run has no slice at all."""
    complete = bool(run.finished)
    series = read_series(run, unfinished=not complete)
    if not series:
        raise ValueError(f"{run.path} has no measurement yet: run its command again, it goes on by itself")
    seeds = tuple(sorted({seed for by_seed in series.values() for seed in by_seed}))
    left_out = tuple(seed for seed in sorted(run.seeds) if complete and seed not in run.finished)
    finals = {
        method: {name: mean([each[name][-1] for each in by_seed.values()]) for name in METRICS}
        for method, by_seed in series.items()
    }
    speedups: dict[str, dict[str, Speedup]] = {}
    equal_time: dict[str, Estimate] = {}
    stopped_early: dict[str, Estimate] = {}
    if baseline in series:
        for method, by_seed in series.items():
            pairs = [(series[baseline][seed], by_seed[seed]) for seed in by_seed if seed in series[baseline]]
            if pairs:
                speedups[method] = {axis: speedup(pairs, axis) for axis in ("seconds", "step")}
                equal_time[method] = mean([_behind(*pair) for pair in pairs])
                stopped_early[method] = mean([_behind_at_best(*pair) for pair in pairs])
    return Analysis(
        run, baseline, tuple(series), seeds, complete, left_out,
        series, finals, speedups, equal_time, stopped_early,
    )  # fmt: skip


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
    if len(data) < ENOUGH_SEEDS or not math.isfinite(center):
        return Estimate(center, None, None, len(data))
    half = _T[min(len(data) - 2, len(_T) - 1)] * float(data.std(ddof=1)) / math.sqrt(len(data))
    return Estimate(center, center - half, center + half, len(data))


def geometric_mean(values: Sequence[float]) -> Estimate:
    """The geometric mean with its 95 % interval by the percentile bootstrap, under a fixed seed."""
    logs = np.log(np.asarray([value for value in values if not math.isnan(value)], dtype=float))
    if not len(logs):
        return Estimate(math.nan, None, None, 0)
    center = float(np.exp(logs.mean()))
    if len(logs) < ENOUGH_SEEDS:
        return Estimate(center, None, None, len(logs))
    chosen = np.random.default_rng(0).integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.exp(np.quantile(logs[chosen].mean(1), [0.025, 0.975]))
    return Estimate(center, float(low), float(high), len(logs))


# --------------------------------------------------------------------------------------------- speedup


def speedup(pairs: Sequence[tuple[Series, Series]], axis: str) -> Speedup:
    """The speedup of a method from (baseline, method) of each seed."""
    by_seed = [_ratios(baseline, own, axis) for baseline, own in pairs]
    ratios = tuple(zip(*by_seed, strict=True))
    at = tuple(geometric_mean([ratio.value for ratio in row]) for row in ratios)
    overall = geometric_mean([_seed_mean(row) for row in by_seed])
    return Speedup(pairs[0][1].method, axis, ratios, at, overall)


def _behind(baseline: Series, own: Series) -> float:
    """How much larger than the baseline's final test error this method's was at that time."""
    then = float(np.interp(baseline["seconds"][-1], own["seconds"], own["test_error"]))
    return then - float(baseline["test_error"][-1])


def _behind_at_best(baseline: Series, own: Series) -> float:
    """The same of the lowest test errors that either had shown by then."""
    in_time = own["seconds"] <= baseline["seconds"][-1]
    lowest = [_lowest(errors) for errors in (own["test_error"][in_time], baseline["test_error"])]
    return lowest[0] - lowest[1]


def _lowest(errors: Array) -> float:
    """NaN if none is a number."""
    known = errors[np.isfinite(errors)]
    return float(known.min()) if len(known) else math.nan


def across(speedups: Sequence[Speedup]) -> Estimate:
    """The geometric mean over several runs, each counting once; the bootstrap resamples seeds within each."""
    logs = [np.log([_seed_mean(row) for row in zip(*each.ratios, strict=True)]) for each in speedups]
    center = float(np.exp(np.mean([each.mean() for each in logs])))
    fewest = min(len(each) for each in logs)
    if fewest < ENOUGH_SEEDS or not math.isfinite(center):
        return Estimate(center, None, None, fewest)
    random = np.random.default_rng(0)
    resampled = [each[random.integers(len(each), size=(RESAMPLES, len(each)))].mean(1) for each in logs]
    low, high = np.exp(np.quantile(np.mean(resampled, 0), [0.025, 0.975]))
    return Estimate(center, float(low), float(high), fewest)


def _seed_mean(row: Sequence[Ratio]) -> float:
    logs = [math.log(ratio.value) for ratio in row if not math.isnan(ratio.value)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _ratios(baseline: Series, own: Series, axis: str) -> tuple[Ratio, ...]:
    found = []
    for fraction in FRACTIONS:
        target = lowest_by(baseline[axis], baseline["train_loss"], fraction * float(baseline[axis][-1]))
        theirs = first_reached(baseline[axis], baseline["train_loss"], target)
        ours = first_reached(own[axis], own["train_loss"], target)
        budget = float(own[axis][-1])
        found.append(
            Ratio(
                own.seed,
                target,
                math.nan if theirs is None else theirs,
                budget if ours is None else ours,
                ours is not None,
            )
        )
    return tuple(found)


def lowest_by(times: Array, losses: Array, time: float) -> float:
    """The running minimum at ``time`` of the curve through the slices."""
    logs = _log(losses)
    last = int(np.searchsorted(times, time, side="right")) - 1
    lowest = np.min(logs[: last + 1], initial=np.inf)
    if last + 1 < len(times) and times[last] < time and np.isfinite(logs[last : last + 2]).all():
        lowest = min(lowest, np.interp(time, times[last : last + 2], logs[last : last + 2]))
    return float(np.exp(lowest))


def first_reached(times: Array, losses: Array, target: float) -> float | None:
    """When the curve through the slices is first at or below ``target``; None if never."""
    logs, goal = _log(losses), math.log(max(target, FLOOR))
    # exp and log of a target may come back one bit lower than the slice that it was taken from.
    goal += 4 * np.finfo(float).eps * max(1.0, abs(goal))
    if not math.isfinite(goal):
        return None
    below = np.flatnonzero(logs <= goal)
    if not len(below):
        return None
    k = int(below[0])
    if k == 0 or not math.isfinite(logs[k - 1]):
        return float(times[k])
    part = (logs[k - 1] - goal) / (logs[k - 1] - logs[k])
    return float(times[k - 1] + part * (times[k] - times[k - 1]))


def _log(losses: Array) -> Array:
    """The logarithms; of what is not a number, infinity: it reaches nothing."""
    return np.log(np.maximum(np.where(np.isnan(losses), np.inf, losses), FLOOR))
