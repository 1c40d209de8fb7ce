"""The rules that hold every example above a floor: Exp3 with other offsets, Release, Avare."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

import adambs
from adambs import reference
from adambs.lab.methods.bandit import Release as DenseRelease
from adambs.rules import exp3
from adambs.rules.avare import Avare
from adambs.rules.exp3 import Exp3
from adambs.rules.release import Release

RULES = [Exp3(step=3.0, offset="none"), Exp3(step=3.0, offset="baseline"), Release(), Avare(p_min=0.3)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)
other_offsets = pytest.mark.parametrize("offset", ["none", "baseline"])


# ----------------------------------------------------------------------- Exp3 with other offsets


class DenseExp3:
    """Algorithm 2 with another offset, for all n at once, and a baseline from the whole history."""

    def __init__(self, rule, project=reference.project):
        self.rule, self.project, self.means = rule, project, []

    def step(self, p, I, scores, drawn_with=None):
        rule, n = self.rule, len(p)
        r = n * (p if drawn_with is None else drawn_with)[I]
        x_squared = (rule.p_min * np.minimum(scores, rule.L) / (rule.L * r)) ** 2
        offset = 0.0
        if rule.offset == "baseline":
            ages = np.arange(len(self.means))[::-1]
            self.means.append(x_squared.mean())
            if not len(ages):
                return p
            offset = np.average(self.means[:-1], weights=0.99**ages)
        growth = np.zeros(n)
        np.add.at(growth, I, rule.step / r * (x_squared - offset))
        return self.project(p * np.exp(growth - growth.max()), rule.p_min / n)


@given(
    n=st.integers(2, 60),
    K=st.integers(1, 12),
    c=st.floats(0.01, 0.99),
    step=st.floats(1e-3, 300),
    offset=st.sampled_from(["none", "baseline"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_exp3_with_another_offset_is_the_dense_one(n, K, c, step, offset, seed):
    K = min(K, n)
    sampler = adambs.BanditSampler(n, K, rule=Exp3(L=1.7, p_min=c, step=step, offset=offset), seed=seed)
    dense = DenseExp3(sampler.rule)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        p = sampler.probabilities().numpy()
        draw = sampler.draw()
        np.testing.assert_allclose(draw.probabilities, p[draw.indices], rtol=1e-15)
        scores = rng.gamma(0.5, 1.0, K)  # some above L
        sampler.update(draw, scores)
        expected = dense.step(p, draw.indices.numpy(), scores)
        np.testing.assert_allclose(sampler.probabilities(), expected, rtol=1e-9)
        assert sampler.probabilities().min() >= c / n


@other_offsets
@pytest.mark.parametrize(("n", "K", "c", "step"), [(300, 10, 0.5, 50.0), (3000, 64, 0.3, 500.0)])
def test_hundreds_of_steps_with_most_examples_at_the_floor(offset, n, K, c, step):
    sampler = adambs.BanditSampler(n, K, rule=Exp3(p_min=c, step=step, offset=offset))
    dense = DenseExp3(sampler.rule, exp3.project)  # itself held against the reference in test_rules
    rng = np.random.default_rng(0)
    norms = rng.gamma(0.2, 1.0, n)
    for _ in range(400):
        p = sampler.probabilities().numpy()
        draw = sampler.draw()
        scores = norms[draw.indices] * rng.uniform(0.5, 1, K)
        sampler.update(draw, scores)
        expected = dense.step(p, draw.indices.numpy(), scores)
        np.testing.assert_allclose(sampler.probabilities(), expected, rtol=1e-9)
    assert (sampler.rule.ratios() < 1.001 * c).mean() > 0.5


@other_offsets
def test_free_running_stays_on_the_dense_one(offset):
    sampler = adambs.BanditSampler(200, 8, rule=Exp3(p_min=0.3, step=0.5, offset=offset))
    dense, p = DenseExp3(sampler.rule), np.full(200, 1 / 200)
    norms = np.random.default_rng(0).gamma(0.3, 1.0, 200)
    for _ in range(500):
        draw = sampler.draw()
        sampler.update(draw, norms[draw.indices])
        p = dense.step(p, draw.indices.numpy(), norms[draw.indices])
    np.testing.assert_allclose(sampler.probabilities(), p, rtol=1e-9)
    assert p.max() > 1.5 * p.min()


@other_offsets
def test_late_updates_with_another_offset(offset):
    n, K = 50, 5
    sampler = adambs.BanditSampler(n, K, rule=Exp3(step=0.5, offset=offset))
    dense, rng = DenseExp3(sampler.rule), np.random.default_rng(0)
    waiting = []
    for _ in range(400):
        waiting.append((sampler.draw(), sampler.probabilities().numpy()))
        if len(waiting) > 7:
            draw, drawn_with = waiting.pop(int(rng.integers(len(waiting))))
            p, scores = sampler.probabilities().numpy(), rng.uniform(0, 1, K)
            sampler.update(draw, scores)
            expected = dense.step(p, draw.indices.numpy(), scores, drawn_with)
            np.testing.assert_allclose(sampler.probabilities(), expected, rtol=1e-9)


@other_offsets
def test_an_example_that_stands_twice_in_the_batch_moves_twice(offset):
    rule = Exp3(step=1.0, p_min=0.5, offset=offset)
    rule.start(10, 4, None)
    rule.update(np.array([0, 1, 2, 3]), np.ones(4), np.full(4, 0.3))
    p = rule.ratios() / 10
    dense = DenseExp3(rule)
    dense.means = [(0.5 * 0.3) ** 2 / 2]
    batch = np.array([5, 7, 5, 5])
    scores = np.array([0.0, 1.0, 0.2, 9.0])
    assert rule.update(batch, 10 * p[batch], scores) == 1
    np.testing.assert_allclose(rule.ratios() / 10, dense.step(p, batch, scores), rtol=1e-12)


@other_offsets
@pytest.mark.parametrize("step", [1e-300, 1e3, 1e6, 1e12, 1e300, 1e308])
@pytest.mark.parametrize("n", [1, 2, 5, 400])
def test_no_step_size_over_or_underflows(n, step, offset):
    sampler = adambs.BanditSampler(n, min(n, 5), rule=Exp3(p_min=0.01, step=step, offset=offset))
    rng = np.random.default_rng(0)
    for _ in range(200):
        draw = sampler.draw()
        sampler.update(draw, rng.choice([0.0, 1e-300, 1.0, 1e300], len(draw)))
    p = sampler.probabilities().numpy()
    assert abs(p.sum() - 1) < 1e-12
    assert p.min() >= 0.01 / n


def test_a_total_that_grows_without_end_is_rescaled():
    sampler = adambs.BanditSampler(50, 5, rule=Exp3(p_min=0.1, step=1e4, offset="none"))
    dense, rescaled = DenseExp3(sampler.rule), 0
    for _ in range(300):
        p, before = sampler.probabilities().numpy(), sampler.rule.tree.total
        draw = sampler.draw()
        scores = np.full(5, 1.0)
        sampler.update(draw, scores)
        rescaled += sampler.rule.tree.total < before
        expected = dense.step(p, draw.indices.numpy(), scores)
        np.testing.assert_allclose(sampler.probabilities(), expected, rtol=1e-9)
    assert rescaled > 0


def test_the_first_batch_sets_the_baseline_and_moves_nothing():
    sampler = adambs.BanditSampler(20, 4, rule=Exp3(L=1.0, p_min=0.5, offset="baseline"))
    assert sampler.rule.baseline == 0.0
    sampler.update(sampler.draw(), [0.0, 1.0, 1.0, 7.0])
    assert sampler.rule.baseline == pytest.approx(0.75 * 0.25)
    assert torch.equal(sampler.probabilities(), torch.full((20,), 0.05, dtype=torch.float64))
    sampler.update(sampler.draw(), [0.0, 1.0, 1.0, 7.0])
    assert sampler.probabilities().max() > 0.05 > sampler.probabilities().min()


def test_an_offset_changes_the_noise_of_an_update_and_not_its_mean():
    n, K, trials = 8, 2, 6000
    norms, rng = np.linspace(0.6, 1.0, n), np.random.default_rng(0)
    means, noises = {}, {}
    for offset in ("none", "baseline"):
        rule = Exp3(L=1.0, p_min=0.4, step=0.1, offset=offset)
        rule.start(n, K, np.linspace(1, 2, n))
        r = rule.ratios()
        state = rule.state_dict()
        if offset == "baseline":
            state |= {"baseline": float(np.mean(r * (0.4 * norms / r) ** 2)), "memory": 1.0}
        changes = np.empty((trials, n))
        for change in changes:
            rule = rule.with_state(state)
            indices, ratios = rule.draw(rng.random(K))
            rule.update(indices, ratios, norms[indices])
            change[:] = np.log(rule.ratios() / r)
        changes -= changes.mean(1, keepdims=True)  # what all have in common changes no p
        means[offset], noises[offset] = changes.mean(0), changes.var(0)
    error = np.sqrt((noises["none"] + noises["baseline"]) / trials)
    assert (abs(means["none"] - means["baseline"]) < 4 * error).all()
    assert noises["baseline"].sum() < 0.3 * noises["none"].sum()
    assert (abs(means["baseline"]) > 4 * error).any()


def test_lifting_thousands_costs_what_was_drawn_and_not_what_is_there():
    n, K, steps = 20_000, 50, 1000
    norms = np.random.default_rng(0).gamma(0.1, 1.0, n)
    for rule in (Exp3(p_min=0.5, step=20.0, offset="none"), Exp3(p_min=0.5, step=20.0, offset="baseline")):
        sampler = adambs.BanditSampler(n, K, rule=rule)
        for _ in range(steps):
            draw = sampler.draw()
            sampler.update(draw, norms[draw.indices])
        assert (sampler.rule.ratios() < 0.5001).mean() > 0.5
        assert sampler.rule.tree.opened_nodes <= n + K * steps


# -------------------------------------------------------------------------------------- Release


def dense_release(n):
    """The lab's dense version, without the training around it."""
    dense = object.__new__(DenseRelease)
    dense.task, dense.low, dense.high = SimpleNamespace(n=n), math.inf, -math.inf
    return dense


