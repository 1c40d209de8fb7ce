"""The paper's bounds as calculators, in the paper's letters.

===============  ==================  ===============================================================
paper            here                meaning
===============  ==================  ===============================================================
n, K, d, T       same                examples, batch size, parameters, steps
D, D_infinity    ``D, D_inf``        largest distance between iterates, in the 2- and the max-norm
G_infinity       ``G_inf``           bound on every entry of G_hat_t
alpha            ``alpha``           alpha_theta = alpha / sqrt(t)
beta_1, beta_2   same                Adam's constants; beta_{1,t} = beta_1 lambda^{t-1}
lambda           ``lam``             that decay, in (0, 1)
gamma            ``gamma_adam``      beta_1^2 / sqrt(beta_2) in Theorem 1
gamma            ``gamma_amsgrad``   beta_1 / sqrt(beta_2) in the AMSGrad theorem
gamma            ``gamma``           exponent of the heavy tail, heavy_tailed.py: a third gamma
L, p_min, P      same                bound on norms, floor, {p: sum p = 1, p_j >= p_min}
S                ``S``               sum_t E[sum_j ||g_j^t||^2 / p_j^t], what the sampler can change
M                ``M``               its minimum over one fixed p in P
R^2              ``R_squared``       largest KL divergence in P (reference.lemma_1_R_squared)
===============  ==================  ===============================================================

Lemma 1's step size and R^2 live in :mod:`adambs.reference`. Deviations from the printed formulas are
arguments (``as_printed``) or functions of their own, each with its reason.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from adambs import _check
from adambs._types import Floats
from adambs.reference import lemma_1_R_squared


class Rho(NamedTuple):
    """The three constants of Theorem 1, or of the AMSGrad theorem."""

    rho_1: float
    rho_2: float
    rho_3: float


class Bound(NamedTuple):
    """A regret bound, term by term."""

    first: float
    """rho_1 d sqrt(T): the sampler does not enter."""
    second: float
    """rho_2 times what the distribution costs."""
    learning: float
    """What learning the distribution costs (Theorem 2), else 0."""
    third: float
    """rho_3."""

    @property
    def total(self) -> float:
        """The bound."""
        return math.fsum(self)


# ----------------------------------------------------------------------------------------- arguments


def check_p_min(n: int, p_min: float) -> float:
    """``p_min`` in (0, 1/n]: above it no distribution exists."""
    p_min = _check.positive("p_min", p_min)
    if p_min * n > 1 + 1e-12:
        raise ValueError(
            f"p_min must be at most 1/n = {1 / n:.6g}, not {p_min:.6g}: n probabilities of at least p_min "
            "would sum to more than 1; choose p_min = c/n with c < 1"
        )
    return p_min


def check_beta(name: str, value: Any) -> float:
    """A beta in [0, 1)."""
    if isinstance(value, bool | str) or not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), not {value}: 0.9 and 0.999 are usual")
    return float(value)


def check_not_negative(name: str, value: float) -> float:
    """A finite number of at least 0."""
    return 0.0 if value == 0 else _check.positive(name, value)


def _gamma(beta_1: float, beta_2: float, power: int) -> float:
    gamma = check_beta("beta_1", beta_1) ** power / math.sqrt(check_beta("beta_2", beta_2) or math.inf)
    if (beta_2 == 0 and beta_1 > 0) or gamma >= 1:
        raise ValueError(
            f"beta_1^{power} / sqrt(beta_2) must be below 1; with beta_1 = {beta_1}, beta_2 = {beta_2} it is "
            f"{'infinite' if beta_2 == 0 else f'{gamma:.6g}'}: choose a smaller beta_1 or a larger beta_2"
        )
    return gamma


def gamma_adam(beta_1: float, beta_2: float) -> float:
    """Theorem 1's gamma = beta_1^2 / sqrt(beta_2), below 1."""
    return _gamma(beta_1, beta_2, 2)


def gamma_amsgrad(beta_1: float, beta_2: float) -> float:
    """The AMSGrad theorem's gamma = beta_1 / sqrt(beta_2), below 1: another number of the same name."""
    return _gamma(beta_1, beta_2, 1)


# ----------------------------------------------------------------------- Theorems 1 and 2, and AMSGrad's


def theorem_1_rho(
    *,
    d: int,
    D: float,
    D_inf: float,
    G_inf: float,
    alpha: float,
    beta_1: float,
    beta_2: float,
    lam: float,
    as_printed: bool = False,
) -> Rho:
    """rho_1, rho_2, rho_3 of Theorem 1.

    The printed rho_3 has (1 - gamma)^2 where Kingma and Ba's Theorem 4.1, which the paper's own appendix
    quotes, has (1 - lambda)^2. The default is the quoted one; ``as_printed`` is the printed one.
    """
    d = _check.whole("d", d, least=1)
    D, D_inf = _check.positive("D", D), _check.positive("D_inf", D_inf)
    G_inf, alpha = _check.positive("G_inf", G_inf), _check.positive("alpha", alpha)
    gamma = gamma_adam(beta_1, beta_2)
    lam = _check.fraction("lam", lam, "beta_{1,t} = beta_1 lam^(t-1) has to decay; 0.999 is a choice")
    rho_1 = D**2 * G_inf / (2 * alpha * (1 - beta_1))
    rho_2 = alpha * (1 + beta_1) * G_inf / ((1 - beta_1) * math.sqrt(1 - beta_2) * (1 - gamma) ** 2)
    decay = 1 - gamma if as_printed else 1 - lam
    rho_3 = d * D_inf**2 * G_inf * math.sqrt(1 - beta_2) / (2 * alpha * (1 - beta_1) * decay**2)
    return Rho(rho_1, rho_2, rho_3)


