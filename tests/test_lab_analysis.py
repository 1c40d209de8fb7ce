"""The numbers of a report against curves whose truth is known, and against slow, dense oracles."""

import itertools
import math
from pathlib import Path

import lab_fixtures as fixtures
import numpy as np
import pytest
from scipy import stats

from adambs.lab import records
from adambs.lab.analysis import (
    FRACTIONS,
    Series,
    Speedup,
    across,
    analyse,
    curve,
    first_reached,
    geometric_mean,
    lowest_by,
    mean,
    speedup,
)
from adambs.lab.words import headline, number, times, warnings_of, words


def series(times, losses, method="m", seed=0, **more):
    times = np.asarray(times, dtype=float)
    fields = {
        "seconds": times,
        "step": times * 10,
        "epoch": times / 10,
        "train_loss": np.asarray(losses, dtype=float),
    }
    return Series(
        method, seed, fields | {name: np.asarray(value, dtype=float) for name, value in more.items()}
    )


def dense(times, losses, points=200_001):
    """The curve between slices, drawn point by point, and its running minimum."""
    grid = np.linspace(times[0], times[-1], points)
    return grid, np.minimum.accumulate(np.exp(np.interp(grid, times, np.log(losses))))


def noisy(seed, speed=1.0, slices=25, noise=0.3):
    rng = np.random.default_rng(seed)
    times = np.concatenate([[0], np.sort(rng.uniform(0.5, 20, slices)), [20.0]])
    return times, 2 * np.exp(-0.15 * speed * times) * np.exp(noise * rng.normal(size=len(times)))


# ------------------------------------------------------------------------------------ reaching a loss


@pytest.mark.parametrize("seed", range(12))
def test_reaching_agrees_with_the_dense_curve(seed):
    times, losses = noisy(seed)
    grid, lowest = dense(times, losses)
    spacing = grid[1] - grid[0]
    for time in np.linspace(0, 20, 23):
        assert lowest_by(times, losses, time) == pytest.approx(np.interp(time, grid, lowest), rel=1e-3)
    for target in np.geomspace(losses.min() * 0.9, losses.max() * 1.1, 23):
        hits = np.flatnonzero(lowest <= target)
        found = first_reached(times, losses, target)
        if not len(hits):
            assert found is None
        else:
            assert found == pytest.approx(grid[hits[0]], abs=1.01 * spacing)


def test_going_up_again_takes_nothing_back():
    times, losses = np.arange(4.0), np.array([4.0, 1.0, 3.0, 0.5])
    assert lowest_by(times, losses, 2.0) == pytest.approx(1)
    assert first_reached(times, losses, 2.0) == pytest.approx(0.5)  # halfway in the logarithm
    assert first_reached(times, losses, 0.9) == pytest.approx(2 + math.log(3 / 0.9) / math.log(3 / 0.5))
    assert first_reached(times, losses, 0.49) is None


def test_what_is_not_a_number_reaches_nothing_and_zero_has_a_logarithm():
    times = np.arange(4.0)
    assert first_reached(times, np.array([2, np.nan, 1, 0.5]), 1.0) == 2.0
    assert first_reached(times, np.array([2, 1.5, np.nan, np.nan]), 1.0) is None
    assert lowest_by(times, np.array([2, 1, np.nan, np.nan]), 3.0) == pytest.approx(1)
    assert first_reached(times, np.array([2, 1, 0, 0.0]), 0.0) == pytest.approx(2)


# -------------------------------------------------------------------------------------------- speedup


def oracle(baseline, own, axis):
    """The definition of issue 3, on dense curves; NaN-free input only."""
    grid, lowest = dense(baseline[axis], baseline["train_loss"])
    own_grid, own_lowest = dense(own[axis], own["train_loss"])
    found = []
    for fraction in FRACTIONS:
        target = np.interp(fraction * baseline[axis][-1], grid, lowest)
        theirs = grid[np.argmax(lowest <= target * (1 + 1e-12))]
        hits = own_lowest <= target * (1 + 1e-12)
        found.append((theirs / (own_grid[np.argmax(hits)] if hits.any() else own_grid[-1]), bool(hits.any())))
    return found


