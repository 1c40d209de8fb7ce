"""The calculators against SciPy, KKT conditions, exact rational arithmetic, and enumeration."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from adambs import reference
from adambs.lab.theory import bounds
from adambs.rules.exp3 import project

CONSTANTS = {"d": 7, "D": 3.0, "D_inf": 2.0, "G_inf": 5.0, "alpha": 0.25, "beta_1": 0.5, "beta_2": 0.75}


def norms_and_floor(seed: int) -> tuple[np.ndarray, float]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    norms = rng.gamma(0.3, 1.0, n) * (rng.random(n) < 0.8)
    return norms, float(rng.uniform(0.01, 1.0)) / n


# ------------------------------------------------------------------------------------------- water-filling


@pytest.mark.parametrize("seed", range(12))
def test_water_filling_is_scipys_minimum(seed):
    norms, p_min = norms_and_floor(seed)
    n = len(norms)
    p = bounds.water_filling(norms, p_min)
    found = minimize(
        lambda q: (norms**2 / q).sum(),
        np.full(n, 1 / n),
        jac=lambda q: -(norms**2) / q**2,
        bounds=[(p_min, 1.0)] * n,
        constraints={"type": "eq", "fun": lambda q: q.sum() - 1, "jac": lambda q: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    ours = bounds.cost(norms, p)
    assert ours <= found.fun * (1 + 1e-6) + 1e-12  # SLSQP leaves the sum of q some 1e-9 off
    assert ours == pytest.approx(found.fun, rel=1e-4, abs=1e-9)


@given(st.integers(0, 10_000))
def test_water_filling_meets_kkt(seed):
    norms, p_min = norms_and_floor(seed)
    p = bounds.water_filling(norms, p_min)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert (p >= p_min * (1 - 1e-12)).all()
    slope = -(norms**2) / p**2  # equal to -mu where p is free, at least -mu at the floor
    free = p > p_min * (1 + 1e-9)
    if free.any():
        mu = -slope[free].mean()
        np.testing.assert_allclose(-slope[free], mu, rtol=1e-8)
        assert (slope >= -mu * (1 + 1e-8)).all()


@given(st.integers(0, 10_000))
def test_no_random_member_of_P_beats_water_filling(seed):
    norms, p_min = norms_and_floor(seed)
    rng = np.random.default_rng(seed)
    n = len(norms)
    best = bounds.cost(norms, bounds.water_filling(norms, p_min))
    for _ in range(20):
        other = p_min + (1 - n * p_min) * rng.dirichlet(np.full(n, 0.5))
        assert best <= bounds.cost(norms, other) * (1 + 1e-9)


@given(st.integers(0, 10_000))
def test_water_filling_is_the_kl_projection_of_the_optimum(seed):
    norms, p_min = norms_and_floor(seed)
    if not norms.any() or p_min * len(norms) > 0.999:
        return
    p = bounds.water_filling(norms, p_min)
    np.testing.assert_allclose(p, project(norms, p_min), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(p, reference.project(norms / norms.sum(), p_min), rtol=1e-9, atol=1e-12)


def test_water_filling_at_the_ends():
    np.testing.assert_array_equal(bounds.water_filling([3.0, 1.0], 0.5), [0.5, 0.5])
    np.testing.assert_array_equal(bounds.water_filling([0.0, 0.0], 0.1), [0.5, 0.5])
    np.testing.assert_allclose(bounds.water_filling([0.0, 0.0, 2.0], 0.1), [0.1, 0.1, 0.8])
    np.testing.assert_array_equal(bounds.water_filling([2.0], 1.0), [1.0])


@pytest.mark.parametrize("c", [0.1, 0.5, 0.9])
def test_the_floor_costs_at_most_one_over_one_minus_c(c):
    norms = 1 / np.arange(1.0, 2001)
    cost = bounds.cost(norms, bounds.water_filling(norms, c / 2000))
    assert 1 - 1e-12 <= cost / norms.sum() ** 2 <= 1 / (1 - c)


@given(st.integers(0, 10_000))
def test_the_optimum_is_cauchy_schwarz(seed):
    norms, _ = norms_and_floor(seed)
    p = bounds.optimal_distribution(norms)
    assert p.sum() == pytest.approx(1)
    assert bounds.cost(norms, p) == pytest.approx(norms.sum() ** 2)
    other = np.random.default_rng(seed).dirichlet(np.ones(len(norms)))
    assert bounds.cost(norms, other) >= norms.sum() ** 2 * (1 - 1e-9)


# ------------------------------------------------------------------------------------------------ bounds


def test_theorem_1_by_hand():
    # gamma = 1/4 / sqrt(3/4); every factor below is written out once more, in fractions where it is rational.
    gamma = 0.25 / math.sqrt(0.75)
    rho = bounds.theorem_1_rho(**CONSTANTS, lam=0.75)
    assert rho.rho_1 == float(Fraction(9 * 5) / (2 * Fraction(1, 4) * Fraction(1, 2)))
    assert rho.rho_2 == pytest.approx(0.25 * 1.5 * 5 / (0.5 * 0.5 * (1 - gamma) ** 2))
    one_feature = Fraction(4 * 5, 2) / (2 * Fraction(1, 4) * Fraction(1, 2) * Fraction(1, 16))
    assert rho.rho_3 == pytest.approx(7 * float(one_feature))
    printed = bounds.theorem_1_rho(**CONSTANTS, lam=0.75, as_printed=True)
    assert printed.rho_3 == pytest.approx(rho.rho_3 * (0.25 / (1 - gamma)) ** 2)
    bound = bounds.theorem_1_bound(rho, d=7, n=10, K=4, T=9, S=400.0)
    assert bound == pytest.approx((rho.rho_1 * 21, math.sqrt(7) * rho.rho_2, 0, rho.rho_3))
    assert bound.total == pytest.approx(sum(bound))


def test_theorem_1_is_kingma_and_bas_theorem_with_the_papers_two_inequalities():
    """Theorem 4.1 on random gradients is below the bound with S/(n^2 K) = sum ||G_hat||^2."""
    rng = np.random.default_rng(0)
    T, d = 50, 7
    G = rng.normal(size=(T, d)) * rng.gamma(1.0, 1.0, d)
    constants = {**CONSTANTS, "G_inf": float(np.abs(G).max())}
    rho = bounds.theorem_1_rho(**constants, lam=0.75)
    beta_2 = constants["beta_2"]
    v = sum((1 - beta_2) * beta_2 ** (T - 1 - t) * G[t] ** 2 for t in range(T)) / (1 - beta_2**T)
    kingma_ba = (
        rho.rho_1 / constants["G_inf"] * math.sqrt(T) * np.sqrt(v).sum()
        + rho.rho_2 * np.linalg.norm(G, axis=0).sum()
        + rho.rho_3
    )
    ours = bounds.theorem_1_bound(rho, d=d, n=1, K=1, T=T, S=float((G**2).sum()))
    assert kingma_ba <= ours.total


def test_exact_moment_adds_the_mean_gradient():
    rho = bounds.Rho(0.0, 1.0, 0.0)
    sizes = {"d": 4, "n": 5, "T": 1}
    plain = bounds.theorem_1_bound(rho, **sizes, K=1, S=25.0)
    assert bounds.theorem_1_bound_exact_moment(rho, **sizes, K=1, S=25.0, G_squared=9.0) == plain
    exact = bounds.theorem_1_bound_exact_moment(rho, **sizes, K=2, S=25.0, G_squared=9.0)
    assert exact.second == pytest.approx(2 * math.sqrt(0.5 + 4.5))


@pytest.mark.parametrize("K", [1, 3, 10])
def test_lemma_1_is_the_minimum_over_alpha_p(K):
    """R^2/a + a/2 n T (L/p_min)^4 at its best a; and with (n-1)/K + 1 for n."""
    n, T, L, p_min = 20, 500, 1.3, 0.02
    R_squared = reference.lemma_1_R_squared(n, p_min)
    numbers = {"n": n, "T": T, "L": L, "p_min": p_min, "R_squared": R_squared}
    for arms, bound in (
        (n, bounds.lemma_1_regret_bound(**numbers)),
        (1 + (n - 1) / K, bounds.lemma_1_regret_bound_with_K(**numbers, K=K)),
    ):
        a = np.geomspace(1e-14, 1e-4, 100_001)
        assert bound == pytest.approx((R_squared / a + a / 2 * arms * T * (L / p_min) ** 4).min(), rel=1e-6)
    alpha_p = reference.lemma_1_alpha_p(**numbers)
    at_alpha = R_squared / alpha_p + alpha_p / 2 * n * T * (L / p_min) ** 4
    assert bounds.lemma_1_regret_bound(**numbers) == pytest.approx(at_alpha)


def test_theorem_2_is_theorem_1_plus_lemma_1_with_the_root_split():
    n, K, T, d, L, p_min, M = 30, 4, 1000, 6, 1.5, 0.01, 1e5
    R_squared = reference.lemma_1_R_squared(n, p_min)
    rho = bounds.Rho(2.0, 3.0, 5.0)
    lemma = bounds.lemma_1_regret_bound(n=n, T=T, L=L, p_min=p_min, R_squared=R_squared)
    joint = bounds.theorem_1_bound(rho, d=d, n=n, K=K, T=T, S=M + lemma)
    numbers = {"d": d, "n": n, "K": K, "T": T, "L": L, "p_min": p_min, "R_squared": R_squared}
    split = bounds.theorem_2_bound(rho, **numbers, M=M)
    assert joint.total <= split.total <= joint.total + (math.sqrt(2) - 1) * joint.second
    as_printed = 3 * L * R_squared**0.25 / p_min * math.sqrt(d / K) / n * (2 * n * T) ** 0.25
    assert split.learning == pytest.approx(as_printed)


def test_amsgrad_by_hand():
    constants = {key: value for key, value in CONSTANTS.items() if key != "D"}
    gamma = 0.5 / math.sqrt(0.75)
    printed = bounds.amsgrad_rho(**constants, lam=0.75, as_printed=True)
    assert printed == pytest.approx((4 * 5 / 0.125, 0.25 / (0.25 * (1 - gamma) * 0.5), 0.5 * 20 / (1 / 16)))
    ours = bounds.amsgrad_rho(**constants, lam=0.75)
    assert ours.rho_3 == pytest.approx(printed.rho_3 * 7 / 0.25)
    bound = bounds.amsgrad_bound(ours, d=7, T=16, sum_G_hat_squared=9.0)
    second = ours.rho_2 * math.sqrt(7 * (1 + math.log(16))) * 3
    assert bound == pytest.approx((ours.rho_1 * 28, second, 0, ours.rho_3))


def test_amsgrads_third_term_sums_what_it_says():
    """D^2 / (2 (1 - beta_1)) sum_t sum_i beta_{1,t} G_inf / alpha_t <= rho'_3, and not <= the printed one."""
    constants = {key: value for key, value in CONSTANTS.items() if key != "D"}
    lam, t = 0.75, np.arange(1, 500)
    total = 4.0 / (2 * 0.5) * 7 * (0.5 * lam ** (t - 1) * 5.0 * np.sqrt(t) / 0.25).sum()
    assert total <= bounds.amsgrad_rho(**constants, lam=lam).rho_3
    assert total > bounds.amsgrad_rho(**constants, lam=lam, as_printed=True).rho_3


