"""Exp3 and Uniform."""

import math

import numpy as np
import pytest
import torch
from helpers import same, taught
from hypothesis import given
from hypothesis import strategies as st

import adambs
from adambs import reference
from adambs.rules.exp3 import _algorithm_2, project
from adambs.trees import SumTree
from adambs.trees._floors import raised


def sampler_and_oracle(n, K, rule, **options):
    """A sampler, and a function that gives the same feedback to the dense reference."""
    sampler = adambs.BanditSampler(n, K, rule=rule, **options)
    rule = sampler.rule
    constants = {"L": rule.L, "p_min": rule.p_min / n, "alpha_p": rule.alpha_p}
    return sampler, lambda p, *feedback, **more: reference.update(p, *feedback, **constants, **more)


@given(
    n=st.integers(2, 60),
    K=st.integers(1, 12),
    c=st.floats(0.01, 0.99),
    step=st.floats(1e-3, 30),
    seed=st.integers(0, 2**32 - 1),
    stratified=st.booleans(),
)
def test_the_fast_path_is_algorithm_2(n, K, c, step, seed, stratified):
    K = min(K, n)
    rule = adambs.Exp3(L=1.7, p_min=c, step=step)
    sampler, oracle = sampler_and_oracle(n, K, rule, seed=seed, stratified=stratified)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        p = sampler.probabilities().numpy()
        draw = sampler.draw()
        indices = draw.indices.numpy()
        np.testing.assert_allclose(draw.probabilities, p[indices], rtol=1e-15)
        scores = rng.gamma(0.5, 1.0, K)  # some above L
        sampler.update(draw, scores)
        np.testing.assert_allclose(sampler.probabilities(), oracle(p, indices, scores), rtol=1e-9)


@pytest.mark.parametrize(("n", "K", "step"), [(1000, 32, 0.1), (5000, 100, 0.2), (200, 2, 0.1)])
def test_thousands_of_steps_stay_on_the_reference(n, K, step):
    """The two run apart for 3,000 steps. (A step amplifies rounding by 1 + step/r, so not for ever.)"""
    sampler, oracle = sampler_and_oracle(n, K, adambs.Exp3(p_min=0.2, step=step))
    rng = np.random.default_rng(1)
    norms = rng.gamma(0.3, 1.0, n).clip(max=math.sqrt(2))
    p = np.full(n, 1 / n)
    for _ in range(3000):
        draw = sampler.draw()
        scores = norms[draw.indices] * rng.uniform(0.5, 1, K)
        sampler.update(draw, scores)
        p = oracle(p, draw.indices.numpy(), scores)
    np.testing.assert_allclose(sampler.probabilities(), p, rtol=1e-9)
    assert np.ptp(p) > 0.5 / n


def test_the_papers_offset_is_the_kernel_and_the_tree_and_nothing_else():
    n, K = 300, 20
    sampler = adambs.BanditSampler(n, K, rule=adambs.Exp3(step=0.7, offset="paper"))
    tree, rng = SumTree(np.ones(n)), np.random.default_rng(0)
    for _ in range(300):
        draw = sampler.draw()
        indices, ratios = draw.indices.numpy(), draw._ratios
        assert np.array_equal(ratios, tree.weights[indices] * n / tree.total)
        scores = rng.gamma(0.5, 1.0, K)
        sampler.update(draw, scores)
        constants = 0.7, math.sqrt(2), 0.5, raised(0.5 / n, n)
        changed, *_ = _algorithm_2(tree.leaves, tree.total, indices, ratios, scores, *constants)
        tree.refresh(changed)
        assert np.array_equal(sampler.rule.tree.weights, tree.weights)
    assert same(sampler.rule.state_dict(), {"weights": torch.from_numpy(tree.weights.copy())})
    assert adambs.Exp3().offset == "paper"


def test_late_and_out_of_order_updates_use_the_probabilities_of_their_own_draw():
    n, K = 50, 5
    sampler, oracle = sampler_and_oracle(n, K, adambs.Exp3(step=0.5))
    rng = np.random.default_rng(0)
    p, waiting = np.full(n, 1 / n), []
    for _ in range(400):
        waiting.append((sampler.draw(), p))
        if len(waiting) > 7:
            draw, drawn_with = waiting.pop(int(rng.integers(len(waiting))))
            if rng.random() < 0.1:
                continue  # never comes back
            scores = rng.uniform(0, 1, K)
            sampler.update(draw, scores)
            p = oracle(p, draw.indices.numpy(), scores, drawn_with=drawn_with)
            np.testing.assert_allclose(sampler.probabilities(), p, rtol=1e-9)


