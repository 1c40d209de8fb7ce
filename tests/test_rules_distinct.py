"""Exp3M, the rule of AdamCB: K distinct examples, against the dense version."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import adambs
from adambs import Exp3M, reference
from adambs.trees.capped import CappedTree


def sampler_and_oracle(n, K, rule, **options):
    """A sampler, and the dense update with the same settings."""
    sampler = adambs.BanditSampler(n, K, rule=rule, **options)
    constants = {"K": K, "L": rule.L, "gamma": rule.gamma, "step": rule.step}
    return sampler, lambda w, J, scores: reference.exp3m_update(w, J, scores, **constants)


@given(
    n=st.integers(1, 60),
    K=st.integers(1, 60),
    gamma=st.floats(0.001, 0.99),
    factor=st.floats(0.1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_the_fast_rule_is_the_dense_one(n, K, gamma, factor, seed):
    """The two run apart. (A step amplifies rounding by 1 + step/r, so not for ever.)"""
    K = min(K, n)
    rule = Exp3M(L=1.7, gamma=gamma, step=gamma * factor)
    sampler, oracle = sampler_and_oracle(n, K, rule, seed=seed)
    rng, w = np.random.default_rng(seed), np.ones(n)
    for _ in range(40):
        P = reference.exp3m_inclusion(w, K, gamma)
        np.testing.assert_allclose(sampler.probabilities() * K, P, rtol=1e-7)
        draw = sampler.draw()
        J = draw.indices.numpy()
        assert len(set(J.tolist())) == K
        np.testing.assert_allclose(draw.weights, K / (n * P[J]), rtol=1e-6)
        scores = rng.gamma(0.5, 1.0, K)  # some above L
        sampler.update(draw, scores)
        w = oracle(w, J, scores)
        assert sampler.rule.certain == reference.exp3m_capped(w, K, gamma)[1].sum()


@pytest.mark.parametrize(("n", "K"), [(1000, 32), (5000, 100), (300, 2)])
def test_thousands_of_steps_stay_on_the_reference(n, K):
    rule = Exp3M()
    sampler, oracle = sampler_and_oracle(n, K, rule)
    rng = np.random.default_rng(1)
    norms = rng.gamma(0.3, 1.0, n).clip(max=math.sqrt(2))
    w = np.ones(n)
    for _ in range(1000):
        draw = sampler.draw()
        scores = norms[draw.indices] * rng.uniform(0.5, 1, K)
        sampler.update(draw, scores)
        w = oracle(w, draw.indices.numpy(), scores)
    P = reference.exp3m_inclusion(w, K, rule.gamma)
    np.testing.assert_allclose(sampler.probabilities() * K, P, rtol=1e-6)
    assert np.ptp(P) > 0.1 * K / n


def test_certain_examples_are_in_every_batch_and_keep_their_weight():
    n, K = 50, 10
    weights = np.ones(n)
    weights[[3, 17, 41]] = 1e6, 300.0, 1e3
    sampler, oracle = sampler_and_oracle(n, K, Exp3M(gamma=0.2), initial_weights=weights)
    assert sampler.rule.certain == 3
    rng, w = np.random.default_rng(0), weights.copy()
    for _ in range(500):
        draw = sampler.draw()
        J = draw.indices.numpy()
        assert {3, 17, 41} <= set(J.tolist())
        np.testing.assert_allclose(draw.probabilities[np.isin(J, [3, 17, 41])] * K, 1, rtol=1e-12)
        scores = rng.gamma(0.5, 0.5, K)
        sampler.update(draw, scores)
        w = oracle(w, J, scores)
        np.testing.assert_allclose(
            sampler.probabilities() * K, reference.exp3m_inclusion(w, K, 0.2), rtol=1e-9
        )
    assert sampler.rule.certain >= 3


@pytest.mark.parametrize(
    ("n", "K", "spread", "seed"),
    [(12, 5, 1.0, 0), (12, 5, 3.0, 1), (40, 3, 1.0, 2), (17, 16, 2.0, 3), (300, 20, 1.5, 4), (7, 7, 1.0, 5)],
)
def test_examples_are_included_as_often_as_they_should(n, K, spread, seed):
    """z-tests of each example's frequency, and one chi-square over all of them."""
    rng, draws = np.random.default_rng(seed), 20_000
    weights = rng.lognormal(0, spread, n)
    sampler = adambs.BanditSampler(n, K, rule=Exp3M(gamma=0.1), initial_weights=weights, seed=seed)
    P = reference.exp3m_inclusion(weights, K, 0.1)
    seen = np.zeros(n)
    for _ in range(draws):
        np.add.at(seen, sampler.rule.draw(rng.random(K))[0], 1)
    certain = P > 1 - 1e-9
    assert (seen[certain] == draws).all()
    seen, P = seen[~certain], P[~certain]
    z = (seen - draws * P) / np.sqrt(draws * P * (1 - P))
    if len(z):
        # The batch size is fixed, so the squares sum to less than those of independent ones: an upper bound.
        assert (z**2).sum() < stats.chi2.ppf(1 - 1e-4, len(z))
        assert abs(z).max() < 4.5


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_part_of_a_batch_has_the_same_ratios(count):
    """Where a reshuffled pass ends within a batch, the rule is asked for fewer than K."""
    n, K, draws = 9, 4, 20_000
    weights = np.random.default_rng(0).lognormal(0, 1.5, n)
    rule = adambs.BanditSampler(n, K, rule=Exp3M(gamma=0.1), initial_weights=weights).rule
    seen, rng = np.zeros(n), np.random.default_rng(1)
    for _ in range(draws):
        np.add.at(seen, rule.draw(rng.random(count))[0], 1)
    P = rule.ratios() * count / n
    z = (seen - draws * P) / np.sqrt(draws * P * (1 - P) + 1e-300)
    assert abs(z).max() < 4


