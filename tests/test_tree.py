"""SumTree against plain arrays: the same draws, the same sums, and nothing changed by an error."""

import copy
import math
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from adambs.lab.bench.plain_tree import PlainTree
from adambs.trees.sum_tree import SumTree, _choose

SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 4096, 4097, 100_000]
EDGES = np.array([0.0, 5e-324, 1e-300, 0.5, np.nextafter(1.0, 0.0), 1.0])


def bits(tree: SumTree) -> bytes:
    return tree._buffer.tobytes()


def some_weights(n: int, seed: int, zeros: float = 0.3) -> np.ndarray:
    """Return weights of many magnitudes, a share of them zero, at least one not."""
    rng = np.random.default_rng(seed)
    weights = rng.lognormal(sigma=2.0, size=n)
    weights[rng.random(n) < zeros] = 0.0
    weights[rng.integers(n)] = 1.0
    return weights


def assert_same_draws(tree: SumTree, weights: np.ndarray, u: np.ndarray) -> None:
    """Compare with cumsum and searchsorted wherever u is not within rounding of a boundary."""
    ends = np.cumsum(weights)
    expected = np.minimum(np.searchsorted(ends, u * ends[-1], side="right"), len(weights) - 1)
    edge = np.concatenate([[0.0], ends])
    target = u * ends[-1]
    gap = np.minimum(np.abs(target - edge[expected]), np.abs(target - edge[expected + 1]))
    clear = gap > 1e-12 * ends[-1]
    drawn, drawn_weights = tree.draw_with_weights(u)
    np.testing.assert_array_equal(drawn[clear], expected[clear])
    np.testing.assert_array_equal(drawn_weights, weights[drawn])
    np.testing.assert_array_equal(tree.draw(u), drawn)
    assert (weights[drawn] > 0.0).all()


# ---------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize("n", SIZES)
def test_draws_are_those_of_the_cumulative_sum(n: int) -> None:
    weights = some_weights(n, seed=n)
    tree = SumTree(weights)
    assert len(tree) == n
    assert tree.total == pytest.approx(math.fsum(weights), rel=1e-13)
    u = np.random.default_rng(1).random(5000)
    assert_same_draws(tree, weights, u)
    # Sizes up to 257 must have every positive weight hit at its middle, and nothing else.
    ends = np.cumsum(weights)
    middles = (ends - weights / 2) / ends[-1]
    wide = weights > 1e-9 * ends[-1]
    np.testing.assert_array_equal(tree.draw(middles[wide]), np.flatnonzero(wide))


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_frequencies_are_proportional_to_weight(n: int) -> None:
    weights = np.random.default_rng(n).exponential(size=n) + 0.1
    weights[::7] = 0.0
    drawn = SumTree(weights).draw(np.random.default_rng(2).random(200_000))
    seen = np.bincount(drawn, minlength=n)
    assert not seen[::7].any()
    positive = weights > 0.0
    expected = weights[positive] / weights.sum() * 200_000
    assert stats.chisquare(seen[positive], expected).pvalue > 0.001


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("zeros", [0.5, 0.999])
def test_zero_weight_is_never_drawn(n: int, zeros: float) -> None:
    rng = np.random.default_rng(n)
    for spread in (0.0, 1.0, 300.0):  # powers of ten: equal weights ... 1e-300 to 1e300
        weights = 10.0 ** rng.uniform(-spread, spread, n)
        weights[rng.random(n) < zeros] = 0.0
        weights[rng.integers(n)] = 1e-300
        tree = SumTree(weights)
        positive = np.flatnonzero(weights)
        near = np.cumsum(weights) / weights.sum()
        u = np.concatenate([EDGES, rng.random(1000), near, np.nextafter(near, 0.0)])
        u = np.clip(u, 0.0, 1.0)
        drawn = tree.draw(u)
        assert (weights[drawn] > 0.0).all()
        assert tree.draw([0.0])[0] == positive[0]
        beyond = weights[tree.draw([1.0])[0] + 1 :].sum()
        assert beyond <= 1e-14 * tree.total  # the last with a weight, to rounding


