"""``adambs mislabelled``: how well rankings find labels that were changed on purpose, and at what cost.

One record is one data set with one kind of noise. Rankings that need one training run are made from two runs:
one with bandit sampling, watched by a history, and one of plain Adam, for those that others have published.
"""

import copy
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import TensorDataset

import adambs
from adambs._types import Floats
from adambs.lab import datasets, experiments, machine, methods, models
from adambs.lab.experiments import Experiment
from adambs.lab.methods import Task
from adambs.lab.runs import training
from adambs.suspects import suspicions

FILE = "rankings.jsonl"  # not records.jsonl: that is what a run is known by
_FOLDS = 5

# Name -> what it is. Those of the first part are made from one training with AdamBS, those of the second from
# one with plain Adam, and the last from five.
RANKINGS = {
    "history": "adambs.History with a last pass, all examples as one class",
    "history, by class": "the same, each example compared with its class",
    "history, no last pass": "without a pass over the data at the end",
    "history, scores only": "without a last pass, and from scores alone",
    "p": "the sampler's p at the end",
    "last loss": "the loss of the model at the end",
    "aum": "area under the margin (Pleiss et al., NeurIPS 2020)",
    "forgetting": "forgetting events, never learned first (Toneva et al., ICLR 2019)",
    "plain last loss": "the last loss, of plain Adam",
    "plain aum": "area under the margin, of plain Adam",
    "plain mean loss": "mean loss over all visits, of plain Adam",
    "plain forgetting": "forgetting events, of plain Adam",
    "cleanlab": "confident learning, 5 folds (Northcutt et al., JAIR 2021), probabilities adjusted by class",
    "cleanlab, not adjusted": "the same with the probabilities as the nets give them",
}
_CLEANLAB = [name for name in RANKINGS if name.startswith("cleanlab")]


@dataclass(frozen=True)
class Case:
    """What is trained on, and what was done to its labels."""

    experiment: str
    noise: str = "flips"
    share: float = 0.05
    long_tail: float = 1.0
    n: int | None = None
    epochs: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.noise not in ("flips", "confusions"):
            raise ValueError(f"noise must be flips or confusions, not {self.noise!r}")
        if not 0 < self.share < 1:
            raise ValueError(f"share must lie strictly between 0 and 1, not {self.share}")


def run(
    case: Case, out: Path, *, with_cleanlab: bool = False, folder: Path | None = None, command: str = ""
) -> dict[str, Any]:
    """The record of a case: from the file if it is there, else made and appended to it."""
    experiment = experiments.find(case.experiment).at("quick")
    if experiment.loss == "squares":
        raise ValueError(f"{case.experiment} fits values, not classes: there are no labels to change")
    if case.epochs is not None:
        experiment = replace(experiment, epochs=case.epochs)
    wanted = {**asdict(case), "epochs": experiment.epochs}
    found = next((each for each in read(out) if each["case"] == wanted), None)
    if found is not None and (not with_cleanlab or set(_CLEANLAB) <= set(found["rankings"])):
        return found
    data = prepared(case, experiment, folder)
    rankings = {} if found is None else dict(found["rankings"])
    flipped = data.flipped.numpy()
    if found is None:
        for name, ranking in _by_one_training(experiment, data, case.seed).items():
            rankings[name] = ranking.measured(flipped)
    if with_cleanlab:
        for name, ranking in _by_cleanlab(experiment, data, case.seed).items():
            rankings[name] = ranking.measured(flipped)
    about = {"n": len(flipped), "changed": int(flipped.sum()), "classes": len(data.classes)}
    record = {
        "case": wanted,
        **about,
        "rankings": rankings,
        "machine": machine.describe(),
        "command": command,
    }
    _append(out, record)
    return record


