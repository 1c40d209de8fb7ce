"""LastingFloor and PassingFloor against plain arrays: the same weights, sums and draws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from adambs import reference
from adambs.trees import LastingFloor, PassingFloor

SIZES = [1, 2, 15, 16, 17, 256, 257, 5000]
EDGES = np.array([0.0, 5e-324, 1e-300, 0.5, np.nextafter(1.0, 0.0), 1.0])


def assert_same_draws(draw, p, u):
    """Compare with cumsum and searchsorted wherever u is not within rounding of a boundary."""
    ends = np.cumsum(p)
    expected = np.minimum(np.searchsorted(ends, u, side="right"), len(p) - 1)
    edge = np.concatenate([[0.0], ends])
    clear = np.minimum(np.abs(u - edge[expected]), np.abs(u - edge[expected + 1])) > 1e-12
    indices, ratios = draw(u)
    np.testing.assert_array_equal(indices[clear], expected[clear])
    np.testing.assert_allclose(ratios, len(p) * p[indices], rtol=1e-14)


def assert_rebuilt_the_same(tree):
    """Every inner node is a function of the weights, to the bit."""
    again = LastingFloor(tree.weights)
    for column in ("_least", "_next_least", "_count", "_rest"):
        assert np.array_equal(getattr(tree, column), getattr(again, column))


def some_weights(rng, size, discrete):
    return rng.integers(1, 9, size).astype(float) if discrete else rng.lognormal(sigma=2.0, size=size)


# ------------------------------------------------------------------------------- LastingFloor


@given(n=st.integers(1, 600), seed=st.integers(0, 2**32 - 1), discrete=st.booleans())
def test_lifting_is_a_maximum_for_good(n, seed, discrete):
    """Discrete weights: floors that hit weights exactly, and many of the same weight."""
    rng = np.random.default_rng(seed)
    weights = some_weights(rng, n, discrete)
    tree = LastingFloor(weights)
    for _ in range(40):
        if rng.random() < 0.5:
            floor = some_weights(rng, 1, discrete)[0] * rng.choice([0.3, 1.0])
            tree.lift(floor)
            weights = np.maximum(weights, floor)
        else:
            indices = rng.integers(0, n, rng.integers(1, 6))
            values = some_weights(rng, len(indices), discrete)
            tree.write(indices, values)
            weights[indices] = values
        some = rng.integers(0, n, 5)
        assert np.array_equal(tree.weights_at(some), weights[some])
        assert tree.total == pytest.approx(math.fsum(weights), rel=1e-13)
        if rng.random() < 0.2:
            assert np.array_equal(tree.weights, weights)
            assert_rebuilt_the_same(tree)
    assert_same_draws(tree.draw_with_ratios, weights / weights.sum(), np.concatenate([rng.random(50), EDGES]))


@pytest.mark.parametrize("n", SIZES)
def test_the_quantiles_cover_all_examples_in_their_order(n):
    tree = LastingFloor(np.random.default_rng(n).exponential(size=n))
    tree.lift(0.7)
    p = tree.weights / tree.total
    middles = np.cumsum(p) - p / 2
    assert np.array_equal(tree.draw_with_ratios(middles)[0], np.arange(n))
    assert np.array_equal(tree.draw_with_ratios(np.array([0.0, 1.0]))[0], [0, n - 1])
    assert_same_draws(tree.draw_with_ratios, p, np.random.default_rng(0).random(2000))


def test_frequencies_are_proportional_to_weight_above_and_at_the_floor():
    rng = np.random.default_rng(0)
    tree = LastingFloor(rng.exponential(size=300))
    tree.lift(0.5)
    tree.write(np.arange(0, 300, 10), rng.uniform(0.1, 0.2, 30))  # the floor falls ...
    tree.lift(0.15)  # ... and rises: some at 0.5, some at 0.15
    drawn, ratios = tree.draw_with_ratios(rng.random(300_000))
    seen = np.bincount(drawn, minlength=300)
    assert stats.chisquare(seen, tree.ratios() * 1000).pvalue > 0.001
    for level in (0.5, 0.15):
        members = seen[tree.weights == level]
        assert len(members) > 10
        assert stats.chisquare(members).pvalue > 0.001
    assert np.array_equal(ratios, tree.ratios()[drawn])
    assert np.array_equal(ratios, tree.ratios(drawn))


@given(
    weights=st.lists(st.sampled_from([1e-9, 0.1, 0.5, 1.0, 1.0001, 3.0, 50.0]), min_size=1, max_size=60),
    c=st.floats(0.01, 0.99),
)
def test_the_projection_is_the_dense_one(weights, c):
    weights = np.array(weights)
    n = len(weights)
    tree = LastingFloor(weights)
    tree.project(c / n)
    expected = reference.project(weights / weights.sum(), c / n)
    np.testing.assert_allclose(tree.ratios() / n, expected, rtol=1e-9)
    assert tree.ratios().min() >= c
    before = tree.weights
    tree.project(c / n)
    assert np.array_equal(tree.weights, before)


def test_a_total_far_from_one_is_rescaled_without_changing_a_probability():
    rng = np.random.default_rng(0)
    for scale in (2.0**600, 2.0**-600):
        weights = rng.exponential(size=100)
        tree, plain = LastingFloor(weights * scale), LastingFloor(weights)
        tree.lift(0.2 * scale)
        plain.lift(0.2)
        assert 0.25 < tree.total < 4
        assert np.array_equal(tree.ratios(), plain.ratios())
        assert_rebuilt_the_same(tree)


def test_the_work_of_all_lifts_is_bounded_by_what_was_written():
    """Floors up and down over 20,000 examples, most of which are at some floor at any time."""
    n, steps, K = 20_000, 400, 50
    rng = np.random.default_rng(0)
    tree = LastingFloor(rng.exponential(size=n))
    for step in range(steps):
        tree.write(rng.integers(0, n, K), rng.exponential(size=K))
        tree.lift(0.7 + 0.5 * math.sin(step / 5))
    inner_levels = 4  # 20,000 -> 1,250 -> 79 -> 5 -> 1
    assert (tree.weights < 1.21).mean() > 0.5
    assert 0 < tree.opened_nodes <= (n + K * steps) * inner_levels
    assert tree.opened_nodes < 0.15 * steps * n / 16  # of the nodes above the leaves at every step


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e308])
def test_a_lasting_floor_wants_positive_weights(bad):
    with pytest.raises(ValueError, match=r"weights\[1\] is .*must be positive"):
        LastingFloor(np.array([1.0, bad, 2.0]))


# ------------------------------------------------------------------------------- PassingFloor


@given(
    n=st.integers(1, 400),
    c=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
    discrete=st.booleans(),
)
def test_a_passing_floor_lets_weights_return(n, c, seed, discrete):
    rng = np.random.default_rng(seed)
    weights = some_weights(rng, n, discrete)
    tree = PassingFloor(weights, c / n)
    for _ in range(40):
        indices = rng.integers(0, n, rng.integers(1, 6))
        values = some_weights(rng, len(indices), discrete) * rng.choice([0, 0.1, 1, 1, 1, 100])
        tree.write(indices, values)
        for j, value in zip(indices, values, strict=True):
            weights[j] = value
        expected = reference.project(weights / weights.sum(), c / n) if weights.any() else np.full(n, 1 / n)
        np.testing.assert_allclose(tree.ratios() / n, expected, rtol=1e-9)
        assert tree.ratios().min() >= c
    assert_same_draws(tree.draw_with_ratios, tree.ratios() / n, np.concatenate([rng.random(50), EDGES]))


@pytest.mark.parametrize("n", SIZES)
def test_the_quantiles_cover_the_free_and_the_low(n):
    tree = PassingFloor(np.random.default_rng(n).gamma(0.3, 1.0, n), 0.5 / n)
    p = tree.ratios() / n
    assert np.array_equal(tree.draw_with_ratios(np.cumsum(p) - p / 2)[0], np.arange(n))
    assert np.array_equal(tree.draw_with_ratios(np.array([0.0, 1.0]))[0], [0, n - 1])
    assert_same_draws(tree.draw_with_ratios, p, np.random.default_rng(0).random(2000))


def test_frequencies_of_the_free_and_the_low():
    rng = np.random.default_rng(1)
    tree = PassingFloor(rng.gamma(0.3, 1.0, 300), 0.4 / 300)
    assert 50 < tree.low.sum() < 250
    seen = np.bincount(tree.draw_with_ratios(rng.random(300_000))[0], minlength=300)
    assert stats.chisquare(seen, tree.ratios() * 1000).pvalue > 0.001
    assert stats.chisquare(seen[tree.low]).pvalue > 0.001


def test_weights_of_any_size_keep_every_probability_above_the_floor():
    rng = np.random.default_rng(0)
    for n in (1, 5, 300):
        tree = PassingFloor(np.zeros(n), 0.1 / n)
        for _ in range(100):
            tree.write(
                rng.integers(0, n, 5), rng.choice([0.0, 5e-324, 1e-199, 1e-30, 1.0, 1e300, 1.7e308], 5)
            )
            ratios = tree.ratios()
            assert ratios.min() >= 0.1
            assert ratios.mean() == pytest.approx(1, rel=1e-12)
        tree.write(np.arange(n), np.zeros(n))
        assert np.array_equal(tree.ratios(), np.ones(n))


def test_a_passing_floor_restored_is_the_same_to_the_bit():
    rng = np.random.default_rng(0)
    tree = PassingFloor(rng.gamma(0.3, 1.0, 500), 0.3 / 500)
    for _ in range(200):
        tree.write(rng.integers(0, 500, 8), rng.gamma(0.3, 1.0, 8))
    again = PassingFloor(tree.weights, tree.p_min, low=tree.low, floor=tree.floor)
    for column in ("_free_sum", "_low_count", "_least_free", "_most_low"):
        assert np.array_equal(getattr(tree, column), getattr(again, column))
    assert again.total == tree.total