def theorem_1_bound(rho: Rho, *, d: int, n: int, K: int, T: int, S: float) -> Bound:
    """R(T) <= rho_1 d sqrt(T) + sqrt(d) rho_2 sqrt(S / (n^2 K)) + rho_3, eq. (3), as printed."""
    d, n, K, T = _sizes(d=d, n=n, K=K, T=T)
    S = check_not_negative("S", S)
    second = math.sqrt(d) * rho.rho_2 * math.sqrt(S / K) / n
    return Bound(rho.rho_1 * d * math.sqrt(T), second, 0.0, rho.rho_3)


def theorem_1_bound_exact_moment(
    rho: Rho, *, d: int, n: int, K: int, T: int, S: float, G_squared: float
) -> Bound:
    """Theorem 1 with the exact E||G_hat||^2 = (1/(n^2 K)) sum ||g||^2/p + (1 - 1/K) ||G||^2.

    ``G_squared`` is sum_t E||G^t||^2. The printed theorem leaves it out, which is wrong for K > 1.
    """
    d, n, K, T = _sizes(d=d, n=n, K=K, T=T)
    moment = check_not_negative("S", S) / (n**2 * K) + (1 - 1 / K) * check_not_negative(
        "G_squared", G_squared
    )
    return Bound(rho.rho_1 * d * math.sqrt(T), math.sqrt(d * moment) * rho.rho_2, 0.0, rho.rho_3)


def lemma_1_regret_bound(*, n: int, T: int, L: float, p_min: float, R_squared: float) -> float:
    """Lemma 1: R L^2 / p_min^2 sqrt(2 n T)."""
    n, T = _check.whole("n", n, least=1), _check.whole("T", T, least=1)
    R = math.sqrt(check_not_negative("R_squared", R_squared))
    return R * _check.positive("L", L) ** 2 / check_p_min(n, p_min) ** 2 * math.sqrt(2 * n * T)


def lemma_1_regret_bound_with_K(*, n: int, K: int, T: int, L: float, p_min: float, R_squared: float) -> float:
    """Lemma 1 sharpened: n becomes 1 + (n - 1)/K, so K draws a step do help.

    The paper bounds E[(sum_k 1(j = I_k))^2] by K^2 p_j; it is K p_j (1 - p_j) + K^2 p_j^2, and so
    E sum_j p_j h_hat_j^2 = sum_j l_j^2 ((1 - p_j)/K + p_j) <= (L/p_min)^4 (1 + (n - 1)/K). The step size is
    Lemma 1's with the same replacement.
    """
    K = _check.whole("K", K, least=1)
    whole = lemma_1_regret_bound(n=n, T=T, L=L, p_min=p_min, R_squared=R_squared)
    return whole * math.sqrt((1 + (n - 1) / K) / n)


def theorem_2_bound(
    rho: Rho, *, d: int, n: int, K: int, T: int, L: float, p_min: float, M: float, R_squared: float
) -> Bound:
    """R(T) <= rho_1 d sqrt(T) + rho_2 sqrt(d)/(n sqrt(K)) (sqrt(M) + L sqrt(R)/p_min (2nT)^(1/4)) + rho_3."""
    d, n, K, T = _sizes(d=d, n=n, K=K, T=T)
    factor = rho.rho_2 * math.sqrt(d / K) / n
    learning = math.sqrt(lemma_1_regret_bound(n=n, T=T, L=L, p_min=p_min, R_squared=R_squared))
    second = factor * math.sqrt(check_not_negative("M", M))
    return Bound(rho.rho_1 * d * math.sqrt(T), second, factor * learning, rho.rho_3)


def amsgrad_rho(
    *,
    d: int,
    D_inf: float,
    G_inf: float,
    alpha: float,
    beta_1: float,
    beta_2: float,
    lam: float,
    as_printed: bool = False,
) -> Rho:
    """rho'_1, rho'_2, rho'_3 of the appendix's AMSGrad theorem.

    The printed rho'_3 lacks the factor d / alpha: it comes from
    D_inf^2 / (2 (1 - beta_1)) sum_t sum_i beta_{1,t} sqrt(v_hat_{t,i}) / alpha_t with alpha_t = alpha /
    sqrt(t).
    """
    d = _check.whole("d", d, least=1)
    D_inf, G_inf = _check.positive("D_inf", D_inf), _check.positive("G_inf", G_inf)
    alpha = _check.positive("alpha", alpha)
    gamma = gamma_amsgrad(beta_1, beta_2)
    lam = _check.fraction("lam", lam, "beta_{1,t} = beta_1 lam^(t-1) has to decay; 0.999 is a choice")
    rho_1 = D_inf**2 * G_inf / (alpha * (1 - beta_1))
    rho_2 = alpha / ((1 - beta_1) ** 2 * (1 - gamma) * math.sqrt(1 - beta_2))
    rho_3 = beta_1 * D_inf**2 * G_inf / (2 * (1 - beta_1) * (1 - lam) ** 2)
    return Rho(rho_1, rho_2, rho_3 if as_printed else rho_3 * d / alpha)


