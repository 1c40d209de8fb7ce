"""The tables of the report, on the page and in the terminal."""

import math
from collections.abc import Iterable

import numpy as np
from rich.table import Table
from rich.text import Text

from adambs.lab.analysis import AXES, ENOUGH_SEEDS, METRICS, Analysis, Estimate, Speedup, analyse_all
from adambs.lab.figures import speedup_range, style
from adambs.lab.records import Run
from adambs.lab.report_markup import Markup, esc, fill, join, slugs, swatch
from adambs.lab.words import not_reached, number, run_title, times, words

LEFT = ("Method", "95 % interval", "In words")


def _table(names: list[str], bodies: Iterable[str], label: str) -> Markup:
    heads = (f'<th scope="col"{" class=left" if name in LEFT else ""}>{esc(name)}</th>' for name in names)
    return fill("table", label=label, heads=join(heads), bodies=join(bodies))


def _row(analysis: Analysis, method: str, cells: Iterable[str]) -> str:
    biased = analysis.run.methods.get(method, {}).get("biased")
    mark = ' <span class="biased">biased</span>' if biased else ""
    name = f'<th scope="row">{swatch(method)}{esc(analysis.title(method))}{mark}</th>'
    return f"<tr>{name}{''.join(cells)}</tr>"


def _body(title: str, columns: int, rows: Iterable[str]) -> str:
    head = f'<tr class="group"><th scope="rowgroup" colspan="{columns}">{title}</th></tr>'
    return f"<tbody>{head}{''.join(rows)}</tbody>"


def _value(estimate: Estimate, metric: str, *, best: bool = False) -> str:
    shown, half = value_and_half(estimate, metric)
    small = f"<small>± {half}</small>" if half else ""
    return f"<td{' class=best' if best else ''}>{shown}{small}</td>"


def finals_table(analysis: Analysis) -> Markup:
    """Where each method ended."""
    rows = []
    for method in analysis.methods:
        cells = [
            _value(each, metric, best=method in lowest(analysis, metric))
            for metric, each in analysis.finals[method].items()
        ]
        for name, unit in (("step", ""), ("seconds", " s"), ("examples", "")):
            total = float(np.mean([each[name][-1] for each in analysis.series[method].values()]))
            shown = f"{total:,.{1 if unit else 0}f}{unit}" if math.isfinite(total) else "–"
            cells.append(f"<td>{shown}</td>")
        rows.append(_row(analysis, method, cells))
    names = [
        "Method",
        *(name.capitalize() for name in METRICS.values()),
        "Steps",
        "Training time",
        "Gradients",
    ]
    enough = len(analysis.seeds) >= ENOUGH_SEEDS
    interval = "± is the 95 % interval (Student’s t)." if enough else "Too few seeds for intervals."
    table = _table(names, [f"<tbody>{''.join(rows)}</tbody>"], "Final losses and errors")
    return fill("finals", seeds=len(analysis.seeds), interval=interval, table=table)


def speedup_table(analysis: Analysis) -> Markup:
    """How much faster than the baseline each method was."""
    others = [name for name in analysis.speedups if name != analysis.baseline]
    if not others:
        return Markup()
    names = ["Method", "at ¼", "at ½", "at ¾", "at the end", "Geometric mean", "95 % interval", "In words"]
    bodies = [
        _body(
            f"In {AXES[axis]}", 8, (_speedup_row(analysis, analysis.speedups[name][axis]) for name in others)
        )
        for axis in ("seconds", "step")
    ]
    table = _table(names, bodies, "Speedups")
    return fill("speedups", baseline=analysis.title(analysis.baseline), table=table)


def _speedup_row(analysis: Analysis, speedup: Speedup) -> str:
    cells = []
    for k, ratios in enumerate(speedup.ratios):
        count = sum(not ratio.reached for ratio in ratios)
        small = f"<small class=missed>{count} of {len(ratios)} not reached</small>" if count else ""
        cells.append(f"<td>{esc(times(speedup, k))}{small}</td>")
    mean = speedup.overall
    interval = f"<small>{mean.low:.2f} to {mean.high:.2f}</small>" if mean.low is not None else ""
    cells.append(f"<td><strong>{esc(times(speedup))}</strong>{interval}</td>")
    cells.append(f'<td class="forest">{_forest(analysis, speedup)}</td>')
    missed = f"<small>{not_reached(speedup)}</small>" if speedup.missed else ""
    cells.append(f'<td class="words"><span class="{speedup.verdict}">{speedup.verdict}</span>{missed}</td>')
    return _row(analysis, speedup.method, cells)


