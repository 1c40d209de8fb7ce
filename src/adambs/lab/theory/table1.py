"""Table 1's second terms, computed exactly: sqrt(E||G_hat||^2) of the four methods as n and K grow."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from adambs._types import Floats
from adambs.lab.theory import bounds
from adambs.lab.theory.errata import second_moment_of_batches
from adambs.lab.theory.heavy_tailed import expected_squares
from adambs.lab.theory.lemmas import power_of_n
from adambs.lab.theory.regret import C, make_groups

BATCH = 10  # K where n grows
BATCHES = [1, 10, 100]  # K where n stands
RATES: dict[str, Callable[[float, float], float]] = {
    # The second terms of Table 1 without sqrt(d log d) sqrt(T), which all four share.
    "Adam": lambda n, K: math.sqrt(n * math.log(n)) / n / math.sqrt(K),
    "AdamBS": lambda n, K: math.log(n) / n / math.sqrt(K),
    "Adam-uni": lambda n, K: math.sqrt(n * math.log(n)) / n,
    "Adam-apt": lambda n, K: math.log(n) / n,
}


def moments(n: int, K: int, d: int, seed: int) -> dict[str, float]:
    """E||G_hat||^2 at theta = 0 of each method with the best p of its kind, and ||G||^2 = its part that is
    no variance.
    """
    z, y = expected_squares(n, d, seed=seed)
    g: Floats = -0.5 * y[:, None] * z
    batches = make_groups(n, K, True, seed)
    m = len(batches)
    p = bounds.water_filling(np.linalg.norm(g, axis=1), C / n)
    p_batch = bounds.water_filling(np.linalg.norm(g[batches].mean(axis=1), axis=1), C / m)
    G = g.mean(axis=0)
    return {
        "Adam": bounds.second_moment(g, np.full(n, 1 / n), K),
        "AdamBS": bounds.second_moment(g, p, K),
        "Adam-uni": second_moment_of_batches(g, batches, np.full(m, 1 / m)),
        "Adam-apt": second_moment_of_batches(g, batches, p_batch),
        "G_squared": float(G @ G),
    }


def measure(sizes: list[int], d: int, seed: int, seeds: int = 5) -> dict[str, Any]:
    """Means over data sets of the roots, and the fitted powers beside those of the paper's rates."""

    def mean(n: int, K: int) -> dict[str, float]:
        runs = [moments(n, K, d, s) for s in range(seed, seed + seeds)]
        return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}

    middle = sizes[len(sizes) // 2]
    by_n = [{"n": n, "K": BATCH, **mean(n, BATCH)} for n in sizes]
    by_K = [{"n": middle, "K": K, **mean(middle, K)} for K in BATCHES]
    powers = {}
    for name, rate in RATES.items():
        roots = [math.sqrt(row[name]) for row in by_n]
        over_K = [math.sqrt(row[name]) for row in by_K]
        variance = [math.sqrt(max(row[name] - row["G_squared"], 1e-300)) for row in by_K]
        powers[name] = {
            "n": power_of_n(sizes, roots),
            "n_paper": power_of_n(sizes, [rate(n, BATCH) for n in sizes]),
            "K": power_of_n(BATCHES, over_K),
            "K_of_deviation": power_of_n(BATCHES, variance),
            "K_paper": power_of_n(BATCHES, [rate(middle, K) for K in BATCHES]),
        }
    return {"d": d, "by_n": by_n, "by_K": by_K, "powers": powers}
