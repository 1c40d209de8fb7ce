"""The tables of the report: on the page, in the terminal, and in RESULTS.md."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from markupsafe import Markup

from adambs.lab.report.analysis import Analysis, analyse_all
from adambs.lab.report.estimates import Estimate
from adambs.lab.report.figures import speedup_range, style
from adambs.lab.report.markup import fill, join, slugs, swatch
from adambs.lab.report.phrases import (
    not_reached,
    number,
    points,
    rise,
    run_title,
    times,
    times_and_interval,
    verdict_in_full,
)
from adambs.lab.report.series import AXES
from adambs.lab.report.speedups import Speedup
from adambs.lab.report.terminal import Numbers
from adambs.lab.runs.records import Run

LEFT = ("Method", "95 % interval", "In words")


def _table(names: list[str], bodies: Iterable[Markup], label: str) -> Markup:
    head = Markup('<th scope="col"{}>{}</th>')
    heads = (head.format(Markup(" class=left") if name in LEFT else "", name) for name in names)
    return fill("table", label=label, heads=join(heads), bodies=join(bodies))


def _row(analysis: Analysis, method: str, cells: Iterable[Markup]) -> Markup:
    biased = analysis.run.methods.get(method, {}).get("biased")
    mark = Markup(' <span class="biased">biased</span>') if biased else ""
    row = Markup('<tr><th scope="row">{}{}{}</th>{}</tr>')
    return row.format(swatch(method), analysis.title(method), mark, join(cells))


def _body(title: str, columns: int, rows: Iterable[Markup]) -> Markup:
    head = Markup('<tr class="group"><th scope="rowgroup" colspan="{}">{}</th></tr>').format(columns, title)
    return Markup("<tbody>{}{}</tbody>").format(head, join(rows))


def _rows(rows: Iterable[Markup]) -> Markup:
    return Markup("<tbody>{}</tbody>").format(join(rows))


def _cell(shown: str, small: str = "", *, attributes: str = "") -> Markup:
    """A cell with a second line in small letters, if there is one."""
    below = Markup("<small>{}</small>").format(small) if small else ""
    return Markup("<td{}>{}{}</td>").format(Markup(attributes), shown, below)


def _above_interval(shown: str) -> Markup:
    """A cell of ``1.55 (1.33 to 1.79)``, the interval on a line of its own: the table is narrower."""
    value, _, interval = shown.partition(" (")
    return _cell(value, interval.removesuffix(")"))


def _value(estimate: Estimate, metric: str, *, best: bool = False) -> Markup:
    shown, half = value_and_half(estimate, metric)
    return _cell(shown, f"± {half}" if half else "", attributes=" class=best" if best else "")


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
            cells.append(_cell(shown))
        rows.append(_row(analysis, method, cells))
    names = [
        "Method",
        *(name.capitalize() for name in analysis.metrics.values()),
        "Steps",
        "Training time",
        "Gradients",
    ]
    several = len(analysis.seeds) > 1
    interval = "± is the 95 % interval (Student’s t)." if several else "One seed has no interval."
    table = _table(names, [_rows(rows)], "Final losses and errors")
    return fill("finals", seeds=len(analysis.seeds), interval=interval, table=table)


def speedup_table(analysis: Analysis) -> Markup:
    """How much faster than the baseline each method was."""
    others = [name for name in analysis.speedups if name != analysis.baseline]
    if not others:
        return Markup()
    names = ["Method", "at ¼", "at ½", "at ¾", "final loss", "Geometric mean", "95 % interval", "In words"]
    bodies = [
        _body(
            f"In {AXES[axis]}", 8, (_speedup_row(analysis, analysis.speedups[name][axis]) for name in others)
        )
        for axis in ("seconds", "step")
    ]
    table = _table(names, bodies, "Speedups")
    return fill("speedups", baseline=analysis.title(analysis.baseline), table=table)


def _speedup_row(analysis: Analysis, speedup: Speedup) -> Markup:
    cells = []
    for k, ratios in enumerate(speedup.ratios):
        count = sum(not ratio.reached for ratio in ratios)
        missing = Markup("<small class=missed>{} of {} not reached</small>").format(count, len(ratios))
        cells.append(_cell(times(speedup, k) + (missing if count else Markup())))
    mean = speedup.overall
    interval = f"{mean.low:.2f} to {mean.high:.2f}" if mean.low is not None else ""
    cells.append(_cell(Markup("<strong>{}</strong>").format(times(speedup)), interval))
    cells.append(_cell(_forest(analysis, speedup), attributes=' class="forest"'))
    verdict = Markup('<span class="{0}">{0}</span>').format(speedup.verdict)
    missed = not_reached(speedup) if speedup.missed else ""
    cells.append(_cell(verdict, missed, attributes=' class="words"'))
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


def beyond_table(analysis: Analysis) -> Markup:
    """What the mean of the four speedups does not tell: the final loss alone, steadiness, the test error."""
    others = [name for name in analysis.speedups if name != analysis.baseline]
    if not others:
        return Markup()
    baseline = analysis.title(analysis.baseline)
    names = ["Method", f"To {baseline}’s final loss", "Steadiness", *_error_names(baseline)]
    if "balanced_test_error" in analysis.equal_time:
        names.append("Balanced test error then")
    rows = []
    for method in (analysis.baseline, *others):
        final = _speedup_cell(analysis, method, analysis.speedups[method]["seconds"].last)
        cells = [final, rise(analysis.steadiness[method]), *_error_cells(analysis, method)]
        rows.append(_row(analysis, method, map(_above_interval, cells)))
    table = _table(names, [_rows(rows)], "Final loss, steadiness and test error")
    return fill("beyond", baseline=baseline, table=table)


def overall_table(analyses: list[Analysis]) -> Markup:
    """One line for each run."""
    names = [
        *("Method", "Training loss", "Test error", "Speedup, wall clock", "Speedup, steps"),
        *("To the final loss", "Steadiness", "In words"),
    ]
    bodies = []
    for analysis, slug in zip(analyses, slugs(analyses), strict=True):
        rows = []
        for method in analysis.methods:
            cells = [
                _value(analysis.finals[method][metric], metric) for metric in ("train_loss", "test_error")
            ]
            *numbers, verdict = speed_cells(analysis, method)
            cells += [*map(_above_interval, numbers), _cell(verdict, attributes=' class="words"')]
            rows.append(_row(analysis, method, cells))
        link = Markup('<a href="#{}">{}</a>').format(slug, run_title(analysis))
        bodies.append(_body(link, len(names), rows))
    table = _table(names, bodies, "All experiments")
    return Markup('<section class="run" id="overall"><h2>All experiments</h2>{}</section>').format(table)


# ------------------------------------------------------------------------- the terminal and RESULTS.md


def terminal_table(runs: list[Run], *, baseline: str = "adam") -> Numbers:
    """The report's first numbers for a terminal, which may be narrow; the rest is on the page."""
    analyses, empty = analyse_all(runs, baseline)
    head = ["method", "training loss", "test error", "speedup, clock", "speedup, steps", "clock, in words"]
    parts = []
    for analysis in analyses:
        rows = []
        for method in analysis.methods:
            clock, steps, _, _, verdict = speed_cells(analysis, method)
            finals = [_final(analysis, method, metric) for metric in ("train_loss", "test_error")]
            rows.append([_name(analysis, method), *finals, clock, steps, verdict])
        parts.append((run_title(analysis) if len(analyses) > 1 else "", rows))
    return Numbers(head, parts, "; ".join(empty))


