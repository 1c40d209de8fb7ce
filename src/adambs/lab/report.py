"""One self-contained ``report.html`` from one or more runs, and the same numbers as a table for a terminal.

Whatever comes from a record (names, labels, texts, commands) is a string of a stranger: it passes through
:func:`esc` on its way into HTML and through :func:`embed` on its way into a script. Should one slip through,
the page's policy lets only its own two scripts run, by their hashes, and loads nothing from anywhere.
"""

import hashlib
import json
import math
import os
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs
from rich.table import Table
from rich.text import Text

import adambs
from adambs.lab.analysis import (
    AXES,
    ENOUGH_SEEDS,
    METRICS,
    Analysis,
    Curve,
    Estimate,
    Speedup,
    analyse,
    compared,
    headline,
    lead,
    not_reached,
    number,
    run_title,
    times,
    warnings_of,
    words,
)
from adambs.lab.figures import Saved, save_figures, speedup_range, style, thumbnail
from adambs.lab.records import Line, Run

SWITCHES = {
    "axis": {"seconds": "Seconds", "step": "Steps", "epoch": "Epochs"},
    "metric": {"train_loss": "Loss", "train_error": "Train error", "test_error": "Test error"},
}
LEFT = ("Method", "95 % interval", "In words")
DASHES = {"solid": "none", "dash": "6 3", "dot": "2 2.5", "dashdot": "7 3 2 3"}


def write_report(
    runs: list[Run],
    folder: Path,
    *,
    title: str | None = None,
    baseline: str = "adam",
    figures: bool = True,
) -> Path:
    """Write ``report.html`` and, unless told not to, ``figures/`` into ``folder``; the path of the report."""
    analyses, empty = _analyse(runs, baseline)
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for index, (analysis, slug) in enumerate(zip(analyses, slugs(analyses), strict=True)):
        saved = save_figures(analysis, folder / "figures", slug) if figures else []
        sections.append(_section(analysis, index, slug, saved, alone=len(analyses) == 1))
    path = folder / "report.html"
    page = _page(analyses, sections, empty, title)
    partial = path.with_suffix(".partial")
    partial.write_bytes(page.encode("utf-8", "replace"))
    os.replace(partial, path)
    return path


def _analyse(runs: list[Run], baseline: str) -> tuple[list[Analysis], list[str]]:
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


def slugs(analyses: Iterable[Analysis]) -> list[str]:
    """A short name for each run, safe in a file name and in an address, no two alike."""
    made: list[str] = []
    for analysis in analyses:
        name = str(analysis.run.config.get("experiment", "")).lower()
        base = re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:40].strip("-") or "run"
        made.append(base if base not in made else f"{base}-{len(made) + 1}")
    return made


# ---------------------------------------------------------------------------------------------- escaping


def esc(value: object) -> str:
    """As text in HTML, in attributes too."""
    return escape(str(value), quote=True)


