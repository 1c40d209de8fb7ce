"""Tuned against tuned: what the grid of ``adambs reproduce --tune`` has chosen, and how the best compare."""

import re
from collections.abc import Sequence
from typing import Any

from adambs.lab.report.analysis import Analysis
from adambs.lab.report.estimates import Estimate, geometric_mean
from adambs.lab.report.phrases import number, points, rise, times_and_interval
from adambs.lab.report.speedups import Speedup, across
from adambs.lab.report.tables import markdown
from adambs.lab.runs import records


def choices(analysis: Analysis) -> dict[str, dict[str, Any]]:
    """Variant -> its method, learning rate, batch size, loss in the grid, and whether it is at an edge."""
    return dict(analysis.run.config.get("tuned") or {})


def is_tuned(analysis: Analysis) -> bool:
    """Whether the run is one of ``--tune``."""
    return bool(choices(analysis))


def tuned_rows(analysis: Analysis) -> list[list[str]]:
    """A head, and a row for each method."""
    head = [
        *("method", "learning rate", "batch size", "lowest loss", "speedup, four targets"),
        *("to Adam's best's final loss", "test error", "against Adam's best's", "steadiness"),
    ]
    rows = []
    for name in analysis.methods:
        chosen = choices(analysis)[name]
        lows = geometric_mean([float(each["train_loss"].min()) for each in analysis.series[name].values()])
        speeds = ["1", "1"]
        if name != analysis.baseline:
            clock = analysis.speedups[name]["seconds"]
            speeds = [times_and_interval(each.overall, each.bounded()) for each in (clock, clock.last)]
        edge = " (at the edge of the grid)" if chosen["edge"] else ""
        error = analysis.finals[name]["test_error"]
        rows.append(
            [
                _title(analysis, name, chosen["method"]) + edge,
                f"{chosen['lr']:g}",
                str(chosen["batch_size"]),
                _with_interval(lows),
                *speeds,
                number(error.value, percent=True),
                "0" if name == analysis.baseline else points(analysis.equal_time["test_error"][name]),
                rise(analysis.steadiness[name]),
            ]
        )
    return [head, *rows]


def tuned_section(analyses: Sequence[Analysis], titles: Sequence[str]) -> str:
    """For RESULTS.md: a table for each run, and the mean over the runs."""
    parts = [
        "## Tuned against tuned",
        "Every method with the same grid of learning rates and batch sizes and the same training time, its "
        "own overhead included. The best of each, by the lowest training loss that it has reached at the end "
        "of that time (one seed), is run again on other seeds for the same time, all taking turns. Speedups "
        "are by the clock over Adam's best; in brackets 95 % intervals, by Student's t on logarithms over "
        "seeds. Errors against Adam's are in percentage points. Steadiness is that of the worst seed.",
    ]
    for analysis, title in zip(analyses, titles, strict=True):
        config, name = analysis.run.config, analysis.run.path.name
        grid = config["grid"]
        parts += [
            f"### {title}",
            f"{len(analysis.seeds)} seeds, {config['seconds']:g} s each; learning rates "
            f"{_listed(grid['lrs'])}, batch sizes {_listed(grid['batch_sizes'])}.",
            markdown(tuned_rows(analysis)),
            f"`{analysis.run.sessions[-1]['command']}`, record: "
            f"[{name}/{records.FILE}]({name}/{records.FILE}), the grid's beside it.",
        ]
    if len(analyses) > 1:
        parts += [f"### Geometric mean over {', '.join(titles)}", markdown(mean_rows(analyses))]
    return "\n\n".join(parts) + "\n"


def mean_rows(analyses: Sequence[Analysis]) -> list[list[str]]:
    """The geometric mean over runs, of the methods that are in all of them; with a context or without one, as
    it suits the data, a method is the same."""
    found: dict[str, list[Speedup]] = {}
    for analysis in analyses:
        for name, chosen in choices(analysis).items():
            if name != analysis.baseline and name in analysis.speedups:
                title = _title(analysis, name, re.sub(":context=[^:]*", "", chosen["method"]))
                found.setdefault(title, []).append(analysis.speedups[name]["seconds"])
    rows = [["method", "speedup, four targets", "to Adam's best's final loss"]]
    for title, speedups in found.items():
        if len(speedups) == len(analyses):
            lasts = [each.last for each in speedups]
            cells = [
                times_and_interval(across(each), any(one.bounded() for one in each))
                for each in (speedups, lasts)
            ]
            rows.append([title, *cells])
    return rows


def how_chosen(analysis: Analysis) -> str:
    """A sentence for the page."""
    edges = [name for name, chosen in choices(analysis).items() if chosen["edge"]]
    note = (
        "Tuned against tuned: each method has the learning rate and the batch size of the same grid with "
        "which its training loss was lowest after the same time. Compared with Adam's best, on other seeds."
    )
    if edges:
        note += f" At the edge of the grid, where more might be won outside: {', '.join(edges)}."
    return note


def _title(analysis: Analysis, name: str, method: str) -> str:
    """The method's for people, without what the table says in other columns."""
    whole = analysis.title(name)
    return ", ".join([whole.split(", ")[0], *method.split(":")[1:]])


def _with_interval(estimate: Estimate) -> str:
    shown = number(estimate.value)
    if estimate.low is None or estimate.high is None:
        return shown
    return f"{shown} ({number(estimate.low)} to {number(estimate.high)})"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
