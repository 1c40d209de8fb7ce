"""Several runs at once: methods side by side, as tables and as a figure; the README's picture; a sweep's."""

import math
from collections.abc import Sequence

import matplotlib.axes
from matplotlib.figure import Figure

from adambs.lab.experiments.sweep import DEFAULT, ORACLE, TRIALS
from adambs.lab.report.analysis import Analysis
from adambs.lab.report.estimates import Estimate
from adambs.lab.report.figures import INK, MUTED, X_LABELS, draw_curves, plain, style, tidy
from adambs.lab.report.phrases import points, run_title, times, times_and_interval
from adambs.lab.report.speedups import Speedup, across
from adambs.lab.report.tables import markdown

CHOOSING = ("cnn-fashion", "cnn-cifar10", "rcnn-imdb")
"""The experiments that the default rule was chosen on, over which the mean is taken."""

OTHERS = "methods-"
"""How the folder of a run begins that has the other methods of such an experiment."""

OLDER = "-0.1"
"""How it ends if a newer run has some of these methods, too."""

ELSEWHERE = " °"
"""Marks what is from another run than the others of its column, such as one of an older version."""

FRONT = ("cnn-fashion", "rcnn-imdb", "cnn-cifar10")
"""The runs of the README's picture, in the order of its table."""

COLUMNS = 5
"""How many runs stand beside each other in a table."""

# What is slower than this is drawn at the edge: one method that fails must not flatten all the others.
_SLOWEST = 0.6
_TICKS = (0.7, 1, 1.2, 1.5, 2)


class SideBySide:
    """Speedups by the clock of the methods that ran in two experiments at least."""

    def __init__(self, analyses: Sequence[Analysis], titles: Sequence[str]) -> None:
        self.analyses, self.titles = analyses, titles
        ran = {name: None for analysis in analyses for name in analysis.methods if name != analysis.baseline}
        self.methods = [name for name in ran if sum(each is not None for each in self.found(name)) > 1]

    def found(self, method: str) -> list[Speedup | None]:
        """In each of the runs; None where it did not run."""
        return [analysis.speedups.get(method, {}).get("seconds") for analysis in self.analyses]

    def mean(self, method: str) -> tuple[Estimate, bool] | None:
        """The geometric mean over :data:`CHOOSING`, and whether it is only a bound."""
        three = [each for name in CHOOSING if (each := self._in(name, method)) is not None]
        if len(three) < len(CHOOSING):
            return None
        return across(three), any(each.bounded() for each in three)

    def _in(self, name: str, method: str) -> Speedup | None:
        """In the run of this name or, if the method is not in it, in one of those of the other methods."""
        of = dict(zip((each.run.path.name for each in self.analyses), self.found(method), strict=True))
        return of.get(name) or of.get(OTHERS + name) or of.get(OTHERS + name + OLDER)

    def name(self, method: str) -> str:
        """The method's, for people; with its own name if another before it has the same title."""
        titles = {
            name: next(each.title(name) for each in self.analyses if name in each.methods)
            for name in self.methods
        }
        same = [name for name in self.methods if titles[name] == titles[method]]
        return titles[method] if method == same[0] else f"{titles[method]} ({method})"

    def tables(self) -> list[str]:
        """A row for each method, a column for each run: first :data:`CHOOSING` and their mean, then the rest.

        No table has more than :data:`COLUMNS` runs, and none has methods that did not run in any of them.
        """
        names = [analysis.run.path.name for analysis in self.analyses]
        chosen = [names.index(name) for name in CHOOSING if name in names]
        others = [k for k in range(len(names)) if k not in chosen and not names[k].startswith(OTHERS)]
        parts = [chosen, *(others[k : k + COLUMNS] for k in range(0, len(others), COLUMNS))]
        return [self._table(part, with_mean=part is chosen) for part in parts if part]

    def _table(self, runs: list[int], *, with_mean: bool) -> str:
        rows = [["method", *(self.titles[k] for k in runs)]]
        for method in self.methods:
            own = self.found(method)
            found = [(self._in(self.analyses[k].run.path.name, method), own[k]) for k in runs]
            if any(each for each, _ in found):
                cells = [
                    "" if each is None else _cell(each) + (ELSEWHERE if each is not here else "")
                    for each, here in found
                ]
                rows.append([self.name(method), *cells])
                if with_mean:
                    mean = self.mean(method)
                    mark = ELSEWHERE if any(cell.endswith(ELSEWHERE) for cell in cells) else ""
                    rows[-1].append("" if mean is None else f"**{times_and_interval(*mean)}**{mark}")
        if with_mean:
            rows[0].append("mean of the three")
        return markdown(rows)

    def figure(self) -> Figure | None:
        """The same as a forest plot, of the methods and the runs that have to do with the default."""
        shown = [
            k
            for k, analysis in enumerate(self.analyses)
            if DEFAULT in analysis.speedups and not analysis.run.path.name.startswith(OTHERS)
        ]
        names = [self.analyses[k].run.path.name for k in shown]
        methods = [method for method in self.methods if any(self._in(name, method) for name in names)]
        if not shown or not methods:
            return None
        means = {method: mean for method in methods if (mean := self.mean(method))}
        titles = [self.titles[k] for k in shown]
        if means:
            titles.append("geometric mean over Fashion-MNIST, CIFAR-10 and IMDB")
        figure, panels = _panels(titles, [self.name(method) for method in methods])
        for row, method in enumerate(methods):
            for axes, each in zip(panels, (self._in(name, method) for name in names), strict=False):
                if each is not None:
                    _dot(axes, row, each.overall, each.bounded(), color=style(method).light)
            if method in means:
                _dot(panels[-1], row, *means[method], color=style(method).light)
        return figure


