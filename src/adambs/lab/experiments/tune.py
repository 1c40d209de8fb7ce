"""``adambs reproduce NAME --tune``: every method at its best, by the clock.

1.  **The grid.** Every method trains with every learning rate and batch size for the same time, on one seed.
    Each cell of the grid is a run of its own, in which the methods take turns.
2.  **The best of each** is the cell in which its training loss was lowest, at any slice, by the end.
3.  **Tuned against tuned.** The best of each are run again, on other seeds, for the same time and taking
    turns. Adam's best is the baseline.

All of it is in records that are appended as it goes: a command that was stopped goes on, and at most the cell
or the seed under way is repeated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from adambs.lab import datasets, methods
from adambs.lab.experiments.catalogue import Experiment
from adambs.lab.runs import records
from adambs.lab.runs.runner import Plan

BASELINE = "adam"

SEED = 1000
"""Of the grid. The seeds that the best are compared on are others."""

FOLDER = "grid"
"""Below the folder of the run: a folder for each cell."""

# Of the slices of a run, the share that a cell has: it only has to tell which setting is best, and where a
# step is fast the evaluations take longer than the training.
_CELL_SLICES = 1 / 3

# Of the experiment's own, if nothing is given.
_RATES, _SIZES = (1.0, 2.0, 4.0), (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Grid:
    """What is tried for every method, and for how long."""

    lrs: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    seconds: float

    def cells(self) -> list[tuple[float, int]]:
        """Each learning rate with each batch size."""
        return list(product(self.lrs, self.batch_sizes))

    def at_the_edge(self, lr: float, batch_size: int) -> str:
        """Which of the two might be better still outside of the grid, in words; or nothing."""
        found = [
            f"{'smallest' if value == min(tried) else 'largest'} {name}"
            for name, value, tried in (
                ("learning rate", lr, self.lrs),
                ("batch size", batch_size, self.batch_sizes),
            )
            if len(tried) > 1 and value in (min(tried), max(tried))
        ]
        return " and ".join(found)


def make_grid(
    experiment: Experiment, seconds: float, lrs: str | None = None, batch_sizes: str | None = None
) -> Grid:
    """The grid of the command line, where lists have commas; without them, factors of the experiment's."""
    if not seconds > 0:
        raise ValueError(f"tune-seconds must be positive, not {seconds:g}")
    rates = _numbers("tune-lrs", lrs, float) or tuple(experiment.lr * factor for factor in _RATES)
    sizes = _numbers("tune-batch-sizes", batch_sizes, int) or tuple(
        max(1, round(experiment.batch_size * factor)) for factor in _SIZES
    )
    return Grid(tuple(dict.fromkeys(rates)), tuple(dict.fromkeys(sizes)), seconds)


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    if not text:
        return ()
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = (0,)
    if not all(value > 0 for value in values):
        words = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} must be positive {words} with commas between, not {text!r}")
    return values


def cell_plan(plan: Plan, grid: Grid, lr: float, batch_size: int) -> Plan:
    """One cell of the grid: all methods with these two. Pictures would be most of the record; it has none."""
    slices = math.ceil(plan.experiment.slices * _CELL_SLICES)
    experiment = replace(plan.experiment, lr=lr, batch_size=batch_size, slices=slices)
    return replace(plan, experiment=experiment, seconds=grid.seconds, one_lr=True, shown=0)


def cell_folder(folder: Path, lr: float, batch_size: int) -> Path:
    """Where its record is."""
    return folder / FOLDER / f"lr={lr:.12g}-batch={batch_size}"


def check(plan: Plan, grid: Grid, seeds: range, n: int) -> None:
    """Refuse what cannot be tuned, before an hour has passed."""
    if BASELINE not in plan.method_names:
        raise ValueError(f"tuned against tuned means against {BASELINE}: add {BASELINE} to --methods")
    for name in plan.method_names:
        for setting in ("lr", "batch_size"):
            if f":{setting}=" in name:
                raise ValueError(f"method {name!r} has a {setting} of its own, which --tune is to find")
    if max(grid.batch_sizes) > n:
        raise ValueError(f"tune-batch-sizes has {max(grid.batch_sizes)}, but there are only {n} examples")
    if SEED in seeds:
        raise ValueError(f"seed {SEED} is that of the grid: the best are to be run on others (--first-seed)")


@dataclass(frozen=True)
class Best:
    """The cell in which a method's training loss was lowest."""

    method: str
    lr: float
    batch_size: int
    loss: float

    @property
    def variant(self) -> str:
        """The method's name with these settings."""
        return f"{self.method}:lr={self.lr:.12g}:batch_size={self.batch_size}"


def best_of_each(method_names: tuple[str, ...], grid: Grid, folder: Path) -> list[Best]:
    """From the records of the grid. Of equals, the first in the grid."""
    found: dict[str, Best] = {}
    for cell in grid.cells():
        for line in records.read(cell_folder(folder, *cell)).lines("slice"):
            known = found.get(line["method"])
            if known is None or line["train_loss"] < known.loss:
                found[line["method"]] = Best(line["method"], *cell, line["train_loss"])
    return [found[name] for name in method_names]


def tuned_plan(plan: Plan, grid: Grid, best: list[Best]) -> Plan:
    """The best of each against each other."""
    variants = {each.variant: each for each in best}
    for name in variants:
        methods.find(name)
    baseline = next(each.variant for each in best if each.method == BASELINE)
    notes = {
        "baseline": baseline,
        "tuned": {
            name: {
                "method": each.method,
                "lr": each.lr,
                "batch_size": each.batch_size,
                "loss": each.loss,
                "edge": grid.at_the_edge(each.lr, each.batch_size),
            }
            for name, each in variants.items()
        },
        "grid": {"lrs": list(grid.lrs), "batch_sizes": list(grid.batch_sizes), "seed": SEED},
    }
    differs = "; ".join(filter(None, [plan.differs, "learning rate and batch size tuned for each method"]))
    return replace(plan, method_names=tuple(variants), seconds=grid.seconds, differs=differs, notes=notes)


Run = Callable[[Plan, range, Path], Any]
"""Runs a plan on some seeds in a folder; what is there already is not run again."""


def tune(
    plan: Plan,
    grid: Grid,
    data: datasets.Data,
    seeds: range,
    folder: Path,
    run: Run,
    say: Callable[[str], None] = lambda words: None,
) -> list[Best]:
    """All three parts, as far as they are not in the records yet; the best of each method."""
    check(plan, grid, seeds, len(data.train))
    cells = grid.cells()
    for number, cell in enumerate(cells, start=1):
        say(f"Grid, {number} of {len(cells)}: learning rate {cell[0]:g}, batches of {cell[1]}")
        run(cell_plan(plan, grid, *cell), range(SEED, SEED + 1), cell_folder(folder, *cell))
    best = best_of_each(plan.method_names, grid, folder)
    for each in best:
        edge = grid.at_the_edge(each.lr, each.batch_size)
        say(
            f"{each.method}: learning rate {each.lr:g}, batches of {each.batch_size}, loss {each.loss:.4g}"
            + (f" ({edge} of the grid)" if edge else "")
        )
    say(f"Tuned against tuned, {len(seeds)} seeds")
    run(tuned_plan(plan, grid, best), seeds, folder)
    return best
