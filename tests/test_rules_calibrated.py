"""Calibrated, against a dense version of itself that knows nothing of groups in order."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import taught
from hypothesis import given
from hypothesis import strategies as st

import adambs
from adambs.rules import calibrated


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


def test_examples_are_numbered_with_four_bytes_each():
    rule = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 200).rule
    assert rule.state_dict()["order"].dtype == torch.int32
    assert rule._order.dtype == rule._place.dtype == np.int32


def test_more_examples_than_four_bytes_can_number(monkeypatch):
    """The same rule with 8 bytes each: only what is stored differs."""
    few = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 100)
    monkeypatch.setattr(calibrated, "_MOST_INT32", 299)
    many = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 100)
    state = many.rule.state_dict()
    assert state["order"].dtype == torch.int64
    assert torch.equal(state["order"], few.rule.state_dict()["order"])
    assert torch.equal(many.draw().indices, few.draw().indices)
    with pytest.raises(ValueError, match=r"state\['order'\] must be a tensor .* \(int64\)"):
        many.rule.with_state(few.rule.state_dict())


@pytest.mark.parametrize(
    ("position", "value"), [(0, 1), (7, 299), (299, -1), (5, 300), (5, 2**31 - 1), (5, -(2**31))]
)
def test_an_order_that_is_no_permutation_is_refused(position, value):
    rule = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 100).rule
    state = rule.state_dict()
    if 0 <= value < 300:
        value = int(state["order"][value])  # an example that stands somewhere else, too
    state["order"][position] = value
    with pytest.raises(ValueError, match=r"state\['order'\] must hold each of 300 examples once"):
        rule.with_state(state)


def test_a_hundred_million_examples_are_drawn_one_by_one():
    """Middles of members at all ends of uneven groups, in exact arithmetic. Zeros are the identity."""
    n = 10**8
    sizes = np.zeros(calibrated._SCORED + 1, np.int64)
    sizes[[0, 7, 30, 60, 89, 90]] = [1, 40_000_000, 3, 9_999_999, 1, n - 50_000_004]
    bounds = np.concatenate([[0], sizes.cumsum()])
    means, draws = np.ones(91), np.zeros(91)
    ratios, sums = np.empty_like(means), np.empty_like(means)
    calibrated._settle(ratios, sums, bounds, means, draws, 5.0, 0.05)
    assert sums[-1] == pytest.approx(n, rel=1e-12)
    exact = [Fraction(float(r)) for r in ratios]
    total = sum(int(size) * r for size, r in zip(sizes, exact, strict=True))
    u, expected, before = [], [], Fraction(0)
    for g in np.flatnonzero(sizes):
        for member in {0, 1, sizes[g] // 3, sizes[g] - 2, sizes[g] - 1} & set(range(sizes[g])):
            for part in (Fraction(1, 1000), Fraction(1, 2), Fraction(999, 1000)):
                u.append(float((before + (int(member) + part) * exact[g]) / total))
                expected.append(bounds[g] + member)
        before += int(sizes[g]) * exact[g]
    indices, drawn = np.empty(len(u), np.int64), np.empty(len(u))
    calibrated._draw(np.zeros(n, np.int32), bounds, sums, ratios, np.array(u), indices, drawn)
    np.testing.assert_array_equal(indices, expected)
    assert ratios.min() < 0.06 < 1 < ratios.max()
    assert set(drawn) == set(ratios[sizes > 0])


def test_starting_from_a_hundred_million_writes_nothing():
    rule = adambs.Calibrated()
    rule.start(10**8, 128, None)
    assert rule.draw(np.array([0.0, 0.123456785, 1.0]))[0].tolist() == [0, 12345678, 10**8 - 1]
    assert rule.spread() == pytest.approx((1, 0), abs=1e-15)


@given(n=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_initial_weights_are_grouped_like_scores(n, seed):
    """Counting sort in start, against moving each example from group to group in observe."""
    weights = np.random.default_rng(seed).gamma(0.2, 1.0, n) ** 3 + 1e-300
    sorted_, moved = adambs.Calibrated(), adambs.Calibrated()
    sorted_.start(n, 1, weights)
    moved.start(n, 1, None)
    moved.observe(np.arange(n), weights)
    assert np.array_equal(sorted_.groups(), moved.groups())
    assert np.array_equal(sorted_.bounds, moved.bounds)
    assert sorted_.unit == moved.unit
    np.testing.assert_array_equal(np.sort(sorted_.order), np.arange(n))
    np.testing.assert_array_equal(sorted_.order[sorted_._place ^ np.arange(n)], np.arange(n))


@pytest.mark.parametrize("first", [1e-300, 1e-308, 1.0])
def test_scores_may_rise_and_fall_by_any_factor(first):
    """Far above the unit all scores look alike; far below, all look like zero. Neither warns."""
    sampler = adambs.BanditSampler(50, 5, rule=adambs.Calibrated())
    for scale in (first, 1.0, 1e300, 1e-300):
        for _ in range(100):
            sampler.update(sampler.draw(), scale * np.array([0.1, 0.2, 0.5, 1.0, 1.5]))
        assert sampler.probabilities().sum() == pytest.approx(1, rel=1e-12)
        assert sampler.probabilities().min() >= 0.05 / 50


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