def test_draws_are_deville_s():
    """All subsets of a small case, with the probabilities that follow from the definition by hand.

    P = (0.5, 0.75, 0.75): the second straddles the border with a = 0.5 before and b = 0.25 behind it. From
    the first piece 0 and 1 come with 1/2 each. After 1 only 2 is left. After 0, 1 comes with b / (1 - a).
    """
    weights = np.array([0.5, 0.75, 0.75])
    tree = CappedTree(weights, 1.0)
    rng, found = np.random.default_rng(0), {}
    for _ in range(20_000):
        pair = tuple(sorted(tree.draw(rng.random(2), 0.0).tolist()))
        found[pair] = found.get(pair, 0) + 1
    expected = {(0, 1): 0.25, (0, 2): 0.25, (1, 2): 0.5}
    assert found.keys() == expected.keys()
    assert (
        stats.chisquare([found[p] for p in expected], [20_000 * q for q in expected.values()]).pvalue > 1e-3
    )


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_the_gradient_is_unbiased_by_enumeration(K):
    """The mean over a fine grid of all u, which is the integral up to the cells that a border cuts."""
    n, steps = 5, {1: 4000, 2: 200, 3: 40, 4: 16}[K]
    weights = np.array([0.3, 2.0, 0.7, 0.1, 1.1])
    rule = adambs.BanditSampler(n, K, rule=Exp3M(gamma=0.2), initial_weights=weights).rule
    grid = (np.arange(steps) + 0.5) / steps
    met, cells = np.zeros(n), 0
    for u in itertools.product(grid, repeat=K):
        indices, ratios = rule.draw(np.array(u))
        met[indices] += 1 / (K * ratios)
        cells += 1
    np.testing.assert_allclose(met / cells, 1 / n, atol=2.0 / steps)


