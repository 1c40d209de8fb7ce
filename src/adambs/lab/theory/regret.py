"""Theorem 1 and Table 1, measured on a convex problem.

Logistic regression on the expected-squares features of heavy_tailed.py: the convex relative of the
one-neuron network (the same without the ReLU), on data with the lemmas' norms ||z_j||^2 = beta_3 j^-gamma
sum_i i^-gamma. On the paper's own data there is nothing to train: it has fewer than three non-zero entries.

Each method is Adam as Theorem 1 has it, alpha_theta = alpha/sqrt(t) and beta_{1,t} = beta_1 lambda^{t-1},
on the gradient estimate G_hat = (1/B) sum_b G_b / (m p_b) from B draws out of m groups of examples. Adam
and AdamBS: m = n groups of one, B = K. Adam-uni and Adam-apt: m = n/K prefixed batches of K, split at
random, B = 1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adambs import _check
from adambs._types import Floats, Indices
from adambs.lab.theory import bounds
from adambs.lab.theory.errata import rho_3_ratio
from adambs.lab.theory.heavy_tailed import LOGISTIC, expected_squares, sigmoid
from adambs.rules import Exp3, Rule, TreeRule, Uniform
from adambs.sampler import BanditSampler

Advance = Callable[[str], None]
Groups = NDArray[np.int64]  # (m, size): the examples of each group

BETA_1, BETA_2, LAMBDA = 0.9, 0.999, 0.999
C = 0.3  # p_min = C / (number of groups)
TARGET = 0.1  # steps until f(theta_t) - f* is this fraction of what it was


class Fixed(TreeRule):
    """Draws from its initial weights for ever: the best p, given by an oracle."""

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Nothing to learn."""
        return 0

    def settings(self) -> dict[str, float]:
        """Nothing to set."""
        return {}


class Method(NamedTuple):
    """One row of Table 1, or its ideal."""

    rule: Callable[[float, int], Rule]
    """From the bound L on a group's norm and the number of steps T."""
    prefixed: bool
    oracle: bool = False
    """Start at the best p in P for the norms at theta_0."""


METHODS: dict[str, Method] = {
    "Adam": Method(lambda L, T: Uniform(), prefixed=False),
    "AdamBS": Method(lambda L, T: Exp3(L=L, p_min=C, horizon=T), prefixed=False),
    "AdamBS, best p": Method(lambda L, T: Fixed(), prefixed=False, oracle=True),
    "Adam-uni": Method(lambda L, T: Uniform(), prefixed=True),
    "Adam-apt": Method(lambda L, T: Exp3(L=L, p_min=C, horizon=T), prefixed=True),
    "Adam-apt, best p": Method(lambda L, T: Fixed(), prefixed=True, oracle=True),
}


class Problem(NamedTuple):
    """f(theta) = (1/n) sum_j log(1 + exp(-y_j z_j . theta)) and its minimiser."""

    z: Floats
    y: Floats
    theta_star: Floats
    f_star: float

    def f(self, theta: Floats) -> float:
        """The loss of all examples."""
        return float(LOGISTIC.loss(self.z @ theta, self.y).mean())


def make_problem(n: int, d: int, seed: int) -> Problem:
    """The data, and the minimum by Newton's method with halved steps."""
    z, y = expected_squares(n, d, seed=seed)
    yz = y[:, None] * z
    theta = np.zeros(d)

    def f(at: Floats) -> float:
        return float(np.logaddexp(0, -(yz @ at)).mean())

    for _ in range(100):
        s = sigmoid(-(yz @ theta))
        gradient = -(s @ yz) / n
        hessian = (yz * (s * (1 - s))[:, None]).T @ yz / n
        step = np.linalg.solve(hessian, gradient)
        if gradient @ step < 1e-22:
            break
        size = 1.0
        while f(theta - size * step) > f(theta) and size > 1e-6:
            size /= 2
        theta = theta - size * step
    return Problem(z, y, theta, f(theta))


def make_groups(n: int, K: int, prefixed: bool, seed: int) -> Groups:
    """n groups of one, or n/K random batches of K."""
    if not prefixed:
        return np.arange(n)[:, None]
    if n % K:
        raise ValueError(f"K must divide n = {n} for prefixed batches, not {K}: choose a divisor")
    return np.random.default_rng(seed).permutation(n).reshape(-1, K)


