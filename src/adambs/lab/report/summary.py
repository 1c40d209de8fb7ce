"""``adambs summary``: RESULTS.md from the records, so that no number in it is typed by hand."""

import re
from pathlib import Path

from adambs import __version__
from adambs.lab.experiments import EXPERIMENTS
from adambs.lab.experiments.sweep import DEFAULT, is_sweep, sweep_section
from adambs.lab.report.analysis import Analysis, analyse
from adambs.lab.report.figures import curves_figure, save_png
from adambs.lab.report.overview import (
    ELSEWHERE,
    OTHERS,
    SideBySide,
    against_baseline,
    front_figure,
    sweep_figure,
)
from adambs.lab.report.phrases import compared, headline, run_title, warnings_of
from adambs.lab.report.tables import balanced_rows, main_rows, markdown, more_rows
from adambs.lab.report.tuned import is_tuned, tuned_section
from adambs.lab.runs import records

_HEAD = """\
# Results

Made by `adambs summary {folder}` from the records in this folder; each section names the command that made
its record. First the library's default, then the paper's Algorithm 2, then everything else.

- **Speedup**: Adam's time over the method's, by the clock, to the training losses that Adam first reaches
  after 1/4, 1/2, 3/4 and all of its budget; the geometric mean of the four. The last of them, Adam's final
  loss, has a column of its own. Above 1 is faster; `<` marks a bound: a loss that was never reached.
- **Test error when Adam ended**: the method's minus Adam's at that moment, in percentage points; minus is
  better.
- In brackets: 95 % intervals, by Student's t over seeds. One seed has none.

More on the columns: [docs/reading-a-report.md](../docs/reading-a-report.md).
"""

_ALGORITHM_2 = "adambs-exp3"

# So many methods tell a run from another in its title.
_NAMED = 2

# The library's default, and what a row about it adds to the name of the experiment.
_DEFAULTS = {
    DEFAULT: "",
    "adambs-loop": ", the README's loop",
    "adambs-loop:context=1": ", the README's loop with the classes as context",
}


def write_summary(folder: Path) -> Path:
    """Write RESULTS.md and the figures in it; ``adambs report`` makes all figures of one run."""
    analyses = [analyse(records.read(path.parent)) for path in sorted(folder.glob(f"*/{records.FILE}"))]
    if not analyses:
        raise records.RecordError(f"{folder} holds no folder with a {records.FILE}")
    order = list(EXPERIMENTS)
    analyses.sort(key=lambda a: (order.index(a.run.config["experiment"]), a.run.path.name))
    sweeps = [analysis for analysis in analyses if is_sweep(analysis)]
    analyses = [analysis for analysis in analyses if not is_sweep(analysis)]
    tuned = [analysis for analysis in analyses if is_tuned(analysis)]
    analyses = [analysis for analysis in analyses if not is_tuned(analysis)]
    titles, notes = _titles(analyses), folder / "NOTES.md"
    text = [
        _HEAD.format(folder=folder.name),
        *([notes.read_text()] if notes.exists() else []),
        _against(
            [each for each in analyses if not each.run.path.name.startswith(OTHERS)],
            titles,
            _DEFAULTS,
            "The library's default against Adam",
            "AdamBS as `BanditLoader` and `AdamBS` set it up: method `adambs` looks before drawing when that "
            "pays, the README's loop does not. What was recorded with an older version says so.",
        ),
        _against(
            analyses,
            titles,
            {_ALGORITHM_2: ""},
            "The paper's Algorithm 2 against Adam",
            "The rule as it is printed (method `adambs-exp3`), which is not the default.",
        ),
        *([tuned_section(tuned, [_title(each) for each in tuned])] if tuned else []),
        "## Everything else\n",
        _side_by_side(analyses, titles, folder / "figures"),
        *([_sweep(sweeps, folder / "figures")] if sweeps else []),
    ]
    front = front_figure(analyses)
    if front is not None:
        save_png(front, folder / "figures", "front")
    for analysis in analyses:
        save_png(curves_figure(analysis), folder / "figures", f"{analysis.run.path.name}-curves")
        text.append(_section(analysis, titles[analysis.run.path.name]))
    file = folder / "RESULTS.md"
    file.write_text("\n".join(text))
    return file


