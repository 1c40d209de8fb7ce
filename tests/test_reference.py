"""The oracle itself, against SciPy, torch.optim and pencil and paper."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import rel_entr

from adambs import reference


@pytest.mark.parametrize("seed", range(8))
def test_projection_is_the_minimiser_that_scipy_finds(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    w = rng.gamma(0.3, size=n) + 1e-3
    p_min = float(rng.uniform(0.05, 0.95)) / n

    def kl(q):  # generalised to w that does not sum to one; the constant does not move the minimum
        return rel_entr(q, w).sum()

    found = minimize(
        kl,
        np.full(n, 1 / n),
        jac=lambda q: np.log(q / w) + 1,
        bounds=[(p_min, 1)] * n,
        constraints={"type": "eq", "fun": lambda q: q.sum() - 1, "jac": lambda q: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    q = reference.project(w, p_min)
    assert q.sum() == pytest.approx(1, abs=1e-12)
    assert q.min() >= p_min
    np.testing.assert_allclose(q, found.x, atol=1e-6)
    assert kl(q) <= found.fun + 1e-12


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_projection_satisfies_the_kkt_conditions(w, fraction):
    w = np.array(w)
    p_min = fraction / len(w)
    q = reference.project(w, p_min)
    free = q > p_min
    assert q.sum() == pytest.approx(1, rel=1e-12)
    assert free.any()
    c = q[free] / w[free]
    np.testing.assert_allclose(c, c[0], rtol=1e-9)  # one multiplier for all that are free
    assert (c[0] * w[~free] <= p_min * (1 + 1e-9)).all()  # the others would fall below the floor


def test_projection_onto_a_single_point_is_that_point():
    np.testing.assert_allclose(reference.project(np.array([1.0, 2.0, 3.0]), 1 / 3), 1 / 3)


def test_update_by_hand():
    # n = 2, K = 1: index 0 drawn with p = 1/2, norm 1, L = 1, p_min = 1/4, alpha_p = log(2) / 24.
    # l = -1/(1/4) + 1/(1/16) = 12, h = 12 / (1/2) = 24, w = (1/4, 1/2), q = (1/3, 2/3).
    p = reference.update(
        np.array([0.5, 0.5]),
        np.array([0]),
        np.array([1.0]),
        L=1,
        p_min=0.25,
        alpha_p=np.log(2) / 24,
    )
    np.testing.assert_allclose(p, [1 / 3, 2 / 3], rtol=1e-14)


def test_a_duplicate_counts_twice():
    arguments = {"L": 1.0, "p_min": 0.05, "alpha_p": 1e-4}
    p = np.full(5, 0.2)
    twice = reference.update(p, np.array([3, 3]), np.array([0.5, 0.5]), **arguments)
    once = reference.update(p, np.array([3]), np.array([0.5]), **arguments)
    np.testing.assert_allclose(twice, once, rtol=1e-14)  # (l + l) / (2 p) = l / p


def test_h_hat_is_unbiased():
    """Line 3: the mean of h_hat over every possible batch is l, whatever p is."""
    p, g, L, p_min, alpha_p = np.array([0.2, 0.3, 0.5]), np.array([0.3, 0.9, 0.1]), 1.0, 0.1, 1e-9
    mean = np.zeros(3)
    for i in range(3):
        for j in range(3):
            batch = np.array([i, j])
            after = reference.update(p, batch, g[batch], L=L, p_min=p_min, alpha_p=alpha_p)
            # log q = log p - alpha_p h + a constant; the constant is fixed by an undrawn example
            h = -np.log(after / p) / alpha_p
            undrawn = [k for k in range(3) if k not in batch]
            mean += p[i] * p[j] * (h - h[undrawn[0]])
    np.testing.assert_allclose(mean, L**2 / p_min**2 - g**2 / p**2, rtol=1e-4)


def test_R_squared_is_the_largest_divergence():
    n, p_min = 6, 0.05
    rng = np.random.default_rng(0)
    corners = np.full((n, n), p_min) + np.eye(n) * (1 - n * p_min)
    inside = p_min + (1 - n * p_min) * rng.dirichlet(np.full(n, 0.1), 300)
    points = np.vstack([corners, inside])
    largest = max(rel_entr(p, q).sum() for p in points for q in points)
    assert reference.lemma_1_R_squared(n, p_min) == pytest.approx(largest, rel=1e-12)


def test_lemma_1_step_minimises_the_bound_of_its_proof():
    n, T, L, p_min = 50, 1000, 1.5, 0.2 / 50
    R_squared = reference.lemma_1_R_squared(n, p_min)
    alpha = reference.lemma_1_alpha_p(n=n, T=T, L=L, p_min=p_min, R_squared=R_squared)

    def bound(a):
        return R_squared / a + a / 2 * n * T * L**4 / p_min**4

    assert bound(alpha) == pytest.approx(np.sqrt(R_squared) * L**2 / p_min**2 * np.sqrt(2 * n * T), rel=1e-12)
    assert bound(alpha) < min(bound(alpha * 1.01), bound(alpha / 1.01))


def test_algorithm_1_takes_the_step_of_torch_adam():
    rng = np.random.default_rng(0)
    n, d, K = 30, 5, 4
    A, b = rng.normal(size=(n, d)), rng.normal(size=n)

    def gradients(theta, batch):
        return (A[batch] @ theta - b[batch])[:, None] * A[batch]

    state = reference.initial_state(rng.normal(size=d), n)
    parameter = torch.nn.Parameter(torch.from_numpy(state.theta.copy()))
    adam = torch.optim.Adam([parameter], lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    for _ in range(200):
        batch = rng.choice(n, K, p=state.p)
        g = gradients(state.theta, batch)
        parameter.grad = torch.from_numpy((g / (n * state.p[batch])[:, None]).mean(0))
        adam.step()
        state = reference.step(
            state, batch, gradients, L=5.0, p_min=0.3 / n, alpha_p=1e-7,
            alpha_theta=0.01, beta_1=0.8, beta_2=0.99, eps=1e-6,
        )  # fmt: skip
        np.testing.assert_allclose(state.theta, parameter.detach().numpy(), rtol=1e-9, atol=1e-12)
    assert state.p.max() > 1.5 * state.p.min()