def test_a_scan_that_runs_off_the_end_takes_the_last_positive_child() -> None:
    # 1.0 swallows a weight of 2**-53 added to it, but not two that were added to each other first:
    # the total depends on the order, and u = 1 is beyond the end in the order of the scan.
    overshot = 0
    for zeros in range(1, 15):
        weights = np.array([1.0, *[2.0**-53] * (15 - zeros), *[0.0] * zeros])
        for shape in (weights, np.concatenate([weights, weights]), np.roll(weights, 2)):
            tree = SumTree(shape)
            assert (shape[tree.draw(EDGES)] > 0.0).all()
            chosen, _ = _choose(tree._buffer, 0, tree.total)
            overshot += tree._buffer[chosen] == 0.0
    assert overshot > 10  # the fallback was needed


def test_one_positive_weight_wins_every_draw() -> None:
    for n in (17, 257, 4097):
        for winner in (0, 15, 16, n - 1):
            for weight in (5e-324, 1e-300, 1.0, 1e300):
                tree = SumTree(np.where(np.arange(n) == winner, weight, 0.0))
                np.testing.assert_array_equal(tree.draw(EDGES), winner)


def test_draws_keep_the_order_of_u_and_take_what_is_not_an_array() -> None:
    tree = SumTree(np.ones(1000))
    np.testing.assert_array_equal(tree.draw([0.9995, 0.0005, 0.5005]), [999, 0, 500])
    assert tree.draw([0.9995]).dtype == np.int64
    np.testing.assert_array_equal(tree.draw([0, 1]), [0, 999])
    np.testing.assert_array_equal(tree.draw(np.float32([0.0, 1.0])), [0, 999])
    u = np.linspace(0.0, 1.0, 200)
    np.testing.assert_array_equal(tree.draw(u[::-2]), tree.draw(u)[::-2])
    assert tree.draw([]).shape == (0,)


# --------------------------------------------------------------------------------- updating


@st.composite
def trees_and_updates(draw: Any) -> tuple[np.ndarray, list[tuple[list[int], list[float]]]]:
    n = draw(st.sampled_from([1, 2, 15, 16, 17, 40, 255, 256, 257, 600]))
    weight = st.one_of(st.just(0.0), st.floats(0.0, 1e3), st.sampled_from([1e-300, 1e-9, 1e9]))
    first = draw(st.lists(weight, min_size=n, max_size=n))
    first[draw(st.integers(0, n - 1))] = 1.0
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        indices = draw(st.lists(st.integers(0, n - 1), max_size=50))
        size = len(indices)
        steps.append((indices, draw(st.lists(weight, min_size=size, max_size=size))))
    return np.array(first), steps


@settings(max_examples=100, deadline=None)
@given(trees_and_updates(), st.integers(0, 2**32 - 1))
def test_any_updates_are_those_of_an_array(
    case: tuple[np.ndarray, list[tuple[list[int], list[float]]]], seed: int
) -> None:
    model, steps = case
    tree = SumTree(model)
    model = model.copy()
    u = np.concatenate([EDGES, np.random.default_rng(seed).random(40)])
    for indices, weights in steps:
        after = model.copy()
        for i, w in zip(indices, weights, strict=True):
            after[i] = w
        if after.any():
            tree.update(indices, weights)
            model = after
        else:
            with pytest.raises(ValueError, match="all weights of the tree zero"):
                tree.update(indices, weights)
        np.testing.assert_array_equal(tree.weights, model)
        assert bits(tree) == bits(SumTree(model))
        assert_same_draws(tree, model, u)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", [1, 7, 128, 5000])
