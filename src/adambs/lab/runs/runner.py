"""Runs methods against each other, fairly, and writes down what happens as it happens.

All methods of a seed start from the same parameters and take turns in one process, a few steps each, until
all have finished a slice of their budget, which is a number of steps or a time: a busy machine hurts all
alike. The clock counts training only, each method's own overhead included and the seconds that it declares as
``untimed`` excluded; evaluation is outside it. A seed that was interrupted is begun again, its old lines
void; finished seeds are never run twice.
"""

import copy
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import adambs
from adambs.lab import experiments, machine, methods, models
from adambs.lab.datasets import Data
from adambs.lab.experiments import Experiment
from adambs.lab.methods import Method, Task
from adambs.lab.runs import records, training
from adambs.lab.runs.budgets import TURN, Budget, Seconds, Steps
from adambs.lab.runs.locking import alone_in
from adambs.lab.runs.randomness import Streams

# When a record shows how p looks, as shares of the budget.
_LOOKS_AT_P = (0.1, 0.5, 1.0)

# How a title tells what was changed.
_CHANGED = {
    "epochs": "{:g} epochs",
    "batch_size": "batches of {}",
    "lr": "learning rate {:g}",
    "long_tail": "long-tailed by {:g}",
}

Progress = Callable[[int, int, dict[str, dict[str, Any]]], None]
"""Called after each slice with the seed, the slice, and the last line of each method."""


@dataclass(frozen=True)
class Plan:
    """An experiment with everything decided."""

    experiment: Experiment
    scale: str
    method_names: tuple[str, ...]
    threads: int = 2
    device: str = "cpu"
    one_lr: bool = False
    differs: str = ""
    seconds: float | None = None
    """Training time of each method, in the place of the experiment's epochs."""
    shown: int = 12
    """How many examples of the highest and of the lowest p the record shows, at the end of the first seed."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What else the record shall say of the run."""

    def budget(self, n: int) -> Budget:
        """Of each method."""
        if self.seconds is not None:
            return Seconds(self.seconds)
        return Steps(max(1, math.ceil(self.experiment.epochs * n / self.experiment.batch_size)))

    def title(self) -> str:
        """The experiment's, and what was changed in it."""
        usual = experiments.find(self.experiment.name).at(self.scale)
        changes = [
            words.format(value) if (field, value) != ("epochs", 1) else "a single pass"
            for field, words in _CHANGED.items()
            if (value := getattr(self.experiment, field)) != getattr(usual, field)
        ]
        if self.seconds is not None:
            changes.append(f"{self.seconds:g} s for each method")
        return ", ".join([self.experiment.title, *changes])

    def config(self, data: Data) -> dict[str, Any]:
        """What the numbers depend on; a run with another configuration is refused."""
        n = len(data.train)
        budget = self.budget(n)
        return {
            "experiment": self.experiment.name,
            "title": self.title(),
            "figure": self.experiment.figure,
            "scale": self.scale,
            "differs": self.differs,
            **self.experiment.settings(),
            "n": n,
            "n_test": len(data.test),
            "classes": list(data.classes),
            "one_lr": self.one_lr,
            **budget.config(),
            "slices": min(self.experiment.slices, budget.most_slices()),
            "turn": TURN,
            "methods": list(self.method_names),
            "threads": self.threads,
            "device": self.device,
            **self.notes,
        }


@dataclass
class _Contestant:
    """A method in the middle of its run."""

    method: Method
    streams: Streams
    step: int = 0
    seconds: float = 0.0
    examples: int = 0
    diverged: bool = False


def run(
    plan: Plan,
    data: Data,
    seeds: list[int],
    folder: Path,
    *,
    command: str,
    progress: Progress = lambda seed, index, lines: None,
    history: bool = False,
) -> records.Run:
    """Run what is not yet in the records of ``folder``, and return all of them.

    With ``history``, what each sampler saw of each example is saved beside the records, for
    ``adambs inspect``.
    """
    chosen = {name: methods.find(name) for name in plan.method_names}
    about = {
        name: {key: getattr(method, key) for key in ("title", "summary", "citation", "biased")}
        for name, method in chosen.items()
    }
    torch.set_num_threads(plan.threads)
    machine.keep_memory()
    config = plan.config(data)
    with alone_in(folder, command):
        writer = records.Writer(folder, config, about)
        todo = [seed for seed in seeds if seed not in writer.run.finished]
        if todo:
            writer.later({"kind": "session", "command": command, "machine": machine.describe()})
        for seed in todo:
            _run_seed(plan, data, seed, chosen, config, writer, progress, folder if history else None)
            writer.run.finished.add(seed)
        return records.read(folder)


def _run_seed(
    plan: Plan,
    data: Data,
    seed: int,
    chosen: dict[str, type[Method]],
    config: dict[str, Any],
    writer: records.Writer,
    progress: Progress,
    histories: Path | None,
) -> None:
    budget, slices = plan.budget(len(data.train)), config["slices"]
    tensors = [_placed(tensor, plan.device) for tensor in (*data.train.tensors, *data.test.tensors)]
    contestants = {
        name: _contestant(plan, method, data, seed, config, tensors) for name, method in chosen.items()
    }
    watched = {} if histories is None else _watched(contestants)
    writer.later({"kind": "begin", "seed": seed})
    looks = {max(1, round(share * slices)) for share in _LOOKS_AT_P}
    last: dict[str, dict[str, Any]] = {}
    for index in range(slices + 1):
        _take_turns(list(contestants.values()), budget, budget.at(index / slices))
        for name, contestant in contestants.items():
            last[name] = {"kind": "slice", "seed": seed, "method": name, **_measure(contestant, tensors)}
            writer.append(last[name])
            if index in looks:
                count = plan.shown if index == slices and not writer.run.finished else 0
                shown = _distribution(contestant, data, tensors[0], count)
                if shown:
                    writer.append({"kind": "distribution", "seed": seed, "method": name, **shown})
        progress(seed, index, last)
    for name, kept in watched.items():
        assert histories is not None
        records.save_history(kept.state_dict(), histories / f"history-{name.replace(':', '-')}-{seed}.pt")
    writer.append({"kind": "end", "seed": seed})


