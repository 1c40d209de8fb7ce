"""One self-contained ``report.html`` from one or more runs.

Whatever comes from a record (names, labels, texts, commands) is a string of a stranger: Jinja2 and
``Markup.format`` escape it on its way into HTML, and ``embedded`` on its way into a script. Should one slip
by, the page's policy lets only its own two scripts run, by their hashes, and loads nothing from anywhere.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from adambs.lab.report.analysis import Analysis, analyse_all
from adambs.lab.report.figures import Saved, save_figures, style, thumbnail
from adambs.lab.report.markup import fill, finite_numbers, join, slugs, swatch
from adambs.lab.report.phrases import (
    compared,
    headline,
    lead,
    number,
    run_title,
    warnings_of,
)
from adambs.lab.report.series import AXES, Curve
from adambs.lab.report.tables import (
    beyond_table,
    finals_table,
    overall_table,
    speedup_table,
)
from adambs.lab.report.tuned import how_chosen, is_tuned
from adambs.lab.runs.records import Line, Run
from adambs.pages import render

_SHORT = 40
"""A text of so many characters stands in a card of the size of a picture."""

SWITCHES = {
    "axis": {"seconds": "Seconds", "step": "Steps", "epoch": "Epochs"},
    "metric": {"train_loss": "Loss", "train_error": "Train error", "test_error": "Test error"},
}


def write_report(
    runs: list[Run],
    folder: Path,
    *,
    title: str | None = None,
    baseline: str = "adam",
    figures: bool = True,
    sentences: Sequence[str] = (),
    closing: str = "",
) -> Path:
    """Write ``report.html`` and, unless told not to, ``figures/`` into ``folder``; the path of the report.

    ``sentences`` stand in the place of the runs' headlines in the contents, ``closing`` below
    the table of all runs.
    """
    analyses, empty = analyse_all(runs, baseline)
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for index, (analysis, slug) in enumerate(zip(analyses, slugs(analyses), strict=True)):
        saved = save_figures(analysis, folder / "figures", slug) if figures else []
        sections.append(_section(analysis, index, slug, saved, alone=len(analyses) == 1))
    path = folder / "report.html"
    page = _page(analyses, sections, empty, title, sentences, closing)
    partial = path.with_suffix(".partial")
    partial.write_bytes(page.encode("utf-8", "replace"))
    os.replace(partial, path)
    return path


# -------------------------------------------------------------------------------------------------- page


def _page(
    analyses: list[Analysis],
    sections: list[Markup],
    empty: list[str],
    title: str | None,
    sentences: Sequence[str],
    closing: str,
) -> str:
    several = len(analyses) > 1
    title = title or (f"{len(analyses)} experiments" if several else run_title(analyses[0]))
    return render(
        "report.html",
        package=__package__,
        script="report.js",
        library=get_plotlyjs().replace("\r", ""),
        title=title,
        lead=_lead_text(analyses, empty),
        contents=_contents(analyses, sentences) if several else "",
        chips=join(_chip(name, shown) for name, shown in _all_methods(analyses).items()),
        axes=_switch("axis"),
        metrics=_switch("metric"),
        overall=overall_table(analyses) if several else "",
        sections=join(sections),
        closing=closing,
        data={"methods": _looks(analyses), "runs": [_data(each) for each in analyses]},
    )


def _lead_text(analyses: list[Analysis], empty: list[str]) -> Markup:
    notes = join(Markup('<p class="note">Left out: {}</p>').format(reason) for reason in empty)
    if len(analyses) > 1:
        return notes
    lead = Markup('<p class="headline">{}</p><p class="compared">{}</p>{}{}')
    return lead.format(headline(analyses[0]), compared(analyses[0]), _notes(analyses[0]), notes)


def _notes(analysis: Analysis) -> Markup:
    notes = [*warnings_of(analysis), *([how_chosen(analysis)] if is_tuned(analysis) else [])]
    return join(Markup('<p class="note">{}</p>').format(note) for note in notes)


def _contents(analyses: list[Analysis], sentences: Sequence[str]) -> Markup:
    told = sentences if len(sentences) == len(analyses) else [headline(each) for each in analyses]
    row = Markup('<li><a href="#{}">{}</a><span>{}</span></li>')
    rows = (
        row.format(slug, run_title(each), sentence)
        for each, slug, sentence in zip(analyses, slugs(analyses), told, strict=True)
    )
    return Markup('<ol class="contents" aria-label="Contents">{}</ol>').format(join(rows))


def _all_methods(analyses: list[Analysis]) -> dict[str, str]:
    return {name: analysis.title(name) for analysis in analyses for name in analysis.methods}


def _chip(name: str, title: str) -> Markup:
    return fill("chip", name=name, title=title, swatch=swatch(name))


def _switch(name: str) -> Markup:
    return join(
        fill("switch", name=name, value=value, label=label, checked="" if k else "checked")
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
        "curves": {metric: {axis: curves(metric, axis) for axis in AXES} for metric in SWITCHES["metric"]},
        "sampling": {name: curves(name, "step") for name in ("ess", "variance_reduction")},
        "distributions": [
            {"method": method, "times": [_shape(line) for line in lines]}
            for method, lines in analysis.last_distributions().items()
        ],
    }


def _shape(line: Line) -> dict[str, Any]:
    ratios = finite_numbers(line["quantiles"])
    return {"step": line["step"], "ratios": [value if value and value > 0 else None for value in ratios]}


def _curve(curve: Curve) -> dict[str, Any]:
    shown = {name: finite_numbers(getattr(curve, name)) for name in ("x", "mean", "low", "high")}
    return {"method": curve.method, "seeds": curve.seeds, **shown}


# ---------------------------------------------------------------------------------------------- a section


def _section(analysis: Analysis, index: int, slug: str, figures: list[Saved], *, alone: bool) -> Markup:
    title, found, what = run_title(analysis), headline(analysis), compared(analysis)
    sessions = analysis.run.sessions
    settings = {
        name: value for name, value in analysis.run.config.items() if name not in ("title", "differs")
    }
    return fill(
        "section",
        slug=slug,
        index=index,
        head="" if alone else fill("head", title=title, headline=found, compared=what),
        notes="" if alone else _notes(analysis),
        names=", ".join(analysis.title(name) for name in analysis.methods),
        finals=finals_table(analysis),
        speedups=speedup_table(analysis),
        beyond=beyond_table(analysis),
        sampling=_sampling(analysis, index),
        examples=_examples(analysis),
        methods=join(_method(analysis, name) for name in analysis.methods),
        commands=join(fill("command", command=each) for each in _distinct(sessions, "command")),
        machines=join(_facts(each) for each in _distinct(sessions, "machine")),
        settings=_facts(settings | {"seeds used": list(analysis.seeds)}),
        files=_files(figures),
    )


def _files(figures: list[Saved]) -> Markup:
    files = join(fill("file", caption=each.caption, name=each.name) for each in figures)
    return fill("files", files=files) if figures else Markup()


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
    return fill("sampling", index=index, shape=fill("shape", index=index) if shapes else "")


def _method(analysis: Analysis, name: str) -> Markup:
    known = analysis.run.methods.get(name, {})
    mark = (
        ' <span class="biased">biased</span> Its steps do not average to the gradient.'
        if known.get("biased")
        else ""
    )
    texts = {key: known.get(key, "") for key in ("summary", "citation")}
    return fill(
        "method", swatch=swatch(name), title=analysis.title(name), name=name, mark=Markup(mark), **texts
    )


def _facts(facts: dict[str, Any]) -> Markup:
    def shown(value: object) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    row = Markup("<div><dt>{}</dt><dd>{}</dd></div>")
    rows = (row.format(str(name).replace("_", " "), shown(value)) for name, value in facts.items())
    return Markup('<dl class="facts">{}</dl>').format(join(rows))


# ----------------------------------------------------------------------------------------------- examples


def _examples(analysis: Analysis) -> Markup:
    found = {method: lines[-1] for method, lines in analysis.last_distributions().items()}
    if not found:
        return Markup()
    opened = next(name for name in (lead(analysis), *found) if name in found)
    groups = {"highest": "Most likely to be drawn", "lowest": "Least likely to be drawn"}
    parts = []
    for method, line in found.items():
        group = Markup("<h4>{}</h4>{}")
        body = join(group.format(groups[key], _cards(line[key])) for key in groups if line.get(key))
        at = f"seed {line['seed']}, step {line['step']:,}"
        is_open = "open" if method == opened else ""
        parts.append(fill("details", open=is_open, title=analysis.title(method), at=at, body=body))
    labelled = any(
        each.get("label") for line in found.values() for key in groups for each in line.get(key, [])
    )
    return fill("examples", methods=join(parts), labelled=labelled)


def _cards(examples: list[Line]) -> Markup:
    longest = max((len(str(each.get("text", ""))) for each in examples), default=0)
    kind = " texts" if longest > _SHORT else ""
    return Markup('<ul class="cards{}">{}</ul>').format(kind, join(map(_card, examples)))


def _card(example: Line) -> Markup:
    label, guess, index = example.get("label", ""), example.get("guess"), example["index"]
    shown = Markup()
    if "text" in example:
        shown = Markup('<blockquote tabindex="0">{}</blockquote>').format(example["text"])
    elif example.get("image"):
        shown = fill("image", address=thumbnail(example["image"]), index=index, label=label)
    said = Markup()
    if guess is not None and (guess or label):  # a value has neither
        kind, mark = ("clip", "✓") if guess == label else ("clip wrong", "✗")
        said = Markup('<span class="{}">{} guess: {}</span>').format(kind, mark, guess)
    ratio = number(float(example["ratio"]))
    return fill("card", shown=shown, label=label, guess=said, ratio=ratio, index=index)