@pytest.mark.parametrize("axis", ["seconds", "step"])
@pytest.mark.parametrize("seed", range(10))
def test_speedup_agrees_with_the_definition_on_noisy_curves(seed, axis):
    baseline = series(*noisy(seed), method="adam")
    own = series(*noisy(100 + seed, speed=(0.5, 1.0, 2.0)[seed % 3]))
    found = speedup([(baseline, own)], axis)
    expected = oracle(baseline, own, axis)
    assert [row[0].reached for row in found.ratios] == [reached for _, reached in expected]
    np.testing.assert_allclose(
        [row[0].value for row in found.ratios], [value for value, _ in expected], rtol=2e-3
    )
    assert found.overall.value == pytest.approx(stats.gmean([value for value, _ in expected]), rel=2e-3)
    assert found.bounded() == (not all(reached for _, reached in expected))


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.7])
def test_exactly_so_many_times_as_fast(factor):
    times = np.linspace(0, 40, 41)
    losses = 2 * np.exp(-0.1 * times) + 0.3
    pairs = [(series(times, losses, "adam", k), series(times / factor, losses, "m", k)) for k in range(4)]
    for axis in ("seconds", "step"):
        found = speedup(pairs, axis)
        assert [each.value for each in found.at] == pytest.approx([factor] * 4)
        assert (found.overall.low, found.overall.high) == pytest.approx((factor, factor))
        assert found.verdict == ("faster" if factor > 1 else "slower")
        assert not found.bounded()


@pytest.mark.parametrize("seed", range(20))
def test_the_baseline_is_exactly_as_fast_as_itself(seed):
    baseline = series(*noisy(seed), method="adam")
    found = speedup([(baseline, baseline)], "seconds")
    assert [row[0].value for row in found.ratios] == [1.0] * 4
    assert not found.bounded()


def test_a_loss_never_reached_counts_as_the_whole_budget():
    times = np.linspace(0, 40, 41)
    baseline = [series(times, np.exp(-0.1 * times), "adam", seed) for seed in range(3)]
    stuck = [
        series(times * 1.5, np.maximum(np.exp(-0.1 * times), math.exp(-2.5)), "m", seed) for seed in range(3)
    ]
    found = speedup(list(zip(baseline, stuck, strict=True)), "seconds")
    # Adam's losses are e^-1, e^-2, e^-3, e^-4; the first two are reached after 15 and 30 s, the others never.
    assert [each.value for each in found.at] == pytest.approx([10 / 15, 20 / 30, 30 / 60, 40 / 60])
    assert [found.bounded(k) for k in range(4)] == [False, False, True, True]
    assert found.missed == 6
    assert found.overall.value == pytest.approx(stats.gmean([2 / 3, 2 / 3, 1 / 2, 2 / 3]))
    assert times_of(found) == ["0.67×", "0.67×", "< 0.50×", "< 0.67×", "< 0.62×"]
    assert words(found) == "slower (6 of 12 not reached)"


def times_of(found: Speedup) -> list[str]:
    return [*(times(found, k) for k in range(4)), times(found)]


def test_an_upper_bound_above_one_is_no_proof_of_speed():
    times = np.linspace(0, 40, 41)
    losses = np.exp(-0.1 * times)
    fast = np.maximum(np.exp(-0.4 * times), math.exp(-3.5))
    pairs = [(series(times, losses, "adam", k), series(times, fast, "m", k)) for k in range(3)]
    found = speedup(pairs, "seconds")
    assert found.overall.low > 1
    assert found.verdict == "undecided"


def test_targets_at_which_the_baseline_had_not_moved_are_left_out():
    times = np.linspace(0, 4, 5)
    baseline, own = series(times, [1, 2, 2, 1, 0.5], "adam"), series(times, [1, 0.5, 0.4, 0.3, 0.2])
    found = speedup([(baseline, own)], "seconds")
    assert [math.isnan(row[0].value) for row in found.ratios] == [True, True, True, False]
    assert found.overall.value == pytest.approx(4.0)
    hopeless = speedup([(series(times, [1, 2, 3, 4, 5], "adam"), own)], "seconds")
    assert math.isnan(hopeless.overall.value)
    assert hopeless.verdict == "cannot be told"


