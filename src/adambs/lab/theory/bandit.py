"""Lemma 1, measured: the regret of Algorithm 2 against the best fixed p in P, beside the bound."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from adambs import _check
from adambs._types import Floats
from adambs.lab.theory import bounds
from adambs.lab.theory.heavy_tailed import ONE_NEURON, expected_squares
from adambs.reference import lemma_1_R_squared
from adambs.rules import Exp3
from adambs.sampler import BanditSampler

Advance = Callable[[str], None]

# The norms of step t may depend on p^t, not on the draw: the lemma allows an adversary that adapts.
Adversary = Callable[[int, Floats], Floats]


class Setting(NamedTuple):
    """What is measured."""

    n: int
    K: int
    c: float
    """p_min = c / n."""
    horizons: list[int]
    seeds: int


QUICK = Setting(50, 4, 0.5, [64, 256, 1024], 2)
FULL = Setting(100, 8, 0.5, [128, 512, 2048, 8192, 32768], 3)


def training_norms(n: int, T: int, seed: int, *, d: int = 10, K: int = 8, alpha: float = 0.3) -> Floats:
    """||g_j^t|| / L of all n examples along T steps of Adam on the one-neuron network, uniform batches. (T,
    n).
    """
    z, y = expected_squares(n, d, seed=seed)
    rng = np.random.default_rng(seed)
    theta, m, v = rng.normal(size=d), np.zeros(d), np.zeros(d)
    lengths = np.linalg.norm(z, axis=1)
    norms = np.empty((T, n))
    for t in range(1, T + 1):
        slope = ONE_NEURON.slope(z @ theta, y)
        norms[t - 1] = np.abs(slope) * lengths
        I = rng.integers(0, n, K)
        G_hat = slope[I] @ z[I] / K
        m, v = 0.9 * m + 0.1 * G_hat, 0.999 * v + 0.001 * G_hat**2
        step = alpha / math.sqrt(t) * m / (1 - 0.9**t)
        theta = theta - step / (np.sqrt(v / (1 - 0.999**t)) + 1e-12)
    norms /= lengths.max()
    return norms


@lru_cache(maxsize=4)
def _recorded(n: int, T: int, seed: int) -> Floats:
    return training_norms(n, T, seed)


def network(setting: Setting, T: int, seed: int) -> Adversary:
    """The paper's losses: the norms of a real training run."""
    norms = _recorded(setting.n, max(T, *setting.horizons), seed)
    return lambda t, p: norms[t]


def switching(setting: Setting, T: int, seed: int) -> Adversary:
    """Four phases: in each another tenth of the examples has norm 1, and the others 0.1."""
    order = np.random.default_rng(seed).permutation(setting.n)
    groups = np.array_split(order, 10)
    norms = np.full((4, setting.n), 0.1)
    for phase in range(4):
        norms[phase, groups[phase]] = 1.0
    return lambda t, p: norms[min(3, 4 * t // T)]


def smallest_p(setting: Setting, T: int, seed: int) -> Adversary:
    """Norm 1 for the tenth of the examples that p likes least, 0 for the others."""
    tenth = max(1, setting.n // 10)

    def norms(t: int, p: Floats) -> Floats:
        chosen = np.zeros(setting.n)
        chosen[np.argpartition(p, tenth - 1)[:tenth]] = 1.0
        return chosen

    return norms


ADVERSARIES: dict[str, Callable[[Setting, int, int], Adversary]] = {
    "one-neuron training run": network,
    "a tenth of large norms, switching": switching,
    "large norms where p is smallest": smallest_p,
}


class Regret(NamedTuple):
    """Costs of one run."""

    bandit: float
    best_fixed: float
    uniform: float

    @property
    def regret(self) -> float:
        """What the bandit pays above the best fixed p in P."""
        return self.bandit - self.best_fixed


def play(adversary: Adversary, setting: Setting, T: int, seed: int) -> Regret:
    """Algorithm 2 with Lemma 1's step for T steps, L = 1. The best fixed p fills water on sum_t
    ||g_j^t||^2.
    """
    T = _check.whole("T", T, least=1)
    n = setting.n
    sampler = BanditSampler(n, setting.K, rule=Exp3(L=1.0, p_min=setting.c, horizon=T), seed=seed)
    paid = 0.0
    squares = np.zeros(n)
    for t in range(T):
        ratios = sampler.rule.ratios()
        norms = adversary(t, ratios)
        squared = norms * norms
        paid += n * float((squared / ratios).sum())
        squares += squared
        draw = sampler.draw()
        sampler.update(draw.number, norms[draw.indices.numpy()])  # nothing is trained, so nothing weighted
    summed = np.sqrt(squares)
    best = bounds.cost(summed, bounds.water_filling(summed, setting.c / n))
    return Regret(paid, best, n * float(squares.sum()))


def measure(setting: Setting, seed: int, advance: Advance) -> dict[str, Any]:
    """For each adversary and T: regret over seeds, the bound, and what uniform sampling would have lost."""
    rows = list(_rows(setting, seed, advance))
    powers = {name: power_of_T([row for row in rows if row["losses"] == name]) for name in ADVERSARIES}
    return {**setting._asdict(), "L": 1.0, "rows": rows, "powers_of_T": powers}


def power_of_T(rows: list[dict[str, Any]]) -> float:
    """b of the least-squares fit regret = a T^b; the bound has 1/2."""
    T, regrets = [row["T"] for row in rows], [max(row["regret"], 1e-300) for row in rows]
    return float(np.polyfit(np.log(T), np.log(regrets), 1)[0])


def _rows(setting: Setting, seed: int, advance: Advance) -> Iterator[dict[str, Any]]:
    n, p_min = setting.n, setting.c / setting.n
    R_squared = lemma_1_R_squared(n, p_min)
    for name, make in ADVERSARIES.items():
        for T in setting.horizons:
            advance(f"Lemma 1: {name}, T = {T}")
            seeds = range(seed, seed + setting.seeds)
            runs = [play(make(setting, T, s), setting, T, s) for s in seeds]
            regrets = np.array([run.regret for run in runs])
            constants = {"n": n, "T": T, "L": 1.0, "p_min": p_min, "R_squared": R_squared}
            yield {
                "losses": name,
                "T": T,
                "regret": float(regrets.mean()),
                "regret_sd": float(regrets.std(ddof=1)) if len(regrets) > 1 else 0.0,
                "uniform_regret": float(np.mean([run.uniform - run.best_fixed for run in runs])),
                "best_fixed": float(np.mean([run.best_fixed for run in runs])),
                "bound": bounds.lemma_1_regret_bound(**constants),  # type: ignore[arg-type]
                "bound_with_K": bounds.lemma_1_regret_bound_with_K(**constants, K=setting.K),  # type: ignore[arg-type]
            }