def against_baseline(analyses: Sequence[Analysis], titles: Sequence[str], methods: dict[str, str]) -> str:
    """Some methods against Adam, a row for each run that has one; nothing if none has.

    ``methods`` says of each what is added to the run's title.
    """
    rows = [
        ["experiment", "seeds", "speedup", "to Adam's final loss", "test error when Adam ended", "in words"]
    ]
    for analysis, title in zip(analyses, titles, strict=True):
        for method in (name for name in methods if name in analysis.speedups):
            clock = analysis.speedups[method]["seconds"]
            error = points(analysis.equal_time["test_error"][method])
            seeds = str(len(analysis.seeds))
            name = title + methods[method]
            rows.append([name, seeds, _cell(clock), _cell(clock.last), error, clock.verdict])
    return markdown(rows) if len(rows) > 1 else ""


def front_figure(analyses: Sequence[Analysis]) -> Figure | None:
    """The README's picture: Adam and the default alone, a panel for each run of :data:`FRONT`."""
    of = {each.run.path.name: each for each in analyses if DEFAULT in each.speedups}
    shown = [of[name] for name in FRONT if name in of]
    if not shown:
        return None
    figure = Figure(figsize=(9, 2.7), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, analysis in zip(panels, shown, strict=True):
        draw_curves(axes, analysis, "train_loss", "seconds", (analysis.baseline, DEFAULT))
        clock = analysis.speedups[DEFAULT]["seconds"]
        found = f"{times(clock)} as fast" if clock.verdict == "faster" else clock.verdict
        axes.set_title(f"{plain(run_title(analysis), 40)}: {found}", fontsize=8.5, loc="left", color=INK)
        axes.set_xlabel(X_LABELS["seconds"], color=INK)
    panels[0].set_ylabel("training loss", color=INK)
    panels[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _cell(speedup: Speedup) -> str:
    return times_and_interval(speedup.overall, speedup.bounded())


def sweep_figure(sweeps: Sequence[Analysis], titles: Sequence[str]) -> Figure:
    """A row for each rule with a dot for each of its trials; lines mark the default and the oracle."""
    figure, panels = _panels(titles, [rule.replace("`", "") for rule in TRIALS])
    for axes, sweep in zip(panels, sweeps, strict=True):
        for row, trials in enumerate(TRIALS.values()):
            for trial in trials:
                found = sweep.speedups[trial]["seconds"]
                _dot(axes, row, found.overall, found.bounded(), color=style(trial.partition(":")[0]).light)
        for name, label in ((DEFAULT, "default"), (ORACLE, "oracle")):
            at = sweep.speedups[name]["seconds"].overall.value
            axes.axvline(at, color=style(name).light, linewidth=1.2, linestyle="--", zorder=0, label=label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=7, labelcolor=INK
    )
    return figure


def _panels(titles: Sequence[str], rows: Sequence[str]) -> tuple[Figure, list[matplotlib.axes.Axes]]:
    """Panels, at most four beside each other, that share a logarithmic axis and one row for each name."""
    columns = min(4, len(titles))
    lines = -(-len(titles) // columns)
    size = 2.2 + 2.1 * columns, 0.8 + lines * (0.9 + 0.27 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    title = "Times as fast as Adam, by the clock"
    figure.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left", weight="bold")
    note = "Hollow: some loss was never reached, so the truth lies further left. Bars: 95 % over seeds."
    figure.supxlabel(note, fontsize=6.5, color=MUTED, x=0.01, ha="left")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    for axes, title in zip(grid, titles, strict=False):
        tidy(axes)
        axes.grid(False, axis="y")
        axes.set_title(plain(title, 34, lines=3), fontsize=7.5, loc="left", color=INK)
        axes.axvline(1, color=INK, linewidth=0.8, zorder=0)
        axes.tick_params(labelbottom=True)
        axes.set_xscale("log")
    first = grid[0]
    first.set_xlim(_SLOWEST / 1.05, 2.8)
    first.set_xticks(_TICKS, [f"{tick:g}×" for tick in _TICKS])
    first.set_xticks([], minor=True)
    first.set_yticks(range(len(rows)), [plain(row, 34) for row in rows])
    first.set_ylim(len(rows) - 0.4, -0.6)
    return figure, list(grid[: len(titles)])


def _dot(axes: matplotlib.axes.Axes, row: int, estimate: Estimate, bounded: bool, *, color: str) -> None:
    """A speedup with its interval; hollow when it is a bound, an arrow when it is beyond the edge."""
    if math.isnan(estimate.value):
        return
    if estimate.value < _SLOWEST:
        axes.plot([_SLOWEST], [row], "<", color=color, markersize=5)
        axes.annotate(
            f"{estimate.value:.2f}", (_SLOWEST, row), (6, 0), textcoords="offset points", va="center",
            fontsize=6.5, color=MUTED,
        )  # fmt: skip
        return
    if estimate.low is not None and estimate.high is not None:
        axes.plot([max(estimate.low, _SLOWEST), estimate.high], [row, row], color=color, linewidth=1.8)
    axes.plot(
        [estimate.value], [row], "o", color=color, markerfacecolor="white" if bounded else color, markersize=5
    )
