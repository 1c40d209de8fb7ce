"""``BanditSampler.draw`` and ``update`` with each rule."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table

import adambs

RULES: dict[str, Callable[[], adambs.Rule]] = {
    "Calibrated": adambs.Calibrated,
    "Exp3": adambs.Exp3,
    "Exp3, baseline": lambda: adambs.Exp3(offset="baseline"),
    "Tracking": adambs.Tracking,
    "VRB": adambs.VRB,
    "Avare": adambs.Avare,
    "Release": adambs.Release,
    "Exp3M": adambs.Exp3M,
}


def measure(n: int, k: int, *, seconds: float) -> dict[str, Any]:
    """µs for a draw and an update with each rule, checks included."""
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
            norms = scores_of(draw, random)
            ready = time.perf_counter()
            sampler.update(draw, norms)
            taken.append(time.perf_counter() - ready + drawn - start)
        times[name] = 1e6 * float(np.median(taken[5:]))
    return {"n": n, "K": k, "microseconds": times}


def scores_of(draw: adambs.Draw, random: np.random.Generator) -> Any:
    """Scores that differ between examples and wobble between visits. Asks for weights, as training does."""
    _ = draw.weights  # else the sampler warns that nobody uses them
    mixed = draw.indices.numpy() * 2654435761 % 1000 / 1000
    return mixed**2 * random.uniform(0.5, 1, len(draw))


def table(rows: list[dict[str, Any]]) -> Table:
    """A row for each n and K."""
    made = Table(title="BanditSampler, draw and update, checks included: µs")
    for column in ("n", "K", *RULES):
        made.add_column(column, justify="right")
    for row in rows:
        cells = (f"{row['microseconds'][name]:.0f}" for name in RULES)
        made.add_row(f"{row['n']:,}", str(row["K"]), *cells)
    return made