def _watched(contestants: dict[str, _Contestant]) -> dict[str, adambs.History]:
    """A history for each method whose sampler draws examples."""
    samplers = {name: getattr(each.method, "sampler", None) for name, each in contestants.items()}
    return {
        name: adambs.History(sampler.n).watch(sampler)
        for name, sampler in samplers.items()
        if sampler is not None and sampler.n == contestants[name].method.task.n
    }


def _contestant(
    plan: Plan,
    method: type[Method],
    data: Data,
    seed: int,
    config: dict[str, Any],
    tensors: list[torch.Tensor],
) -> _Contestant:
    """The method at its start; it has been warmed up on a copy, so that nothing compiles on the clock."""
    experiment = plan.experiment
    model = models.build(
        experiment.model,
        classes=len(data.classes),
        seed=seed,
        tokens=data.tokens,
        features=data.features,
        **experiment.model_options,
    )
    model = model.to(plan.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def task(model: torch.nn.Module) -> Task:
        loss = training.LOSSES[experiment.loss]
        batch_size = method.batch_size or experiment.batch_size
        settings = (batch_size, experiment.lr, config["steps"], seed, plan.one_lr, data.context)
        seconds = math.inf if plan.seconds is None else plan.seconds
        return Task(
            model, tensors[0], tensors[1], loss, *settings, seconds=seconds, schedule=experiment.schedule
        )

    # Another's streams: the warm-up must not move the method's own. If it diverges, so will the method.
    for rehearsal in method.rehearsals():
        with Streams(plan.device, seed).turn(), suppress(training.DivergedError):
            training.train(rehearsal(task(copy.deepcopy(model))), 3)
    streams = Streams(plan.device, seed)
    with streams.turn():
        return _Contestant(method(task(model)), streams)


def _placed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """On the device; images with their channels last, which convolutions on a CPU run twice as fast."""
    tensor = tensor.to(device)
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _take_turns(contestants: list[_Contestant], budget: Budget, target: float) -> None:
    """Bring all to ``target``, a few steps at a time, a different one beginning each round."""
    first, behind = 0, True
    while behind:
        behind = False
        for contestant in contestants[first:] + contestants[:first]:
            if count := budget.turn(contestant.step, contestant.seconds, target):
                behind = True
                _advance(contestant, count, budget, target)
        first = (first + 1) % len(contestants)


def _advance(contestant: _Contestant, count: int, budget: Budget, target: float) -> None:
    """Train so many steps, on the clock, with the method's own random streams for dropout.

    A method that has diverged trains no more, and is charged as if it went on at its pace.
    """
    if contestant.diverged:
        now = contestant.step, contestant.seconds
        contestant.step, contestant.seconds = budget.charged(*now, target)
        return
    with contestant.streams.turn():
        contestant.method.spent = contestant.seconds
        untimed = contestant.method.untimed
        start = time.perf_counter()
        try:
            contestant.examples += training.train(contestant.method, count)
        except training.DivergedError:
            contestant.diverged = True
        contestant.streams.wait()
        contestant.seconds += time.perf_counter() - start - (contestant.method.untimed - untimed)
    contestant.step += count


def _measure(contestant: _Contestant, tensors: list[torch.Tensor]) -> dict[str, Any]:
    method = contestant.method
    task = method.task
    train = training.evaluate(task.model, tensors[0], tensors[1], task.loss)
    test = training.evaluate(task.model, tensors[2], tensors[3], task.loss)
    p = method.probabilities()
    return {
        "step": contestant.step,
        "epoch": contestant.examples / task.n,
        "seconds": contestant.seconds,
        "examples": contestant.examples,
        "train_loss": _finite(math.inf if contestant.diverged else train.loss),
        "train_error": train.error,
        "test_loss": _finite(test.loss),
        "test_error": test.error,
        "balanced_test_error": test.balanced_error,
        "ess": None if p is None else float(1 / (len(p) * np.square(p).sum())),
        "variance_reduction": method.variance_reduction(),
    }


def _finite(value: float) -> float:
    """JSON has no infinity: a diverged run is a very large loss, not a missing one."""
    return value if math.isfinite(value) else 1e300


@torch.no_grad()
def _distribution(
    contestant: _Contestant, data: Data, inputs: torch.Tensor, count: int
) -> dict[str, Any] | None:
    """How p looks now, and the ``count`` examples that it likes best and least."""
    method = contestant.method
    p = method.probabilities()
    if p is None:
        return None
    n = len(p)
    order = np.argsort(p, kind="stable")
    model = method.task.model.eval()

    def shown(indices: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        if not count:
            return []
        guesses = method.task.loss.guesses(model(inputs[torch.as_tensor(indices.copy())])).tolist()
        return [
            {
                "index": int(i),
                "ratio": float(n * p[i]),
                "guess": data.classes[guess] if guess >= 0 else "",
                **data.example(int(i)),
            }
            for i, guess in zip(indices, guesses, strict=True)
        ]

    return {
        "step": contestant.step,
        "quantiles": np.quantile(n * p, np.linspace(0, 1, 101)).round(6).tolist(),
        "highest": shown(order[::-1][:count]),
        "lowest": shown(order[:count]),
    }