@given(n=st.integers(1, 80), K=st.integers(1, 12), seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 1e3))
def test_release_is_the_labs_dense_version(n, K, seed, scale):
    K = min(n, K)
    sampler = adambs.BanditSampler(n, K, rule=Release(), seed=seed)
    dense, rng = dense_release(n), np.random.default_rng(seed)
    norms = rng.gamma(0.5, scale, n)
    for _ in range(60):
        dense.p = sampler.probabilities().numpy()
        draw = sampler.draw()
        scores = norms[draw.indices.numpy()]
        sampler.update(draw, scores)
        dense.learn(draw.indices.numpy(), scores)
        np.testing.assert_allclose(sampler.probabilities(), dense.p, rtol=1e-9)


@pytest.mark.parametrize(("n", "K"), [(400, 20), (5000, 10)])
def test_release_at_both_of_its_clips(n, K):
    """More than 1000 examples, so that the cap is below one, and enough growth for the lower clip."""
    sampler = adambs.BanditSampler(n, K, rule=Release())
    dense, rng = dense_release(n), np.random.default_rng(0)
    lowest, highest = 1.0, 1.0
    for step in range(300):
        dense.p = sampler.probabilities().numpy()
        draw = sampler.draw()
        # Only a few have large gradients, and others as training goes on.
        scores = np.where(draw.indices.numpy() % 50 == step // 30, 1.0, 1e-3 * rng.random(K))
        if step % 3 == 0:  # and some that p deems unlikely
            unlikely = np.argsort(dense.p)[:K]
            indices, ratios = unlikely, n * dense.p[unlikely]
            sampler.rule.update(indices, ratios, scores := np.ones(K))
        else:
            indices = draw.indices.numpy()
            sampler.update(draw, scores)
        dense.learn(indices, scores)
        np.testing.assert_allclose(sampler.probabilities(), dense.p, rtol=1e-9)
        lowest, highest = min(lowest, n * dense.p.min()), max(highest, n * dense.p.max())
    assert lowest <= (1e-5 if n == 400 else 0.1)
    assert 100 < highest <= 1000 * (1 + 1e-12)


def test_release_brings_a_teachers_weights_within_its_clips():
    n = 5000
    weights = np.zeros(n)
    weights[:3] = 5.0, 3.0, 0.001
    ratios = adambs.BanditSampler(n, 1, rule=Release(), initial_weights=weights).rule.ratios()
    np.testing.assert_allclose(ratios[:2], 1000, rtol=1e-12)
    assert ratios.mean() == pytest.approx(1, rel=1e-12)
    assert ratios.min() >= 1e-5
    assert np.ptp(ratios[3:]) == 0
    small = adambs.BanditSampler(4, 1, rule=Release(), initial_weights=[1, 2, 3, 4])
    np.testing.assert_allclose(small.probabilities(), [0.1, 0.2, 0.3, 0.4], rtol=1e-14)


def test_release_counts_an_example_drawn_twice_once_with_its_last_score():
    twice, once = Release(), Release()
    for rule in (twice, once):
        rule.start(6, 3, None)
    twice.update(np.array([1, 4, 1]), np.ones(3), np.array([0.0, 0.3, 1.0]))
    once.update(np.array([5, 4, 1]), np.ones(3), np.array([0.0, 0.3, 1.0]))  # a score of 0 moves nothing
    assert np.array_equal(twice.ratios(), once.ratios())
    assert twice.ratios()[1] > 2


# ---------------------------------------------------------------------------------------- Avare


@settings(max_examples=30)
@given(n=st.integers(1, 120), K=st.integers(1, 12), c=st.floats(0.01, 0.99), seed=st.integers(0, 2**32 - 1))
def test_avare_is_the_dense_solution_for_the_last_scores(n, K, c, seed):
    K = min(n, K)
    sampler = adambs.BanditSampler(n, K, rule=Avare(p_min=c), seed=seed)
    rng = np.random.default_rng(seed)
    last, unseen = np.zeros(n), np.ones(n, bool)
    for step in range(300):
        draw = sampler.draw()
        scores = rng.gamma(0.3, 1.0, K) * rng.choice([0.0, 1.0, 1.0, 10.0])
        sampler.update(draw, scores)
        if scores.any() and not last.any() and unseen.any():
            last[unseen] = scores.max()  # the first positive batch
        unseen[draw.indices] = False
        for j, score in zip(draw.indices, scores, strict=True):
            last[j] = score
        if step % 10 == 0 and last.any():
            expected = reference.project(last / last.sum(), c / n)
            np.testing.assert_allclose(sampler.probabilities(), expected, rtol=1e-9)
            assert sampler.probabilities().min() >= c / n
            assert np.array_equal(sampler.rule.last_scores, last)


def test_thousands_of_steps_of_avare():
    n, K = 1000, 16
    sampler = adambs.BanditSampler(n, K, rule=Avare(p_min=0.2))
    rng = np.random.default_rng(0)
    norms, last = rng.gamma(0.3, 1.0, n), None
    for step in range(5000):
        draw = sampler.draw()
        scores = norms[draw.indices] * rng.uniform(0.5, 1.5, K) * 0.9997**step
        sampler.update(draw, scores)
        last = np.full(n, scores.max()) if last is None else last
        last[draw.indices.numpy()] = scores  # of duplicates, numpy keeps the last
    expected = reference.project(last / last.sum(), 0.2 / n)
    np.testing.assert_allclose(sampler.probabilities(), expected, rtol=1e-9)
    assert sampler.rule.tree.low.mean() > 0.2
    assert sampler.rule.tree.crossings < 3 * 5000 * K
    assert sampler.diagnostics().variance_reduction > 1.3


def test_avare_minimises_the_second_moment():
    scores, c = np.array([0.05, 0.4, 1.0, 3.0, 0.9]), 0.3
    rule = Avare(p_min=c)
    rule.start(5, 1, scores)
    p = rule.ratios() / 5
    found = optimize.minimize(
        lambda q: (scores**2 / q).sum(),
        np.full(5, 0.2),
        bounds=[(c / 5, 1)] * 5,
        constraints={"type": "eq", "fun": lambda q: q.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-11, "maxiter": 500},
    )
    assert found.success
    np.testing.assert_allclose(p, found.x, atol=1e-5)
    assert (scores**2 / p).sum() <= found.fun * (1 + 1e-9)
    assert p[0] == pytest.approx(c / 5)


def test_unseen_examples_have_the_largest_score_of_the_first_batch():
    rule = Avare(p_min=0.1)
    rule.start(6, 2, None)
    assert np.array_equal(rule.ratios(), np.ones(6))
    rule.update(np.array([0, 1]), np.ones(2), np.array([0.0, 0.0]))  # says nothing about the scale
    np.testing.assert_allclose(rule.ratios(), [0.1, 0.1, 1.45, 1.45, 1.45, 1.45])
    rule.update(np.array([2, 3]), np.ones(2), np.array([3.0, 7.0]))
    assert np.array_equal(rule.last_scores, [0, 0, 3, 7, 7, 7])
    rule.update(np.array([4, 4]), np.ones(2), np.array([1.0, 9.0]))
    assert np.array_equal(rule.last_scores, [0, 0, 3, 7, 9, 7])


def test_avare_is_uniform_when_all_scores_are_zero_and_recovers():
    rule = Avare()
    rule.start(4, 4, None)
    for scores in ([1.0, 2.0, 3.0, 4.0], [0.0] * 4):
        rule.update(np.arange(4), np.ones(4), np.array(scores))
    assert np.array_equal(rule.ratios(), np.ones(4))
    assert np.array_equal(rule.draw(np.array([0.1, 0.3, 0.6, 0.9]))[0], np.arange(4))
    rule.update(np.array([2]), np.ones(1), np.array([1e-8]))
    np.testing.assert_allclose(rule.ratios(), [0.1, 0.1, 3.7, 0.1], rtol=1e-12)


def test_avare_takes_scores_from_outside_a_draw():
    told, taught_ = Avare(), Avare()
    scores = np.random.default_rng(0).gamma(0.5, 1.0, 30)
    for rule in (told, taught_):
        rule.start(30, 5, None)
    assert told.observe(np.arange(30), scores) == 0
    taught_.update(np.arange(30), np.ones(30), scores)
    assert np.array_equal(told.ratios(), taught_.ratios())
    assert told.observe(np.array([3, 4]), np.array([1e308, 2.0])) == 1
    assert told.ratios()[3] > 25


def test_avare_takes_a_teachers_weights_for_scores():
    weights = np.array([1.0, 2.0, 0.0, 5.0])
    sampler = adambs.BanditSampler(4, 1, rule=Avare(p_min=0.2), initial_weights=weights)
    np.testing.assert_allclose(sampler.probabilities(), reference.project(weights / 8, 0.05), rtol=1e-9)
    sampler.rule.update(np.array([0]), np.ones(1), np.array([7.0]))
    assert np.array_equal(sampler.rule.last_scores, [7, 2, 0, 5])


@pytest.mark.parametrize(
    ("p_min", "error", "words"),
    [(0, ValueError, "strictly between 0 and 1"), (1, ValueError, "Uniform"), ("x", TypeError, "a number")],
)
def test_avare_refuses(p_min, error, words):
    with pytest.raises(error, match=words):
        Avare(p_min=p_min)


# --------------------------------------------------------------------------------- all of them


@every_rule
def test_a_state_of_other_settings_is_refused(rule):
    sampler = adambs.BanditSampler(30, 5, rule=rule)
    other = adambs.BanditSampler(30, 5, rule=Exp3(step=3.0))
    with pytest.raises(ValueError, match="rule"):
        sampler.load_state_dict(other.state_dict())


def test_settings_are_printed():
    assert repr(RULES[0]) == "Exp3(L=1.41421, p_min=0.5, step=3, offset='none')"
    assert repr(RULES[2]) == "Release()"
    assert repr(RULES[3]) == "Avare(p_min=0.3)"
