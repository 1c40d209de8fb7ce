"""``adambs demo``: Adam and AdamBS on scikit-learn's digits, side by side."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import adambs

K, LR, EVERY = 32, 1e-3, 14  # batch size, learning rate, steps between two looks at the loss

# A trainer does EVERY more steps each time that it is asked.
Trainer = Iterator[None]


def digits() -> TensorDataset:
    """1,797 images of 8 x 8 pixels, shipped with scikit-learn."""
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.from_numpy(x).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(y))


def network(seed: int) -> nn.Module:
    """A small CNN; the same parameters for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def train_adam(model: nn.Module, train: TensorDataset, seed: int) -> Trainer:
    """The ordinary loop, reshuffled each epoch."""
    shuffled = RandomSampler(train, generator=torch.Generator().manual_seed(seed))
    loader = DataLoader(train, batch_size=None, sampler=BatchSampler(shuffled, K, drop_last=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    step = 0
    while True:
        for x, y in loader:
            losses = F.cross_entropy(model(x), y, reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                yield


def train_adambs(model: nn.Module, train: TensorDataset, seed: int) -> Trainer:
    """The same loop with the five lines changed."""
    sampler = adambs.BanditSampler(len(train), K, seed=seed)
    optimizer = adambs.AdamBS(model.parameters(), sampler, lr=LR)
    step = 0
    while True:
        for (x, y), draw in adambs.BanditLoader(train, sampler):
            logits = model(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            optimizer.zero_grad()
            draw.mean(losses).backward()  # type: ignore[no-untyped-call]
            optimizer.step(draw, adambs.scores.cross_entropy(logits, y))
            step += 1
            if step % EVERY == 0:
                yield


METHODS: dict[str, Callable[[nn.Module, TensorDataset, int], Trainer]] = {
    "Adam": train_adam,
    "AdamBS": train_adambs,
}
COLOURS = {"Adam": "#666666", "AdamBS": "#c8421b"}


def run_demo(console: Console, out: Path, seeds: int, epochs: int) -> None:
    """Train, print a table, draw a picture into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    train = digits()
    x, y = train.tensors
    looks = max(1, epochs * -(-len(train) // K) // EVERY)
    seconds = {method: np.zeros((seeds, looks + 1)) for method in METHODS}
    losses = {method: np.zeros((seeds, looks + 1)) for method in METHODS}

    progress = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console)
    with progress:
        for trainer in METHODS.values():  # compile and warm up before any clock runs
            next(trainer(network(0), train, 0))
        task = progress.add_task("training", total=seeds * looks)
        for seed in range(seeds):
            models = {method: network(seed) for method in METHODS}
            trainers = {m: METHODS[m](model, train, seed) for m, model in models.items()}
            for look in range(looks + 1):  # the methods take turns, so a busy machine hurts all alike
                for method, model in models.items():
                    if look:
                        start = time.perf_counter()
                        next(trainers[method])
                        elapsed = time.perf_counter() - start
                        seconds[method][seed, look] = seconds[method][seed, look - 1] + elapsed
                    with torch.no_grad():  # outside the clock
                        losses[method][seed, look] = F.cross_entropy(model(x), y).item()
                now = "  ".join(f"{m} {losses[m][seed, look]:.4f}" for m in METHODS)
                progress.update(task, advance=look > 0, description=f"seed {seed}  {now}")

    console.print(_table(seconds, losses))
    console.print(_verdict(losses))
    picture = out / "demo.png"
    _plot(picture, seconds, losses)
    console.print(f"The picture: [bold]{picture.resolve()}[/bold]")


def _table(seconds: dict[str, np.ndarray], losses: dict[str, np.ndarray]) -> Table:
    table = Table(title="scikit-learn's digits, a small CNN: loss on the whole training set")
    for column in ("method", "steps", "seconds", "ms a step", "final loss (mean ± sd over seeds)"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, loss in losses.items():
        steps = (loss.shape[1] - 1) * EVERY
        time_taken = seconds[method][:, -1].mean()
        final = loss[:, -1]
        table.add_row(
            method, f"{steps}", f"{time_taken:.1f}", f"{1000 * time_taken / steps:.2f}",
            f"{final.mean():.4f} ± {final.std(ddof=1) if len(final) > 1 else 0:.4f}",
        )  # fmt: skip
    return table


def _verdict(losses: dict[str, np.ndarray]) -> str:
    """One sentence, paired by seed, with a 95 % interval of the ratio of final losses."""
    ratio = np.log(losses["AdamBS"][:, -1] / losses["Adam"][:, -1])
    if len(ratio) < 3:
        return "Too few seeds for a verdict: run with --seeds 5."
    rng = np.random.default_rng(0)
    means = rng.choice(ratio, (10_000, len(ratio))).mean(axis=1)
    low, high = np.exp(np.percentile(means, [2.5, 97.5]))
    middle = np.exp(ratio.mean())
    numbers = f"AdamBS / Adam final loss {middle:.2f}, 95 % interval {low:.2f} to {high:.2f}"
    if high < 1:
        return f"After the same number of steps AdamBS has the lower loss: {numbers}."
    if low > 1:
        return f"No gain here; Adam has the lower loss after the same number of steps: {numbers}."
    return f"No significant difference after the same number of steps: {numbers}."


def _plot(file: Path, seconds: dict[str, np.ndarray], losses: dict[str, np.ndarray]) -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for method, loss in losses.items():
        when = seconds[method].mean(axis=0)
        logs = np.log(loss)
        middle, spread = logs.mean(axis=0), logs.std(axis=0)
        axes.plot(when, np.exp(middle), color=COLOURS[method], label=method, linewidth=2)
        axes.fill_between(
            when, np.exp(middle - spread), np.exp(middle + spread),
            color=COLOURS[method], alpha=0.2, linewidth=0,
        )  # fmt: skip
    axes.set(
        yscale="log",
        xlabel="training time, seconds",
        ylabel="loss on the whole training set",
        title=f"scikit-learn's digits, {len(loss)} seeds: mean and band of one standard deviation",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
