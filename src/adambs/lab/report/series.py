"""What a run has recorded, as arrays: one series for each method and seed, and curves over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
    return np.exp(np.interp(grid, x, log_of(y))) if log else np.interp(grid, x, y)


def log_of(losses: Array) -> Array:
    """The logarithms; of what is not a number, infinity: it reaches nothing."""
    return np.log(np.maximum(np.where(np.isnan(losses), np.inf, losses), FLOOR))