def test_ten_million_updates_keep_p_a_distribution_above_its_floor():
    n, K = 2000, 1000
    sampler = adambs.BanditSampler(n, K, rule=adambs.Exp3(p_min=0.2, step=0.5))
    scores = np.random.default_rng(0).gamma(0.5, 0.5, n).clip(max=1.4)
    rescaled = 0
    for _ in range(10_000):  # times K = 10^7 examples
        draw = sampler.draw()
        before = sampler.rule.tree.total
        sampler.update(draw, scores[draw.indices])
        rescaled += sampler.rule.tree.total > 2 * before
        assert sampler.rule.tree.total > 2.0**-600
    p = sampler.probabilities().numpy()
    assert rescaled > 0
    assert abs(math.fsum(p) - 1) < 1e-12
    assert p.min() >= 0.2 / n
    assert p.min() < 0.21 / n < 2 / n < p.max()


@pytest.mark.parametrize("step", [1e-300, 1e3, 1e12, 1e300])
@pytest.mark.parametrize("n", [1, 2, 5, 400])
def test_no_step_size_over_or_underflows(n, step):
    sampler = adambs.BanditSampler(n, min(n, 5), rule=adambs.Exp3(p_min=0.01, step=step))
    rng = np.random.default_rng(0)
    for _ in range(200):
        draw = sampler.draw()
        sampler.update(draw, rng.choice([0.0, 1e-300, 1.0, 1e300], len(draw)))
    p = sampler.probabilities().numpy()
    assert abs(p.sum() - 1) < 1e-12
    assert p.min() >= 0.01 / n


@pytest.mark.parametrize("offset", ["paper", "none", "baseline"])
@pytest.mark.parametrize("c", [1e-9, 0.5, 0.999, 0.99999, 1 - 1e-9, 1 - 1e-12, 1 - 2**-53])
@pytest.mark.parametrize(("n", "K"), [(3, 3), (50, 5), (40, 30)])
def test_no_probability_falls_below_p_min(n, K, c, offset):
    """Near one the floor is nearly all of the total, so raising it hardly raises p."""
    weights = np.random.default_rng(1).gamma(0.2, 1.0, n) + 1e-9
    sampler = adambs.BanditSampler(
        n, K, rule=adambs.Exp3(p_min=c, step=3.0, offset=offset), initial_weights=weights
    )
    rng = np.random.default_rng(0)
    for _ in range(300):
        r = sampler.rule.ratios()
        assert r.min() >= min(c, 1 - 1e-12)
        assert r.mean() == pytest.approx(1, rel=1e-12)
        sampler.update(sampler.draw(), rng.gamma(0.3, 1.0, K))


def test_rescaling_changes_no_probability_by_a_bit():
    sampler = taught(adambs.BanditSampler(100, 10, rule=adambs.Exp3(step=1.0)), 300)
    before = sampler.probabilities()
    sampler.rule.tree.rescale(-700)
    assert torch.equal(sampler.probabilities(), before)


def test_scores_above_L_are_clipped_and_counted():
    clipped, bounded = (adambs.BanditSampler(20, 4, rule=adambs.Exp3(L=2.0, step=0.5)) for _ in range(2))
    draw, same_draw = clipped.draw(), bounded.draw()
    clipped.update(draw, [0.5, 2.0, 2.1, 1e9])
    bounded.update(same_draw, [0.5, 2.0, 2.0, 2.0])
    assert torch.equal(clipped.probabilities(), bounded.probabilities())
    assert clipped.diagnostics().clipped_scores == 2
    assert bounded.diagnostics().clipped_scores == 0


def test_a_bound_that_most_scores_exceed_is_warned_of_once():
    sampler = adambs.BanditSampler(20, 4, rule=adambs.Exp3(L=0.1))
    for _ in range(49):
        sampler.update(sampler.draw(), torch.ones(4))
    with pytest.warns(RuntimeWarning, match="200 of the first 200 scores were above the bound"):
        sampler.update(sampler.draw(), torch.ones(4))
    for _ in range(100):  # a second warning would be an error here
        sampler.update(sampler.draw(), torch.ones(4))
    assert sampler.diagnostics().clipped_scores == 600


