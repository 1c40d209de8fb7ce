"""Drawing K examples with their weights, then writing K new weights: ``SumTree`` beside its peers."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.table import Table

import adambs
from adambs._types import Floats
from adambs.lab.bench.plain_tree import PlainTree

# A tree candidate draws a batch for the given u and then writes the given weights to what it drew.
DrawAndUpdate = Callable[[Floats, Floats], None]


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


def measure(n: int, k: int, *, seconds: float) -> dict[str, Any]:
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


def table(rows: list[dict[str, Any]]) -> Table:
    """How many µs, and how many times as many as ``SumTree``'s."""
    made = Table(title="Draw K and write K new weights: µs (times SumTree's)")
    for column in ("n", "K", *TREES):
        made.add_column(column, justify="right")
    made.add_column("growth", justify="right", header_style="bold")
    smallest = {row["K"]: row["microseconds"]["adambs.SumTree"] for row in rows[:2]}
    for row in rows:
        cells = []
        for name in TREES:
            if name in row["microseconds"]:
                cells.append(f"{row['microseconds'][name]:,.0f} ({row['ratio'][name]:.1f}x)")
            else:
                cells.append("-")
        growth = row["microseconds"]["adambs.SumTree"] / smallest[row["K"]]
        made.add_row(f"{row['n']:.0e}", str(row["K"]), *cells, f"{growth:.1f}x")
    made.caption = "growth: SumTree's cost over its cost at the smallest n"
    return made