def amsgrad_bound(rho: Rho, *, d: int, T: int, sum_G_hat_squared: float) -> Bound:
    """R(T) <= rho'_1 d sqrt(T) + rho'_2 sqrt(d (1 + log T)) sqrt(sum_t ||G_hat_t||^2) + rho'_3."""
    d, T = _check.whole("d", d, least=1), _check.whole("T", T, least=1)
    total = check_not_negative("sum_G_hat_squared", sum_G_hat_squared)
    second = rho.rho_2 * math.sqrt(d * (1 + math.log(T)) * total)
    return Bound(rho.rho_1 * d * math.sqrt(T), second, 0.0, rho.rho_3)


def _sizes(**sizes: int) -> tuple[int, ...]:
    return tuple(_check.whole(name, value, least=1) for name, value in sizes.items())


# ------------------------------------------------------------------------- distributions and moments


def cost(g_norms: Floats, p: Floats) -> float:
    """sum_j ||g_j||^2 / p_j, with 0/0 = 0: what the distribution is to minimise."""
    seen = g_norms > 0
    return float((g_norms[seen] ** 2 / p[seen]).sum())


def optimal_distribution(g_norms: Any) -> Floats:
    """argmin of sum ||g_j||^2 / p_j over all distributions: p_j = ||g_j|| / sum ||g_i||.

    The minimum is (sum ||g_j||)^2, by Cauchy-Schwarz. If every norm is 0 any p will do: uniform.
    """
    g_norms = _norms(g_norms)
    total = g_norms.sum()
    p: Floats = g_norms / total if total > 0 else np.full(len(g_norms), 1 / len(g_norms))
    return p


def water_filling(g_norms: Any, p_min: float) -> Floats:
    """argmin of sum ||g_j||^2 / p_j over P: p_j = max(p_min, c ||g_j||). O(n log n).

    KKT: -||g_j||^2 / p_j^2 + mu - nu_j = 0 with nu_j >= 0, nu_j (p_j - p_min) = 0, so a free p_j is
    ||g_j|| / sqrt(mu). With the m smallest norms at the floor, c = (1 - m p_min) / (sum of the others); m is
    right when the smallest of the others stays at or above the floor. (The KL projection of line 5 has the
    same form: the best p in P is the projection of the best p of all.)
    """
    g_norms = _norms(g_norms)
    n = len(g_norms)
    p_min = check_p_min(n, p_min)
    optimal = optimal_distribution(g_norms)
    ascending = np.sort(optimal)
    rest = np.cumsum(ascending[::-1])[::-1]  # rest[m]: the mass of all but the m smallest
    left = 1 - np.arange(n) * p_min
    fits = left * ascending >= p_min * rest
    fits &= rest > 0
    if not fits.any():  # p_min = 1/n
        return np.full(n, 1 / n)
    m = int(np.argmax(fits))
    p: Floats = np.maximum(p_min, optimal * (left[m] / rest[m]))
    return p


def second_moment(g: Floats, p: Floats, K: int) -> float:
    """E||G_hat||^2 of eq. (1), exactly: (1/K) (1/n^2) sum ||g_j||^2/p_j + (1 - 1/K) ||G||^2."""
    K, n = _check.whole("K", K, least=1), len(g)
    G = g.mean(axis=0)
    return cost(np.linalg.norm(g, axis=1), p) / n**2 / K + (1 - 1 / K) * float(G @ G)


def second_moment_as_printed(g: Floats, p: Floats, K: int) -> float:
    """The paper's upper bound of it, (1/(n^2 K)) sum ||g_j||^2/p_j: too small for K > 1 wherever G != 0."""
    return cost(np.linalg.norm(g, axis=1), p) / len(g) ** 2 / _check.whole("K", K, least=1)


def steps_before_lemma_1_helps(
    *, n: int, L: float, p_min: float, uniform_cost: float, best_cost: float
) -> float:
    """The T from which Lemma 1 promises less than uniform sampling costs, for norms that stay the same.

    best T + R L^2/p_min^2 sqrt(2nT) <= uniform T, that is T >= 2 n R^2 L^4 / (p_min^4 (uniform - best)^2).
    """
    p_min = check_p_min(n, p_min)
    if not uniform_cost > best_cost:
        return math.inf
    R_squared = lemma_1_R_squared(n, p_min)
    return 2 * n * R_squared * L**4 / (p_min**4 * (uniform_cost - best_cost) ** 2)


def _norms(g_norms: Any) -> Floats:
    length = len(g_norms)
    if length < 1:
        raise ValueError("g_norms is empty: give at least one norm")
    return _check.vector("g_norms", g_norms, length)