def test_step_alpha_p_and_horizon_say_the_same():
    n, K, L, c, T = 300, 20, 1.3, 0.4, 5000
    R_squared = reference.lemma_1_R_squared(n, c / n)
    alpha_p = reference.lemma_1_alpha_p(n=n, T=T, L=L, p_min=c / n, R_squared=R_squared)
    by_horizon = adambs.BanditSampler(n, K, rule=adambs.Exp3(L=L, p_min=c, horizon=T)).rule
    by_alpha = adambs.BanditSampler(n, K, rule=adambs.Exp3(L=L, p_min=c, alpha_p=alpha_p)).rule
    by_step = adambs.BanditSampler(n, K, rule=adambs.Exp3(L=L, p_min=c, step=by_alpha.step)).rule
    for rule in (by_horizon, by_alpha, by_step):
        assert rule.alpha_p == pytest.approx(alpha_p, rel=1e-12)


def test_step_is_the_exponent_of_a_drawn_example_of_zero_gradient():
    sampler = adambs.BanditSampler(1000, 1, rule=adambs.Exp3(p_min=0.01, step=0.25))
    draw = sampler.draw()
    sampler.update(draw, [0.0])
    p = sampler.probabilities()
    undrawn = (int(draw.indices[0]) + 1) % 1000
    assert p[draw.indices[0]] / p[undrawn] == pytest.approx(math.exp(-0.25), rel=1e-12)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_a_teachers_weights_are_projected_onto_the_allowed_set(weights, c):
    weights = np.array(weights)
    weights[0] += 1e-3
    n = len(weights)
    expected = reference.project(weights / weights.sum(), c / n)
    np.testing.assert_allclose(project(weights, c / n), expected, rtol=1e-9)
    sampler = adambs.BanditSampler(n, 1, rule=adambs.Exp3(p_min=c), initial_weights=weights)
    np.testing.assert_allclose(sampler.probabilities(), expected, rtol=1e-9)
    assert sampler.probabilities().min() >= c / n


def test_exp3_finds_the_examples_with_large_gradients():
    n = 200
    norms = np.where(np.arange(n) < 20, 1.4, 0.05)
    sampler = adambs.BanditSampler(n, 20, rule=adambs.Exp3(p_min=0.5, step=0.02))
    for _ in range(20_000):
        draw = sampler.draw()
        sampler.update(draw, norms[draw.indices])
    p = sampler.probabilities().numpy()
    assert p[:20].mean() > 2 * p[20:].mean()
    assert sampler.diagnostics().variance_reduction > 1.5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"L": 0}, ValueError, "L must be positive and finite, not 0"),
        ({"L": math.nan}, ValueError, "L must be positive and finite, not nan"),
        ({"L": "big"}, TypeError, "L must be a number, not 'big'"),
        ({"p_min": 0}, ValueError, "p_min must lie strictly between 0 and 1, not 0"),
        ({"p_min": 1}, ValueError, "Uniform"),
        ({"step": -1}, ValueError, "step must be positive"),
        ({"alpha_p": math.inf}, ValueError, "alpha_p must be positive and finite, not inf"),
        ({"horizon": 0}, ValueError, "horizon must be at least 1, not 0"),
        ({"horizon": 1.5}, TypeError, "horizon must be a whole number, not 1.5"),
        ({"step": 1, "horizon": 7}, ValueError, "step=1 and horizon=7 say the same thing twice"),
        ({"offset": "mean"}, ValueError, "offset must be one of 'paper', 'none', 'baseline', not 'mean'"),
        ({"offset": 0.5}, ValueError, "offset must be one of 'paper', 'none', 'baseline', not 0.5"),
    ],
)
def test_exp3_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        adambs.Exp3(**arguments)


def test_uniform_draws_every_example_alike_with_weights_of_one():
    sampler = adambs.BanditSampler(49, 7, rule=adambs.Uniform())  # 1/(49 (1/49)) rounds to below 1
    draws = [sampler.draw() for _ in range(200)]
    assert all(torch.equal(draw.weights, torch.ones(7, dtype=torch.float64)) for draw in draws)
    sampler.update(draws[0], torch.rand(7))
    np.testing.assert_allclose(sampler.probabilities(), 1 / 49, rtol=1e-15)
    assert sampler.rule.draw(np.array([0.0, 1.0]))[0].tolist() == [0, 48]
    with pytest.raises(ValueError, match="initial_weights has no meaning for Uniform"):
        adambs.BanditSampler(3, 1, rule=adambs.Uniform(), initial_weights=[1, 2, 3])
