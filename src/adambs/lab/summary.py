"""``adambs summary``: RESULTS.md from the records, so that no number in it is typed by hand."""

import re
from pathlib import Path

from adambs.lab import records
from adambs.lab.analysis import Analysis, analyse
from adambs.lab.experiments import EXPERIMENTS
from adambs.lab.figures import save, save_figures
from adambs.lab.overview import SideBySide, default_table, sweep_figure
from adambs.lab.report_tables import error_rows, markdown, speed_rows
from adambs.lab.sweep import is_sweep, sweep_section
from adambs.lab.words import compared, headline, run_title, warnings_of

_HEAD = """\
# Results

Made by `adambs summary {folder}` from the records in this folder; each section names the command that made
its record. What the columns mean: [docs/reading-a-report.md](../docs/reading-a-report.md). A speedup is the
geometric mean, over the training losses that Adam first reaches after 1/4, 1/2, 3/4 and all of its budget,
of Adam's time over the method's; the last of the four is Adam's final loss, and has a column of its own.
Steadiness is the largest ratio, after the first tenth of a run, of the training loss to the lowest loss so
far, in the worst seed: 1 never rose. Intervals are 95 %, by Student's t over seeds, on the logarithms of
ratios and on differences as they are; one seed has none. Differences of errors are in percentage points.
`<` marks a bound: a loss or an error that was not reached.
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
        _default(analyses),
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


def _default(analyses: list[Analysis]) -> str:
    table = default_table(analyses, [_title(analysis) for analysis in analyses])
    if not table:
        return ""
    return (
        "## The default against Adam\n\nThe library's default (`adambs`), by the clock: speedups to Adam's "
        "four losses, to its final loss and to its lowest test error; steadiness; and test errors minus "
        f"Adam's.\n\n{table}\n"
    )


def _side_by_side(analyses: list[Analysis], figures: Path) -> str:
    found = SideBySide(analyses, [_title(analysis) for analysis in analyses])
    if not found.methods:
        return ""
    figure = found.figure()
    if figure is not None:
        save(figure, figures, "side-by-side")
    tables = "\n\n".join(found.tables())
    picture = "" if figure is None else "\n![Side by side](figures/side-by-side.png)\n"
    return (
        "## Side by side\n\nSpeedup over Adam by the clock, with its 95 % interval over seeds. The last "
        "column of the first table is the geometric mean over Fashion-MNIST, CIFAR-10 and IMDB, on which the "
        f"library's default was chosen.\n\n{tables}\n{picture}"
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
        markdown(speed_rows(analysis)),
        markdown(error_rows(analysis)),
        f"![Loss and errors](figures/{name}-curves.png)",
        f"`{session['command']}` on {machine['processor']}, {analysis.run.config['threads']} threads, torch "
        f"{machine['torch']}; record: [{name}/{records.FILE}]({name}/{records.FILE}).",
    ]
    return "\n\n".join(parts) + "\n"