def test_steps_before_lemma_1_helps_is_where_the_costs_meet():
    n, L, p_min = 50, 1.2, 0.005
    T = bounds.steps_before_lemma_1_helps(n=n, L=L, p_min=p_min, uniform_cost=900.0, best_cost=200.0)
    R_squared = reference.lemma_1_R_squared(n, p_min)
    for factor, helps in ((1.001, True), (0.999, False)):
        steps = round(T * factor)
        lemma = bounds.lemma_1_regret_bound(n=n, T=steps, L=L, p_min=p_min, R_squared=R_squared)
        assert (200.0 * steps + lemma <= 900.0 * steps) is helps
    same = {"uniform_cost": 5.0, "best_cost": 5.0}
    assert bounds.steps_before_lemma_1_helps(n=n, L=L, p_min=p_min, **same) == math.inf


# ------------------------------------------------------------------------------------------- bad input

LEMMA_1 = {"n": 10, "T": 5, "L": 1.0, "p_min": 0.05, "R_squared": 1.0}
SIZES = {"d": 2, "n": 10, "K": 3, "T": 5, "S": 1.0}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.water_filling([1.0, 2.0], 0.6), r"p_min must be at most 1/n = 0.5, not 0.6.*c < 1"),
        (lambda: bounds.water_filling([1.0, 2.0], 0.0), r"p_min must be positive.*not 0"),
        (lambda: bounds.water_filling([1.0, 2.0], -0.1), r"p_min must be positive.*not -0.1"),
        (lambda: bounds.water_filling([], 0.1), r"g_norms is empty"),
        (lambda: bounds.water_filling([1.0, -2.0], 0.1), r"g_norms\[1\] is -2"),
        (lambda: bounds.optimal_distribution([1.0, math.nan]), r"g_norms\[1\] is nan"),
        (lambda: bounds.lemma_1_regret_bound(**{**LEMMA_1, "T": 0}), r"T must be at least 1, not 0"),
        (
            lambda: bounds.lemma_1_regret_bound(**{**LEMMA_1, "p_min": 0.2}),
            r"p_min must be at most 1/n = 0.1",
        ),
        (lambda: bounds.lemma_1_regret_bound(**{**LEMMA_1, "L": 0.0}), r"L must be positive"),
        (lambda: bounds.lemma_1_regret_bound_with_K(**LEMMA_1, K=0), r"K must be at least 1"),
        (lambda: bounds.theorem_1_bound(bounds.Rho(1, 1, 1), **{**SIZES, "n": 0}), r"n must be at least 1"),
        (lambda: bounds.theorem_1_bound(bounds.Rho(1, 1, 1), **{**SIZES, "T": 0}), r"T must be at least 1"),
        (lambda: bounds.theorem_1_bound(bounds.Rho(1, 1, 1), **{**SIZES, "S": -1.0}), r"S must be positive"),
        (lambda: bounds.theorem_1_rho(**CONSTANTS, lam=1.0), r"lam must lie strictly between 0 and 1"),
        (lambda: bounds.theorem_1_rho(**{**CONSTANTS, "d": 0}, lam=0.5), r"d must be at least 1"),
        (
            lambda: bounds.theorem_1_rho(**{**CONSTANTS, "beta_1": 1.0}, lam=0.5),
            r"beta_1 must lie in \[0, 1\)",
        ),
        (
            lambda: bounds.gamma_amsgrad(0.9, 0.5),
            r"beta_1\^1 / sqrt\(beta_2\) must be below 1.*smaller beta_1",
        ),
        (lambda: bounds.gamma_adam(0.9, 0.0), r"infinite"),
        (lambda: bounds.amsgrad_bound(bounds.Rho(1, 1, 1), d=1, T=0, sum_G_hat_squared=1.0), r"T must be"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
