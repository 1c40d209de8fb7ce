"""Every erratum of docs/theory.md that is a computation, and the claims of the paper that do hold."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adambs import reference
from adambs.lab.theory import bounds, errata
from adambs.lab.theory.heavy_tailed import LOGISTIC, ONE_NEURON, PRINTED


def test_13_the_loss_estimate_is_unbiased_only_with_the_p_that_drew():
    rng = np.random.default_rng(0)
    p, other = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
    l = rng.random(4)
    np.testing.assert_allclose(errata.expected_loss_estimate(l, p, p), l)
    assert np.abs(errata.expected_loss_estimate(l, p, other) - l).max() > 0.1
    # the expectation itself, from the definition of h_hat, by Monte Carlo
    K, draws = 3, 40_000
    I = rng.choice(4, (draws, K), p=p)
    counts = (I[:, :, None] == np.arange(4)).sum(axis=1)
    h_hat = l * counts / (K * other)
    error = (h_hat.mean(axis=0) - errata.expected_loss_estimate(l, p, other)) / (
        h_hat.std(axis=0) / draws**0.5
    )
    assert np.abs(error).max() < 4


def test_14_rho_3():
    assert errata.rho_3_ratio(0.9, 0.999, 1 - 1e-8) > 1e14
    gamma = 0.81 / math.sqrt(0.999)
    assert errata.rho_3_ratio(0.9, 0.999, 0.99) == pytest.approx(((1 - gamma) / 0.01) ** 2)


@pytest.mark.parametrize("gamma", [2.0, 2.5, 3.0])
def test_7_the_sum_is_bounded_and_log_n_is_not(gamma):
    rows = errata.log_n_against_the_sum(gamma, [1, 2, 10, 10**6])
    assert all(total < math.pi**2 / 6 for _, total, _ in rows)
    assert rows[0][1] > rows[0][2]  # n = 1: 1 <= log 1 = 0 is false
    assert rows[1][1] > rows[1][2]
    assert rows[-1][2] > 8 * rows[-1][1]


def test_7_at_gamma_2_the_inequality_fails_up_to_n_4():
    assert [total > log for _, total, log in errata.log_n_against_the_sum(2.0, [1, 2, 3, 4, 5])] == [
        True, True, True, True, False,
    ]  # fmt: skip


def test_8_the_data_is_almost_empty():
    mean, most = errata.mean_non_zeros(10**6, 1000, 2.0, 1.0, 1000, 0)
    assert most < 2.71
    assert mean == pytest.approx(most, abs=0.2)


def test_15_the_printed_loss_is_no_cross_entropy():
    form = errata.loss_of_a_sure_mistake(5.0)
    assert form.printed_loss < 0  # a cross-entropy is never negative
    probability = 1 / (1 + math.exp(-5.0))
    assert form.cross_entropy == pytest.approx(-math.log(1 - probability))
    assert form.printed_slope == pytest.approx(1 - probability)  # the surer the mistake, the smaller
    assert form.cross_entropy_slope == pytest.approx(probability)  # the surer the mistake, the larger


def test_15_for_label_plus_one_both_forms_agree():
    u, y = np.linspace(-3, 3, 13), np.ones(13)
    np.testing.assert_array_equal(PRINTED.loss(u, y), ONE_NEURON.loss(u, y))
    np.testing.assert_array_equal(PRINTED.slope(u, y), ONE_NEURON.slope(u, y))


def test_5_the_network_is_not_convex_and_logistic_regression_is():
    assert errata.convexity_gap(ONE_NEURON, -1, 1, 1.0) > 0.18
    assert errata.convexity_gap(PRINTED, 0.5, 4, -1.0) > 0.05
    rng = np.random.default_rng(0)
    for a, b in rng.normal(0, 3, (200, 2)):
        for y in (-1.0, 1.0):
            assert errata.convexity_gap(LOGISTIC, a, b, y) <= 1e-12


def test_1_adam_breaks_theorem_1_and_amsgrad_keeps_its_own():
    run = errata.reddi(3000)
    assert run.adam_x == 1.0  # the worst point of [-1, 1]
    assert run.adam_average_regret == pytest.approx(2 / 3, abs=0.02)
    assert run.broken_from is not None
    assert run.broken_from < 1000
    assert run.adam_average_regret * run.T > 2 * run.adam_bound
    assert run.amsgrad_x < -0.95
    assert run.amsgrad_average_regret * run.T < 0.1 * run.amsgrad_bound
    assert errata.reddi(30_000).amsgrad_average_regret < run.amsgrad_average_regret / 2


@pytest.mark.parametrize("amsgrad", [False, True])
def test_1_the_steps_are_torchs(amsgrad):
    """Unprojected, on a range that is never left: torch.optim.Adam with lr = alpha/sqrt(t)."""
    rng = np.random.default_rng(0)
    g = rng.normal(size=30)
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([x], betas=(0.0, 0.9), eps=0.0, amsgrad=amsgrad)
    for t, gradient in enumerate(g, 1):
        # torch's AMSGrad divides the running maximum of v by 1 - beta_2^t; Reddi et al. do not
        correction = 1 / math.sqrt(1 - 0.9**t) if amsgrad else 1.0
        optimizer.param_groups[0]["lr"] = 0.01 / math.sqrt(t) * correction
        x.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
    ours = errata.online_adam(g, alpha=0.01, beta_2=0.9, amsgrad=amsgrad)
    assert ours.x == pytest.approx(x.item(), rel=1e-9)


def test_1_regret_is_against_the_best_fixed_point():
    g = np.array([1.0, -3.0, 1.0])
    run = errata.online_adam(g, alpha=1e-9, beta_2=0.5, amsgrad=False)
    np.testing.assert_allclose(run.regret, [1.0, 2.0, 1.0], atol=1e-6)  # x stays at 0; best is -|sum g|


@pytest.mark.parametrize("seed", range(3))
def test_1_the_optimal_p_heals_adam(seed):
    ends = errata.sampled_reddi(20_000, seed)
    assert ends.uniform_x > 0.9
    assert ends.uniform_amsgrad_x < -0.9
    assert ends.optimal_x < -0.9


@given(st.integers(0, 10_000))
def test_2_the_second_moment_is_the_identity(seed):
    rng = np.random.default_rng(seed)
    n, K = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    g, p = rng.normal(size=(n, 2)), rng.dirichlet(np.ones(n)) * 0.8 + 0.2 / n
    moments = errata.second_moments(g, p, K)
    assert moments.enumerated == pytest.approx(moments.exact)
    G = g.mean(axis=0)
    assert moments.exact - moments.printed_bound == pytest.approx((1 - 1 / K) * (G @ G), abs=1e-9)


def test_2_the_printed_inequality_fails():
    moments = errata.second_moments(np.ones((3, 1)), np.full(3, 1 / 3), 2)
    assert moments.enumerated == pytest.approx(1.0)
    assert moments.printed_bound == pytest.approx(0.5)


def test_3_prefixed_batches_gain_from_K_as_much_as_drawn_ones():
    """Over random partitions Adam-uni's second moment is at most Adam's: a batch has no duplicates."""
    rng = np.random.default_rng(0)
    n, K = 12, 3
    g = rng.normal(size=(n, 2)) * rng.gamma(0.5, 1, (n, 1)) + 0.3
    adam = bounds.second_moment(g, np.full(n, 1 / n), K)
    uniform = np.full(n // K, K / n)
    uni = np.mean(
        [errata.second_moment_of_batches(g, rng.permutation(n).reshape(-1, K), uniform) for _ in range(4000)]
    )
    squares, G = (g**2).sum(), g.mean(axis=0)
    pairs = (n**2 * (G @ G) - squares) / (n * (n - 1))
    exactly = squares / n / K + (1 - 1 / K) * pairs
    assert uni == pytest.approx(exactly, rel=0.02)
    assert exactly <= adam


@given(st.integers(0, 10_000))
def test_9_the_multi_draw_step_holds_and_is_loose(seed):
    rng = np.random.default_rng(seed)
    n, K = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    l, p = rng.random(n), rng.dirichlet(np.ones(n)) * 0.8 + 0.2 / n
    exact, printed = errata.squared_estimates(l, p, K)
    enumerated = 0.0
    for batch in np.ndindex(*(n,) * K):
        I = np.array(batch)
        h_hat = l * np.bincount(I, minlength=n) / (K * p)
        enumerated += p[I].prod() * (p * h_hat**2).sum()
    assert exact == pytest.approx(enumerated)
    assert exact <= printed * (1 + 1e-12)


def test_19_the_sign_slip_is_harmless():
    """Adding the same number to every entry, with either sign, changes no <., p - q>."""
    rng = np.random.default_rng(0)
    p, q, x = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5)), rng.random(5)
    for offset in (0.0, 7.0, -7.0):
        assert (-(x) + offset) @ (p - q) == pytest.approx(-x @ (p - q))


def test_19_the_linearisation_goes_the_right_way():
    rng = np.random.default_rng(0)
    for _ in range(200):
        p, q, norms = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5)), rng.random(5)
        difference = bounds.cost(norms, p) - bounds.cost(norms, q)
        assert difference <= -(norms**2) / p**2 @ (p - q) + 1e-9


def test_6_the_second_term_is_not_homogeneous():
    one, small = errata.scaled_terms(1.0), errata.scaled_terms(0.01)
    assert small[0] == pytest.approx(one[0])
    assert small[2] == pytest.approx(one[2])
    assert small[1] == pytest.approx(one[1] / 100)


def test_6_kingma_and_bas_lemma_10_3_fails_for_small_gradients():
    left, right = errata.kingma_ba_lemma_10_3(np.array([0.1]))
    assert left > right
    left, right = errata.kingma_ba_lemma_10_3(np.array([1.0, -1.0, 0.5]))
    assert left <= right


def test_4_the_learning_term_grows_with_n():
    """Theorem 2's third term with p_min = c/n: n^(1/4) up to sqrt(R), where Theorem 4 has dropped it."""
    rho = bounds.Rho(1.0, 1.0, 1.0)

    def learning(n: int) -> float:
        p_min = 0.3 / n
        R_squared = reference.lemma_1_R_squared(n, p_min)
        numbers = {"d": 10, "n": n, "K": 10, "T": 10**4, "L": 1.0, "p_min": p_min}
        return bounds.theorem_2_bound(rho, **numbers, M=0.0, R_squared=R_squared).learning

    assert learning(10**6) / learning(10**2) > 10


def test_10_the_bound_on_G_hat_depends_on_the_floor():
    """One example at the floor: |G_hat| = L / (n p_min), so G_infinity is 1/c times Adam's."""
    n, c, L = 10, 0.1, 2.0
    p = bounds.water_filling(np.array([0.0] + [1.0] * (n - 1)), c / n)
    assert L / (n * p[0]) == pytest.approx(L / c)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: errata.reddi(0), "T must be at least 1"),
        (lambda: errata.sampled_reddi(0, 0), "T must be at least 1"),
        (lambda: errata.sampled_reddi(10, 0, C=5.0), "C must be above n - 1 = 10, not 5.0"),
        (lambda: errata.scaled_terms(0.0), "scale must be positive"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
