"""An order that is computed: every element once, and to every statistic here a uniformly random order.

The statistics are functions from a source of orders to a p-value, so that the same ones can be shown to
reject a network with too few rounds.
"""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from adambs.permutation import _STORED, Permutation

LARGE = 10**8  # of which only a part is looked at
WHOLE = 128 * 640 + 128  # above the bound, and small enough to look at all of it


def computed(n, *key, start=0, stop=None, rounds=8):
    """The order by the network, also where ``take`` would store a shuffle."""
    permutation = Permutation(n, *key)
    permutation._computed(0, 0)
    permutation._network = permutation._network[: 3 + rounds]
    return permutation._computed(start, n if stop is None else stop)


def with_rounds(rounds):
    return lambda *args, **places: computed(*args, rounds=rounds, **places)


def two_sided(z):
    return 2 * stats.norm.sf(abs(z))


def two_sided_chi2(q, df):
    return 2 * min(stats.chi2.sf(q, df), stats.chi2.cdf(q, df))


def bins(x, n, count):
    """Which of ``count`` equal stretches of 0 .. n-1 each x lies in."""
    return x * count // n


def table(x, y, count):
    """How often each pair of bins occurs, as a p-value against all equally often."""
    return stats.chisquare(np.bincount(x * count + y, minlength=count**2)).pvalue


# One bijection.


def test_every_small_network_is_a_bijection():
    for n in range(1, 601):
        for key in ((0,), (1, 2), (2**40, n)):
            assert np.array_equal(np.sort(computed(n, *key)), np.arange(n)), (n, key)


@given(st.integers(1, 5 * _STORED), st.integers(0, 2**70), st.integers(0, 50))
@example(_STORED - 1, 0, 0)
@example(_STORED, 0, 0)
@example(_STORED + 1, 0, 0)
@example(257**2, 3, 1)  # a full table
@example(257**2 + 1, 3, 1)
def test_every_element_once(n, seed, number):
    order = Permutation(n, seed, number).take(0, n)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))


@given(st.integers(_STORED + 1, 2**62), st.integers(0, 2**64), st.data())
@example(2**62, 5, None)
@example(2**62 - 1, 5, None)
@example((2**31 - 1) ** 2, 5, None)
@example((2**31 - 1) ** 2 + 1, 5, None)
def test_a_stretch_of_a_huge_order_is_in_range_and_without_repetition(n, seed, data):
    start = n - 1000 if data is None else data.draw(st.integers(0, n - 1000))
    part = Permutation(n, seed).take(start, start + 1000)
    assert part.min() >= 0
    assert part.max() < n
    assert len(np.unique(part)) == 1000


