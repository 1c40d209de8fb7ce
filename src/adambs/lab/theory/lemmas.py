"""Lemmas 2 and 3, measured: sum_j ||g_j||^2 / p_j under uniform p, the optimum, and what the rules have
learned.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from adambs import _check
from adambs._types import Floats
from adambs.lab.theory import bounds
from adambs.lab.theory.heavy_tailed import (
    ONE_NEURON,
    expected_norms,
    generate,
    gradient_norms,
    power_sum,
    zeta,
)
from adambs.rules import Exp3, Rule, Uniform
from adambs.sampler import BanditSampler

Advance = Callable[[str], None]

C = 0.3  # p_min = C / n everywhere in this experiment
K = 64

# Name -> a rule for norms up to L and T steps. A new rule is one more entry.
RULES: dict[str, Callable[[float, int], Rule]] = {
    "Uniform": lambda L, T: Uniform(),
    "Exp3, Lemma 1's step": lambda L, T: Exp3(L=L, p_min=C, horizon=T),
    "Exp3, step 0.1": lambda L, T: Exp3(L=L, p_min=C, step=0.1),
    "Exp3, step 1": lambda L, T: Exp3(L=L, p_min=C, step=1.0),
}


class Setting(NamedTuple):
    """What is measured."""

    sizes: list[int]
    d: int
    learn_up_to: dict[float, int]
    """For each gamma that is measured, the largest n at which the rules learn."""
    sets: int
    """Data sets of the paper's kind averaged over, for each n."""
    epochs: float
    """n-fold draws that a rule may learn from."""
    curve_epochs: list[int]
    """For the learning curve at n = 1000."""


QUICK = Setting([10**2, 10**3, 10**4], 100, {2.0: 10**4}, 100, 4, [10, 100])
FULL = Setting([10**2, 10**3, 10**4, 10**5, 10**6], 1000, {2.0: 10**6, 3.0: 10**5}, 1000, 10, [10, 100, 1000])


def measure(setting: Setting, seed: int, advance: Advance) -> dict[str, Any]:
    """A row for each gamma and n, and the fitted growth of each column."""
    rows: list[dict[str, Any]] = []
    for gamma in setting.learn_up_to:
        for n in setting.sizes:
            advance(f"Lemmas 2 and 3: gamma = {gamma:g}, n = {n:.0e}")
            rows.append(one_size(n, gamma, setting, seed))
    fits = [
        {"gamma": gamma, **growths([row for row in rows if row["gamma"] == gamma])}
        for gamma in setting.learn_up_to
    ]
    curve = learning_curve(setting, seed, advance)
    facts = {"c": C, "K": K, "d": setting.d, "sets": setting.sets, "epochs": setting.epochs}
    return {**facts, "rows": rows, "fits": fits, "curve": curve}


def learning_curve(setting: Setting, seed: int, advance: Advance) -> list[dict[str, Any]]:
    """What the rules have learned at n = 1000, gamma = 2 after more and more steps."""
    norms = expected_norms(1000, setting.d)
    rows = []
    for epochs in setting.curve_epochs:
        advance(f"Lemma 3: learning for {epochs} epochs, n = 1000")
        T = round(epochs * 1000 / K)
        rows.append({"epochs": epochs, "T": T, "learned": all_learned(norms, T, seed)})
    return rows


def one_size(n: int, gamma: float, setting: Setting, seed: int) -> dict[str, Any]:
    """Everything for one n."""
    d, p_min = setting.d, C / n
    expected = expected_norms(n, d, gamma=gamma)
    best = bounds.cost(expected, bounds.water_filling(expected, p_min))
    uniform = n * float((expected**2).sum())
    row: dict[str, Any] = {
        "n": n,
        "gamma": gamma,
        # In expectation, with ||z_j||^2 for ||g_j||^2, as both lemmas bound it.
        "uniform": uniform,
        "best_p": float(expected.sum() ** 2),
        "best_p_in_P": best,
        "lemma_2_line": n * math.log(n) * math.log(d),
        "lemma_3_line": math.log(d) * math.log(n) ** 2,
        "steps_before_lemma_1_helps": bounds.steps_before_lemma_1_helps(
            n=n, L=float(expected[0]), p_min=p_min, uniform_cost=uniform, best_cost=best
        ),
        **printed_data(n, gamma, setting, seed),
    }
    if n <= setting.learn_up_to[gamma]:
        T = max(1, round(setting.epochs * n / K))
        row["T"] = T
        row["learned"] = all_learned(expected, T, seed)
    return row