def test_updated_is_rebuilt_bit_for_bit(n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    tree = SumTree(some_weights(n, seed=3))
    before = bits(tree)
    for _ in range(5):
        tree.update(rng.integers(n, size=k), rng.lognormal(sigma=5.0, size=k))
    assert bits(tree) == bits(SumTree(tree.weights))
    assert bits(tree) != before


def test_the_last_duplicate_wins() -> None:
    tree = SumTree(np.ones(300))
    tree.update([5, 7, 5, 299, 5], [10.0, 2.0, 20.0, 3.0, 30.0])
    assert tree.weights[[5, 7, 299]].tolist() == [30.0, 2.0, 3.0]
    assert tree.total == 297 + 35.0
    tree.update([5, 5], [1.0, 0.0])
    assert tree.weights[5] == 0.0


def test_a_million_updates_do_not_drift() -> None:
    rng = np.random.default_rng(4)
    tree = SumTree(np.ones(3000))
    for _ in range(1000):
        tree.update(rng.integers(3000, size=1000), rng.lognormal(sigma=6.0, size=1000))
    assert tree.total == pytest.approx(math.fsum(tree.weights), rel=1e-12)
    assert not (tree.weights == 1.0).any()


def test_a_tree_may_be_updated_from_its_own_weights() -> None:
    weights = np.arange(1.0, 301.0)
    tree = SumTree(weights)
    tree.update(np.arange(300)[::-1], tree.weights)
    np.testing.assert_array_equal(tree.weights, weights[::-1])


def test_an_update_of_nothing_changes_nothing() -> None:
    tree = SumTree([1.0, 2.0])
    before = bits(tree)
    tree.update([], [])
    assert bits(tree) == before


# ------------------------------------------------------------------------- memory and copies


def test_bytes_an_example_and_alignment() -> None:
    for n in (10_000, 1_000_000):
        tree = SumTree(np.ones(n))
        assert 8 * n < tree.nbytes <= 9 * n
        assert tree._buffer.ctypes.data % 64 == 0
        assert tree._buffer.size == tree._offsets[-1] + 1
        assert not (tree._offsets % 16).any()


def test_weights_are_a_read_only_view() -> None:
    given_weights = np.array([1.0, 2.0, 3.0])
    tree = SumTree(given_weights)
    view = tree.weights
    given_weights[0] = 9.0
    assert view[0] == 1.0  # the tree keeps no reference to what it was built from
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5.0
    tree.update([0], [7.0])
    assert view[0] == 7.0
    assert np.shares_memory(view, tree.weights)


def test_copies_are_equal_and_apart() -> None:
    tree = SumTree(some_weights(500, seed=5))
    tree.update([3], [8.0])
    for twin in (copy.copy(tree), copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert bits(twin) == bits(tree)
        twin.update([3], [9.0])
        assert (twin.weights[3], tree.weights[3]) == (9.0, 8.0)
    assert repr(SumTree([1.0, 2.0])) == "SumTree(n=2, total=3)"


# --------------------------------------------------------------------------------- rescaling


@pytest.mark.parametrize("n", [1, 17, 4097])
@pytest.mark.parametrize("exponent", [-900, -1, 0, 1, 60, 900])
def test_rescale_is_exact(n: int, exponent: int) -> None:
    weights = some_weights(n, seed=6)
    tree = SumTree(weights)
    before, u = bits(tree), np.random.default_rng(7).random(500)
    drawn = tree.draw(u)
    tree.rescale(exponent)
    np.testing.assert_array_equal(tree.weights, np.ldexp(weights, exponent))
    assert tree.total == math.ldexp(SumTree(weights).total, exponent)
    np.testing.assert_array_equal(tree.draw(u), drawn)
    assert bits(tree) == bits(SumTree(tree.weights))
    tree.rescale(-exponent)
    assert bits(tree) == before


def test_rescale_lifts_the_smallest_numbers() -> None:
    tree = SumTree([5e-324, 1e-320])
    tree.rescale(1023)
    assert tree.weights.tolist() == [math.ldexp(5e-324, 1023), math.ldexp(1e-320, 1023)]


# ------------------------------------------------------------------------------------- errors

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([], ValueError, "weights is empty"),
        ([[1.0, 2.0]], ValueError, r"weights has shape \(1, 2\)"),
        (1.0, ValueError, r"weights has shape \(\)"),
        (["a"], TypeError, "weights has dtype <U1"),
        ([1j], TypeError, "weights has dtype complex128"),
        ([True], TypeError, "weights has dtype bool"),
        ([0.0, 0.0], ValueError, "weights are all zero"),
        ([1.0, NAN], ValueError, r"weights\[1\] is nan"),
        ([INF, 1.0], ValueError, r"weights\[0\] is inf"),
        ([1.0, 1.0, -2.5], ValueError, r"weights\[2\] is -2.5, but must be finite, not negative"),
        ([1.0, sys.float_info.max], ValueError, r"weights\[1\] .* at most 4.49423e\+307"),
    ],
)
def test_weights_that_make_no_tree(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SumTree(weights)


@pytest.mark.parametrize("n", [1, 3, 16, 17, 300])
def test_the_largest_weights_have_a_finite_total(n: int) -> None:
    limit = sys.float_info.max / 2 / n
    tree = SumTree(np.full(n, limit))
    assert math.isfinite(tree.total)
    assert tree.draw([0.0, 1.0]).tolist() == [0, n - 1]
    with pytest.raises(ValueError, match=r"weights\[0\]"):
        tree.update([0], [np.nextafter(limit, INF)])


@pytest.mark.parametrize(
    ("indices", "weights", "error", "message"),
    [
        ([0, 40], [1.0, 1.0], ValueError, r"indices\[1\] is 40, but must be in 0 ... 39"),
        ([-1], [1.0], ValueError, r"indices\[0\] is -1.*no negative"),
        ([2**63 - 1], [1.0], ValueError, r"indices\[0\]"),
        (np.array([2**64 - 1], np.uint64), [1.0], ValueError, r"indices\[0\]"),
        ([0.0], [1.0], TypeError, "indices has dtype float64, but must hold integers"),
        ([True], [1.0], TypeError, "indices has dtype bool"),
        ([[0]], [1.0], ValueError, r"indices has shape \(1, 1\)"),
        (3, 1.0, ValueError, r"indices has shape \(\)"),
        ([0, 1], [1.0], ValueError, "indices has length 2 and weights 1"),
        ([0], [[1.0]], ValueError, r"weights has shape \(1, 1\)"),
        ([0], ["a"], TypeError, "weights has dtype"),
        ([0, 1], [5.0, NAN], ValueError, r"weights\[1\] is nan"),
        ([0, 1], [INF, 5.0], ValueError, r"weights\[0\] is inf"),
        ([0, 1], [5.0, -1.0], ValueError, r"weights\[1\] is -1.0"),
        ([0, 1], [5.0, 1e308], ValueError, r"weights\[1\] is 1e\+308"),
        (range(40), [0.0] * 40, ValueError, "would make all weights of the tree zero"),
        ([*range(40), 0, 0], [0.0] * 40 + [3.0, 0.0], ValueError, "all weights of the tree zero"),
    ],
)
def test_a_refused_update_changes_nothing(
    indices: Any, weights: Any, error: type[Exception], message: str
) -> None:
    tree = SumTree(some_weights(40, seed=8))
    before = bits(tree)
    with pytest.raises(error, match=message):
        tree.update(indices, weights)
    assert bits(tree) == before


@pytest.mark.parametrize(
    ("u", "error", "message"),
    [
        ([0.5, 1.5], ValueError, r"u\[1\] is 1.5, but must be in \[0, 1\]"),
        ([np.nextafter(1.0, 2.0)], ValueError, r"u\[0\] is 1.0000000000000002"),
        ([-1e-300], ValueError, r"u\[0\] is -1e-300"),
        ([0.0, 0.0, NAN], ValueError, r"u\[2\] is nan"),
        ([[0.5]], ValueError, r"u has shape \(1, 1\)"),
        (0.5, ValueError, r"u has shape \(\)"),
        (["a"], TypeError, "u has dtype"),
    ],
)
def test_u_that_cannot_be_drawn_with(u: Any, error: type[Exception], message: str) -> None:
    tree = SumTree([1.0, 2.0])
    before = bits(tree)
    with pytest.raises(error, match=message):
        tree.draw(u)
    assert bits(tree) == before


@pytest.mark.parametrize(
    ("exponent", "error", "message"),
    [
        (1.0, TypeError, "exponent is 1.0, but must be an integer"),
        (1024, ValueError, "exponent is 1024, but must be in -1022 ... 1023"),
        (-1023, ValueError, "exponent is -1023"),
        (1022, ValueError, r"exponent is 1022, which weights\[2\] = 1024.0 does not survive"),
        (-1000, ValueError, r"exponent is -1000, which weights\[1\] = 1e-20 does not survive"),
    ],
)
def test_a_refused_rescale_changes_nothing(exponent: Any, error: type[Exception], message: str) -> None:
    tree = SumTree([0.0, 1e-20, 1024.0])
    before = bits(tree)
    with pytest.raises(error, match=message):
        tree.rescale(exponent)
    assert bits(tree) == before


# -------------------------------------------------------------------------------- the yardstick


@pytest.mark.parametrize("n", [1, 17, 257, 4097])
def test_the_plain_tree_is_the_same_tree(n: int) -> None:
    weights = some_weights(n, seed=9)
    tree, plain = SumTree(weights), PlainTree(weights)
    rng = np.random.default_rng(10)
    for _ in range(5):
        drawn, drawn_weights = plain.draw(rng.random(100))
        np.testing.assert_array_equal(drawn_weights, tree.weights[drawn])
        assert (drawn_weights > 0.0).all()
        new = rng.exponential(size=100)
        plain.update(drawn, new)
        tree.update(drawn, new)
        assert plain.total == pytest.approx(tree.total, rel=1e-13)
    u = rng.random(1000)
    assert np.mean(plain.draw(u)[0] == tree.draw(u)) > 0.99
