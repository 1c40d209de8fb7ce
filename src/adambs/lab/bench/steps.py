"""Training steps of AdamBS beside Adam's, on one thread.

A candidate takes some steps in a row, as in training, where a step finds in the processor's caches what the
one before it has left there. Then comes the next; in another order each time, so that a busy machine slows
all of them alike. (To go through them forth and back, step by step, is unfair: who is last and then first
again takes two steps in a row, and the others do not.) A round is some turns of each; its time is the median
of the steps. The ratio is the geometric mean over the rounds of a candidate's time over Adam's, with a 95 %
interval by Student's t on the logarithms.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import adambs
from adambs.lab.report import estimates

Step = Callable[[], None]


@dataclass(frozen=True)
class Workload:
    """A net, made-up data of its shape, and how many times Adam's a step may take."""

    title: str
    net: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int
    n: int
    K: int
    bar: float
    loaders: bool = False
    """Whether batches come from a DataLoader and a BanditLoader; if not, by plain indexing."""
    exact: bool = False
    """Whether exact norms are measured, too."""

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels, always the same."""
        stream = torch.Generator().manual_seed(0)
        x = torch.randn(self.n, *self.inputs, generator=stream)
        return x, torch.randint(0, self.classes, (self.n,), generator=stream)


def small_net() -> nn.Module:
    """A convolution and two linear layers for images of 8 x 8: a step takes about a millisecond."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """Two hidden layers of 128 on 116 features, 23 classes."""
    return nn.Sequential(nn.Linear(116, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 23))


def fashion_cnn() -> nn.Module:
    """The paper's CNN for Fashion-MNIST: two 3x3 convolutions, pooling, 128 hidden units."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


SMALL = Workload("small convolutional net", small_net, (1, 8, 8), 10, n=1437, K=32, bar=1.10)
MLP = Workload("MLP 116-128-128-23", mlp, (116,), 23, n=20_000, K=256, bar=1.06)
FASHION = Workload(
    "Fashion-MNIST CNN", fashion_cnn, (1, 28, 28), 10, n=20_000, K=128, bar=1.00, loaders=True, exact=True
)

# workload -> rounds, turns in a round, and steps in a row at each turn. The first two rounds are not counted.
# What lies in caches matters to short steps only; long ones alternate, to meet the same moods of a machine.
ROUNDS = {SMALL: (200, 1, 30), MLP: (200, 1, 15), FASHION: (30, 5, 1)}


def measure_all(*, quick: bool) -> list[dict[str, Any]]:
    """All workloads. The number of torch's threads is set back in the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            measure(workload, rounds=max(6, rounds // 10) if quick else rounds, turns=turns, steps=steps)
            for workload, (rounds, turns, steps) in ROUNDS.items()
        ]
    finally:
        torch.set_num_threads(threads)


def measure(workload: Workload, *, rounds: int, steps: int, turns: int = 1) -> dict[str, Any]:
    """Milliseconds a step of each candidate, and the ratio to Adam's with its interval."""
    candidates = {
        "Adam": (_adam_from_loader if workload.loaders else _adam)(workload),
        "AdamBS, bound": (_adambs_from_loader if workload.loaders else _adambs)(workload),
    }
    if not workload.loaders:
        candidates["AdamBS, bound, with its gate"] = _adambs(workload, gate=None)
        candidates["Adam, weighted losses"] = _adam(workload, weighted=True)
    if workload.exact:
        candidates["AdamBS, exact norms"] = _adambs_from_loader(workload, exact=True)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = np.random.default_rng(0)
    for index in range(rounds + 2):
        taken: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(turns):
            for name in order.permutation(list(candidates)):
                taken[name] += [_seconds(candidates[name]) for _ in range(steps)]
        if index >= 2:
            for name, seconds in taken.items():
                times[name].append(float(np.median(seconds)))
    result: dict[str, Any] = {"title": workload.title, "n": workload.n, "K": workload.K, "bar": workload.bar}
    result["candidates"] = {name: _against(times["Adam"], own) for name, own in times.items()}
    if not workload.loaders:
        result["parts"] = parts(workload, steps=10 * rounds)
    return result


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _against(adam: list[float], own: list[float]) -> dict[str, Any]:
    logs = estimates.mean([math.log(a / b) for a, b in zip(own, adam, strict=True)])
    assert logs.low is not None
    assert logs.high is not None
    return {
        "milliseconds": 1e3 * float(np.median(own)),
        "ratio": math.exp(logs.value),
        "interval": [math.exp(logs.low), math.exp(logs.high)],
        "rounds": logs.seeds,
    }


# ------------------------------------------------------------------------------------------------
# The candidates
# ------------------------------------------------------------------------------------------------


def _net(workload: Workload) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return workload.net()


