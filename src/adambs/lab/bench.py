"""``adambs bench``: what the sampler and the scores cost, beside their peers, in one run, as ratios.

The candidates take turns, repetition by repetition, so that a busy machine slows all of them alike; a
number is the median over the repetitions, a ratio the median of the ratios of neighbours in time.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import adambs
from adambs._types import Floats
from adambs.lab import machine
from adambs.lab.plain_tree import PlainTree

# A tree candidate draws a batch for the given u and then writes the given weights to what it drew.
DrawAndUpdate = Callable[[Floats, Floats], None]


def run_bench(console: Console, out: Path, *, quick: bool) -> None:
    """Measure everything, print the tables, write JSON."""
    result: dict[str, Any] = {"machine": machine.describe(), "quick": quick}
    console.print(result["machine"])
    sizes = [10**4, 10**5, 10**6] if quick else [10**4, 10**5, 10**6, 10**7, 10**8]
    with console.status("drawing and updating") as status:
        result["tree"] = []
        for n in sizes:
            for k in (128, 1024):
                status.update(f"drawing and updating: n = {n:.0e}, K = {k}")
                result["tree"].append(bench_tree(n, k, seconds=1 if quick else 8))
        result["sampler"] = [bench_sampler(n, 128, seconds=0.3 if quick else 2) for n in sizes if n <= 10**7]
        status.update("training steps of a Fashion-MNIST CNN, K = 128")
        result["step"] = bench_step(rounds=10 if quick else 40)
        status.update("imports")
        result["import"] = bench_import(repeats=2 if quick else 5)
    for table in (_tree_table, _sampler_table, _step_table, _import_table):
        console.print(table(result))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written: [bold]{out}[/bold]")


# --------------------------------------------------------------------------------------------------------
# Drawing K examples with their weights, then writing K new weights
# --------------------------------------------------------------------------------------------------------


def _sum_tree(weights: Floats) -> DrawAndUpdate:
    tree = adambs.SumTree(weights)

    def work(u: Floats, new: Floats) -> None:
        indices, _ = tree.draw_with_weights(u)
        tree.update(indices, new)

    return work


def _plain_tree(weights: Floats) -> DrawAndUpdate:
    tree = PlainTree(weights)

    def work(u: Floats, new: Floats) -> None:
        indices, _ = tree.draw(u)
        tree.update(indices, new)

    return work


def _cpprb(weights: Floats) -> DrawAndUpdate:
    from cpprb import PrioritizedReplayBuffer

    n = len(weights)
    buffer = PrioritizedReplayBuffer(n, {"i": {"dtype": np.int8}}, alpha=1.0)
    for start in range(0, n, 1_000_000):  # it wants stored examples; one byte each
        part = weights[start : start + 1_000_000]
        buffer.add(i=np.zeros(len(part), np.int8), priorities=part)

    def work(u: Floats, new: Floats) -> None:  # it makes its own random numbers
        indices = buffer.sample(len(u), beta=1.0)["indexes"]
        buffer.update_priorities(indices, new)

    return work


def _multinomial(weights: Floats) -> DrawAndUpdate:
    tensor = torch.from_numpy(weights.copy())

    def work(u: Floats, new: Floats) -> None:  # it makes its own random numbers
        indices = torch.multinomial(tensor, len(u), replacement=True)
        tensor[indices]
        tensor[indices] = torch.from_numpy(new)

    return work


def _cumsum(weights: Floats) -> DrawAndUpdate:
    array = weights.copy()

    def work(u: Floats, new: Floats) -> None:
        sums = np.cumsum(array)
        indices = np.searchsorted(sums, u * sums[-1], side="right")
        array[indices]
        array[indices] = new

    return work


# name -> (constructor, largest n that it takes in reasonable time)
TREES: dict[str, tuple[Callable[[Floats], DrawAndUpdate], int]] = {
    "adambs.SumTree": (_sum_tree, 10**9),
    "plain numba tree": (_plain_tree, 10**9),
    "cpprb": (_cpprb, 10**7),
    "torch.multinomial": (_multinomial, 2**24),
    "cumsum + searchsorted": (_cumsum, 10**7),
}


def bench_tree(n: int, k: int, *, seconds: float) -> dict[str, Any]:
    """Medians in microseconds, and how many times longer than ``SumTree`` each peer takes."""
    rng = np.random.default_rng(0)
    weights = rng.gamma(0.5, 1.0, n) + 1e-3
    candidates = {}
    for name, (construct, largest) in TREES.items():
        if n <= largest:
            try:
                candidates[name] = construct(weights)
            except ImportError:
                continue
    times: dict[str, list[float]] = {name: [] for name in candidates}
    slow: set[str] = set()
    end = time.perf_counter() + seconds
    repetition = 0
    while time.perf_counter() < end or repetition < 15:
        u, new = rng.random(k), rng.gamma(0.5, 1.0, k) + 1e-3
        for name, work in candidates.items():
            if name in slow and repetition % 20 and repetition > 15:
                continue  # a peer that takes milliseconds needs fewer repetitions
            start = time.perf_counter()
            work(u, new)
            elapsed = time.perf_counter() - start
            if repetition >= 3:  # the first ones compile and warm up
                times[name].append(elapsed)
                if elapsed > 1e-3:
                    slow.add(name)
        repetition += 1
    medians = {name: 1e6 * float(np.median(t)) for name, t in times.items()}
    ours = np.array(times["adambs.SumTree"])
    ratios = {}
    for name, t in times.items():
        paired = np.array(t) / ours if len(t) == len(ours) else np.array(t) / np.median(ours)
        ratios[name] = float(np.median(paired))
    return {"n": n, "K": k, "microseconds": medians, "ratio": ratios, "repetitions": len(ours)}


RULES: dict[str, Callable[[], adambs.Rule]] = {
    "Calibrated": adambs.Calibrated,
    "Exp3": adambs.Exp3,
    "Exp3, baseline": lambda: adambs.Exp3(offset="baseline"),
    "Tracking": adambs.Tracking,
    "VRB": adambs.VRB,
    "Avare": adambs.Avare,
    "Release": adambs.Release,
}


def bench_sampler(n: int, k: int, *, seconds: float) -> dict[str, Any]:
    """``BanditSampler.draw`` and ``update`` with each rule, checks included: µs for both."""
    times = {}
    for name, make in RULES.items():
        sampler = adambs.BanditSampler(n, k, rule=make())
        random = np.random.default_rng(1)
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(taken) < 50:
            start = time.perf_counter()
            draw = sampler.draw()
            drawn = time.perf_counter()
            # Norms that differ between examples and wobble between visits.
            norms = (draw.indices.numpy() * 2654435761 % 1000 / 1000) ** 2 * random.uniform(0.5, 1, k)
            ready = time.perf_counter()
            sampler.update(draw, norms)
            taken.append(time.perf_counter() - ready + drawn - start)
        times[name] = 1e6 * float(np.median(taken[5:]))
    return {"n": n, "K": k, "microseconds": times}


# --------------------------------------------------------------------------------------------------------
# A training step
# --------------------------------------------------------------------------------------------------------


def fashion_cnn() -> nn.Module:
    """The paper's CNN for Fashion-MNIST: two 3x3 convolutions, pooling, 128 hidden units."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _adam(train: TensorDataset, k: int) -> Iterator[None]:
    model = fashion_cnn()
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        order = BatchSampler(RandomSampler(train), k, drop_last=True)
        for x, y in DataLoader(train, batch_size=None, sampler=order):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield


def _adambs(train: TensorDataset, k: int, *, exact: bool) -> Iterator[None]:
    model = fashion_cnn()
    norms = adambs.scores.ExactNorms(model) if exact else None
    sampler = adambs.BanditSampler(len(train), k)
    optimizer = adambs.AdamBS(model.parameters(), sampler)
    while True:
        for (x, y), draw in adambs.BanditLoader(train, sampler, drop_last=True):
            logits = model(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            optimizer.zero_grad()
            draw.mean(losses).backward()
            optimizer.step(draw, norms(draw) if norms else adambs.scores.cross_entropy(logits, y))
            yield


def bench_step(*, rounds: int, n: int = 20_000, k: int = 128) -> dict[str, Any]:
    """Seconds a training step, and its ratio to Adam's, on images of Fashion-MNIST's shape."""
    data = torch.Generator().manual_seed(0)
    train = TensorDataset(
        torch.randn(n, 1, 28, 28, generator=data), torch.randint(0, 10, (n,), generator=data)
    )
    loops = {
        "Adam": _adam(train, k),
        "AdamBS, bound": _adambs(train, k, exact=False),
        "AdamBS, exact norms": _adambs(train, k, exact=True),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for index in range(rounds + 2):
        for name, loop in loops.items():
            start = time.perf_counter()
            for _ in range(5):
                next(loop)
            if index >= 2:
                times[name].append((time.perf_counter() - start) / 5)
    base = np.array(times["Adam"])
    rng = np.random.default_rng(0)
    result = {}
    for name, t in times.items():
        ratios = np.array(t) / base
        medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
        result[name] = {
            "milliseconds": 1e3 * float(np.median(t)),
            "ratio": float(np.median(ratios)),
            "interval": np.percentile(medians, [2.5, 97.5]).tolist(),
        }
    return result


# --------------------------------------------------------------------------------------------------------
# Importing, and the first draw
# --------------------------------------------------------------------------------------------------------

_IMPORT = """
import time
start = time.perf_counter()
import numba, torch, torch.utils.data, torch.optim
before = time.perf_counter()
import adambs
after = time.perf_counter()
sampler = adambs.BanditSampler(100_000, 128)
built = time.perf_counter()
draw = sampler.draw()
drawn = time.perf_counter()
sampler.update(draw, torch.ones(128))
print(before - start, after - before, drawn - built, time.perf_counter() - drawn)
"""


def bench_import(*, repeats: int) -> dict[str, float]:
    """Seconds, in processes of their own: what adambs adds to its dependencies, and the first calls."""
    runs = []
    for _ in range(repeats + 1):  # the first may compile
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
        runs.append([float(word) for word in done.stdout.split()])
    names = ("torch and numba", "adambs beyond them", "first draw", "first update")
    return dict(zip(names, np.median(runs[1:], axis=0).tolist(), strict=True))


# --------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------


def _tree_table(result: dict[str, Any]) -> Table:
    table = Table(title="Draw K and write K new weights: µs (times SumTree's)")
    for column in ("n", "K", *TREES):
        table.add_column(column, justify="right")
    table.add_column("growth", justify="right", header_style="bold")
    smallest = {row["K"]: row["microseconds"]["adambs.SumTree"] for row in result["tree"][:2]}
    for row in result["tree"]:
        cells = []
        for name in TREES:
            if name in row["microseconds"]:
                cells.append(f"{row['microseconds'][name]:,.0f} ({row['ratio'][name]:.1f}x)")
            else:
                cells.append("-")
        growth = row["microseconds"]["adambs.SumTree"] / smallest[row["K"]]
        table.add_row(f"{row['n']:.0e}", str(row["K"]), *cells, f"{growth:.1f}x")
    table.caption = "growth: SumTree's cost over its cost at the smallest n"
    return table


def _sampler_table(result: dict[str, Any]) -> Table:
    table = Table(title="BanditSampler, draw and update, K = 128, checks included: µs")
    for column in ("n", *RULES):
        table.add_column(column, justify="right")
    for row in result["sampler"]:
        table.add_row(f"{row['n']:.0e}", *(f"{row['microseconds'][name]:.0f}" for name in RULES))
    return table


def _step_table(result: dict[str, Any]) -> Table:
    table = Table(title="One training step, Fashion-MNIST CNN, K = 128")
    for column in ("", "ms", "times Adam's", "95 % interval"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in result["step"].items():
        low, high = row["interval"]
        table.add_row(name, f"{row['milliseconds']:.1f}", f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}")
    return table


def _import_table(result: dict[str, Any]) -> Table:
    table = Table(title="Start-up, kernels cached: seconds")
    for name in result["import"]:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.3f}" for value in result["import"].values()))
    return table