def by_hand(n, keys, place):
    """The definition, in Python's own integers."""
    b = math.isqrt(n - 1) + 1
    a = -(-n // b)

    def distance(by, key, size):
        z = (by ^ key) * 0xBF58476D1CE4E5B9 % 2**64
        return (z ^ z >> 32) * 0x94D049BB133111EB % 2**64 * size >> 64

    row, column = divmod(place, b)
    while True:
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            row = (row + distance(column, first, a)) % a
            column = (column + distance(row, second, b)) % b
        if row * b + column < n:
            return row * b + column


@pytest.mark.parametrize("n", [1, 2, 3, 7, 50, 99_999, LARGE, 2**40 + 1, 2**62])
def test_it_is_the_definition_in_plain_integers(n):
    keys = [int(key) for key in np.random.SeedSequence([4, 2]).generate_state(8, np.uint64)]
    for start in {0, n // 3, max(0, n - 40)}:
        stop = min(n, start + 40)
        expected = [by_hand(n, keys, place) for place in range(start, stop)]
        assert computed(n, 4, 2, start=start, stop=stop).tolist() == expected


def test_an_order_is_the_same_in_every_version_and_on_every_platform():
    assert Permutation(6, 1, 2).take(0, 6).tolist() == [4, 5, 1, 0, 3, 2]
    assert Permutation(LARGE, 1, 2).take(0, 3).tolist() == [91757992, 8469049, 69096805]
    assert Permutation(2**62, 2**40, 2).take(0, 2).tolist() == [389434590979190074, 4400855935526014871]


def test_a_small_order_is_the_generators_own_shuffle():
    expected = np.random.Generator(np.random.PCG64([3, 9])).permutation(_STORED)
    assert np.array_equal(Permutation(_STORED, 3, 9).take(0, _STORED), expected)


# The order is fixed by the key.


@pytest.mark.parametrize("n", [1000, LARGE])
def test_the_order_does_not_depend_on_how_it_is_taken(n):
    whole = Permutation(n, 8, 1).take(0, 1000)
    parts = Permutation(n, 8, 1)
    assert np.array_equal(parts.take(300, 1000), whole[300:])
    assert np.array_equal(
        np.concatenate([parts.take(0, 1), parts.take(1, 1), parts.take(1, 300)]), whole[:300]
    )
    parts.take(0, 1000)[:] = 0  # the caller's own
    assert np.array_equal(parts.take(0, 1000), whole)


@pytest.mark.parametrize("n", [50, LARGE])
def test_another_key_is_another_order(n):
    keys = [
        (5, 1),
        (5, 2),
        (6, 1),
        (1, 5),
        (2**32 + 5, 0),
        (5, 2**32),
        (2**32, 5),
        (2**64 + 5, 1),
        (5, 2**64),
    ]
    assert len({tuple(Permutation(n, *key).take(0, 40)) for key in keys}) == len(keys)


def test_nothing_is_kept_per_example():
    Permutation(LARGE, 0).take(0, 128)  # compiled
    tracemalloc.start()
    permutation = Permutation(LARGE, 1)
    permutation.take(10**7, 10**7 + 128)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 20_000


# All orders are equally likely.


def test_all_orders_of_four_are_equally_likely():
    orders = [tuple(Permutation(4, 0, number).take(0, 4)) for number in range(4800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def one_place(order, n, place):
    """Over keys, the element at one place is uniform, in its upper and in its lower digits."""
    x = np.concatenate([order(n, 11, number, start=place, stop=place + 1) for number in range(3000)])
    return min(stats.chisquare(np.bincount(b, minlength=30)).pvalue for b in (bins(x, n, 30), x % 30))


@pytest.mark.parametrize("place", [0, 1, 9_999, 10_000, 54_321_012, LARGE - 1])
def test_each_place_is_uniform_over_keys(place):
    assert one_place(computed, LARGE, place) > 1e-3


def two_places(order, n, i, j):
    """Over keys, the elements at two places are jointly uniform."""
    x, y = (
        np.concatenate([order(n, 12, number, start=place, stop=place + 1) for number in range(3200)])
        for place in (i, j)
    )
    return min(table(bins(x, n, 8), bins(y, n, 8), 8), table(x % 8, y % 8, 8))


@pytest.mark.parametrize(
    ("i", "j"),
    [(0, 1), (777, 778), (0, LARGE - 1), (5, 5 + LARGE // 2), (42, 10_042), (9_999, 10_000), (0, 30_003)],
    # Two of one row, of one column, of neither; 1e8 places have 10,000 columns.
)
def test_two_places_are_jointly_uniform_over_keys(i, j):
    assert two_places(computed, LARGE, i, j) > 1e-3


def pairs_within(order, n, lag):
    """Within one order, elements ``lag`` places apart are jointly uniform, and so is their difference.

    Disjoint pairs: of so few among n the dependence through "every element once" is not to be seen.
    """
    count = 100_000
    x = order(n, 13, lag, start=0, stop=count + lag)
    first = np.arange(count)[np.arange(count) // lag % 2 == 0]
    first, second = x[first], x[first + lag]
    difference = np.bincount(bins((second - first) % n, n, 500), minlength=500)
    return min(
        table(bins(first, n, 20), bins(second, n, 20), 20),
        table(first % 20, second % 20, 20),
        stats.chisquare(difference).pvalue,
    )


@pytest.mark.parametrize("lag", [1, 2, 3, 128, 9_999, 10_000, 20_000])
def test_neighbours_and_distant_places_are_jointly_uniform_within_an_order(lag):
    assert pairs_within(computed, LARGE, lag) > 1e-3


def coincidences(order, n, step, keys=600):
    """The number of places with the same element in two orders, or of fixed points: Poisson(1) over keys."""
    counts = np.empty(keys, dtype=int)
    for k in range(keys):
        other = order(n, 14, k + step) if step else np.arange(n)
        counts[k] = (order(n, 14, k) == other).sum()
    expected = stats.poisson.pmf(np.arange(5), 1)
    expected[4] += stats.poisson.sf(4, 1)
    return stats.chisquare(np.bincount(np.minimum(counts, 4), minlength=5), keys * expected).pvalue


@pytest.mark.parametrize(("n", "keys"), [(_STORED + 1, 600), (500, 4000)])
def test_the_number_of_fixed_points_is_that_of_a_random_order(n, keys):
    assert coincidences(computed, n, 0, keys) > 1e-3


def test_consecutive_passes_agree_as_often_as_independent_orders():
    assert coincidences(computed, _STORED + 1, 1, 300) > 1e-3


def across_keys(order, n, step):
    """The elements at the same places under two keys are uncorrelated and jointly uniform."""
    count = 100_000
    x, y = order(n, 15, 0, stop=count), order(n, 15, step, stop=count)
    z = np.corrcoef(x, y)[0, 1] * math.sqrt(count)
    return min(two_sided(z), table(bins(x, n, 20), bins(y, n, 20), 20))


@pytest.mark.parametrize("step", [1, 2, 3, 1000, 2**32])
def test_passes_are_independent(step):
    assert across_keys(computed, LARGE, step) > 1e-3


def inversions(order, n, keys):
    """The number of inversions: Kendall's tau has mean 0 and variance 2 (2n + 5) / (9 n (n - 1))."""
    tau = np.array([stats.kendalltau(np.arange(n), order(n, 16, k)).statistic for k in range(keys)])
    z = tau / math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))
    return min(two_sided(z.sum() / math.sqrt(keys)), two_sided_chi2((z**2).sum(), keys))


@pytest.mark.parametrize(("n", "keys"), [(_STORED + 1, 40), (1000, 400)])
def test_the_number_of_inversions_is_that_of_a_random_order(n, keys):
    assert inversions(computed, n, keys) > 1e-3


def serial_correlation(order, n, lag, keys=150):
    """Round the circle it has mean -1 / (n - 1) and, nearly, variance 1 / n."""
    r = np.array([np.corrcoef(x, np.roll(x, lag))[0, 1] for x in (order(n, 17, k) for k in range(keys))])
    z = (r + 1 / (n - 1)) * math.sqrt(n)
    return min(two_sided(z.sum() / math.sqrt(keys)), two_sided_chi2((z**2).sum(), keys))


@pytest.mark.parametrize("lag", [1, 2, 257, 30_000])
def test_the_serial_correlation_is_that_of_a_random_order(lag):
    assert serial_correlation(computed, _STORED + 1, lag) > 1e-3


# What training sees: means over batches.

QUANTITIES = {
    "linear": lambda u, x: u,
    "square": lambda u, x: u**2,
    "one period": lambda u, x: np.sin(2 * np.pi * u),
    "seven periods": lambda u, x: np.cos(14 * np.pi * u),
    "a thousand periods": lambda u, x: np.sin(2000 * np.pi * u),
    "half": lambda u, x: (u < 0.5) * 1.0,
    "odd": lambda u, x: x % 2.0,
    "position in a block of 287": lambda u, x: x % 287.0,  # WHOLE is a table of 287 columns
}


def batch_means(order, n, quantity, K=128, keys=20):
    """The squares of the means of all batches of a pass.

    Without replacement a mean over K of n has the variance S²/K (1 - K/n). Over the n/K batches of a pass
    the means add up to zero, so Σ mean² K/S² is nearly chi-square with n/K - 1 degrees of freedom.
    """
    values = QUANTITIES[quantity](np.arange(n) / n, np.arange(n))
    values = (values - values.mean()) / values.std(ddof=1)
    q = sum((K * values[order(n, 18, k)].reshape(-1, K).mean(axis=1) ** 2).sum() for k in range(keys))
    return two_sided_chi2(q, keys * (n // K - 1))


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("K", [8, 128])
def test_batches_vary_as_without_replacement(quantity, K):
    assert batch_means(computed, WHOLE, quantity, K) > 1e-3


@pytest.mark.parametrize("quantity", ["linear", "one period", "half", "odd"])
def test_batches_of_a_huge_pass_vary_as_without_replacement(quantity):
    """Here the first batches of the pass alone; the moments are those of the whole."""
    mean, deviation = {
        "linear": (0.5, 12**-0.5),
        "one period": (0, 2**-0.5),
        "half": (0.5, 0.5),
        "odd": (0.5, 0.5),
    }[quantity]
    q = 0.0
    for k in range(10):
        x = Permutation(LARGE, 19, k).take(0, 128 * 1000)
        values = (QUANTITIES[quantity](x / LARGE, x) - mean) / deviation
        q += (128 * values.reshape(-1, 128).mean(axis=1) ** 2).sum()
    assert two_sided_chi2(q, 10_000) > 1e-3


def prefix_mean(order, n, quantity, m, keys=1000):
    """Over keys, the mean over the first m places is unbiased and varies as without replacement."""
    values = QUANTITIES[quantity](np.arange(n) / n, np.arange(n))
    values = (values - values.mean()) / values.std(ddof=1)
    means = np.array([values[order(n, 20, k, stop=m)].mean() for k in range(keys)])
    z = means / math.sqrt((1 - m / n) / m)
    return min(two_sided(z.sum() / math.sqrt(keys)), two_sided_chi2((z**2).sum(), keys))


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("m", [100, 5000])
def test_the_mean_of_a_prefix_is_unbiased(quantity, m):
    assert prefix_mean(computed, WHOLE, quantity, m) > 1e-3


# The statistics can see.


@pytest.mark.parametrize(
    ("rounds", "statistic"),
    [
        (2, lambda order: two_places(order, LARGE, 42, 10_042)),
        (2, lambda order: pairs_within(order, LARGE, 1)),
        (2, lambda order: across_keys(order, LARGE, 1)),
        (2, lambda order: coincidences(order, _STORED + 1, 0, 100)),
        (2, lambda order: inversions(order, _STORED + 1, 10)),
        (2, lambda order: batch_means(order, WHOLE, "position in a block of 287")),
        (2, lambda order: prefix_mean(order, WHOLE, "linear", 5000, 300)),
        (4, lambda order: serial_correlation(order, _STORED + 1, 257)),  # down the columns
    ],
)
def test_the_statistics_reject_too_few_rounds(rounds, statistic):
    assert statistic(with_rounds(rounds)) < 1e-6


# Errors.


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((0,), ValueError, "n must be at least 1, not 0"),
        ((-3, 1), ValueError, "n must be at least 1, not -3"),
        ((2**62 + 1,), ValueError, r"n must be at most 2\*\*62, not 4611686018427387905"),
        ((1.5,), TypeError, "n must be a whole number, not 1.5"),
        ((True,), TypeError, "n must be a whole number, not True"),
        ((10, 3, -1), ValueError, r"key\[1\] must be at least 0, not -1"),
        ((10, "3"), TypeError, r"key\[0\] must be a whole number, not '3'"),
    ],
)
def test_bad_arguments_are_refused(args, error, message):
    with pytest.raises(error, match=message):
        Permutation(*args)


@pytest.mark.parametrize("n", [100, LARGE])
@pytest.mark.parametrize(
    ("beyond", "start", "stop", "error", "message"),
    [
        (False, -1, 5, ValueError, "start must be at least 0, not -1"),
        (False, 5, 4, ValueError, "stop must be at least 5, not 4"),
        (True, 0, 1, ValueError, "stop must be at most n = "),
        (False, 0.0, 4, TypeError, "start must be a whole number"),
        (False, 0, None, TypeError, "stop must be a whole number, not None"),
    ],
)
def test_places_out_of_range_are_refused(n, beyond, start, stop, error, message):
    with pytest.raises(error, match=message):
        Permutation(n, 0).take(start, n + stop if beyond else stop)


def test_whole_numbers_of_numpy_will_do():
    given = Permutation(np.int64(LARGE), np.uint8(3)).take(np.int32(5), np.int64(9))
    assert np.array_equal(given, Permutation(LARGE, 3).take(5, 9))
    assert len(Permutation(LARGE).take(LARGE, LARGE)) == 0
