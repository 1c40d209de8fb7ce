"""``adambs summary``: RESULTS.md from the records, so that no number in it is typed by hand."""

import math
import re
from pathlib import Path

from adambs.lab import records
from adambs.lab.analysis import METRICS, Analysis, Estimate, analyse
from adambs.lab.experiments import EXPERIMENTS
from adambs.lab.figures import save, save_figures
from adambs.lab.overview import SideBySide, sweep_figure
from adambs.lab.report_tables import speedup_cells, value_and_half
from adambs.lab.sweep import is_sweep, sweep_section
from adambs.lab.words import compared, headline, run_title, warnings_of

_HEAD = """\
# Results

Made by `adambs summary {folder}` from the records in this folder; each section names the command that made
its record. What the columns mean: [docs/reading-a-report.md](../docs/reading-a-report.md). A speedup is the
geometric mean, over the training losses that Adam first reaches after 1/4, 1/2, 3/4 and all of its budget,
of Adam's time over the method's. Intervals are 95 %, over seeds. `<` marks a bound: a loss that was not
reached.
"""


def write_summary(folder: Path) -> Path:
    """Write RESULTS.md and the figures for every run below ``folder``."""
    analyses = [analyse(records.read(path.parent)) for path in sorted(folder.glob(f"*/{records.FILE}"))]
    if not analyses:
        raise records.RecordError(f"{folder} holds no folder with a {records.FILE}")
    order = list(EXPERIMENTS)
    analyses.sort(key=lambda a: (order.index(a.run.config["experiment"]), a.run.path.name))
    sweeps = [analysis for analysis in analyses if is_sweep(analysis)]
    analyses = [analysis for analysis in analyses if not is_sweep(analysis)]
    notes = folder / "NOTES.md"
    text = [
        _HEAD.format(folder=folder.name),
        *([notes.read_text()] if notes.exists() else []),
        _overview(analyses),
        _side_by_side(analyses, folder / "figures"),
        *([_sweep(sweeps, folder / "figures")] if sweeps else []),
    ]
    for analysis in analyses:
        save_figures(analysis, folder / "figures", analysis.run.path.name)
        text.append(_section(analysis))
    file = folder / "RESULTS.md"
    file.write_text("\n".join(text))
    return file


def _title(analysis: Analysis) -> str:
    """The experiment's, and which seeds if they are others than the first."""
    first, last = analysis.seeds[0], analysis.seeds[-1]
    return run_title(analysis) + (f", seeds {first} to {last}" if first else "")


def _anchor(heading: str) -> str:
    """Where GitHub puts a heading: small letters, no punctuation, a hyphen for each space."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _overview(analyses: list[Analysis]) -> str:
    rows = ["| experiment | seeds | what was found |", "|---|---|---|"]
    for analysis in analyses:
        name = f"[{_title(analysis)}](#{_anchor(_title(analysis))})"
        rows.append(f"| {name} | {len(analysis.seeds)} | {headline(analysis)} |")
    return "\n".join(rows) + "\n"


def _side_by_side(analyses: list[Analysis], figures: Path) -> str:
    found = SideBySide(analyses, [_title(analysis) for analysis in analyses])
    if not found.methods:
        return ""
    figure = found.figure()
    if figure is not None:
        save(figure, figures, "side-by-side")
    picture = "" if figure is None else "\n![Side by side](figures/side-by-side.png)\n"
    return (
        "## Side by side\n\nSpeedup over Adam by the clock, with its 95 % interval over seeds. The last "
        "column is the geometric mean over Fashion-MNIST, CIFAR-10 and IMDB, on which the library's default "
        f"was chosen.\n\n{found.table()}\n{picture}"
    )


def _sweep(sweeps: list[Analysis], figures: Path) -> str:
    titles = [_title(sweep) for sweep in sweeps]
    save(sweep_figure(sweeps, titles), figures, "sweep")
    return sweep_section(sweeps, titles) + "\n![The sweep](figures/sweep.png)\n"


def _section(analysis: Analysis) -> str:
    experiment = EXPERIMENTS[analysis.run.config["experiment"]]
    name = analysis.run.path.name
    session = analysis.run.sessions[-1]
    machine = session["machine"]
    parts = [
        f"## {_title(analysis)}",
        compared(analysis),
        *(f"**Note.** {note}" for note in warnings_of(analysis)),
        f"**The paper's figure** ({experiment.figure}): {experiment.shows}.",
        *(
            f"**Here, {name}:** {headline(analysis, method)}"
            for method, name in (
                ("adambs-exp3", "the paper's Algorithm 2"),
                ("adambs", "the library's default"),
            )
            if method in analysis.speedups
        ),
        _table(analysis),
        f"![Loss and errors](figures/{name}-curves.png)",
        f"`{session['command']}` on {machine['processor']}, {analysis.run.config['threads']} threads, torch "
        f"{machine['torch']}; record: [{name}/{records.FILE}]({name}/{records.FILE}).",
    ]
    return "\n\n".join(parts) + "\n"


def _table(analysis: Analysis) -> str:
    head = [
        "method",
        *METRICS.values(),
        "test error when Adam ended, against Adam's",
        "lowest by then, against Adam's",
        "speedup, wall clock",
        "speedup, steps",
        "in words (wall clock)",
    ]
    rows = [head, ["---"] * len(head)]
    for method in analysis.methods:
        finals = (value_and_half(each, metric) for metric, each in analysis.finals[method].items())
        cells = [f"{shown} ± {half}" if half else shown for shown, half in finals]
        cells += [_difference(found.get(method)) for found in (analysis.equal_time, analysis.stopped_early)]
        biased = " (biased)" if analysis.run.methods[method]["biased"] else ""
        rows.append([f"{analysis.title(method)}{biased}", *cells, *speedup_cells(analysis, method)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _difference(estimate: Estimate | None) -> str:
    """In percentage points, with its interval."""
    if estimate is None or math.isnan(estimate.value):
        return "–"
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        interval = f" ({100 * estimate.low:+.2f} to {100 * estimate.high:+.2f})"
    return f"{100 * estimate.value:+.2f}{interval}"
