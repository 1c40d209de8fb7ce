"""``adambs demo``: where it pays, and where it does not. Three panels, on data that needs no files.

The panels run in two processes where there are two processors, with one thread each. The methods of a panel
take turns in one process, so that a busy machine slows both alike.
"""

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from adambs.lab.errors import STOPPED, user_errors
from adambs.lab.experiments import reproduce
from adambs.lab.report.analysis import Analysis, analyse
from adambs.lab.report.page import write_report
from adambs.lab.report.phrases import finding
from adambs.lab.report.tables import terminal_table
from adambs.lab.runs import records, runner

TITLE = "Where it pays, and where it does not"


@dataclass(frozen=True)
class Panel:
    """One of the three: an experiment, and what it is, in a sentence."""

    experiment: str
    about: str


PANELS = (
    Panel(
        "heavy-tailed",
        "Generated so that a few examples have most of the gradient, as the paper's theory assumes.",
    ),
    Panel(
        "photograph",
        "Real data: the pixels of a photograph, of which the sky is soon learned and the roofs are not.",
    ),
    Panel(
        "balanced-digits",
        "Real data passed over twice, all of it alike: nothing to win, and the gate keeps the cost small.",
    ),
)

Lane = list[tuple[runner.Plan, Path]]
"""Panels that one process runs, one after the other, with their folders."""
Show = Callable[[str, float], None]

# Which panels each process runs, one after the other: both take about as long.
_LANES = (("photograph",), ("heavy-tailed", "balanced-digits"))

NEXT = """1. Is it for your model? A minute on a copy of it says what there is to win:
   print(adambs.probe(model, train, F.cross_entropy, batch_size=128))
2. Then a few lines of your loop change:
   sampler = adambs.BanditSampler(len(train), batch_size=128)
   optimizer = adambs.AdamBS(model.parameters(), sampler, lr=1e-3)
   for (x, y), draw in adambs.BanditLoader(train, sampler):
       ...
       scores = adambs.scores.cross_entropy(logits, y)
       draw.mean(losses, scores).backward()
       optimizer.step(draw, scores)"""


def run_demo(console: Console, out: Path, seeds: int, *, command: str) -> None:
    """Run what is not there yet, print what was found, write the report."""
    console.print(f"{TITLE}: Adam against AdamBS, as in the README's loop.", style="bold", highlight=False)
    plans = {panel.experiment: _plan(panel.experiment) for panel in PANELS}
    folders = {name: _folder(out, name, plan) for name, plan in plans.items()}
    stopped = False
    try:
        _run(console, plans, folders, seeds, command)
    except KeyboardInterrupt:
        stopped = True
        console.print("Stopped. What is done is kept; the same command goes on from here.")
    runs = {name: run for name, folder in folders.items() if (run := records.begun(folder))}
    if runs:
        page = write_report(list(runs.values()), out, title=TITLE, sentences=_sentences(runs), closing=NEXT)
        _print_findings(console, runs)
        console.print(f"The report: [bold]{page.resolve()}[/bold]")
        console.print(Text(f"What next\n{NEXT}"), soft_wrap=True)
    if stopped:
        raise SystemExit(STOPPED)


def _print_findings(console: Console, runs: dict[str, records.Run]) -> None:
    for number, sentence in enumerate(_sentences(runs), start=1):
        console.print(Text(f"{number}. {sentence}"))
    console.print(terminal_table(list(runs.values())))


def _sentences(runs: dict[str, records.Run]) -> list[str]:
    """What each panel is and what was found there; nothing of a panel without a measurement."""
    sentences = []
    for panel in PANELS:
        run = runs.get(panel.experiment)
        if run is not None and any(run.seeds.values()):
            analysis = analyse(run)
            [method] = (name for name in analysis.methods if name != analysis.baseline)
            sentences.append(f"{panel.about} {finding(analysis, method)} {_cost(analysis, method)}")
    return sentences


def _cost(analysis: Analysis, method: str) -> str:
    """What the same number of steps took, as a ratio of the totals."""
    ours, theirs = (
        sum(float(each["seconds"][-1]) for each in analysis.series[name].values())
        for name in (method, analysis.baseline)
    )
    return f"A step took {ours / theirs:.2f}× as long." if theirs else ""


# ------------------------------------------------------------------------------------------------ running


def _plan(name: str) -> runner.Plan:
    return reproduce.make_plan(name, "paper", reproduce.Overrides(threads=1))


def _folder(out: Path, name: str, plan: runner.Plan) -> Path:
    """The folder to go on with, or a new one if an older version's demo left other settings there."""
    config = plan.config(reproduce.prepare(plan, None))
    for number in count(1):
        folder = out / (name if number == 1 else f"{name}-{number}")
        if records.same_config(folder, config):
            return folder
    raise AssertionError("unreachable")


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(
    console: Console, plans: dict[str, runner.Plan], folders: dict[str, Path], seeds: int, command: str
) -> None:
    """Run the lanes, side by side where there are two processors, with a bar for each panel."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console, expand=True) as bars:
        tasks = {name: bars.add_task(plan.experiment.title, total=seeds) for name, plan in plans.items()}

        def show(name: str, done: float) -> None:
            bars.update(tasks[name], completed=round(done, 2))

        lanes = [[(plans[name], folders[name]) for name in lane] for lane in _LANES]
        if processors() > 1:
            _side_by_side(lanes, seeds, command, show)
        else:
            for lane in lanes:
                _run_lane(lane, seeds, command, show)


def _side_by_side(lanes: list[Lane], seeds: int, command: str, show: Show) -> None:
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    started = [
        context.Process(target=_in_its_process, args=(lane, seeds, command, news), daemon=True)
        for lane in lanes
    ]
    try:
        with _ctrl_c_later():
            for process in started:
                process.start()
        waiting = len(started)
        while waiting:
            try:
                kind, *what = news.get(timeout=1)
            except queue.Empty:
                if not any(process.is_alive() for process in started) and news.empty():
                    raise RuntimeError("a process of the demo ended without a word") from None
                continue
            if kind == "failed":
                raise ValueError(what[0])
            if kind == "done":
                waiting -= 1
            else:
                show(*what)
    finally:
        for process in started:
            if process.pid is not None:
                process.terminate()
                process.join()


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Ctrl-C waits until the end. Processes started inside never hear of it: this one ends them.

    They inherit the blocked signal. Here another thread may get it, and Python would raise in this one, while
    a process is given its work: so there is a handler, too.
    """
    if not hasattr(signal, "pthread_sigmask") or current_thread() is not main_thread():
        yield  # Windows; and signals are the main thread's
        return
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if heard:
        raise KeyboardInterrupt


def _in_its_process(lane: Lane, seeds: int, command: str, news: Any) -> None:
    try:
        _run_lane(lane, seeds, command, lambda name, done: news.put(("at", name, done)))
        news.put(("done",))
    except user_errors() as error:
        news.put(("failed", str(error)))
    except KeyboardInterrupt:
        pass


def _run_lane(lane: Lane, seeds: int, command: str, show: Show) -> None:
    """Some panels, one after the other; ``show`` is told how many seeds of a panel are done."""
    for plan, folder in lane:
        name, data = plan.experiment.name, reproduce.prepare(plan, None)
        slices = plan.config(data)["slices"]

        def advance(seed: int, index: int, _: dict[str, Any], name: str = name, slices: int = slices) -> None:
            show(name, seed + index / slices)

        runner.run(plan, data, list(range(seeds)), folder, command=command, progress=advance)
        show(name, seeds)
