"""``adambs demo``: the idea in a few minutes, on data that needs no files."""

from pathlib import Path

from rich.console import Console

from adambs.lab import reproduce
from adambs.lab.report import write_report
from adambs.lab.report_tables import terminal_table

METHODS = ("adam", "adam-impt", "adambs")
RUNS = {"digits": 1.0, "digits-long-tailed": 50.0}


def run_demo(console: Console, out: Path, seeds: int, *, command: str) -> None:
    """Digits, balanced and long-tailed, three methods, a report."""
    runs = []
    try:
        for name, factor in RUNS.items():
            plan = reproduce.make_plan(
                "digits", "paper", reproduce.Overrides(methods=METHODS, long_tail=factor)
            )
            data = reproduce.prepare(plan, None)
            console.print(f"{plan.experiment.title}, long-tailed by {factor:g}: {len(data.train)} examples")
            folder = out / name
            runs.append(reproduce.run_with_progress(console, plan, data, seeds, folder, command=command))
    except KeyboardInterrupt:
        console.print("Stopped. What is done is kept; the same command goes on from here.")
    if runs:
        page = write_report(runs, out)
        console.print(terminal_table(runs))
        console.print(f"The report: [bold]{page.resolve()}[/bold]")