@given(
    weights=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=80),
    share=st.floats(0.02, 0.99),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_no_weight_has_more_than_its_share(weights, share, data):
    tree = CappedTree(np.array(weights), share)
    dense = np.array(weights)
    for _ in range(4):
        assert tree.weights.max() <= share * tree.total * (1 + 1e-9) or len(weights) * share < 1 + 1e-9
        fresh = CappedTree(tree.weights, share)
        assert np.array_equal(fresh.weights, tree.weights)  # lowering twice is lowering once
        assert (fresh.total, fresh.lowered) == (tree.total, tree.lowered)
        np.testing.assert_allclose(tree.total, tree.weights.sum(), rtol=1e-12)
        indices = np.array(data.draw(st.lists(st.integers(0, len(weights) - 1), max_size=6)), np.int64)
        before = tree.weights.copy()
        tree.shrink(indices, np.full(len(indices), 0.7))
        assert (tree.weights <= before * (1 + 1e-12)).all()
        assert len(dense) == len(before)


def test_stratified_draws_and_contexts_are_refused():
    with pytest.raises(ValueError, match="stratified must be False with Exp3M"):
        adambs.BanditSampler(40, 4, rule=Exp3M(), stratified=True)
    with pytest.raises(TypeError, match="Exp3M has no use for a context"):
        adambs.BanditSampler(40, 4, rule=Exp3M(), context=[0] * 40)
    with pytest.raises(ValueError, match="gamma must lie strictly between 0 and 1, not 1"):
        Exp3M(gamma=1.0)
    with pytest.raises(ValueError, match="step must be"):
        Exp3M(step=0.0)
    with pytest.raises(TypeError, match="rule must be Calibrated"):
        adambs.ShardedSampler(40, 4, rule=Exp3M())


def test_looks_take_candidates_in_distinct_batches():
    n, K = 60, 4
    sampler = adambs.BanditSampler(n, K, rule=Exp3M(), candidates=adambs.Candidates(3, cost=1e-3))
    norms = np.random.default_rng(0).gamma(0.2, 1.0, n)
    asked = []

    def score(indices):
        asked.append(indices.tolist())
        return norms[indices]

    for _ in range(50):
        draw = sampler.draw(score)
        assert draw.weights.min() > 0
        sampler.update(draw, norms[draw.indices])
    assert len(asked) > 10
    assert all(len(set(part)) == K for part in (c[i : i + K] for c in asked for i in (0, K, 2 * K)))


def test_a_sampler_resumes_while_examples_are_certain():
    weights = np.ones(40)
    weights[:3] = 1e4
    make = lambda: adambs.BanditSampler(40, 8, rule=Exp3M(gamma=0.1), initial_weights=weights, seed=2)  # noqa: E731
    straight, resumed = make(), make()
    rng = np.random.default_rng(0)
    for _ in range(40):
        straight.update(straight.draw(), rng.gamma(0.5, 0.5, 8))
    assert straight.rule.certain >= 3
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    for _ in range(40):
        draws, scores = (straight.draw(), resumed.draw()), rng.gamma(0.5, 0.5, 8)
        assert torch.equal(draws[0].indices, draws[1].indices)
        straight.update(draws[0], scores)
        resumed.update(draws[1], scores)
    assert same(straight.state_dict(), resumed.state_dict())


def test_the_weights_are_rescaled_before_they_underflow():
    n, K = 64, 16
    rule = adambs.BanditSampler(n, K, rule=Exp3M(gamma=0.05, step=1.0)).rule
    norms = np.random.default_rng(0).gamma(0.5, 0.5, n).clip(max=1.4)
    rng = np.random.default_rng(1)
    largest = 0.0
    for _ in range(20_000):
        indices, ratios = rule.draw(rng.random(K))
        before = rule.tree.total
        rule.update(indices, ratios, norms[indices])
        largest = max(largest, rule.tree.total / before)
    assert largest > 2.0**200  # it was rescaled
    assert rule.ratios().mean() == pytest.approx(1, rel=1e-12)
    assert rule.tree.weights.min() > 0
