"""What else a critic would compare with: AdamCB, RS2 and RAIS, written from their papers."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import adambs
from adambs.lab.methods.bandit import Bandit
from adambs.lab.methods.base import Method, Plain, Task


class AdamCB(Bandit):
    """K distinct examples by Exp3.M (:class:`adambs.Exp3M`), and AMSGrad's largest second moment.

    Ours: a constant learning rate and beta_1, as everywhere in the lab, where the proof lets both decay; and
    gamma = 0.4.
    """

    name = "adamcb"
    title = "AdamCB"
    summary = "K distinct examples with learned inclusion probabilities (Exp3.M), AMSGrad's step"
    citation = "Kim and Oh, ICLR 2025"
    rule_class = adambs.Exp3M
    options = {"amsgrad": True}


class RS2(Method):
    """Rounds over fresh random subsets of the data, and a learning rate that is annealed over the budget.

    RS2 shortens training: a round goes over a share ``fraction`` of the data, drawn anew, and the schedule of
    the learning rate ends when the shortened budget does. Without replacement between rounds
    (``replacement=0``, the authors' best) consecutive rounds take what a reshuffled pass has left, so the
    batches are those of Adam. When all methods have the same budget, as here, what is left of RS2 is then its
    schedule: a cosine from the learning rate to zero over the budget (``anneal=1``). With both off it is
    Adam, to the bit. ``replacement=1`` draws each subset from all data again. Ours: the fraction of a tenth,
    and Adam in the place of SGD. A task with a schedule of its own keeps that one.
    """

    name = "rs2"
    title = "RS2"
    summary = "a fresh random subset each round, the learning rate annealed to zero over the budget"
    citation = "Okanovic et al., ICLR 2024"

    fraction = 0.1
    replacement = 0
    anneal = 1

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._subset: np.ndarray[Any, Any] = np.empty(0, np.int64)

    def choose(self) -> Plain:
        K = self.task.batch_size
        if not self.replacement:
            return Plain(torch.from_numpy(self.passes.take(K)))
        while len(self._subset) < K:
            self._subset = np.concatenate([self._subset, self.subset()])
        taken, self._subset = self._subset[:K], self._subset[K:]
        return Plain(torch.from_numpy(taken))

    def subset(self) -> np.ndarray[Any, Any]:
        """The examples of a round, each once, in random order."""
        size = max(1, round(self.fraction * self.task.n))
        return self.rng.choice(self.task.n, size, replace=False)

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        anneals = self.anneal and not self.task.schedule
        with scaled_rate(self.optimizer, (1 + math.cos(math.pi * self.share)) / 2 if anneals else 1.0):
            self.optimizer.step()


class RAIS(Bandit):
    """The learning rate times what importance sampling gains: RAIS's gain ratio, with the library's p.

    The gain is the running estimate of how many times smaller than under uniform sampling the second moment
    of the gradient is, at least 1 and at most ``most``. The authors estimate p by robust optimisation and
    spend a schedule by the sum of the gains; ours are p from the default rule, a constant schedule, Adam in
    the place of SGD, the gain from single examples' bounds, and the limit.
    """

    name = "rais"
    title = "RAIS"
    summary = "draws from the library's p, with the learning rate times the variance reduction"
    citation = "Johnson and Guestrin, NeurIPS 2018"
    gate = 1.1

    most = 4.0

    @property
    def gain(self) -> float:
        """By how much the learning rate is multiplied now."""
        reduction = self.sampler.counters.trained.reduction
        return 1.0 if math.isnan(reduction) else min(max(reduction, 1.0), self.most)

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        with scaled_rate(self.optimizer, self.gain):
            super().step(batch, outputs, targets, losses)


class scaled_rate:  # noqa: N801  # used as a statement
    """Learning rates times a factor, for one step."""

    def __init__(self, optimizer: Any, factor: float) -> None:
        self.groups, self.factor = optimizer.param_groups, factor

    def __enter__(self) -> None:
        self.before = [group["lr"] for group in self.groups]
        for group in self.groups:
            group["lr"] *= self.factor

    def __exit__(self, *error: object) -> None:
        for group, lr in zip(self.groups, self.before, strict=True):
            group["lr"] = lr


ALL: list[type[Method]] = [AdamCB, RS2, RAIS]
