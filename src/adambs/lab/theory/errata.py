"""What in the paper does not follow, or is loose: each as a function that computes the counter-example.

The argument for each is in docs/theory.md; the tests assert what the functions return.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adambs import _check
from adambs._types import Floats
from adambs.lab.theory import bounds
from adambs.lab.theory.heavy_tailed import ONE_NEURON, PRINTED, Model, generate, power_sum, zeta


def expected_loss_estimate(l: Floats, p_draw: Floats, p_used: Floats) -> Floats:
    """E h_hat of Algorithm 2, line 3, if the batch comes from ``p_draw`` and line 3 divides by ``p_used``.

    E[sum_k 1(j = I_k)] = K p_draw_j, so it is l_j p_draw_j / p_used_j: unbiased only with the p that drew.
    """
    estimate: Floats = l * p_draw / p_used
    return estimate


def rho_3_ratio(beta_1: float, beta_2: float, lam: float) -> float:
    """The quoted rho_3 over the printed one: ((1 - gamma) / (1 - lambda))^2."""
    numbers = {"d": 1, "D": 1.0, "D_inf": 1.0, "G_inf": 1.0, "alpha": 1.0}
    quoted = bounds.theorem_1_rho(**numbers, beta_1=beta_1, beta_2=beta_2, lam=lam)  # type: ignore[arg-type]
    printed = bounds.theorem_1_rho(**numbers, beta_1=beta_1, beta_2=beta_2, lam=lam, as_printed=True)  # type: ignore[arg-type]
    return quoted.rho_3 / printed.rho_3


def log_n_against_the_sum(gamma: float, sizes: list[int]) -> list[tuple[int, float, float]]:
    """(n, sum_{j<=n} j^-gamma, log n): the sum is bounded by zeta(gamma) <= 1.645, and above log n for n <=
    4.
    """
    return [(n, power_sum(n, gamma), math.log(n)) for n in sizes]


def mean_non_zeros(n: int, d: int, gamma: float, beta_3: float, sets: int, seed: int) -> tuple[float, float]:
    """Mean number of non-zero entries of ``sets`` generated data sets, and its bound beta_3 zeta(gamma)^2."""
    counts = [
        len(generate(n, d, gamma=gamma, beta_3=beta_3, seed=s).columns) for s in range(seed, seed + sets)
    ]
    return float(np.mean(counts)), beta_3 * zeta(gamma) ** 2


class LossForm(NamedTuple):
    """The one-neuron loss at label -1, as printed and as a cross-entropy."""

    printed_loss: float
    printed_slope: float
    cross_entropy: float
    cross_entropy_slope: float


def loss_of_a_sure_mistake(u: float) -> LossForm:
    """Label -1 and a large margin u: the network is sure, and wrong."""
    at, y = np.array([u]), np.array([-1.0])

    def both(model: Model) -> tuple[float, float]:
        return float(model.loss(at, y)[0]), float(model.slope(at, y)[0])

    return LossForm(*both(PRINTED), *both(ONE_NEURON))


def convexity_gap(model: Model, a: float, b: float, y: float) -> float:
    """f((a + b)/2) - (f(a) + f(b))/2 for the margins a and b: positive where f is not convex."""
    u = np.array([a, (a + b) / 2, b])
    left, middle, right = model.loss(u, np.full(3, y))
    return float(middle - (left + right) / 2)


class Moments(NamedTuple):
    """E||G_hat||^2 three ways."""

    enumerated: float
    exact: float
    printed_bound: float


def second_moments(g: Floats, p: Floats, K: int) -> Moments:
    """E||G_hat||^2 by going through all n^K batches, by the identity, and the paper's bound of it."""
    n = len(g)
    total = 0.0
    for batch in np.ndindex(*(n,) * K):
        I = np.array(batch)
        G_hat = (g[I] / (n * p[I])[:, None]).mean(axis=0)
        total += float(p[I].prod() * (G_hat @ G_hat))
    return Moments(total, bounds.second_moment(g, p, K), bounds.second_moment_as_printed(g, p, K))


def second_moment_of_batches(g: Floats, batches: NDArray[np.int64], p: Floats) -> float:
    """E||G_hat||^2 for one of m prefixed batches drawn from p, weighted 1/(m p_b): (1/m^2) sum
    ||G_b||^2/p_b.
    """
    m = len(batches)
    return bounds.cost(np.linalg.norm(g[batches].mean(axis=1), axis=1), p) / m**2


def squared_estimates(l: Floats, p: Floats, K: int) -> tuple[float, float]:
    """E sum_j p_j h_hat_j^2: exactly, sum l_j^2 ((1 - p_j)/K + p_j), and the paper's bound sum l_j^2."""
    return float((l**2 * ((1 - p) / K + p)).sum()), float((l**2).sum())


def scaled_terms(scale: float) -> tuple[float, float, float]:
    """Theorem 1's terms when every loss is multiplied by ``scale``, each divided by ``scale``.

    Adam (epsilon = 0) takes the same steps, so R(T) is multiplied by ``scale``, and a bound must be too.
    The second term has G_infinity and sqrt(S), and so scale^2: with small losses the sampler's term goes
    away.
    """
    scale = _check.positive("scale", scale)
    rho = bounds.theorem_1_rho(
        d=10, D=1.0, D_inf=1.0, G_inf=scale, alpha=0.1, beta_1=0.9, beta_2=0.999, lam=0.999
    )
    bound = bounds.theorem_1_bound(rho, d=10, n=100, K=10, T=1000, S=1000 * 1e4 * scale**2)
    return bound.first / scale, bound.second / scale, bound.third / scale