def test_losses_paired_by_seed():
    """Each seed has its own scale of time: the pairs agree, unpaired seeds would not."""
    times_ = np.linspace(0, 10, 11)
    pairs = []
    for seed, scale in enumerate((1, 10, 100)):
        losses = np.exp(-0.3 * times_)
        pairs.append(
            (series(times_ * scale, losses, "adam", seed), series(times_ * scale / 2, losses, "m", seed))
        )
    found = speedup(pairs, "seconds")
    assert (found.overall.low, found.overall.high) == pytest.approx((2, 2))


# ------------------------------------------------------------------------------------------ intervals


@pytest.mark.parametrize("count", [3, 4])
def test_bootstrap_interval_agrees_with_all_resamples(count):
    values = np.random.default_rng(count).uniform(0.5, 3, count)
    means = [stats.gmean(chosen) for chosen in itertools.product(values, repeat=count)]
    found = geometric_mean(list(values))
    low, high = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert found.value == pytest.approx(stats.gmean(values))
    near = sorted(means)
    for end, exact in ((found.low, low), (found.high, high)):  # within one resample of the exact quantile
        assert abs(np.searchsorted(near, end) - np.searchsorted(near, exact)) <= 0.02 * len(near) + 2
    assert geometric_mean(list(values)) == found


def test_the_mean_across_runs_counts_each_run_once_and_resamples_seeds_within_each():
    """Two runs, of 3 and of 4 seeds: the interval against all 27 x 256 resamples."""
    times_ = np.linspace(0, 40, 41)
    losses = 2 * np.exp(-0.1 * times_) + 0.3

    def run(factors):
        pairs = [
            (series(times_, losses, "adam", k), series(times_ / f, losses, "m", k))
            for k, f in enumerate(factors)
        ]
        return speedup(pairs, "seconds")

    first, second = [1.0, 1.2, 1.5], [2.0, 2.1, 2.6, 1.8]
    found = across([run(first), run(second)])
    assert found.value == pytest.approx(stats.gmean([stats.gmean(first), stats.gmean(second)]))
    means = [
        stats.gmean([stats.gmean(a), stats.gmean(b)])
        for a in itertools.product(first, repeat=3)
        for b in itertools.product(second, repeat=4)
    ]
    assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), rel=0.01)
    assert across([run(first), run([2.0, 2.0])]).low is None
    assert across([run(first)]).value == pytest.approx(run(first).overall.value)


@pytest.mark.parametrize("count", [3, 5, 12])
def test_interval_of_a_mean_is_students(count):
    values = np.random.default_rng(count).normal(size=count)
    found = mean(list(values))
    expected = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_seeds_have_no_interval(count):
    times_ = np.linspace(0, 10, 11)
    pair = series(times_, np.exp(-times_), "adam"), series(times_ / 2, np.exp(-times_))
    found = speedup([pair] * count, "seconds")
    assert found.overall.low is None
    assert found.overall.value == pytest.approx(2)
    assert found.verdict == "too few seeds"
    assert mean([1.0] * count).low is None


def test_no_significant_difference_when_the_interval_holds_one():
    times_ = np.linspace(0, 10, 11)
    losses = np.exp(-times_)
    pairs = [
        (series(times_, losses, "adam", k), series(times_ / factor, losses, "m", k))
        for k, factor in enumerate((0.8, 1.0, 1.3, 0.9))
    ]
    found = speedup(pairs, "seconds")
    assert found.overall.low < 1 < found.overall.high
    assert found.verdict == "no significant difference"


# ------------------------------------------------------------------------------------------- curves, runs


def test_a_curve_on_shared_slices_is_the_plain_mean():
    a, b = series([0, 1, 2], [3, 2, 1]), series([0, 1, 2], [5, 4, 1], seed=1)
    found = curve([a, b], "train_loss", "step")
    assert found.x.tolist() == [0, 10, 20]
    assert found.mean.tolist() == [4, 3, 1]
    assert found.low.tolist() == [3, 2, 1]
    assert found.high.tolist() == [5, 4, 1]


def test_a_curve_of_seeds_with_clocks_of_their_own_ends_with_the_first():
    a = series([0, 1, 2], [4, 1, 1], error=[1, 0.5, 0])
    b = series([0, 2, 4], [4, 1, 0.25], seed=1, error=[1, 0.5, 0])
    found = curve([a, b], "train_loss", "seconds")
    assert (found.x[0], found.x[-1]) == (0, 2)
    at_one = int(np.flatnonzero(found.x == 1)[0])
    assert found.mean[at_one] == pytest.approx((1 + 2) / 2)  # 2 is halfway from 4 to 1 in the logarithm
    assert curve([a, b], "error", "seconds").mean[at_one] == pytest.approx((0.5 + 0.75) / 2)