def _adam(workload: Workload, *, weighted: bool = False) -> Step:
    """Batches by plain indexing, in reshuffled order.

    ``weighted``: torch's own price of a weight for each example, with weights that are there already. A
    bandit cannot have them for less.
    """
    model, (x, y), K = _net(workload), workload.data(), workload.K
    optimizer = torch.optim.Adam(model.parameters())
    weights = torch.full((K,), 1 / K)

    def batches() -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(x))
            for start in range(0, len(x) - K + 1, K):
                yield order[start : start + K]

    indices = batches()

    def step() -> None:
        chosen = next(indices)
        logits, labels = model(x[chosen]), y[chosen]
        if weighted:
            loss = torch.dot(F.cross_entropy(logits, labels, reduction="none"), weights)
        else:
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _adambs(workload: Workload, gate: float | None = 0.0) -> Step:
    """The same with the README's loop. Without a gate every batch is drawn from p; None is the usual gate."""
    model, (x, y) = _net(workload), workload.data()
    sampler = adambs.BanditSampler(len(x), workload.K, gate=gate)
    optimizer = adambs.AdamBS(model.parameters(), sampler)

    def step() -> None:
        draw = sampler.draw()
        chosen = draw.indices
        labels = y[chosen]
        logits = model(x[chosen])
        losses = F.cross_entropy(logits, labels, reduction="none")
        optimizer.zero_grad()
        scores = adambs.scores.cross_entropy(logits, labels)
        draw.mean(losses, scores).backward()  # type: ignore[no-untyped-call]
        optimizer.step(draw, scores)

    return step


def _adam_from_loader(workload: Workload) -> Step:
    model, train = _net(workload), TensorDataset(*workload.data())
    optimizer = torch.optim.Adam(model.parameters())

    def loop() -> Iterator[None]:
        while True:
            order = BatchSampler(RandomSampler(train), workload.K, drop_last=True)
            for x, y in DataLoader(train, batch_size=None, sampler=order):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                yield

    steps = loop()
    return lambda: next(steps)


def _adambs_from_loader(workload: Workload, *, exact: bool = False) -> Step:
    model, train = _net(workload), TensorDataset(*workload.data())
    norms = adambs.scores.ExactNorms(model) if exact else None
    sampler = adambs.BanditSampler(len(train), workload.K, gate=0.0)
    optimizer = adambs.AdamBS(model.parameters(), sampler)

    def loop() -> Iterator[None]:
        while True:
            for (x, y), draw in adambs.BanditLoader(train, sampler, drop_last=True):
                logits = model(x)
                losses = F.cross_entropy(logits, y, reduction="none")
                optimizer.zero_grad()
                if norms:  # they are known after the backward pass, so there is no cap
                    draw.mean(losses).backward()
                    optimizer.step(draw, norms(draw))
                else:
                    scores = adambs.scores.cross_entropy(logits, y)
                    draw.mean(losses, scores).backward()
                    optimizer.step(draw, scores)
                yield

    steps = loop()
    return lambda: next(steps)


# ------------------------------------------------------------------------------------------------
# Where the time goes
# ------------------------------------------------------------------------------------------------


def parts(workload: Workload, *, steps: int) -> dict[str, float]:
    """µs, as medians, of what a step of AdamBS does and a step of Adam does not.

    The weighted mean takes the place of a plain mean, which Adam's step does have: both are given.
    """
    model, (x, y) = _net(workload), workload.data()
    sampler = adambs.BanditSampler(len(x), workload.K, gate=0.0)
    optimizer = torch.optim.Adam(model.parameters())
    taken: dict[str, list[float]] = {"draw": [], "plain mean": [], "mean": [], "score": [], "update": []}
    clock = time.perf_counter
    for _ in range(steps):
        start = clock()
        draw = sampler.draw()
        chosen = draw.indices
        taken["draw"].append(clock() - start)
        labels = y[chosen]
        logits = model(x[chosen])
        losses = F.cross_entropy(logits, labels, reduction="none")
        start = clock()
        scores = adambs.scores.cross_entropy(logits, labels)
        taken["score"].append(clock() - start)
        start = clock()
        losses.mean()
        between = clock()
        loss = draw.mean(losses, scores)
        taken["mean"].append(clock() - between)
        taken["plain mean"].append(between - start)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        start = clock()
        sampler.update(draw, scores)
        taken["update"].append(clock() - start)
    return {name: 1e6 * float(np.median(seconds)) for name, seconds in taken.items()}


def table(rows: list[dict[str, Any]]) -> Table:
    """Three rows or four a workload, and where the time of the small ones goes."""
    made = Table(title="One training step, one thread")
    for column in ("", "", "ms", "times Adam's", "95 % interval", "bar"):
        made.add_column(column, justify="right" if column else "left")
    notes = []
    for row in rows:
        title = f"{row['title']}, K = {row['K']}"
        for name, one in row["candidates"].items():
            low, high = one["interval"]
            bar = f"{row['bar']:.2f}" if name == "AdamBS, bound" else ""
            ratio = "1" if name == "Adam" else f"{one['ratio']:.3f}"
            interval = "" if name == "Adam" else f"{low:.3f} to {high:.3f}"
            made.add_row(title, name, f"{one['milliseconds']:.2f}", ratio, interval, bar)
            title = ""
        made.add_section()
        if "parts" in row:
            words = ", ".join(f"{name} {value:.0f}" for name, value in row["parts"].items())
            notes.append(f"{row['title']}, µs: {words}")
    made.caption = "\n".join(notes)
    return made
