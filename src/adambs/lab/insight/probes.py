"""``adambs probe``: what a probe is asked about, from a file or from an experiment, with a bar."""

import json
import runpy
import traceback
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from torch.utils.data import TensorDataset

import adambs
from adambs.lab import models
from adambs.lab.experiments import reproduce
from adambs.lab.runs import training
from adambs.probing import Progress

_PACKAGE = Path(adambs.__file__).parent
_REQUIRED = ("model", "train", "loss", "batch_size")
_OPTIONAL = ("epochs", "lr", "optimizer", "schedule", "contexts", "collate_fn", "seed")


@dataclass(frozen=True)
class Question:
    """The arguments of :func:`adambs.probe`."""

    model: Any
    train: Any
    loss: Any
    batch_size: int
    options: dict[str, Any] = field(default_factory=dict)


def template() -> str:
    """A file to begin with, which runs as it is."""
    return resources.files(__package__).joinpath("probe_template.txt").read_text("utf-8")


def from_file(path: Path) -> Question:
    """Run a Python file of the user's and take the names that it defines."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: see `adambs probe --template` for one to begin with")
    try:
        names = runpy.run_path(str(path), run_name="adambs_probe")
    except Exception as error:
        raise ValueError(f"{path}{_place(error, path)}: {type(error).__name__}: {error}") from error
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise ValueError(
            f"{path} does not define {', '.join(missing)}: see `adambs probe --template` for a file that does"
        )
    options = {name: names[name] for name in _OPTIONAL if name in names}
    model, train, loss, batch_size = (names[name] for name in _REQUIRED)
    return Question(model, train, loss, batch_size, options)


def _place(error: Exception, path: Path) -> str:
    """The line of the file at which it went wrong, in words."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def from_experiment(
    name: str, scale: str, folder: Path | None, seed: int = 0, overrides: reproduce.Overrides | None = None
) -> Question:
    """An experiment of the lab, as its baseline would train."""
    plan = reproduce.make_plan(name, scale, overrides or reproduce.Overrides())
    data, experiment = reproduce.prepare(plan, folder), plan.experiment
    model = models.build(
        experiment.model,
        classes=len(data.classes),
        seed=seed,
        tokens=data.tokens,
        features=data.features,
        **experiment.model_options,
    )
    loss, train = training.LOSSES[experiment.loss], data.train
    if train.tensors[0].ndim == 4:  # as the lab trains
        x, y = train.tensors
        train = TensorDataset(x.contiguous(memory_format=torch.channels_last), y)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def losses_and_scores(model: Any, batch: Any) -> tuple[Any, Any]:
        outputs = model(batch[0])
        return loss.losses(outputs, batch[1]), lambda: loss.scores(outputs, batch[1])

    options: dict[str, Any] = {"epochs": experiment.epochs, "lr": experiment.lr, "seed": seed}
    if experiment.schedule:
        options["schedule"] = lambda share: training.rate(experiment.schedule, share)
    return Question(model, train, losses_and_scores, experiment.batch_size, options)


def run(question: Question, seconds: float, progress: Progress | None = None) -> adambs.Answer:
    """Probe."""
    return adambs.probe(
        question.model,
        question.train,
        question.loss,
        batch_size=question.batch_size,
        seconds=seconds,
        progress=progress,
        **question.options,
    )


def run_with_progress(console: Console, question: Question, seconds: float) -> adambs.Answer:
    """Probe, with a bar that ends when the time is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("probing", total=1.0)
        try:
            return run(
                question,
                seconds,
                lambda share, words: bar.update(task, completed=share, description=words),
            )
        except TypeError as error:
            # What the probe says of its arguments is one line, what a model raises a traceback.
            if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(str(_PACKAGE)):
                raise ValueError(str(error)) from error
            raise


def write(answer: adambs.Answer, page: Path | None, numbers: Path | None) -> list[Path]:
    """The page and the JSON that were asked for."""
    written = []
    if page is not None:
        written.append(answer.report(page))
    if numbers is not None:
        numbers.write_text(json.dumps(answer.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        written.append(numbers)
    return written