def test_a_metric_that_a_method_lacks_has_no_curve(tmp_path: Path):
    found = analyse(fixtures.write_run(tmp_path))
    assert [each.method for each in found.curves("ess", "step")] == [
        "adambs",
        "adambs-exp3",
        "adambs-release",
    ]
    assert len(found.curves("train_loss", "epoch")) == 5


def test_analysis_of_a_run_has_the_speeds_that_it_was_made_with(tmp_path: Path):
    found = analyse(fixtures.write_run(tmp_path, noise=0.0))
    for method, (speed, cost, _, _) in fixtures.METHODS.items():
        in_steps, clock = found.speedups[method]["step"], found.speedups[method]["seconds"]
        if not in_steps.bounded():
            assert in_steps.overall.value == pytest.approx(speed, rel=0.02)
            assert clock.overall.value == pytest.approx(speed * 0.020 / cost, rel=0.03)
    assert found.speedups["adambs-release"]["step"].verdict == "slower"
    assert "faster" in headline(found)


def test_test_errors_are_compared_at_the_time_when_the_baseline_ended(tmp_path: Path):
    run = fixtures.write_run(tmp_path, noise=0.0)
    found = analyse(run)
    assert found.equal_time["adam"].value == 0
    for method in fixtures.METHODS:
        expected, lowest = [], []
        for seed in found.seeds:
            lines = [line for line in run.lines("slice") if line["seed"] == seed]
            end = max(line["seconds"] for line in lines if line["method"] == "adam")
            own = [(line["seconds"], line["test_error"]) for line in lines if line["method"] == method]
            adam = [line["test_error"] for line in lines if line["method"] == "adam"]
            expected.append(np.interp(end, *zip(*own, strict=True)) - adam[-1])
            lowest.append(min(error for seconds, error in own if seconds <= end) - min(adam))
        assert found.equal_time[method].value == pytest.approx(np.mean(expected), abs=1e-12)
        assert found.stopped_early[method].value == pytest.approx(np.mean(lowest), abs=1e-12)


def test_unfinished_seeds_are_left_out_and_named(tmp_path: Path):
    found = analyse(fixtures.write_run(tmp_path, seeds=3, finished=2))
    assert found.seeds == (0, 1)
    assert found.left_out == (2,)
    assert any("seed 2" in note for note in warnings_of(found))


def test_without_a_finished_seed_what_there_is_is_used_and_said(tmp_path: Path):
    found = analyse(fixtures.write_run(tmp_path, seeds=1, finished=0))
    assert found.seeds == (0,)
    assert not found.complete
    assert any("No seed of this run has finished" in note for note in warnings_of(found))


def test_a_run_without_the_baseline_or_without_numbers(tmp_path: Path):
    found = analyse(fixtures.write_run(tmp_path / "a", ["adambs", "adam-impt"]))
    assert not found.speedups
    assert headline(found).startswith("No speedups: adam did not run")
    other = analyse(records.read(tmp_path / "a"), baseline="adam-impt")
    assert other.speedups["adam-impt"]["step"].overall.value == 1
    with pytest.raises(ValueError, match="no measurement yet"):
        analyse(fixtures.write_run(tmp_path / "b", seeds=0))


def test_diverged_methods_are_reported_without_a_number(tmp_path: Path):
    writer = records.Writer(tmp_path, fixtures.config(["adam", "sgd"]), {})
    writer.append({"kind": "begin", "seed": 0})
    for step in range(5):
        for method, loss in (("adam", 2.0 - 0.3 * step), ("sgd", None if step > 2 else 2.0)):
            line = {"seed": 0, "method": method, "step": step, "seconds": float(step), "train_loss": loss}
            writer.append({"kind": "slice", **line})
    writer.append({"kind": "end", "seed": 0})
    found = analyse(records.read(tmp_path))
    assert number(found.finals["sgd"]["train_loss"].value) == "–"
    assert found.speedups["sgd"]["step"].missed == 4
    assert number(0.29) == "0.290"
    assert number(12345.6) == "12,346"