def embed(value: object) -> str:
    """As JSON inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 is escaped as well
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


# ------------------------------------------------------------------------------------------------- parts


def _file(kind: str) -> str:
    return resources.files("adambs.lab").joinpath(f"report_template.{kind}").read_text("utf-8")


@cache
def _parts() -> dict[str, Template]:
    """The pieces of ``report_template.html``, by name."""
    _, *pieces = _file("html").split("<!-- part: ")
    return {name: Template(text.strip()) for name, text in (piece.split(" -->", 1) for piece in pieces)}


class Markup(str):
    """A string that is HTML already."""


def _fill(part: str, **values: object) -> Markup:
    """A piece with its values, each escaped unless it is :class:`Markup`."""
    shown = {name: value if isinstance(value, Markup) else esc(value) for name, value in values.items()}
    return Markup(_parts()[part].substitute(shown))


def _join(pieces: Iterable[str]) -> Markup:
    """Pieces of HTML one after the other."""
    return Markup("".join(pieces))


# -------------------------------------------------------------------------------------------------- page


def _page(analyses: list[Analysis], sections: list[Markup], empty: list[str], title: str | None) -> str:
    several = len(analyses) > 1
    title = title or (f"{len(analyses)} experiments" if several else run_title(analyses[0]))
    scripts = get_plotlyjs().replace("\r", ""), _file("js")
    hashes = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return _fill(
        "page",
        title=title,
        lead=_lead_text(analyses, empty),
        contents=_contents(analyses) if several else "",
        chips=_join(_chip(name, shown) for name, shown in _all_methods(analyses).items()),
        axes=_switch("axis"),
        metrics=_switch("metric"),
        overall=_overall(analyses) if several else "",
        sections=_join(sections),
        version=adambs.__version__,
        hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in hashes)),
        css=Markup(_file("css")),
        data=Markup(embed({"methods": _looks(analyses), "runs": [_data(each) for each in analyses]})),
        plotly=Markup(scripts[0]),
        js=Markup(scripts[1]),
    )


def _lead_text(analyses: list[Analysis], empty: list[str]) -> Markup:
    notes = _join(f'<p class="note">Left out: {esc(reason)}</p>' for reason in empty)
    if len(analyses) > 1:
        return notes
    found, what = esc(headline(analyses[0])), esc(compared(analyses[0]))
    return Markup(
        f'<p class="headline">{found}</p><p class="compared">{what}</p>{_notes(analyses[0])}{notes}'
    )


def _notes(analysis: Analysis) -> Markup:
    return _join(f'<p class="note">{esc(note)}</p>' for note in warnings_of(analysis))


def _contents(analyses: list[Analysis]) -> Markup:
    rows = (
        f'<li><a href="#{slug}">{esc(run_title(each))}</a><span>{esc(headline(each))}</span></li>'
        for each, slug in zip(analyses, slugs(analyses), strict=True)
    )
    return Markup(f'<ol class="contents" aria-label="Contents">{"".join(rows)}</ol>')


def _all_methods(analyses: list[Analysis]) -> dict[str, str]:
    return {name: analysis.title(name) for analysis in analyses for name in analysis.methods}


def _chip(name: str, title: str) -> Markup:
    return _fill("chip", name=name, title=title, swatch=_swatch(name))


def _swatch(method: str) -> Markup:
    look = style(method)
    return _fill("swatch", light=look.light, dark=look.dark, dash=DASHES[look.dash])


def _switch(name: str) -> Markup:
    return _join(
        _fill("switch", name=name, value=value, label=label, checked="" if k else "checked")
        for k, (value, label) in enumerate(SWITCHES[name].items())
    )


# ---------------------------------------------------------------------------------- numbers for the plots


def _looks(analyses: list[Analysis]) -> list[dict[str, str]]:
    looks = []
    for name, title in _all_methods(analyses).items():
        look = style(name)
        looks.append(
            {"name": name, "title": title, "light": look.light, "dark": look.dark, "dash": look.dash}
        )
    return looks


def _data(analysis: Analysis) -> dict[str, Any]:
    def curves(metric: str, axis: str) -> list[dict[str, Any]]:
        return [_curve(each) for each in analysis.curves(metric, axis)]

    return {
        "curves": {metric: {axis: curves(metric, axis) for axis in AXES} for metric in METRICS},
        "sampling": {name: curves(name, "step") for name in ("ess", "variance_reduction")},
        "distributions": [
            {"method": method, "times": [_shape(line) for line in lines]}
            for method, lines in analysis.last_distributions().items()
        ],
    }


def _shape(line: Line) -> dict[str, Any]:
    ratios = _numbers(line["quantiles"])
    return {"step": line["step"], "ratios": [value if value and value > 0 else None for value in ratios]}


def _curve(curve: Curve) -> dict[str, Any]:
    shown = {name: _numbers(getattr(curve, name)) for name in ("x", "mean", "low", "high")}
    return {"method": curve.method, "seeds": curve.seeds, **shown}


# ---------------------------------------------------------------------------------------------- a section


def _section(analysis: Analysis, index: int, slug: str, figures: list[Saved], *, alone: bool) -> Markup:
    title, found, what = run_title(analysis), headline(analysis), compared(analysis)
    sessions = analysis.run.sessions
    settings = {
        name: value for name, value in analysis.run.config.items() if name not in ("title", "differs")
    }
    return _fill(
        "section",
        slug=slug,
        index=index,
        head="" if alone else _fill("head", title=title, headline=found, compared=what),
        notes="" if alone else _notes(analysis),
        names=", ".join(analysis.title(name) for name in analysis.methods),
        finals=_finals(analysis),
        speedups=_speedups(analysis),
        sampling=_sampling(analysis, index),
        examples=_examples(analysis),
        methods=_join(_method(analysis, name) for name in analysis.methods),
        commands=_join(_fill("command", command=each) for each in _distinct(sessions, "command")),
        machines=_join(_facts(each) for each in _distinct(sessions, "machine")),
        settings=_facts(settings | {"seeds used": list(analysis.seeds)}),
        files=_files(figures),
    )


def _files(figures: list[Saved]) -> Markup:
    files = _join(_fill("file", caption=each.caption, name=each.name) for each in figures)
    return _fill("files", files=files) if figures else Markup()


def _distinct(sessions: list[Line], name: str) -> list[Any]:
    found: list[Any] = []
    for session in sessions:
        if session.get(name) and session[name] not in found:
            found.append(session[name])
    return found


def _sampling(analysis: Analysis, index: int) -> Markup:
    shapes = analysis.last_distributions()
    if not shapes and not analysis.curves("ess", "step"):
        return Markup()
    return _fill("sampling", index=index, shape=_fill("shape", index=index) if shapes else "")


def _method(analysis: Analysis, name: str) -> Markup:
    known = analysis.run.methods.get(name, {})
    mark = (
        ' <span class="biased">biased</span> Its steps do not average to the gradient.'
        if known.get("biased")
        else ""
    )
    texts = {key: known.get(key, "") for key in ("summary", "citation")}
    return _fill(
        "method", swatch=_swatch(name), title=analysis.title(name), name=name, mark=Markup(mark), **texts
    )


def _facts(facts: dict[str, Any]) -> Markup:
    def shown(value: object) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    rows = (
        f"<div><dt>{esc(str(name).replace('_', ' '))}</dt><dd>{esc(shown(value))}</dd></div>"
        for name, value in facts.items()
    )
    return Markup(f'<dl class="facts">{"".join(rows)}</dl>')


# ------------------------------------------------------------------------------------------------- tables


def _table(names: list[str], bodies: Iterable[str], label: str) -> Markup:
    heads = (f'<th scope="col"{" class=left" if name in LEFT else ""}>{esc(name)}</th>' for name in names)
    return _fill("table", label=label, heads=_join(heads), bodies=_join(bodies))


def _row(analysis: Analysis, method: str, cells: Iterable[str]) -> str:
    biased = analysis.run.methods.get(method, {}).get("biased")
    mark = ' <span class="biased">biased</span>' if biased else ""
    name = f'<th scope="row">{_swatch(method)}{esc(analysis.title(method))}{mark}</th>'
    return f"<tr>{name}{''.join(cells)}</tr>"


def _body(title: str, columns: int, rows: Iterable[str]) -> str:
    head = f'<tr class="group"><th scope="rowgroup" colspan="{columns}">{title}</th></tr>'
    return f"<tbody>{head}{''.join(rows)}</tbody>"


def _value(estimate: Estimate, metric: str, *, best: bool = False) -> str:
    shown, half = value_and_half(estimate, metric)
    small = f"<small>± {half}</small>" if half else ""
    return f"<td{' class=best' if best else ''}>{shown}{small}</td>"


def _finals(analysis: Analysis) -> Markup:
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
    return _fill("finals", seeds=len(analysis.seeds), interval=interval, table=table)


def _speedups(analysis: Analysis) -> Markup:
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
    return _fill("speedups", baseline=analysis.title(analysis.baseline), table=table)


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
    return _fill("forest", label=label, light=look.light, dark=look.dark, kind=kind, **places)


def _overall(analyses: list[Analysis]) -> Markup:
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


# ----------------------------------------------------------------------------------------------- examples


def _examples(analysis: Analysis) -> Markup:
    found = {method: lines[-1] for method, lines in analysis.last_distributions().items()}
    if not found:
        return Markup()
    opened = next(name for name in (lead(analysis), *found) if name in found)
    groups = {"highest": "Most likely to be drawn", "lowest": "Least likely to be drawn"}
    parts = []
    for method, line in found.items():
        body = _join(f"<h4>{groups[key]}</h4>{_cards(line[key])}" for key in groups if line.get(key))
        at = f"seed {line['seed']}, step {line['step']:,}"
        is_open = "open" if method == opened else ""
        parts.append(_fill("details", open=is_open, title=analysis.title(method), at=at, body=body))
    return _fill("examples", methods=_join(parts))


def _cards(examples: list[Line]) -> str:
    kind = " texts" if any("text" in each for each in examples) else ""
    return f'<ul class="cards{kind}">{"".join(map(_card, examples))}</ul>'


def _card(example: Line) -> Markup:
    label, guess, index = example.get("label", ""), example.get("guess"), example["index"]
    shown = Markup()
    if "text" in example:
        shown = Markup(f'<blockquote tabindex="0">{esc(example["text"])}</blockquote>')
    elif example.get("image"):
        shown = _fill("image", address=thumbnail(example["image"]), index=index, label=label)
    said = Markup()
    if guess is not None:
        kind, mark = ("clip", "✓") if guess == label else ("clip wrong", "✗")
        said = Markup(f'<span class="{kind}">{mark} guess: {esc(guess)}</span>')
    ratio = number(float(example["ratio"]))
    return _fill("card", shown=shown, label=label, guess=said, ratio=ratio, index=index)


# ---------------------------------------------------------------------------------------------- terminal


def terminal_table(runs: list[Run], *, baseline: str = "adam") -> Table:
    """The report's numbers for a terminal."""
    analyses, empty = _analyse(runs, baseline)
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