def kingma_ba_lemma_10_3(g: Floats) -> tuple[float, float]:
    """Both sides of sum_t sqrt(g_t^2 / t) <= 2 G_infinity ||g_{1:T}||_2, where that G_infinity comes from."""
    t = np.arange(1, len(g) + 1)
    left = float((np.abs(g) / np.sqrt(t)).sum())
    return left, float(2 * np.abs(g).max() * np.linalg.norm(g))


# ------------------------------------------------------------------ Reddi, Kale and Kumar 2018, and Theorem 1


class OnlineRun(NamedTuple):
    """One run on linear losses f_t(x) = g_t x over [-1, 1]."""

    x: float
    regret: Floats
    """R(t) against the best fixed x up to t, for t = 1..T."""
    sum_squares: Floats
    """sum of g^2 up to t."""


def online_adam(
    g: Floats, *, alpha: float, beta_2: float, amsgrad: bool, eps: float = 0.0, x: float = 0.0
) -> OnlineRun:
    """Adam or AMSGrad with beta_1 = 0 and alpha_t = alpha/sqrt(t), projected onto [-1, 1]."""
    v = v_hat = 0.0
    losses = np.empty(len(g))
    for t, gradient in enumerate(g.tolist(), 1):
        losses[t - 1] = gradient * x
        v = beta_2 * v + (1 - beta_2) * gradient**2
        corrected = v / (1 - beta_2**t)
        v_hat = max(v_hat, v) if amsgrad else corrected
        x -= alpha / math.sqrt(t) * gradient / (math.sqrt(v_hat) + eps)
        x = min(1.0, max(-1.0, x))
    best = -np.abs(np.cumsum(g))  # min over [-1, 1] of x sum g
    return OnlineRun(x, np.cumsum(losses) - best, np.cumsum(g**2))


class Reddi(NamedTuple):
    """Adam and AMSGrad on Reddi et al.'s problem, with the bounds that are said to hold."""

    T: int
    adam_x: float
    adam_average_regret: float
    adam_bound: float
    """Theorem 1's bound on R(T), both (1 - gamma) and (1 - lambda) read as is; beta_1 = 0 makes rho_3
    small.
    """
    broken_from: int | None
    """The first t with R(t) above Theorem 1's bound."""
    amsgrad_x: float
    amsgrad_average_regret: float
    amsgrad_bound: float


def reddi(T: int = 3000, *, C: float = 3.0, alpha: float = 0.5) -> Reddi:
    """f_t(x) = C x if t mod 3 = 1, else -x, on [-1, 1]: Reddi et al., Theorem 1, with beta_1 = 0, beta_2 =
    1/(1 + C^2).

    The best x is -1. Adam takes a step of about alpha/sqrt(t) for the one large gradient and two larger
    ones for the two small gradients after it, and ends at +1: R(T) grows like 2 (C - 2) T / 3.
    """
    T = _check.whole("T", T, least=1)
    g = np.where(np.arange(T) % 3 == 0, C, -1.0)
    beta_2 = 1 / (1 + C**2)
    adam = online_adam(g, alpha=alpha, beta_2=beta_2, amsgrad=False)
    ams = online_adam(g, alpha=alpha, beta_2=beta_2, amsgrad=True)
    constants = {"d": 1, "D_inf": 2.0, "G_inf": C, "alpha": alpha, "beta_1": 0.0, "beta_2": beta_2}
    rho = bounds.theorem_1_rho(**constants, D=2.0, lam=0.5)  # type: ignore[arg-type]
    rho_ams = bounds.amsgrad_rho(**constants, lam=0.5)  # type: ignore[arg-type]
    steps = np.arange(1, T + 1)
    # Theorem 1 with n = K = 1: S = sum g^2.
    bound = rho.rho_1 * np.sqrt(steps) + rho.rho_2 * np.sqrt(adam.sum_squares) + rho.rho_3
    above = np.flatnonzero(adam.regret > bound)
    return Reddi(
        T,
        adam.x,
        float(adam.regret[-1] / T),
        float(bound[-1]),
        int(above[0] + 1) if len(above) else None,
        ams.x,
        float(ams.regret[-1] / T),
        bounds.amsgrad_bound(rho_ams, d=1, T=T, sum_G_hat_squared=float(ams.sum_squares[-1])).total,
    )


class Healed(NamedTuple):
    """Where Adam ends on a finite sum whose best x is -1."""

    uniform_x: float
    uniform_amsgrad_x: float
    optimal_x: float


def sampled_reddi(T: int, seed: int, *, n: int = 11, C: float = 12.0, beta_2: float = 0.5) -> Healed:
    """One example of gradient C, n - 1 of gradient -1, drawn one at a time: f(x) = (C - n + 1)/n x, best x
    = -1.

    Uniform sampling shows Adam the rare large gradient divided by its own size. With p_j proportional to
    |g_j| every G_hat has the same size, v is constant and Adam is plain SGD: the optimal p heals it (in one
    dimension).
    """
    T = _check.whole("T", T, least=1)
    if n - 1 >= C:
        raise ValueError(f"C must be above n - 1 = {n - 1}, not {C}: else +1 is the best x")
    rng = np.random.default_rng(seed)
    g = np.full(n, -1.0)
    g[0] = C
    uniform = g[rng.integers(0, n, T)]
    p = bounds.optimal_distribution(np.abs(g))
    drawn = rng.choice(n, T, p=p)
    optimal = g[drawn] / (n * p[drawn])
    ends = [
        online_adam(gradients, alpha=0.5, beta_2=beta_2, amsgrad=ams).x
        for gradients, ams in ((uniform, False), (uniform, True), (optimal, False))
    ]
    return Healed(*ends)
