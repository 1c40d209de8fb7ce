"""What a user would pick instead today: written from their papers, with Adam's step."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adambs.lab.methods.base import Floats, Method, Plain, Task, Weighted, on_host
from adambs.trees import SumTree


class InfoBatch(Method):
    """At the start of each epoch drop, with probability r, each example whose last loss is below the mean.

    The ones of them that stay weigh 1/(1 - r), so an epoch's expected gradient is that of the whole data.
    The first epoch and the last 1 - delta of the budget use all data. r = 0.5, delta = 0.875 as published.

    So the mean weight of a batch is above one while examples are left out, and one before and after. To Adam,
    whose v remembers a thousand steps, that is a larger learning rate for a while. With ``even`` weights are
    divided by their mean over the epoch, which leaves the choice of examples and takes that away.
    """

    name = "infobatch"
    title = "InfoBatch"
    summary = "each epoch leaves out half of the examples of small loss and reweights the rest"
    citation = "Qin et al., ICLR 2024"

    r = 0.5
    delta = 0.875
    even = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.last_losses = np.full(task.n, np.inf)  # not yet seen: never below the mean
        self._order: Tensor = torch.empty(0, dtype=torch.int64)
        self._weights = torch.empty(0)

    def choose(self) -> Weighted:
        if not len(self._order):
            self._order, self._weights = self.epoch()
        K = self.task.batch_size
        batch = Weighted(self._order[:K], self._weights[:K])
        self._order, self._weights = self._order[K:], self._weights[K:]
        return batch

    def epoch(self) -> tuple[Tensor, Tensor]:
        """The examples of the next epoch in random order, and their weights."""
        weights = np.ones(self.task.n)
        seen = self.last_losses[np.isfinite(self.last_losses)]
        if len(seen) and self.share < self.delta:
            small = self.last_losses < seen.mean()
            dropped = small & (self.rng.random(self.task.n) < self.r)
            weights[small] = 1 / (1 - self.r)
            weights[dropped] = 0
        order = self.passes.take(self.task.n)
        order = order[weights[order] > 0]
        kept = weights[order]
        return torch.from_numpy(order), torch.from_numpy(kept / kept.mean() if self.even else kept)

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        self.optimizer.step()
        self.last_losses[batch.indices.numpy()] = on_host(losses)


class SelectiveBackprop(Method):
    """Forward passes over reshuffled data; an example is trained on with probability CDF(loss)^beta.

    CDF is the share of the last R losses that are not larger. The expected share of examples that are
    selected is 1/(beta + 1). Selected examples wait until there are K. Biased towards large losses.
    beta = 1 and R = 1024 are published settings.
    """

    name = "selective-backprop"
    title = "Selective-Backprop"
    summary = "forward passes choose the examples of large loss to train on; biased"
    citation = "Jiang et al., 2019"
    biased = True

    beta = 1.0
    history = 1024

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._recent: Floats = np.empty(0)
        self._waiting = np.empty(0, np.int64)
        self.offered = self.selected = 0

    def choose(self) -> Plain:
        K = self.task.batch_size
        while len(self._waiting) < K:
            candidates = self.passes.take(K)
            chosen = self.select(self.task.evaluate(candidates, "losses"))
            self._waiting = np.concatenate([self._waiting, candidates[chosen]])
        taken, self._waiting = self._waiting[:K], self._waiting[K:]
        return Plain(torch.from_numpy(taken))

    def select(self, losses: Floats) -> np.ndarray[Any, Any]:
        """Which of the candidates to train on."""
        self._recent = np.concatenate([self._recent, losses])[-self.history :]
        ranks = np.searchsorted(np.sort(self._recent), losses, side="right")
        probability = (ranks / len(self._recent)) ** self.beta
        chosen: np.ndarray[Any, Any] = self.rng.random(len(losses)) < probability
        self.offered += len(losses)
        self.selected += int(chosen.sum())
        return chosen


class OnlineBatchSelection(Method):
    """Rank the examples by their last loss; the probability decays exponentially with the rank.

    The first is s_e times as likely as the last; s_e decays exponentially from 100 to 1 over the budget.
    Ranks are made anew ten times an epoch, after a first epoch that sees everything. Gradients are not
    weighted, so large losses are favoured. Ours: the decay to 1, the ten, and no passes that only refresh
    losses.
    """

    name = "online-batch-selection"
    title = "Online batch selection"
    summary = "draws by the rank of the last loss, with fading pressure; biased"
    citation = "Loshchilov and Hutter, 2015"
    biased = True

    pressure = 100.0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.last_losses = np.full(task.n, np.inf)
        self._first_epoch = math.ceil(task.n / task.batch_size)
        self._every = max(1, self._first_epoch // 10)
        self.steps = 0
        self._ranked = np.arange(task.n)

    def choose(self) -> Plain:
        if self.steps < self._first_epoch:
            return Plain(torch.from_numpy(self.passes.take(self.task.batch_size)))
        if (self.steps - self._first_epoch) % self._every == 0:
            self._ranked = np.argsort(-self.last_losses, kind="stable")
        s_e = self.pressure ** (1 - self.share)
        return Plain(torch.from_numpy(self._ranked[self.ranks(s_e)]))

    def ranks(self, s_e: float) -> np.ndarray[Any, Any]:
        """K ranks; rank i has probability proportional to s_e^(-i/n): the inverse of its distribution."""
        n, u = self.task.n, self.rng.random(self.task.batch_size)
        if s_e <= 1 + 1e-9:
            return (u * n).astype(np.int64)
        position = -np.log1p(-u * (1 - 1 / s_e)) / math.log(s_e)
        return (position * n).astype(np.int64).clip(max=n - 1)

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        self.optimizer.step()
        self.steps += 1
        self.last_losses[batch.indices.numpy()] = on_host(losses)


class LossProportional(Method):
    """p is 0.9 of the last seen losses over their sum and 0.1 uniform; weights 1/(n p), so unbiased.

    An example not yet seen counts with the largest loss of the first batch. Ours: the 0.1.
    """

    name = "loss-proportional"
    title = "Loss-proportional"
    summary = "draws in proportion to the last seen loss, weighted to be unbiased"
    citation = "after Schaul et al., ICLR 2016, and Katharopoulos and Fleuret, 2017"

    uniform = 0.1

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.tree = SumTree(np.full(task.n, 1.0))
        self._seen_any = False

    def choose(self) -> Weighted:
        n, K = self.task.n, self.task.batch_size
        indices, _ = self.tree.draw_with_weights(self.rng.random(K))
        even = self.rng.random(K) < self.uniform
        indices[even] = self.rng.integers(n, size=int(even.sum()))
        return Weighted(torch.from_numpy(indices), torch.from_numpy(1 / (n * self._p(indices))))

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        self.optimizer.step()
        seen = on_host(losses).clip(min=1e-12)
        if not self._seen_any:
            self.tree = SumTree(np.full(self.task.n, seen.max()))
            self._seen_any = True
        self.tree.update(batch.indices.numpy(), seen)

    def probabilities(self) -> Floats:
        return self._p(slice(None))

    def _p(self, indices: Any) -> Floats:
        learned: Floats = self.tree.weights[indices] / self.tree.total
        return (1 - self.uniform) * learned + self.uniform / self.task.n