def _titles(analyses: list[Analysis]) -> dict[str, str]:
    """Of each run, by the name of its folder. One that looks like another is told by the methods it adds."""
    titles: dict[str, str] = {}
    known: dict[str, Analysis] = {}
    for analysis in sorted(analyses, key=lambda each: each.run.path.name.startswith(OTHERS)):
        folder, title = analysis.run.path.name, _title(analysis)
        first = known.setdefault(title, analysis)
        added = [analysis.title(name) for name in analysis.methods if name not in first.methods]
        added.sort(key=lambda name: "," in name)  # those with settings last
        more = f" and {len(added) - _NAMED} more" if len(added) > _NAMED else ""
        told = f"with {', '.join(added[:_NAMED])}{more}" if added else folder
        titles[folder] = title if first is analysis else f"{title}, {told}"
    return titles


def _title(analysis: Analysis) -> str:
    """The experiment's; its scale if it is the paper's, its seeds if not the first, its version if older."""
    config = analysis.run.config
    whole = config["scale"] == "paper" and EXPERIMENTS[config["experiment"]].quick
    scale = ", at the paper's scale" if whole else ""
    first, last = analysis.seeds[0], analysis.seeds[-1]
    seeds = f", seeds {first} to {last}" if first else ""
    recorded = _minor(analysis.run.sessions[-1]["machine"].get("adambs", __version__))
    version = "" if recorded == _minor(__version__) else f", version {recorded}"
    return run_title(analysis) + scale + seeds + version


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _anchor(heading: str) -> str:
    """Where GitHub puts a heading: small letters, no punctuation, a hyphen for each space."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _against(
    analyses: list[Analysis], titles: dict[str, str], methods: dict[str, str], heading: str, what: str
) -> str:
    """Some methods against Adam in all runs that have them, each linked to its section."""
    names = [titles[analysis.run.path.name] for analysis in analyses]
    table = against_baseline(analyses, [f"[{name}](#{_anchor(name)})" for name in names], methods)
    return f"## {heading}\n\n{what}\n\n{table}\n" if table else ""


def _side_by_side(analyses: list[Analysis], titles: dict[str, str], figures: Path) -> str:
    found = SideBySide(analyses, [titles[analysis.run.path.name] for analysis in analyses])
    if not found.methods:
        return ""
    figure = found.figure()
    if figure is not None:
        save_png(figure, figures, "side-by-side")
    tables = "\n\n".join(found.tables())
    picture = "" if figure is None else "\n![Side by side](figures/side-by-side.png)\n"
    return (
        "### Side by side\n\nSpeedup over Adam by the clock, with its 95 % interval over seeds. The last "
        "column of the first table is the geometric mean over Fashion-MNIST, CIFAR-10 and IMDB, on which the "
        f"library's default was chosen. What is marked with {ELSEWHERE.strip()} is from another run of the "
        "experiment, beside its own Adam, and most of that is of version 0.1: compare it with care.\n\n"
        f"{tables}\n{picture}"
    )


def _sweep(sweeps: list[Analysis], figures: Path) -> str:
    titles = [_title(sweep) for sweep in sweeps]
    save_png(sweep_figure(sweeps, titles), figures, "sweep")
    return sweep_section(sweeps, titles) + "\n![The sweep](figures/sweep.png)\n"


def _section(analysis: Analysis, title: str) -> str:
    experiment = EXPERIMENTS[analysis.run.config["experiment"]]
    name = analysis.run.path.name
    session = analysis.run.sessions[-1]
    machine = session["machine"]
    parts = [
        f"### {title}",
        compared(analysis),
        *(f"**Note.** {note}" for note in warnings_of(analysis)),
        f"**The paper's figure** ({experiment.figure}): {experiment.shows}.",
        *(
            f"**Here, {name}:** {headline(analysis, method)}"
            for method, name in (
                (DEFAULT, "the library's default"),
                (_ALGORITHM_2, "the paper's Algorithm 2"),
            )
            if method in analysis.speedups
        ),
        markdown(main_rows(analysis)),
        f"![Loss and errors](figures/{name}-curves.png)",
        "<details><summary>Steps, steadiness and test errors</summary>",
        "Steadiness is the largest ratio, after the first tenth of a run, of the training loss to the lowest "
        "loss so far, in the worst seed: 1 never rose. Errors against Adam's are in percentage points.",
        markdown(more_rows(analysis)),
        *([markdown(balanced_rows(analysis))] if "balanced_test_error" in analysis.equal_time else []),
        "</details>",
        f"`{session['command']}` on {machine['processor']}, {analysis.run.config['threads']} threads, torch "
        f"{machine['torch']}; record: [{name}/{records.FILE}]({name}/{records.FILE}).",
    ]
    return "\n\n".join(parts) + "\n"
