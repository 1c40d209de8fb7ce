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
from typing import Any

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

# Name -> what it is, and which training it needs.
RANKINGS = {
    "history": "mean loss above its class's, by adambs.History",
    "history, scores only": "the same from scores alone",
    "p": "the sampler's p at the end",
    "last loss": "the loss of the model at the end",
    "aum": "area under the margin (Pleiss et al., NeurIPS 2020), plain Adam",
    "mean loss": "mean loss over all visits, plain Adam",
    "forgetting": "forgetting events, never learned first (Toneva et al., ICLR 2019), plain Adam",
    "cleanlab": "confident learning, 5 folds (Northcutt et al., JAIR 2021)",
}


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
    if case.epochs is not None:
        experiment = replace(experiment, epochs=case.epochs)
    wanted = {**asdict(case), "epochs": experiment.epochs}
    found = next((each for each in read(out) if each["case"] == wanted), None)
    if found is not None and (not with_cleanlab or "cleanlab" in found["rankings"]):
        return found
    data = prepared(case, experiment, folder)
    rankings = {} if found is None else dict(found["rankings"])
    flipped = data.flipped.numpy()
    if found is None:
        for name, (suspicion, seconds) in _by_one_training(experiment, data, case.seed).items():
            rankings[name] = {**measured(flipped, suspicion), "seconds": seconds}
    if with_cleanlab:
        suspicion, seconds = _by_cleanlab(experiment, data, case.seed)
        rankings["cleanlab"] = {**measured(flipped, suspicion), "seconds": seconds}
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
    shown = Table("ranking", "precision", "AUROC", "seconds", title=f"{case['experiment']}, {case['noise']}")
    for name, found in record["rankings"].items():
        shown.add_row(name, f"{found['precision']:.3f}", f"{found['auroc']:.4f}", f"{found['seconds']:.1f}")
    return shown


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
    """Labels that depend on the example: a weak model's guess where it is most sure of another class.

    The model sees a tenth of an epoch. The examples on which it prefers another class to the true one by the
    most get that class, as an annotator confuses cats with dogs.
    """
    task = _task(experiment, data, seed, epochs=0.1)
    training.train(methods.find("adam")(task), task.steps)
    outputs = torch.from_numpy(_outputs(task.model, task.inputs))
    z = outputs if outputs.ndim == 2 and outputs.shape[1] > 1 else torch.stack((-outputs, outputs), 1) / 2
    z = z.reshape(len(task.targets), -1).log_softmax(1)
    others = z.scatter(1, task.targets[:, None], -math.inf)
    best, guess = others.max(1)
    order = torch.argsort(best - z.gather(1, task.targets[:, None])[:, 0], descending=True, stable=True)
    chosen = order[: round(share * len(order))]
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


def _by_one_training(
    experiment: Experiment, data: datasets.Data, seed: int
) -> dict[str, tuple[Floats, float]]:
    n, classes = len(data.labels), data.labels.numpy()
    history = adambs.History(n, with_losses=True)

    def watch(method: Any, *step: Any) -> None:
        if step:
            history.losses(step[0], step[3])
        else:
            history.watch(method.sampler)

    bandit, seconds = _trained("adambs", experiment, data, seed, watch)
    kept = history.table()
    scores_only = {name: column for name, column in kept.items() if "loss" not in name}
    last = bandit.task.evaluate(torch.arange(n), "losses")
    visits = _Visits(n)
    _, plain = _trained("adam", experiment, data, seed, visits)
    return {
        "history": (suspicions(kept, classes)[0], seconds),
        "history, scores only": (suspicions(scores_only, classes)[0], seconds),
        "p": (bandit.probabilities(), seconds),
        "last loss": (last, seconds),
        "aum": (-visits.margins / visits.count.clip(1), plain),
        "mean loss": (visits.losses / visits.count.clip(1), plain),
        "forgetting": (np.where(visits.ever, visits.forgotten, math.inf), plain),
    }


class _Visits:
    """What the published rankings want to know of each visit of a plain training."""

    def __init__(self, n: int) -> None:
        self.count, self.margins, self.losses = np.zeros(n), np.zeros(n), np.zeros(n)
        self.forgotten, self.right, self.ever = np.zeros(n), np.zeros(n, bool), np.zeros(n, bool)

    def __call__(self, method: Any, *step: Any) -> None:
        if not step:
            return
        batch, outputs, targets, losses = step
        j, margin = batch.indices.numpy(), margins(outputs, targets).double().numpy()
        right = margin > 0
        np.add.at(self.count, j, 1)
        np.add.at(self.margins, j, margin)
        np.add.at(self.losses, j, losses.double().numpy())
        np.add.at(self.forgotten, j, self.right[j] & ~right)
        self.right[j] = right
        self.ever[j] |= right


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


def _by_cleanlab(experiment: Experiment, data: datasets.Data, seed: int) -> tuple[Floats, float]:
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
    return -np.asarray(get_label_quality_scores(labels, probabilities, adjust_pred_probs=True)), seconds
