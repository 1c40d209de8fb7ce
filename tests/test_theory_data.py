"""Doubly heavy-tailed data and the models: against dense generation, exact probabilities, and autograd."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from adambs.lab.theory import heavy_tailed as ht


@pytest.mark.parametrize("s", [1.5, 2.0, 2.7, 4.0, 30.0])
def test_zeta(s):
    assert ht.zeta(s) == pytest.approx(special.zeta(s), rel=1e-9)


def test_power_sum():
    assert ht.power_sum(4, 2.0) == pytest.approx(1 + 1 / 4 + 1 / 9 + 1 / 16)


@pytest.mark.parametrize(("gamma", "beta_3"), [(2.0, 1.0), (2.0, 0.6), (2.5, 0.9)])
def test_each_entry_has_its_probability(gamma, beta_3):
    n, d, sets = 4, 3, 3000
    counts = np.zeros((n, d))
    signs = np.zeros((n, d))
    for seed in range(sets):
        z = ht.generate(n, d, gamma=gamma, beta_3=beta_3, seed=seed).dense()
        counts += np.abs(z)
        signs += z
    p = beta_3 * np.outer(np.arange(1.0, n + 1) ** -gamma, np.arange(1.0, d + 1) ** -gamma)
    assert counts[0, 0] == sets or beta_3 < 1
    inside = p < 1
    z_scores = (counts - sets * p)[inside] / np.sqrt(sets * p * (1 - p))[inside]
    assert stats.chi2.sf((z_scores**2).sum(), inside.sum()) > 1e-3
    sign_scores = signs / np.sqrt(np.maximum(counts, 1))
    assert stats.chi2.sf((sign_scores**2).sum(), n * d) > 1e-3


def test_entries_are_independent_as_in_dense_generation():
    """The whole pattern of a 2 x 2 corner: chi-square over its 8 possible values, (1, 1) being always set."""
    sets, p = 5000, np.array([1 / 4, 1 / 4, 1 / 16])
    seen = np.zeros(8)
    rng = np.random.default_rng(1)
    dense = np.bincount((rng.random((sets, 3)) < p) @ [4, 2, 1], minlength=8)
    for seed in range(sets):
        z = np.abs(ht.generate(2, 2, seed=seed).dense())
        seen[int(4 * z[0, 1] + 2 * z[1, 0] + z[1, 1])] += 1
    expected = np.array(
        [math.prod(p[b] if k >> (2 - b) & 1 else 1 - p[b] for b in range(3)) for k in range(8)]
    )
    assert stats.chisquare(seen, sets * expected).pvalue > 1e-3
    assert stats.chisquare(dense, sets * expected).pvalue > 1e-3  # the oracle itself


def test_the_number_of_non_zeros_does_not_grow_with_n_or_d():
    counts = {n: np.mean([len(ht.generate(n, n, seed=s).columns) for s in range(1000)]) for n in (10, 10**6)}
    for n, mean in counts.items():
        assert mean == pytest.approx(ht.power_sum(n, 2.0) ** 2, abs=0.2)
    assert ht.zeta(2.0) ** 2 < 2.71


def test_a_huge_data_set_costs_its_non_zeros():
    data = ht.generate(10**15, 10**12, seed=3)  # n d = 1e27 cells: only O(non-zeros) can do this
    assert (data.n, data.d) == (10**15, 10**12)
    assert len(data.columns) < 50


def test_sparse_rows_are_the_dense_ones():
    rng = np.random.default_rng(0)
    for seed in range(50):
        data = ht.generate(6, 5, seed=seed)
        z, theta = data.dense(), rng.normal(size=5)
        np.testing.assert_allclose((z @ theta)[data.rows], data.margins(theta))
        np.testing.assert_allclose(np.linalg.norm(z, axis=1)[data.rows], data.row_norms())
        assert np.count_nonzero(np.abs(z).sum(axis=1)) == len(data.rows)
        assert set(np.unique(z)) <= {-1.0, 0.0, 1.0}


def test_an_empty_data_set_has_no_rows():
    seed = next(s for s in range(100) if len(ht.generate(3, 3, beta_3=0.01, seed=s).rows) == 0)
    data = ht.generate(3, 3, beta_3=0.01, seed=seed)
    assert data.margins(np.ones(3)).shape == data.row_norms().shape == (0,)
    assert not data.dense().any()


def test_same_seed_same_data():
    a, b, other = (ht.generate(100, 100, seed=s) for s in (5, 5, 6))
    np.testing.assert_array_equal(a.dense(), b.dense())
    assert not np.array_equal(a.dense(), other.dense())


def test_expected_squares_have_the_expected_norms():
    z, y = ht.expected_squares(40, 7, gamma=2.5, beta_3=0.8, seed=1)
    norms = ht.expected_norms(40, 7, gamma=2.5, beta_3=0.8)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), norms)
    assert set(y) == {-1.0, 1.0}
    dense = np.mean(
        [ht.generate(3, 7, gamma=2.5, beta_3=0.8, seed=s).dense() ** 2 for s in range(2000)], axis=0
    )
    np.testing.assert_allclose(dense.sum(axis=1), norms[:3] ** 2, rtol=0.15)


def printed_loss(u, y):
    return -y * torch.log(torch.sigmoid(torch.relu(u)))


def cross_entropy(u, y):
    # torch's own, on the network's output, with the label in {0, 1}
    return torch.nn.functional.binary_cross_entropy(
        torch.sigmoid(torch.relu(u)), (y + 1) / 2, reduction="none"
    )


def logistic(u, y):
    return torch.nn.functional.binary_cross_entropy_with_logits(u, (y + 1) / 2, reduction="none")


@pytest.mark.parametrize(
    ("model", "torchs"),
    [(ht.PRINTED, printed_loss), (ht.ONE_NEURON, cross_entropy), (ht.LOGISTIC, logistic)],
)
def test_models_are_autograds(model, torchs):
    rng = np.random.default_rng(0)
    z, theta = rng.choice([-1.0, 0.0, 1.0], (200, 6)), rng.normal(size=6)
    y = rng.choice([-1.0, 1.0], 200)
    weights = torch.from_numpy(theta).requires_grad_()
    losses = torchs(torch.from_numpy(z) @ weights, torch.from_numpy(y))
    np.testing.assert_allclose(model.loss(z @ theta, y), losses.detach(), rtol=1e-12, atol=1e-14)
    for j in range(0, 200, 9):
        (gradient,) = torch.autograd.grad(losses[j], weights, retain_graph=True)
        ours = model.slope(z[j] @ theta, y[j]) * z[j]
        np.testing.assert_allclose(ours, gradient, rtol=1e-9, atol=1e-12)
        assert np.linalg.norm(ours) <= np.linalg.norm(z[j])  # the paper's ||g_j||^2 <= ||z_j||^2


def test_losses_do_not_overflow():
    u, y = np.array([-1e4, 1e4, 0.0]), np.array([1.0, -1.0, 1.0])
    for model in (ht.PRINTED, ht.ONE_NEURON, ht.LOGISTIC):
        assert np.isfinite(model.loss(u, y)).all()
        assert np.isfinite(model.slope(u, y)).all()


def test_gradient_norms_of_sparse_data():
    rng = np.random.default_rng(2)
    for seed in range(20):
        data = ht.generate(5, 4, seed=seed)
        theta, y = rng.normal(size=4), rng.choice([-1.0, 1.0], 5)
        z = data.dense()
        dense = np.linalg.norm(ht.ONE_NEURON.slope(z @ theta, y)[:, None] * z, axis=1)
        norms = ht.gradient_norms(data, ht.ONE_NEURON, theta, y[data.rows])
        np.testing.assert_allclose(norms, dense[data.rows])
        assert dense.sum() == pytest.approx(norms.sum())


@pytest.mark.parametrize("make", [ht.generate, ht.expected_squares, ht.expected_norms])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gamma": 1.9}, r"gamma must be at least 2, not 1.9.*heaviest"),
        ({"gamma": math.nan}, r"gamma must be positive"),
        ({"beta_3": 0.0}, r"beta_3 must be positive.*not 0"),
        ({"beta_3": 1.5}, r"beta_3 must lie in \(0, 1\], not 1.5"),
        ({"n": 0}, r"n must be at least 1, not 0"),
        ({"d": -3}, r"d must be at least 1, not -3"),
    ],
)
def test_bad_input_is_named(make, arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**{"n": 4, "d": 3, **arguments})
