"""``adambs demo``: the idea in a few minutes, on data that needs no files."""

from itertools import count
from pathlib import Path

from rich.console import Console

from adambs.lab.datasets import Data
from adambs.lab.errors import STOPPED
from adambs.lab.experiments import reproduce
from adambs.lab.report.page import write_report
from adambs.lab.report.tables import terminal_table
from adambs.lab.runs import records, runner

METHODS = ("adam", "adam-impt", "adambs")
RUNS = {"digits": 1.0, "digits-long-tailed": 50.0}


def run_demo(console: Console, out: Path, seeds: int, *, command: str) -> None:
    """Digits, balanced and long-tailed, three methods, a report."""
    folders, stopped = [], False
    try:
        for name, factor in RUNS.items():
            plan = reproduce.make_plan(
                "digits", "paper", reproduce.Overrides(methods=METHODS, long_tail=factor)
            )
            data = reproduce.prepare(plan, None)
            console.print(f"{plan.title()}: {len(data.train):,} examples")
            folders.append(_free(out, name, plan, data))
            reproduce.run_with_progress(console, plan, data, range(seeds), folders[-1], command=command)
    except KeyboardInterrupt:
        stopped = True
        console.print("Stopped. What is done is kept; the same command goes on from here.")
    runs = [run for folder in folders if (run := records.begun(folder))]
    if runs:
        page = write_report(runs, out)
        console.print(terminal_table(runs))
        console.print(f"The report: [bold]{page.resolve()}[/bold]")
    if stopped:
        raise SystemExit(STOPPED)


def _free(out: Path, name: str, plan: runner.Plan, data: Data) -> Path:
    """The folder to go on with, or a new one if an older version's demo left other settings there."""
    for number in count(1):
        folder = out / (name if number == 1 else f"{name}-{number}")
        if records.same_config(folder, plan.config(data)):
            return folder
    raise AssertionError("unreachable")