class Run(NamedTuple):
    """One training run."""

    t: Floats
    gap: Floats
    """f(theta_t) - f* at the looks ``t``."""
    regret: Floats
    """sum_{s<=t} f(theta_s) - f*, the conditional mean of the paper's R(t) against theta*, by the trapezoid
    rule.
    """
    G_inf: float
    """Largest entry of any G_hat."""
    D: float
    """Largest distance of an iterate from theta*, theta_0 included."""
    G_hat_squared: float
    """sum_t ||G_hat_t||^2."""
    v_sum: float
    """sum_i sqrt(v_hat_{T,i}): Theorem 1 bounds it by d G_inf."""


def looks(T: int) -> Indices:
    """About a hundred steps from 1 to T, evenly in the logarithm."""
    return np.unique(np.round(np.geomspace(1, T, 110)).astype(np.int64))


def train(problem: Problem, method: Method, *, K: int, T: int, alpha: float, seed: int) -> Run:
    """T steps of Adam, as Theorem 1 has it, on the estimates of ``method``."""
    K, T, alpha = (
        _check.whole("K", K, least=1),
        _check.whole("T", T, least=1),
        _check.positive("alpha", alpha),
    )
    z, y = problem.z, problem.y
    n, d = z.shape
    groups = make_groups(n, K, method.prefixed, seed)
    sampler = _sampler(problem, method, groups, K, T, seed)
    theta, m, v, v_hat = np.zeros(d), np.zeros(d), np.zeros(d), np.zeros(d)
    when = set(looks(T).tolist())
    t_seen, gaps = [0.0], [problem.f(theta) - problem.f_star]
    G_inf = squares = 0.0
    D = float(np.linalg.norm(problem.theta_star))
    for t in range(1, T + 1):
        draw = sampler.draw()
        members = groups[draw.indices.numpy()]  # (B, size)
        z_drawn = z[members]
        slope = LOGISTIC.slope(z_drawn @ theta, y[members])
        G_b = np.einsum("bs,bsd->bd", slope, z_drawn) / members.shape[1]
        G_hat = draw.weights.numpy() @ G_b / len(members)  # eq. (1)
        beta_1t = BETA_1 * LAMBDA ** (t - 1)
        m = beta_1t * m + (1 - beta_1t) * G_hat
        v = BETA_2 * v + (1 - BETA_2) * G_hat**2
        v_hat = v / (1 - BETA_2**t)
        theta = theta - alpha / math.sqrt(t) * m / (1 - BETA_1**t) / (np.sqrt(v_hat) + 1e-300)
        sampler.update(draw, np.sqrt(np.einsum("bd,bd->b", G_b, G_b)))
        G_inf = max(G_inf, float(np.abs(G_hat).max()))
        squares += float(G_hat @ G_hat)
        if t in when:
            t_seen.append(t)
            gaps.append(problem.f(theta) - problem.f_star)
            D = max(D, float(np.linalg.norm(theta - problem.theta_star)))
    ts, gap = np.array(t_seen), np.array(gaps)
    regret = np.concatenate([[0.0], np.cumsum(np.diff(ts) * (gap[1:] + gap[:-1]) / 2)])
    return Run(ts, gap, regret, G_inf, D, squares, float(np.sqrt(v_hat).sum()))


def _sampler(problem: Problem, method: Method, groups: Groups, K: int, T: int, seed: int) -> BanditSampler:
    norms = group_norms(problem, groups)
    # ||g_j|| <= ||z_j||, and a batch's mean gradient is no longer than its longest member.
    L = float(np.linalg.norm(problem.z, axis=1)[groups].max())
    best = bounds.water_filling(norms, C / len(groups)) if method.oracle else None
    size = 1 if method.prefixed else min(K, len(groups))
    return BanditSampler(len(groups), size, rule=method.rule(L, T), seed=seed, initial_weights=best)


def group_norms(problem: Problem, groups: Groups) -> Floats:
    """||G_b|| of every group at theta = 0."""
    g = -0.5 * problem.y[:, None] * problem.z  # the slope at 0 is -y/2
    norms: Floats = np.linalg.norm(g[groups].mean(axis=1), axis=1)
    return norms


# ------------------------------------------------------------------------------------- the experiment


