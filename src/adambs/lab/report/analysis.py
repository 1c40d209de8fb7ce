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

from dataclasses import dataclass, field

import numpy as np

from adambs.lab.report.estimates import Estimate, mean
from adambs.lab.report.series import METRICS, Curve, Series, curve, log_of, read_series
from adambs.lab.report.speedups import Speedup, lowest, speedup, speedup_to_lowest_error
from adambs.lab.runs.records import Line, Run

TEST_ERRORS = ("test_error", "balanced_test_error")
SETTLING = 0.1
"""The part of a run, from its start, that steadiness leaves out."""
LEADS = ("adambs", "adambs-loop", "adambs-exp3", "amsgrad-bs", "adambs-release")
"""Whom a headline is about: the first of these that ran."""


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
        """Those of :data:`METRICS` that there is something to say of, with their names for people."""
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
    metrics = [name for name in METRICS if name != "balanced_test_error" or _unbalanced(series)]
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


def _unbalanced(series: dict[str, dict[int, Series]]) -> bool:
    """Whether balanced test errors were recorded, and are others than the plain ones."""
    every = [each for by_seed in series.values() for each in by_seed.values()]
    return any((abs(each["balanced_test_error"] - each["test_error"]) > 1e-9).any() for each in every)


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


def _behind(baseline: Series, own: Series, metric: str) -> float:
    """How much larger than the baseline's final error this method's was at that time."""
    then = float(np.interp(baseline["seconds"][-1], own["seconds"], own[metric]))
    return then - float(baseline[metric][-1])


def _behind_at_lowest(baseline: Series, own: Series, metric: str) -> float:
    """The same of the lowest errors that either had shown by then, and at that time itself."""
    end = baseline["seconds"][-1]
    then = np.interp(end, own["seconds"], own[metric])
    shown = np.append(own[metric][own["seconds"] <= end], then)
    return lowest(shown) - lowest(baseline[metric])


def steadiness(series: Series) -> float:
    """The largest ratio, after the first tenth of the steps, of the loss to the lowest loss so far.

    At least 1. Infinite when a loss was not a number, NaN when nothing was measured after the first tenth.
    """
    logs, steps = log_of(series["train_loss"]), series["step"]
    lowest = np.minimum.accumulate(logs)
    rises = (logs - np.where(np.isfinite(lowest), lowest, 0))[steps > SETTLING * steps[-1]]
    return float(np.exp(rises.max())) if len(rises) else np.nan