def read(out: Path) -> list[dict[str, Any]]:
    """All records, the last of each case; a line that a crash has torn is left out."""
    file, kept = out / FILE, {}
    if file.exists():
        for line in file.read_text("utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            kept[json.dumps(record["case"], sort_keys=True)] = record
    return list(kept.values())


def _append(out: Path, record: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / FILE).open("ab") as stream:
        stream.write((json.dumps(record, allow_nan=False) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())


def table(record: dict[str, Any]) -> Table:
    """A record for the terminal."""
    case = record["case"]
    columns = ("ranking", "precision", "AUROC", "seconds", "of them extra")
    shown = Table(*columns, title=f"{case['experiment']}, {case['noise']}")
    for name, found in record["rankings"].items():
        values = (f"{found['precision']:.3f}", f"{found['auroc']:.4f}", f"{found['seconds']:.1f}")
        shown.add_row(name, *values, f"{found['extra']:.1f}")
    return shown


def write_tables(out: Path) -> Path:
    """All records of a folder as two tables, in its README; the path of that."""
    records, target = read(out), out / "README.md"
    parts = [f"# Rankings of changed labels\n\n## AUROC\n\n{markdown(records, 'auroc')}"]
    parts.append(f"## Precision among as many as were changed\n\n{markdown(records, 'precision')}")
    parts.append("## What they are\n\n" + "".join(f"- {name}: {words}\n" for name, words in RANKINGS.items()))
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def markdown(records: list[dict[str, Any]], measure: str) -> str:
    """A table: rankings in rows, cases in columns, means over seeds."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: _place(record["case"])):
        cases.setdefault(_words(record["case"]), []).append(record)
    lines = ["| | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for name in RANKINGS:
        cells = []
        for found in cases.values():
            values = [each["rankings"][name][measure] for each in found if name in each["rankings"]]
            cells.append(f"{np.mean(values):.3f}" if values else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    seeds = (", ".join(str(each["case"]["seed"]) for each in found) for found in cases.values())
    return "\n".join([*lines, "| seeds | " + " | ".join(seeds) + " |"]) + "\n"


def _place(case: dict[str, Any]) -> tuple[Any, ...]:
    """The order of the columns: flips before confusions, even classes before long tails."""
    return case["noise"] != "flips", case["long_tail"], case["experiment"], case["share"], case["seed"]


def _words(case: dict[str, Any]) -> str:
    tail = f", long-tailed by {case['long_tail']:g}" if case["long_tail"] > 1 else ""
    return f"{case['experiment']}, {100 * case['share']:g} % {case['noise']}{tail}"


# ------------------------------------------------------------------------------------------------ measures


def measured(changed: np.ndarray[Any, Any], suspicion: Floats) -> dict[str, float]:
    """Precision among as many as were changed, and the area under the ROC curve. Ties count for half."""
    suspicion = np.where(np.isnan(suspicion), -math.inf, suspicion)
    count = int(changed.sum())
    order = np.argsort(-suspicion, kind="stable")[:count]
    _, inverse, sizes = np.unique(suspicion, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[inverse]
    area = (ranks[changed].sum() - count * (count + 1) / 2) / (count * (len(changed) - count))
    return {"precision": float(changed[order].mean()), "auroc": float(area)}


# ---------------------------------------------------------------------------------------------------- data


def prepared(case: Case, experiment: Experiment, folder: Path | None) -> datasets.Data:
    """The data of a case, with labels changed."""
    data = datasets.load(experiment.dataset, folder)
    if case.n is not None and case.n < len(data.train):
        data = datasets.subset(data, case.n, None, case.seed)
    if case.long_tail > 1:
        data = datasets.long_tailed(data, case.long_tail, case.seed)
    if case.noise == "flips":
        return datasets.with_flipped_labels(data, case.share, case.seed)
    return with_confused_labels(experiment, data, case.share, case.seed)


def with_confused_labels(
    experiment: Experiment, data: datasets.Data, share: float, seed: int
) -> datasets.Data:
    """Labels that depend on the example: a part, at random, of the mistakes of a weak model.

    The model sees one epoch. Some of the examples on which it prefers another class to the true one get that
    class, as an annotator confuses cats with dogs.
    """
    task = _task(experiment, data, seed, epochs=1.0)
    training.train(methods.find("adam")(task), task.steps)
    outputs = torch.from_numpy(_outputs(task.model, task.inputs)).reshape(len(task.targets), -1)
    guess = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
    mistakes = torch.nonzero(guess != task.targets)[:, 0].numpy()
    count = min(round(share * len(guess)), len(mistakes))
    chosen = np.random.default_rng([seed, 11]).choice(mistakes, count, replace=False)
    inputs, labels = data.train.tensors
    wrong = labels.clone()
    wrong[chosen] = guess[chosen]
    change = f"{len(chosen):,} labels confused by a weak model, seed {seed}"
    return replace(data, train=TensorDataset(inputs, wrong), changes=(*data.changes, change))


# ------------------------------------------------------------------------------------------------ rankings


def _task(experiment: Experiment, data: datasets.Data, seed: int, epochs: float | None = None) -> Task:
    x, y = data.train.tensors
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    model = models.build(
        experiment.model,
        classes=len(data.classes),
        seed=seed,
        tokens=data.tokens,
        features=data.features,
        **experiment.model_options,
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps = max(1, math.ceil((epochs or experiment.epochs) * len(y) / experiment.batch_size))
    loss = training.LOSSES[experiment.loss]
    return Task(model, x, y, loss, experiment.batch_size, experiment.lr, steps, seed)


def _trained(
    name: str, experiment: Experiment, data: datasets.Data, seed: int, watch: Callable[..., None]
) -> tuple[Any, float]:
    """A method after its training, each step watched, and the seconds of it."""
    with torch.random.fork_rng():
        task = _task(experiment, data, seed)
        torch.manual_seed(seed)
        method = methods.find(name)(task)
        watch(method)
        task.model.train()
        start = time.perf_counter()
        for _ in range(task.steps):
            batch = method.choose()
            targets = task.targets[batch.indices]
            outputs = task.model(task.inputs[batch.indices])
            losses = task.loss.losses(outputs, targets)
            watch(method, batch, outputs.detach(), targets, losses.detach())
            method.optimizer.zero_grad()
            method.objective(batch, outputs, targets, losses).backward()  # type: ignore[no-untyped-call]
            method.step(batch, outputs, targets, losses)
        return method, time.perf_counter() - start


class Ranking(NamedTuple):
    """How suspicious each example is, and what it took to know."""

    suspicion: Floats
    seconds: float
    """All of it, training included."""
    extra: float
    """What is beyond a training that is made anyway."""

    def measured(self, changed: np.ndarray[Any, Any]) -> dict[str, float]:
        """Its record."""
        return {**measured(changed, self.suspicion), "seconds": self.seconds, "extra": self.extra}


def _by_one_training(experiment: Experiment, data: datasets.Data, seed: int) -> dict[str, Ranking]:
    n, classes, clock = len(data.labels), data.labels.numpy(), time.perf_counter
    one_class = np.zeros(n, np.int64)
    history, visits, watched = adambs.History(n, with_losses=True), _Visits(n), 0.0

    def watch(method: Any, *step: Any) -> None:
        nonlocal watched
        if not step:
            history.watch(method.sampler)
            method.sampler.observers[-1] = observe
            return
        start = clock()
        history.losses(step[0], step[3])
        watched += clock() - start
        visits(method, *step)

    def observe(draw: adambs.Draw, scores: Floats) -> None:
        nonlocal watched
        start = clock()
        history(draw, scores)
        watched += clock() - start

    bandit, seconds = _trained("adambs", experiment, data, seed, watch)
    seconds -= visits.seconds
    start = clock()
    last = np.asarray(bandit.task.evaluate(torch.arange(n), "losses", rough=False), np.float64)
    a_pass = clock() - start
    start = clock()
    kept = history.table()
    found = suspicions(kept, one_class, last)[0]
    watched += clock() - start
    scores_only = {name: column for name, column in kept.items() if "loss" not in name}
    scores_only["excess"] = visits.excess()
    rankings = {
        "history": Ranking(found, seconds + a_pass, watched + a_pass),
        "history, by class": Ranking(suspicions(kept, classes, last)[0], seconds + a_pass, watched + a_pass),
        "history, no last pass": Ranking(suspicions(kept, one_class)[0], seconds, watched),
        "history, scores only": Ranking(suspicions(scores_only, one_class)[0], seconds, watched),
        "p": Ranking(bandit.probabilities(), seconds, 0.0),
        "last loss": Ranking(last, seconds + a_pass, a_pass),
        **visits.rankings("", seconds),
    }
    plainly = _Visits(n)
    plain, seconds = _trained("adam", experiment, data, seed, plainly)
    start = clock()
    last = np.asarray(plain.task.evaluate(torch.arange(n), "losses", rough=False), np.float64)
    a_pass = clock() - start
    seconds -= plainly.seconds
    rankings["plain last loss"] = Ranking(last, seconds + a_pass, a_pass)
    return rankings | plainly.rankings("plain ", seconds)


class _Visits:
    """What the published rankings want to know of each visit, and the excess of the scores."""

    def __init__(self, n: int) -> None:
        self.count, self.margins, self.losses = np.zeros(n), np.zeros(n), np.zeros(n)
        self.forgotten, self.right, self.ever = np.zeros(n), np.zeros(n, bool), np.zeros(n, bool)
        self.scores = adambs.History(n)
        self.seconds = 0.0

    def __call__(self, method: Any, *step: Any) -> None:
        if not step:
            return
        start = time.perf_counter()
        batch, outputs, targets, losses = step
        j, margin = batch.indices.numpy(), margins(outputs, targets).double().numpy()
        right = margin > 0
        np.add.at(self.count, j, 1)
        np.add.at(self.margins, j, margin)
        np.add.at(self.losses, j, losses.double().numpy())
        np.add.at(self.forgotten, j, self.right[j] & ~right)
        self.right[j] = right
        self.ever[j] |= right
        if isinstance(batch, adambs.Draw):
            self.scores(batch, method.task.loss.scores(outputs, targets).double().numpy())
        self.seconds += time.perf_counter() - start

    def excess(self) -> Floats:
        """What a history without losses would have kept."""
        return self.scores.table()["excess"].astype(np.float64)

    def rankings(self, prefix: str, seconds: float) -> dict[str, Ranking]:
        """From what was seen; free, but for what it takes to watch."""
        count = self.count.clip(1)
        found = {
            "aum": -self.margins / count,
            "mean loss": self.losses / count,
            "forgetting": np.where(self.ever, self.forgotten, math.inf),
        }
        if not prefix:
            del found["mean loss"]
        return {prefix + name: Ranking(value, seconds, self.seconds) for name, value in found.items()}


def margins(outputs: Tensor, targets: Tensor) -> Tensor:
    """The label's logit minus the largest of the others; of a sigmoid, the logit with the label's sign."""
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        return outputs.reshape(-1) * (2 * targets - 1)
    own = outputs.gather(1, targets[:, None])
    return own[:, 0] - outputs.scatter(1, targets[:, None], -math.inf).amax(1)


@torch.no_grad()
def _outputs(model: torch.nn.Module, inputs: Tensor) -> Floats:
    model.eval()
    found: Floats = torch.cat([model(part) for part in torch.split(inputs, 200)]).double().numpy()
    return found


def _by_cleanlab(experiment: Experiment, data: datasets.Data, seed: int) -> dict[str, Ranking]:
    """Confident learning on probabilities out of sample: five trainings, each without a fifth."""
    try:
        from cleanlab.rank import get_label_quality_scores
    except ModuleNotFoundError:
        raise ValueError("--cleanlab needs the cleanlab package: pip install cleanlab") from None
    n, labels = len(data.labels), data.labels.numpy()
    fold = np.random.default_rng([seed, 7]).permutation(n) % _FOLDS
    probabilities, seconds = np.zeros((n, len(data.classes))), 0.0
    inputs = _task(experiment, data, seed, epochs=0.01).inputs
    for k in range(_FOLDS):
        inside = torch.from_numpy(np.flatnonzero(fold != k))
        part = copy.copy(data)
        object.__setattr__(part, "train", TensorDataset(*(each[inside] for each in data.train.tensors)))
        method, took = _trained("adam", experiment, part, seed, lambda *step: None)
        start = time.perf_counter()
        outside = np.flatnonzero(fold == k)
        z = torch.from_numpy(_outputs(method.task.model, inputs[torch.from_numpy(outside)]))
        two = torch.stack((torch.zeros_like(z.reshape(-1)), z.reshape(-1)), 1)
        probabilities[outside] = (two if len(data.classes) == 2 and z.numel() == len(z) else z).softmax(1)
        seconds += took + time.perf_counter() - start
    return {
        name: Ranking(
            -np.asarray(get_label_quality_scores(labels, probabilities, adjust_pred_probs=adjusted)),
            seconds,
            seconds,
        )
        for name, adjusted in zip(_CLEANLAB, (True, False), strict=True)
    }
