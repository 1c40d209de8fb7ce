"""Tracking and VRB, which keep a number for each example, against dense versions of themselves."""

import math

import numpy as np
import pytest
import torch
from helpers import taught
from hypothesis import given
from hypothesis import strategies as st

import adambs


class DenseTracking:
    """The same, over all n at once, with nothing kept but plain arrays."""

    def __init__(self, n, uniform, smoothing=0.0, forgetting=0.0):
        self.n, self.uniform, self.smoothing, self.forgetting = n, uniform, smoothing, forgetting
        self.scores = [None] * n
        self.top = None
        self.cycle = 0

    def known(self):
        return np.array([self.top if s is None else s for s in self.scores])

    def p(self):
        if self.top is None:
            return np.full(self.n, 1 / self.n)
        known = self.known()
        return (1 - self.uniform) * known / known.sum() + self.uniform / self.n

    def update(self, indices, scores):
        if self.top is None:
            self.top = max(scores)
        elif self.forgetting:
            known = self.known()
            for j in [(self.cycle + k) % self.n for k in range(len(indices))]:
                moved = known[j] + self.forgetting * (known.mean() - known[j])
                if self.scores[j] is not None:
                    self.scores[j] = moved
        if self.forgetting:
            self.cycle = (self.cycle + len(indices)) % self.n
        for j, s in zip(indices, scores, strict=True):
            old = self.scores[j]
            self.scores[j] = s if old is None else self.smoothing * old + (1 - self.smoothing) * s


@given(
    n=st.integers(1, 80),
    K=st.integers(1, 12),
    uniform=st.floats(0.01, 0.99),
    smoothing=st.sampled_from([0.0, 0.5, 0.9]),
    forgetting=st.sampled_from([0.0, 0.1, 0.8]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_tracking_is_its_dense_version(n, K, uniform, smoothing, forgetting, scale, seed):
    K = min(K, n)
    rule = adambs.Tracking(uniform=uniform, smoothing=smoothing, forgetting=forgetting)
    sampler = adambs.BanditSampler(n, K, rule=rule, seed=seed)
    dense = DenseTracking(n, uniform, smoothing, forgetting)
    rng = np.random.default_rng(seed)
    for _ in range(40):
        draw = sampler.draw()
        np.testing.assert_allclose(draw.probabilities, dense.p()[draw.indices], rtol=1e-9)
        scores = scale * rng.gamma(0.5, 1.0, K)
        sampler.update(draw, scores)
        dense.update(draw.indices.tolist(), scores)
        np.testing.assert_allclose(sampler.probabilities(), dense.p(), rtol=1e-9)


def test_quantiles_at_the_ends_and_at_the_seam_are_valid():
    sampler = taught(adambs.BanditSampler(7, 3, rule=adambs.Tracking(uniform=0.3)), 20)
    u = np.array([0.0, np.nextafter(0.3, 0), 0.3, np.nextafter(0.3, 1), np.nextafter(1, 0)])
    indices, ratios = sampler.rule.draw(u)
    assert indices.min() >= 0
    assert indices.max() < 7
    np.testing.assert_array_equal(ratios, sampler.rule.ratios(indices))


def test_no_weight_is_above_one_over_the_uniform_share():
    sampler = taught(adambs.BanditSampler(500, 20, rule=adambs.Tracking(uniform=0.25)), 200)
    assert 500 * sampler.probabilities().min() >= 0.25
    assert sampler.draw().weights.max() <= 4


def test_tracking_reaches_the_variance_reduction_of_known_norms():
    """With norms that never change it soon knows them all: n sum s^2 / (sum s^2/p), as computed directly."""
    n, rng = 2000, np.random.default_rng(0)
    norms = rng.gamma(0.3, 1.0, n)
    sampler = adambs.BanditSampler(n, 50, rule=adambs.Tracking(uniform=0.1), seed=1)
    for _ in range(2000):
        draw = sampler.draw()
        sampler.update(draw, norms[draw.indices])
    p = 0.9 * norms / norms.sum() + 0.1 / n
    np.testing.assert_allclose(sampler.probabilities(), p, rtol=1e-9)
    best = n * (norms**2).sum() / (norms**2 / p).sum()
    assert sampler.diagnostics().variance_reduction == pytest.approx(best, rel=0.1)


def test_a_teachers_weights_count_as_seen_scores():
    rule = adambs.Tracking(uniform=0.5, smoothing=0.5)
    sampler = adambs.BanditSampler(3, 1, rule=rule, initial_weights=[1.0, 2.0, 3.0])
    np.testing.assert_allclose(sampler.probabilities(), 0.5 * np.array([1, 2, 3]) / 6 + 0.5 / 3)
    sampler.rule.observe(np.array([0]), np.array([5.0]))
    np.testing.assert_allclose(sampler.probabilities(), 0.5 * np.array([3, 2, 3]) / 8 + 0.5 / 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"uniform": 0.0}, "uniform must lie strictly between"),
        ({"uniform": 1.0}, r"use Uniform\(\)"),
        ({"smoothing": 1.0}, "smoothing must be at least 0 and below 1"),
        ({"forgetting": -0.1}, "forgetting must be at least 0"),
    ],
)
def test_tracking_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        adambs.Tracking(**arguments)