class Setting(NamedTuple):
    """What is measured: every n at the middle K, every K at the middle n."""

    sizes: list[int]
    batches: list[int]
    d: int
    T: int
    alphas: list[float]
    seeds: int
    moment_sizes: list[int]

    def pairs(self) -> list[tuple[int, int]]:
        """The (n, K) that are trained."""
        n, K = self.sizes[len(self.sizes) // 2], self.batches[len(self.batches) // 2]
        return sorted({(size, K) for size in self.sizes} | {(n, batch) for batch in self.batches})


QUICK = Setting([100, 1000], [10], 5, 300, [0.3, 1.0], 1, [100, 1000, 10000])
FULL = Setting(
    [100, 1000, 10000], [2, 10, 50], 10, 2000, [0.3, 1.0, 3.0, 10.0], 3, [10**2, 10**3, 10**4, 10**5]
)


def measure(setting: Setting, seed: int, advance: Advance) -> dict[str, Any]:
    """Training runs, best alpha of the same grid for each method; then the exact second moments."""
    rows = []
    for n, K in setting.pairs():
        problems = [make_problem(n, setting.d, s) for s in range(seed, seed + setting.seeds)]
        for name in METHODS:
            advance(f"Table 1: {name}, n = {n}, K = {K}")
            rows.append(best_of_grid(name, problems, K, setting, seed))
    facts = {"d": setting.d, "T": setting.T, "alphas": setting.alphas, "seeds": setting.seeds}
    return {**facts, "c": C, "target": TARGET, "lambda": LAMBDA, "rows": rows}


def best_of_grid(name: str, problems: list[Problem], K: int, setting: Setting, seed: int) -> dict[str, Any]:
    """The alpha with the smallest mean relative regret, and its numbers."""
    tried = []
    for alpha in setting.alphas:
        runs = [
            train(p, METHODS[name], K=K, T=setting.T, alpha=alpha, seed=seed + s)
            for s, p in enumerate(problems)
        ]
        tried.append((float(np.mean([run.regret[-1] / run.gap[0] for run in runs])), alpha, runs))
    relative, alpha, runs = min(tried, key=lambda entry: entry[:2])
    spread = [float(run.regret[-1] / run.gap[0]) for run in runs]
    curve = np.mean([run.gap / run.gap[0] for run in runs], axis=0)
    regret = np.mean([run.regret / run.gap[0] for run in runs], axis=0)
    t = runs[0].t
    late = t >= setting.T / 10
    return {
        "method": name,
        "n": len(problems[0].y),
        "K": K,
        "alpha": alpha,
        "relative_regret": relative,
        "relative_regrets": spread,
        "relative_regret_sd": float(np.std(spread, ddof=1)) if len(spread) > 1 else 0.0,
        "power_of_T": float(np.polyfit(np.log(t[late]), np.log(regret[late]), 1)[0]),
        "steps_to_target": _steps_to(t, curve),
        "final_gap": float(curve[-1]),
        "t": t.tolist(),
        "curve": curve.tolist(),
        "theorem_1": theorem_1_terms(runs[0], len(problems[0].y), setting, alpha),
    }


def _steps_to(t: Floats, curve: Floats) -> float | None:
    reached = np.flatnonzero(curve <= TARGET)
    return float(t[reached[0]]) if len(reached) else None


def theorem_1_terms(run: Run, n: int, setting: Setting, alpha: float) -> dict[str, float]:
    """Theorem 1 with the run's own D, G_inf and sum ||G_hat||^2 (what the printed second term stands for)."""
    d, T = setting.d, setting.T
    rho = bounds.theorem_1_rho(
        d=d,
        D=2 * run.D,
        D_inf=2 * run.D,
        G_inf=run.G_inf,
        alpha=alpha,
        beta_1=BETA_1,
        beta_2=BETA_2,
        lam=LAMBDA,
    )
    # S / (n^2 K) is E sum ||G_hat||^2 in the paper's reading: with n = K = 1, S is that sum.
    bound = bounds.theorem_1_bound(rho, d=d, n=1, K=1, T=T, S=run.G_hat_squared)
    return {
        "regret": float(run.regret[-1]),
        "first": bound.first,
        "second": bound.second,
        "third": bound.third,
        "third_as_printed": bound.third / rho_3_ratio(BETA_1, BETA_2, LAMBDA),
        "first_with_v": rho.rho_1 / run.G_inf * math.sqrt(T) * run.v_sum,
    }
