"""Algorithms 1 and 2 of the paper, dense, in the paper's letters: the oracle.

Correct but slow, O(n) a step. The library never imports this module; its tests do.

*Adam with Bandit Sampling for Deep Learning*, Liu, Wu and Mozafari, NeurIPS 2020.

===============  ======================  ==============================================================
paper            here                    meaning
===============  ======================  ==============================================================
n                ``n``                   number of training examples
K                ``K``                   mini-batch size
T                ``T``                   number of steps (Lemma 1)
theta, d         ``theta``               parameters, a vector of length d
I^t              ``I``                   the K indices drawn at step t, duplicates allowed
g_j              ``g_norms``, ``g``      gradient of example j's loss, and its norm
G_hat_t          ``G_hat``               (1/K) sum_k g_{I_k} / (n p_{I_k}), eq. (1)
p^t              ``p``                   distribution over the n examples
p_min            ``p_min``               smallest probability allowed (absolute; the library's
                                         ``Exp3(p_min=c)`` means p_min = c/n)
P                the set                 {p: sum p = 1, p_j >= p_min}
L                ``L``                   bound on every g_norm
l_t,j            ``l``                   loss of arm j, Algorithm 2 line 2
h_hat_t,j        ``h_hat``               its unbiased estimate, Algorithm 2 line 3
alpha_p          ``alpha_p``             step size of the distribution
alpha_theta      ``alpha_theta``         learning rate
R^2              ``R_squared``           max of KL(p || p') over P (Lemma 1)
m, v, beta, eps  ``m, v, beta, eps``     Adam's moments and constants
===============  ======================  ==============================================================

Deviations, each at its line: the index of p (Algorithm 2 writes p^t in lines 2 and 3 for the
distribution that drew the batch, which Algorithm 1 calls p^{t-1}), and scores above L.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]


def project(w: Vector, p_min: float) -> Vector:
    """Algorithm 2, line 5: argmin over q in P of KL(q || w).

    The Lagrangian gives q_j = max(p_min, c w_j). Try every number m of examples at the floor, smallest
    first: the right one leaves the smallest free entry at or above p_min.
    """
    n = len(w)
    ascending = np.sort(w)
    for m in range(n):
        c = (1 - m * p_min) / ascending[m:].sum()
        if c * ascending[m] >= p_min:
            q: Vector = np.maximum(p_min, c * w)
            return q
    return np.full(n, p_min)  # only p_min = 1/n leaves nothing free


def update(
    p: Vector,
    I: Indices,
    g_norms: Vector,
    *,
    L: float,
    p_min: float,
    alpha_p: float,
    drawn_with: Vector | None = None,
) -> Vector:
    """Algorithm 2: the next distribution, from the batch ``I`` and the K norms of its gradients.

    ``drawn_with`` is the distribution that drew ``I``, if other updates have come in between: it is the
    p^t of lines 2 and 3, which make l and h_hat unbiased; line 4 moves the distribution of today.
    """
    n, K = len(p), len(I)
    p_drawn = p if drawn_with is None else drawn_with
    h_hat = np.zeros(n)
    for j, g_norm in zip(I, g_norms, strict=True):
        # L bounds the norms by assumption; a norm above it is clipped, else l < 0 (our choice).
        l = -(min(g_norm, L) ** 2) / p_drawn[j] ** 2 + L**2 / p_min**2  # line 2
        h_hat[j] += l / (K * p_drawn[j])  # line 3, once for every time that j stands in I
    h_hat -= h_hat.min() if (h_hat > 0).all() else 0  # a common factor of w: line 5 does not see it
    w = p * np.exp(-alpha_p * h_hat)  # line 4
    return project(w, p_min)  # line 5


def lemma_1_R_squared(n: int, p_min: float) -> float:
    """R^2 = max of KL(p || p') over P.

    KL is convex in the pair, so the maximum is at two corners of P. A corner has one entry
    a = 1 - (n - 1) p_min and p_min elsewhere; two different ones are (a - p_min) log(a / p_min) apart.
    """
    a = 1 - (n - 1) * p_min
    return float((a - p_min) * np.log(a / p_min))


def lemma_1_alpha_p(*, n: int, T: int, L: float, p_min: float, R_squared: float) -> float:
    """Lemma 1: alpha_p = sqrt(2 R^2 p_min^4 / (n T L^4))."""
    return float(np.sqrt(2 * R_squared * p_min**4 / (n * T * L**4)))


class State(NamedTuple):
    """What Algorithm 1 carries from step to step."""

    theta: Vector
    m: Vector
    v: Vector
    p: Vector
    t: int


def initial_state(theta: Vector, n: int) -> State:
    """Algorithm 1, lines 1 to 3."""
    return State(theta, np.zeros_like(theta), np.zeros_like(theta), np.full(n, 1 / n), 0)


def step(
    state: State,
    I: Indices,
    gradients: Callable[[Vector, Indices], Vector],
    *,
    L: float,
    p_min: float,
    alpha_p: float,
    alpha_theta: float = 1e-3,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    eps: float = 1e-8,
) -> State:
    """Algorithm 1, lines 5 and 7 to 11, for the batch ``I`` that line 6 drew from ``state.p``.

    ``gradients(theta, I)`` returns the K gradients, one a row.
    """
    theta, m, v, p, t = state
    n = len(p)
    t = t + 1  # line 5
    g = gradients(theta, I)
    G_hat = (g / (n * p[I])[:, None]).mean(axis=0)  # line 7, eq. (1)
    m = beta_1 * m + (1 - beta_1) * G_hat  # line 8
    v = beta_2 * v + (1 - beta_2) * G_hat**2
    m_hat = m / (1 - beta_1**t)  # line 9
    v_hat = v / (1 - beta_2**t)
    theta = theta - alpha_theta * m_hat / (np.sqrt(v_hat) + eps)  # line 10
    p = update(p, I, np.linalg.norm(g, axis=1), L=L, p_min=p_min, alpha_p=alpha_p)  # line 11
    return State(theta, m, v, p, t)


def exp3m_capped(w: Vector, K: int, gamma: float) -> tuple[Vector, NDArray[np.bool_]]:
    """Exp3.M (Uchiya, Nakamura and Kudo 2010; AdamCB, Kim and Oh 2025): w', and who is capped.

    If some K ((1 - gamma) w_j / sum w + gamma / n) is above one, those w_j >= a count as a, where

        a / (sum of a over w_j >= a + sum of w_j over the others) = (1/K - gamma/n) / (1 - gamma).

    Try every number m of capped ones, smallest first: the right one leaves the next below a.
    """
    n = len(w)
    C = (1 / K - gamma / n) / (1 - gamma)
    descending = np.sort(w)[::-1]
    if n == K or descending[0] < C * w.sum():
        return w, np.full(n, n == K)
    for m in range(1, K):
        a = C * descending[m:].sum() / (1 - m * C)
        if descending[m] < a:
            return np.minimum(w, a), w >= a
    raise AssertionError("fewer than K are capped")


def exp3m_inclusion(w: Vector, K: int, gamma: float) -> Vector:
    """The probability of each example to be in a batch of K distinct ones. They sum to K."""
    capped, _ = exp3m_capped(w, K, gamma)
    P: Vector = K * ((1 - gamma) * capped / capped.sum() + gamma / len(w))
    return np.ones(len(w)) if len(w) == K else P


def exp3m_update(
    w: Vector, J: Indices, g_norms: Vector, *, K: int, L: float, gamma: float, step: float | None = None
) -> Vector:
    """The next weights of AdamCB, from the batch ``J`` and the norms of its gradients.

    The loss is Algorithm 2's, scaled to [0, 1] by p_min = gamma/n as its authors do, with p_j = P_j / K; it
    is divided by P_j, and those with P_j = 1 are left out.
    """
    n = len(w)
    eta = K * (gamma if step is None else step) / n
    P = exp3m_inclusion(w, K, gamma)
    _, left_out = exp3m_capped(w, K, gamma)
    new = w.copy()
    for j, g_norm in zip(J, g_norms, strict=True):
        p_min, p = gamma / n, P[j] / K
        l = p_min**2 / L**2 * (-(min(g_norm, L) ** 2) / p**2 + L**2 / p_min**2)
        if not left_out[j]:
            new[j] *= np.exp(-eta * l / P[j])
    return new
