"""Calibrated, against a dense version of itself that knows nothing of groups in order."""

import math

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded, taught
from hypothesis import given
from hypothesis import strategies as st

import adambs


class DenseCalibrated:
    """The definition, in dictionaries: the group of a score is floor(3 log2(score / top))."""

    def __init__(self, n, uniform, memory, prior):
        self.n, self.uniform, self.memory, self.prior = n, uniform, memory, prior
        self.group = ["unseen"] * n
        self.mean, self.draws = {}, {}
        self.top = None

    def value(self, group):
        draws, mean = self.draws.get(group, 0.0), self.mean.get(group, 0.0)
        if group == "unseen":
            return mean if draws else 1.0
        middle = 2.0 ** ((group + 0.5) / 3)
        return (draws * mean + self.prior * middle**2) / (draws + self.prior)

    def p(self):
        roots = np.array([math.sqrt(self.value(group)) for group in self.group])
        return ((1 - self.uniform) * roots / roots.mean() + self.uniform) / self.n

    def update(self, indices, scores):
        self.top = max(scores) if self.top is None else self.top
        known = [s / self.top for s in scores]
        for group, s in zip([self.group[j] for j in indices], known, strict=True):
            self.draws[group] = min(self.draws.get(group, 0.0) + 1, self.memory)
            old = self.mean.get(group, 0.0)
            self.mean[group] = old + (s**2 - old) / max(self.draws[group], 1)
        for j, s in zip(indices, known, strict=True):
            self.group[j] = min(max(math.floor(3 * np.log2(s)), -60), 29) if s > 0 else -60


@given(
    n=st.integers(1, 80),
    K=st.integers(1, 12),
    uniform=st.floats(0.01, 0.99),
    memory=st.sampled_from([0.5, 3.0, 300.0]),
    prior=st.sampled_from([0.1, 5.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_its_dense_version(n, K, uniform, memory, prior, scale, seed):
    K = min(K, n)
    rule = adambs.Calibrated(uniform=uniform, memory=memory, prior=prior)
    sampler = adambs.BanditSampler(n, K, rule=rule, seed=seed)
    dense = DenseCalibrated(n, uniform, memory, prior)
    rng = np.random.default_rng(seed)
    for _ in range(40):
        draw = sampler.draw()
        np.testing.assert_allclose(draw.probabilities, dense.p()[draw.indices], rtol=1e-9)
        scores = scale * rng.gamma(0.3, 1.0, K) ** 3  # over more octaves than there are groups for
        sampler.update(draw, scores)
        dense.update(draw.indices.tolist(), scores)
        np.testing.assert_allclose(sampler.probabilities(), dense.p(), rtol=1e-9)


def test_the_order_stays_a_permutation_that_agrees_with_the_places():
    rule = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 200).rule
    np.testing.assert_array_equal(np.sort(rule.order), np.arange(300))
    np.testing.assert_array_equal(rule.order[rule._place ^ np.arange(300)], np.arange(300))
    assert (np.diff(rule.bounds) >= 0).all()
    assert len(np.unique(rule.groups())) > 10


def test_draws_follow_the_probabilities():
    """Chi-square over 200,000 draws with a fixed seed."""
    n, K = 20, 10
    sampler = taught(adambs.BanditSampler(n, K, rule=adambs.Calibrated(), seed=3), 50)
    counts = np.zeros(n)
    for _ in range(20_000):
        np.add.at(counts, sampler.draw().indices.numpy(), 1)
    expected = counts.sum() * sampler.probabilities().numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # 99.9 % of chi-square with 19 degrees
    assert expected.max() > 3 * expected.min()


def test_quantiles_at_the_ends_are_valid_and_all_members_are_reached():
    sampler = taught(adambs.BanditSampler(37, 3, rule=adambs.Calibrated()), 40)
    indices, ratios = sampler.rule.draw(np.linspace(0, 1, 5001))
    assert set(indices) == set(range(37))
    np.testing.assert_array_equal(ratios, sampler.rule.ratios(indices))


def test_stale_scores_are_worth_what_they_have_proved_to_be():
    """Every draw finds an example hard or easy by a coin: a score says nothing, and p must not follow it."""
    n, K = 1000, 50
    rng = np.random.default_rng(1)
    sampler = adambs.BanditSampler(n, K, rule=adambs.Calibrated(), seed=0)
    naive = adambs.BanditSampler(n, K, rule=adambs.Tracking(uniform=0.1), seed=0)
    for trained in (sampler, naive):
        for _ in range(3000):
            draw = trained.draw()
            trained.update(draw, np.where(rng.random(K) < 0.5, 1.0, 0.01))  # whatever it was before
    assert 0.9 < sampler.diagnostics().variance_reduction < 1.1  # it has found out: uniform
    assert naive.diagnostics().variance_reduction < 0.5  # it believes each score
    p = n * sampler.probabilities()
    assert p.max() / p.min() < 1.5


def test_it_reaches_the_variance_reduction_of_known_norms():
    """With norms that never change it loses only the width of a group and the uniform share."""
    n, rng = 2000, np.random.default_rng(0)
    norms = rng.gamma(0.3, 1.0, n)
    sampler = adambs.BanditSampler(n, 50, rule=adambs.Calibrated(), seed=1)
    for _ in range(2000):
        draw = sampler.draw()
        sampler.update(draw, norms[draw.indices])
    p = 0.9 * norms / norms.sum() + 0.1 / n
    best = n * (norms**2).sum() / (norms**2 / p).sum()
    assert sampler.diagnostics().variance_reduction == pytest.approx(best, rel=0.1)


def test_a_teachers_weights_count_as_seen_scores():
    sampler = adambs.BanditSampler(3, 1, rule=adambs.Calibrated(), initial_weights=[0.1, 1.0, 4.0])
    p = sampler.probabilities()
    assert p[0] < p[1] < p[2]
    assert p[2] / p[1] > 2


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1e300, 0.0], [1e-300, 1e-308]])
def test_extreme_scores_leave_a_distribution(scores):
    sampler = adambs.BanditSampler(4, 2, rule=adambs.Calibrated())
    for _ in range(1000):
        sampler.update(sampler.draw(), scores)
    p = sampler.probabilities()
    assert torch.isfinite(p).all()
    assert p.min() > 0
    assert math.isclose(p.sum(), 1, rel_tol=1e-9)


def test_it_resumes_to_the_bit_and_refuses_damaged_states():
    def make():
        return adambs.BanditSampler(100, 8, rule=adambs.Calibrated(), seed=2)

    straight = taught(make(), 70)
    resumed = make()
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    assert same(taught(straight, 30, seed=1).state_dict(), taught(resumed, 30, seed=1).state_dict())
    damages = {
        "order": torch.zeros(100, dtype=torch.int64),
        "bounds": torch.arange(92),
        "means": -torch.ones(91),
        "draws": torch.ones(3),
        "unit": math.inf,
    }
    for name, value in damages.items():
        state = straight.state_dict()
        state["rule_state"][name] = value
        with pytest.raises(ValueError, match=name):
            resumed.load_state_dict(state)
    assert same(straight.state_dict(), resumed.state_dict())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"uniform": 0.0}, "uniform must lie strictly between"),
        ({"uniform": 1.0}, r"use Uniform\(\)"),
        ({"memory": 0}, "memory must be positive"),
        ({"prior": -1}, "prior must be positive"),
    ],
)
def test_it_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        adambs.Calibrated(**arguments)
