"""``adambs reproduce``: an experiment from its name to its report."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from adambs.lab import datasets, experiments, methods
from adambs.lab.experiments import sweep
from adambs.lab.experiments import tune as tuning
from adambs.lab.runs import records, runner
from adambs.lab.runs.randomness import usable


@dataclass(frozen=True)
class Overrides:
    """What a user may change of an experiment; None keeps it."""

    methods: tuple[str, ...] | None = None
    epochs: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    long_tail: float | None = None
    slices: int | None = None
    threads: int | None = None
    device: str | None = None


def make_plan(name: str, scale: str, changes: Overrides) -> runner.Plan:
    """Decide everything, and say in words how it differs from the paper."""
    original = experiments.find(name)
    experiment = original.at(scale)
    differs = [original.quick_differs] if scale == "quick" and original.quick_differs else []
    for field in ("epochs", "batch_size", "lr", "long_tail"):
        value = getattr(changes, field)
        if value is not None and value != getattr(experiment, field):
            _positive(field, value)
            differs.append(f"{field.replace('_', ' ')} {value:g} instead of {getattr(experiment, field):g}")
            experiment = replace(experiment, **{field: value})
    if changes.slices is not None:
        _positive("slices", changes.slices)
        experiment = replace(experiment, slices=changes.slices)
    chosen = changes.methods or experiment.methods
    if chosen == ("sweep",):
        chosen = sweep.METHODS
    for method in chosen:
        methods.find(method)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"methods has {', '.join(chosen)}: each may stand there once")
    options: dict[str, Any] = {}
    if changes.threads is not None:
        _positive("threads", changes.threads)
        options["threads"] = changes.threads
    if changes.device is not None:
        options["device"] = str(usable(changes.device))
    return runner.Plan(
        experiment, scale, chosen, one_lr=changes.lr is not None, differs="; ".join(differs), **options
    )


def prepare(plan: runner.Plan, folder: Path | None) -> datasets.Data:
    """Load the data, thinned or unbalanced as the experiment says."""
    experiment = plan.experiment
    data = datasets.load(experiment.dataset, folder)
    if experiment.train_size or experiment.test_size:
        train_size = min(experiment.train_size or len(data.train), len(data.train))
        data = datasets.subset(data, train_size, experiment.test_size)
    if experiment.long_tail != 1:
        data = datasets.long_tailed(data, experiment.long_tail)
    if experiment.flipped:
        data = datasets.with_flipped_labels(data, experiment.flipped)
    if experiment.batch_size > len(data.train):
        raise ValueError(f"batch_size {experiment.batch_size} is more than the {len(data.train)} examples")
    return data


def run_with_progress(
    console: Console,
    plan: runner.Plan,
    data: datasets.Data,
    seeds: range,
    folder: Path,
    *,
    command: str,
    tensorboard: bool = False,
    history: bool = False,
) -> records.Run:
    """Run with a bar that tells the time left and the losses side by side."""
    config = plan.config(data)
    earlier = records.begun(folder)
    done = len(earlier.finished & set(seeds)) if earlier else 0
    if done:
        console.print(f"{done} of {len(seeds)} seeds are in {folder} already.")
    losses_column = TextColumn(
        "{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    bar_column = BarColumn(bar_width=max(6, console.width // 6))
    columns = (losses_column, bar_column, MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    progress = Progress(*columns, console=console, expand=True)
    with progress as bar, _tensorboard(folder, tensorboard) as board:
        rounds = config["slices"] + 1
        task = bar.add_task("warming up", total=len(seeds) * rounds, completed=done * rounds)

        def advance(seed: int, index: int, lines: dict[str, dict[str, Any]]) -> None:
            losses = "  ".join(f"{name} {line['train_loss']:.4f}" for name, line in lines.items())
            bar.update(task, advance=1, description=f"seed {seed}  {losses}")
            board(seed, lines)

        return runner.run(plan, data, list(seeds), folder, command=command, progress=advance, history=history)


def tune_with_progress(
    console: Console,
    plan: runner.Plan,
    grid: tuning.Grid,
    data: datasets.Data,
    seeds: range,
    folder: Path,
    **options: Any,
) -> list[tuning.Best]:
    """Tuned against tuned, with a bar for each cell of the grid and one for the comparison."""

    def run(part: runner.Plan, its_seeds: range, its_folder: Path) -> None:
        run_with_progress(console, part, data, its_seeds, its_folder, **options)

    return tuning.tune(plan, grid, data, seeds, folder, run, console.print)


@contextmanager
def _tensorboard(folder: Path, wanted: bool) -> Iterator[Any]:
    """A function that writes the slices as TensorBoard scalars, or does nothing."""
    if not wanted:
        yield lambda seed, lines: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
    writers: dict[tuple[int, str], Any] = {}

    def write(seed: int, lines: dict[str, dict[str, Any]]) -> None:
        for name, line in lines.items():
            place = folder / "tensorboard" / name / f"seed-{seed}"
            writer = writers.setdefault((seed, name), None) or SummaryWriter(str(place))
            writers[seed, name] = writer
            for key, value in line.items():
                if key not in ("kind", "seed", "method", "step") and value is not None:
                    writer.add_scalar(key, value, line["step"])

    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name.replace('_', '-')} must be positive, not {value}")