def main_rows(analysis: Analysis) -> list[list[str]]:
    """What matters most of each method, in six columns: a head, and a row for each."""
    baseline = analysis.title(analysis.baseline)
    head = ["method", "training loss", "test error", "speedup", f"to {baseline}'s final loss", "in words"]
    rows = []
    for method in analysis.methods:
        clock, _, final, _, verdict = speed_cells(analysis, method)
        ends = [_final(analysis, method, metric) for metric in ("train_loss", "test_error")]
        rows.append([_name(analysis, method), *ends, clock, final, verdict])
    return [head, *rows]


def more_rows(analysis: Analysis) -> list[list[str]]:
    """Steps, steadiness, and the test error against the baseline's: a head, and a row for each."""
    names = ["method", "speedup in steps", "steadiness", *_error_names(analysis.title(analysis.baseline))]
    rows = []
    for method in analysis.methods:
        _, steps, _, steady, _ = speed_cells(analysis, method)
        rows.append([_name(analysis, method), steps, steady, *_error_cells(analysis, method)[:3]])
    return [names, *rows]


def balanced_rows(analysis: Analysis) -> list[list[str]]:
    """The test error within classes, averaged over them, where it was recorded."""
    baseline = analysis.title(analysis.baseline)
    head = ["method", "balanced test error", f"when {baseline} ended, against {baseline}'s"]
    rows = [
        [
            _name(analysis, method),
            _final(analysis, method, "balanced_test_error"),
            _error_cells(analysis, method)[3],
        ]
        for method in analysis.methods
    ]
    return [head, *rows]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def speed_cells(analysis: Analysis, method: str) -> list[str]:
    """Wall clock, steps, the final loss, steadiness, and the words on the wall clock."""
    found, steady = analysis.speedups.get(method), rise(analysis.steadiness[method])
    if found is None:
        return ["–", "–", "–", steady, ""]
    clock, steps = found["seconds"], found["step"]
    shown = [_speedup_cell(analysis, method, each) for each in (clock, steps, clock.last)]
    return [*shown, steady, "the baseline" if method == analysis.baseline else verdict_in_full(clock)]


def _error_names(baseline: str) -> list[str]:
    return [
        f"speedup to {baseline}'s lowest test error",
        f"test error when {baseline} ended, against {baseline}'s",
        f"lowest by then, against {baseline}'s",
    ]


def _error_cells(analysis: Analysis, method: str) -> list[str]:
    """What :func:`_error_names` says, and the balanced test error when the baseline ended, if recorded."""
    balanced = "balanced_test_error" in analysis.equal_time
    if method == analysis.baseline:
        return ["1", "0", "0", *(["0"] if balanced else [])]
    found = analysis.to_lowest_error.get(method)
    speed = "–" if found is None else _speedup_cell(analysis, method, found)
    ends, lows = analysis.equal_time, analysis.stopped_early
    cells = [speed, *(points(each.get("test_error", {}).get(method)) for each in (ends, lows))]
    if balanced:
        cells.append(points(ends["balanced_test_error"].get(method)))
    return cells


def _speedup_cell(analysis: Analysis, method: str, speedup: Speedup) -> str:
    if method == analysis.baseline:
        return "1"
    return times_and_interval(speedup.overall, speedup.bounded())


def _name(analysis: Analysis, method: str) -> str:
    biased = " (biased)" if analysis.run.methods.get(method, {}).get("biased") else ""
    return f"{analysis.title(method)}{biased}"


def _final(analysis: Analysis, method: str, metric: str) -> str:
    shown, half = value_and_half(analysis.finals[method][metric], metric)
    return f"{shown} ± {half}" if half else shown


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
