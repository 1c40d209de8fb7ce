"""``adambs summary``: RESULTS.md from the records, so that no number in it is typed by hand."""

from pathlib import Path

from adambs.lab import records
from adambs.lab.analysis import METRICS, Analysis, analyse
from adambs.lab.experiments import EXPERIMENTS
from adambs.lab.figures import save_figures
from adambs.lab.report_tables import speedup_cells, value_and_half
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
    analyses.sort(key=lambda a: order.index(a.run.config["experiment"]))
    text = [_HEAD.format(folder=folder.name), _overview(analyses)]
    for analysis in analyses:
        save_figures(analysis, folder / "figures", analysis.run.path.name)
        text.append(_section(analysis))
    file = folder / "RESULTS.md"
    file.write_text("\n".join(text))
    return file


def _overview(analyses: list[Analysis]) -> str:
    rows = ["| experiment | seeds | what was found |", "|---|---|---|"]
    for analysis in analyses:
        anchor = run_title(analysis).lower().replace(" ", "-").replace(",", "").replace("'", "")
        name = f"[{run_title(analysis)}](#{anchor})"
        rows.append(f"| {name} | {len(analysis.seeds)} | {headline(analysis)} |")
    return "\n".join(rows) + "\n"


def _section(analysis: Analysis) -> str:
    experiment = EXPERIMENTS[analysis.run.config["experiment"]]
    name = analysis.run.path.name
    session = analysis.run.sessions[-1]
    machine = session["machine"]
    parts = [
        f"## {run_title(analysis)}",
        compared(analysis),
        *(f"**Note.** {note}" for note in warnings_of(analysis)),
        f"**The paper's figure** ({experiment.figure}): {experiment.shows}.",
        f"**Here:** {headline(analysis)}",
        _table(analysis),
        f"![Loss and errors](figures/{name}-curves.png)",
        f"`{session['command']}` on {machine['processor']}, {analysis.run.config['threads']} threads, torch "
        f"{machine['torch']}; record: [{name}/{records.FILE}]({name}/{records.FILE}).",
    ]
    return "\n\n".join(parts) + "\n"


def _table(analysis: Analysis) -> str:
    head = ["method", *METRICS.values(), "speedup, wall clock", "speedup, steps", "in words (wall clock)"]
    rows = [head, ["---"] * len(head)]
    for method in analysis.methods:
        finals = (value_and_half(each, metric) for metric, each in analysis.finals[method].items())
        cells = [f"{shown} ± {half}" if half else shown for shown, half in finals]
        biased = " (biased)" if analysis.run.methods[method]["biased"] else ""
        rows.append([f"{analysis.title(method)}{biased}", *cells, *speedup_cells(analysis, method)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