def printed_data(n: int, gamma: float, setting: Setting, seed: int) -> dict[str, float]:
    """The paper's data and network: means over data sets at a random theta, labels fair coins.
    O(non-zeros).
    """
    rng = np.random.default_rng([seed, n])
    costs = np.zeros((setting.sets, 3))
    for s in range(setting.sets):
        data = generate(n, setting.d, gamma=gamma, seed=int(rng.integers(2**62)))
        y = rng.choice(np.array([-1.0, 1.0]), len(data.rows))
        norms = gradient_norms(data, ONE_NEURON, rng.normal(size=setting.d), y)
        costs[s] = n * float((norms**2).sum()), float(norms.sum() ** 2), len(data.columns)
    uniform, best, non_zeros = costs.mean(axis=0).tolist()
    return {"network_uniform": uniform, "network_best_p": best, "non_zeros": non_zeros}


def learned_cost(norms: Floats, rule: Rule, T: int, seed: int) -> float:
    """sum ||g_j||^2 / p_j of the p that the rule has learned after T steps of K draws, the norms standing
    still.
    """
    T = _check.whole("T", T, least=1)
    sampler = BanditSampler(len(norms), min(K, len(norms)), rule=rule, seed=seed)
    for _ in range(0 if isinstance(rule, Uniform) else T):
        draw = sampler.draw()
        sampler.update(draw.number, norms[draw.indices.numpy()])  # nothing is trained, so nothing weighted
    return bounds.cost(norms, sampler.probabilities().numpy())


def all_learned(norms: Floats, T: int, seed: int) -> dict[str, float]:
    """The cost of every rule, the mean over three seeds (one for n above 1e5)."""
    L, seeds = float(norms.max()), range(seed, seed + (3 if len(norms) <= 10**5 else 1))
    return {
        name: float(np.mean([learned_cost(norms, rule(L, T), T, s) for s in seeds]))
        for name, rule in RULES.items()
    }


# -------------------------------------------------------------------------------------------- growth


def power_of_n(n: list[int], values: list[float]) -> float:
    """b of the least-squares fit values = a n^b."""
    return float(np.polyfit(np.log(n), np.log(values), 1)[0])


def power_of_log_n(n: list[int], values: list[float]) -> float:
    """b of the least-squares fit values = a (log n)^b."""
    return float(np.polyfit(np.log(np.log(n)), np.log(values), 1)[0])


def growths(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Both fitted powers of every column; the paper's lines go through the same fits."""
    columns = ("uniform", "best_p", "best_p_in_P", "network_uniform", "network_best_p")
    series = {name: [row[name] for row in rows] for name in (*columns, "lemma_2_line", "lemma_3_line")}
    sizes = [row["n"] for row in rows]
    fits: dict[str, Any] = {name: _fit(sizes, values) for name, values in series.items()}
    learnt = [row for row in rows if "learned" in row]
    if len(learnt) > 1:
        for name in RULES:
            fits[name] = _fit([row["n"] for row in learnt], [row["learned"][name] for row in learnt])
    return fits


def _fit(sizes: list[int], values: list[float]) -> dict[str, float]:
    return {"power_of_n": power_of_n(sizes, values), "power_of_log_n": power_of_log_n(sizes, values)}


def limits(gamma: float, d: int) -> dict[str, float]:
    """Where the columns go as n grows: uniform / n, and the best p for gamma > 2."""
    H_d = power_sum(d, gamma)
    return {
        "uniform_over_n": zeta(gamma) * H_d,
        "best_p": zeta(gamma / 2) ** 2 * H_d if gamma > 2 else math.inf,
    }