def _forest(analysis: Analysis, speedup: Speedup) -> Markup:
    """The interval as a line and the mean as a dot, on a logarithmic axis that all rows share."""
    start, end = (math.log(edge) for edge in speedup_range(analysis))

    def x(value: float | None) -> str:
        shown = mean.value if value is None else value
        return f"{176 * (math.log(shown) - start) / (end - start):.1f}"

    mean, look = speedup.overall, style(speedup.method)
    if not math.isfinite(mean.value):
        return Markup()
    kind = "bound" if speedup.bounded() else "exact"
    label = f"{times(speedup)}, {speedup.verdict}"
    places = {"one": x(1), "low": x(mean.low), "high": x(mean.high), "mean": x(mean.value)}
    return fill("forest", label=label, light=look.light, dark=look.dark, kind=kind, **places)


def overall_table(analyses: list[Analysis]) -> Markup:
    """One line for each run."""
    names = ["Method", "Training loss", "Test error", "Speedup, wall clock", "Speedup, steps", "In words"]
    bodies = []
    for analysis, slug in zip(analyses, slugs(analyses), strict=True):
        rows = []
        for method in analysis.methods:
            cells = [
                _value(analysis.finals[method][metric], metric) for metric in ("train_loss", "test_error")
            ]
            *numbers, verdict = speedup_cells(analysis, method)
            cells += [f"<td>{esc(each)}</td>" for each in numbers]
            rows.append(_row(analysis, method, [*cells, f'<td class="words">{esc(verdict)}</td>']))
        link = f'<a href="#{slug}">{esc(run_title(analysis))}</a>'
        bodies.append(_body(link, len(names), rows))
    table = _table(names, bodies, "All experiments")
    return Markup(f'<section class="run" id="overall"><h2>All experiments</h2>{table}</section>')


# ---------------------------------------------------------------------------------------------- terminal


def terminal_table(runs: list[Run], *, baseline: str = "adam") -> Table:
    """The report's numbers for a terminal."""
    analyses, empty = analyse_all(runs, baseline)
    table = Table(caption=Text("; ".join(empty)) if empty else None)
    for name in ("method", *METRICS.values(), "speedup, wall clock", "speedup, steps", "in words"):
        table.add_column(name, justify="left" if name in ("method", "in words") else "right")
    for analysis in analyses:
        if len(analyses) > 1:
            table.add_section()
            table.add_row(Text(run_title(analysis), style="bold"))
        for method in analysis.methods:
            finals = (value_and_half(each, metric) for metric, each in analysis.finals[method].items())
            cells = [f"{shown} ± {half}" if half else shown for shown, half in finals]
            table.add_row(*map(Text, [analysis.title(method), *cells, *speedup_cells(analysis, method)]))
    return table


def speedup_cells(analysis: Analysis, method: str) -> tuple[str, str, str]:
    """Wall clock, steps, and the words on the wall clock."""
    found = analysis.speedups.get(method)
    if found is None:
        return "–", "–", ""
    if method == analysis.baseline:
        return "1", "1", "the baseline"
    return times(found["seconds"]), times(found["step"]), words(found["seconds"])


def value_and_half(estimate: Estimate, metric: str) -> tuple[str, str]:
    """A final value, and half the width of its interval or nothing."""
    percent = metric.endswith("_error")
    shown = number(estimate.value, percent=percent)
    if estimate.low is None or estimate.high is None:
        return shown, ""
    return shown, number((estimate.high - estimate.low) / 2, percent=percent, digits=2)


def lowest(analysis: Analysis, metric: str) -> list[str]:
    """The methods whose final value is the lowest."""
    values = {name: finals[metric].value for name, finals in analysis.finals.items()}
    best = min((value for value in values.values() if math.isfinite(value)), default=math.nan)
    return [name for name, value in values.items() if value == best]