def dense_vrb(n, uniform, prior, forgetting):
    """p and its update, over all n at once, from the formula; p is uniform before the first update."""
    sums, top = np.full(n, float(prior)), None

    def p():
        root = np.sqrt(sums)
        return (1 - uniform) * root / root.sum() + uniform / n

    def update(indices, drawn_with, scores):
        nonlocal sums, top
        top = scores.max() if top is None else top
        sums = sums * (1 - forgetting) ** (len(indices) / n)
        np.add.at(sums, indices, (scores / top) ** 2 / (n * drawn_with))

    return p, update


@given(
    n=st.integers(1, 60),
    K=st.integers(1, 12),
    uniform=st.floats(0.01, 0.99),
    prior=st.floats(1e-3, 1e3),
    forgetting=st.sampled_from([0.0, 0.3, 0.999]),
    seed=st.integers(0, 2**32 - 1),
)
def test_vrb_is_its_dense_version(n, K, uniform, prior, forgetting, seed):
    K = min(K, n)
    rule = adambs.VRB(uniform=uniform, prior=prior, forgetting=forgetting)
    sampler = adambs.BanditSampler(n, K, rule=rule, seed=seed)
    p, update = dense_vrb(n, uniform, prior, forgetting)
    rng = np.random.default_rng(seed)
    for _ in range(40):
        draw = sampler.draw()
        np.testing.assert_allclose(draw.probabilities, p()[draw.indices], rtol=1e-9)
        scores = rng.gamma(0.5, 1.0, K)
        sampler.update(draw, scores)
        update(draw.indices.numpy(), draw.probabilities.numpy(), scores)
        np.testing.assert_allclose(sampler.probabilities(), p(), rtol=1e-9)


def test_vrb_without_forgetting_finds_the_best_p_for_fixed_norms():
    n, rng = 200, np.random.default_rng(0)
    norms = rng.gamma(0.5, 1.0, n)
    sampler = adambs.BanditSampler(n, 20, rule=adambs.VRB(uniform=0.1), seed=0)
    for _ in range(20_000):
        draw = sampler.draw()
        sampler.update(draw, norms[draw.indices])
    best = 0.9 * norms / norms.sum() + 0.1 / n
    large = norms > np.median(norms)
    np.testing.assert_allclose(sampler.probabilities()[large], best[large], rtol=0.1)


def test_forgetting_for_ever_stays_finite():
    """Half of every sum is gone each epoch of five steps: 2^4000 in all, past every float."""
    sampler = taught(adambs.BanditSampler(10, 2, rule=adambs.VRB(forgetting=0.5)), 20_000)
    p = sampler.probabilities()
    assert torch.isfinite(p).all()
    assert math.isclose(p.sum(), 1, rel_tol=1e-12)
    assert p.max() > 1.5 * p.min()
