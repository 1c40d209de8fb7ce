"""The numbers of a report against curves whose truth is known, and against slow, dense oracles."""

import json
import math
from pathlib import Path

import lab_fixtures as fixtures
import numpy as np
import pytest
from scipy import stats

from adambs.lab.report.analysis import analyse, steadiness
from adambs.lab.report.estimates import geometric_mean, mean
from adambs.lab.report.phrases import (
    _finding,
    headline,
    number,
    points,
    rise,
    times,
    verdict_in_full,
    warnings_of,
)
from adambs.lab.report.series import Series, curve
from adambs.lab.report.speedups import (
    FRACTIONS,
    Ratio,
    Speedup,
    across,
    first_reached,
    lowest_by,
    speedup,
    speedup_to_lowest_error,
)
from adambs.lab.runs import records


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
    assert verdict_in_full(found) == "slower (6 of 12 not reached)"


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


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_intervals_are_students(count):
    values = np.random.default_rng(count).uniform(0.5, 3, count)
    for found, data, back in (
        (mean(values), values, np.positive),
        (geometric_mean(values), np.log(values), np.exp),
    ):
        assert found.seeds == count
        assert found.value == pytest.approx(back(data.mean()))
        oracle = stats.t.interval(0.95, count - 1, data.mean(), stats.sem(data))
        assert (found.low, found.high) == pytest.approx(tuple(back(oracle)))
        tested = stats.ttest_1samp(data, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((back(tested.low), back(tested.high)))


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.3])
def test_faster_and_slower_are_what_the_t_test_says(factor):
    """Over many draws of three seeds: a verdict stands where the p-value is below 5 %, and nowhere else."""
    rng = np.random.default_rng(int(10 * factor))
    for _ in range(200):
        logs = math.log(factor) + 0.1 * rng.normal(size=3)
        found = geometric_mean(np.exp(logs))
        test = stats.ttest_1samp(logs, 0)
        verdict = Speedup("m", "step", (), (), found).verdict
        if test.pvalue < 0.05:
            assert verdict == ("faster" if logs.mean() > 0 else "slower")
        else:
            assert verdict == "no significant difference"


def coverage(intervals, truth):
    return np.mean([found.low <= truth <= found.high for found in intervals])


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_cover_what_they_say(seeds):
    """4,000 experiments with log-normal speedups around 1.3: 95 % of the intervals hold the truth."""
    rng = np.random.default_rng(seeds)
    ratios = np.exp(math.log(1.3) + 0.2 * rng.normal(size=(4000, seeds)))
    # Four standard errors of a share of 95 % of 4,000.
    assert coverage([geometric_mean(row) for row in ratios], 1.3) == pytest.approx(0.95, abs=0.0138)
    points = 0.01 + 0.02 * rng.normal(size=(4000, seeds))
    assert coverage([mean(row) for row in points], 0.01) == pytest.approx(0.95, abs=0.0138)


def speedup_of(factors):
    """A method exactly so many times as fast, in a seed for each factor."""
    times_ = np.linspace(0, 40, 5)
    losses = 2 * np.exp(-0.1 * times_)
    pairs = [
        (series(times_, losses, "adam", k), series(times_ / factor, losses, "m", k))
        for k, factor in enumerate(factors)
    ]
    return speedup(pairs, "seconds")


def test_the_mean_across_runs_counts_each_run_once():
    """Two runs, of 3 and of 4 seeds, against Welch's formula in scipy: (a + b) / 2 is half of a - (-b)."""
    first, second = [1.0, 1.2, 1.5], [2.0, 2.1, 2.6, 1.8]
    found = across([speedup_of(first), speedup_of(second)])
    assert found.value == pytest.approx(stats.gmean([stats.gmean(first), stats.gmean(second)]))
    welch = stats.ttest_ind(np.log(first), -np.log(second), equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((math.exp(welch.low / 2), math.exp(welch.high / 2)))
    assert across([speedup_of(first), speedup_of([2.0])]).low is None
    alone, same = across([speedup_of(first)]), speedup_of(first).overall
    assert (alone.value, alone.low, alone.high) == pytest.approx((same.value, same.low, same.high))
    certain = across([speedup_of([2.0, 2.0]), speedup_of([0.5, 0.5])])
    assert (certain.low, certain.high) == pytest.approx((1, 1))


def test_the_interval_across_runs_covers_what_it_says():
    """1,500 times three runs of three seeds that scatter by 2, 5 and 15 %; Welch is rather too wide."""
    rng = np.random.default_rng(0)
    logs = np.array([0.02, 0.05, 0.15])[:, None] * rng.normal(size=(1500, 3, 3)) + np.log(
        [[1.0], [1.2], [1.4]]
    )
    truth = math.exp(np.log([1.0, 1.2, 1.4]).mean())

    def run(row):
        ratios = tuple(Ratio(k, 1.0, math.exp(value), 1.0, True) for k, value in enumerate(row))
        return Speedup("m", "seconds", (ratios,), (), geometric_mean(np.exp(row)))

    assert 0.93 < coverage([across([run(row) for row in rows]) for rows in logs], truth) < 0.98


def test_one_seed_has_no_interval():
    found = speedup_of([2.0])
    assert found.overall.low is None
    assert found.overall.value == pytest.approx(2)
    assert found.verdict == found.last.verdict == "one seed"
    assert mean([1.0]).low is None
    assert speedup_of([2.0, 2.1]).verdict == "faster"
    assert speedup_of([2.0, 3.0]).verdict == "no significant difference"  # 12.7 standard errors to each side


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


def test_words_tell_what_is_not_known_from_what_is_no_gain():
    said = {
        factors: _finding(speedup_of(factors), "M", "Adam")
        for factors in ((0.97, 1.04, 1.01), (2.0, 3.0), (2.0, 2.1))
    }
    none, unknown, faster = said.values()
    assert none.startswith("No gain here: between M and Adam there is no significant difference in time")
    assert unknown.startswith("Not known: between M and Adam there is no significant difference in time, but")
    assert unknown.endswith("More seeds would tell.")
    assert faster.startswith("M reached the same training losses 2.05× as fast as Adam")


# ------------------------------------------- the final loss, steadiness, and the lowest test error


def test_the_last_target_alone_is_the_final_loss():
    times_ = np.linspace(0, 40, 41)
    losses = np.exp(-0.1 * times_)
    # Level with Adam until e^-2, then twice as fast.
    own = np.exp(-0.1 * np.where(times_ < 20, times_, 20 + 2 * (times_ - 20)))
    pairs = [(series(times_, losses, "adam", k), series(times_, own, "m", k)) for k in range(2)]
    found = speedup(pairs, "seconds")
    assert [each.value for each in found.at] == pytest.approx([1, 1, 30 / 25, 40 / 30])
    assert found.last.overall == found.at[-1]
    assert times_of(found)[3] == times(found.last)
    assert found.last.missed == 0
    stuck = speedup(
        [(series(times_, losses, "adam"), series(times_, np.maximum(own, math.exp(-3.5))))], "step"
    )
    assert stuck.last.bounded()
    assert verdict_in_full(stuck.last) == "one seed (1 of 1 not reached)"


STEADY = {
    "never rises": (range(11), [8, 7, 6, 5, 4, 3, 2, 1, 0.5, 0.25, 0.1], 1.0),
    "one late jump": (range(11), [8, 7, 6, 5, 4, 3, 2, 1, 0.5, 5, 0.1], 10.0),
    "the largest of two": (range(11), [8, 7, 6, 5, 20, 3, 2, 1, 0.5, 0.6, 0.1], 4.0),
    "against the lowest ever, not the last": (range(11), [8, 4, 6, 5, 4, 3, 1, 2, 3, 3.5, 2], 3.5),
    "a low of the first tenth counts": (range(11), [8, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2], 2.0),
    "a jump in the first tenth does not": (range(21), [8, 4, 400, *[3] * 18], 1.0),
    "right after it does": (range(21), [8, 4, 4, 400, *[3] * 17], 100.0),
    "diverged": (range(5), [8, 4, 2, np.nan, np.nan], math.inf),
    "never a number": (range(3), [np.nan] * 3, math.inf),
    "only its start": ([0], [8], math.nan),
}


@pytest.mark.parametrize("case", STEADY)
def test_steadiness_of_series_made_by_hand(case):
    times_, losses, expected = STEADY[case]
    assert steadiness(series(list(times_), losses)) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("seed", range(5))
def test_steadiness_against_two_loops(seed):
    times_, losses = noisy(seed)
    worst = 1.0
    for t in range(len(times_)):
        if times_[t] > 0.1 * times_[-1]:
            worst = max(worst, *(losses[t] / losses[s] for s in range(t + 1)))
    assert steadiness(series(times_, losses)) == pytest.approx(worst)


def test_steadiness_of_a_method_is_its_worst_seed(tmp_path: Path):
    found = analyse(fixtures.write_run(tmp_path, noise=0.1))
    for method, by_seed in found.series.items():
        assert found.steadiness[method] == max(map(steadiness, by_seed.values())) > 1
    assert (rise(1.0), rise(12.345), rise(math.inf), rise(math.nan)) == ("1.00", "12.3", "diverged", "–")


def test_the_time_to_the_lowest_test_error():
    """Adam's lowest is 0.1 after 30 s; straight lines between the slices, not straight in the logarithm."""
    times_ = [0, 10, 20, 30, 40]
    adam = series(times_, [4, 3, 2, 1, 1], "adam", test_error=[0.9, 0.5, 0.2, 0.1, 0.15])
    fast = series(times_, [4, 3, 2, 1, 1], test_error=[0.9, 0.3, 0.05, 0.3, 0.3])
    never = series(times_, [4, 3, 2, 1, 1], test_error=[0.9, 0.3, 0.2, 0.2, 0.2])
    lost = series(times_, [4, 3, 2, 1, 1], test_error=[0.9, np.nan, np.nan, np.nan, np.nan])
    found = speedup_to_lowest_error([(adam, fast)])
    assert found.ratios[0][0].target == 0.1
    assert found.overall.value == pytest.approx(30 / 18)
    assert speedup_to_lowest_error([(adam, adam)]).overall.value == 1
    for own in (never, lost):
        found = speedup_to_lowest_error([(adam, own)])
        assert found.bounded()
        assert found.overall.value == pytest.approx(30 / 40)
    three = speedup_to_lowest_error([(adam, fast), (adam, adam), (adam, never)])
    assert (three.missed, three.overall.value) == (1, pytest.approx(stats.gmean([30 / 18, 1, 30 / 40])))
    assert three.overall.low is not None
    unmeasured = series(times_, [4, 3, 2, 1, 1], "adam", test_error=[np.nan] * 5)
    assert math.isnan(speedup_to_lowest_error([(unmeasured, fast)]).overall.value)


def test_differences_in_points_have_students_interval():
    assert points(mean([0.01, 0.02, 0.03])) == "+2.00 (-0.48 to +4.48)"  # 4.303 / sqrt(3)
    assert points(mean([-0.01])) == "-1.00"
    assert points(mean([math.nan])) == points(None) == "–"


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
    assert found.equal_time["test_error"]["adam"].value == 0
    for method in fixtures.METHODS:
        expected, lowest = [], []
        for seed in found.seeds:
            lines = [line for line in run.lines("slice") if line["seed"] == seed]
            end = max(line["seconds"] for line in lines if line["method"] == "adam")
            own = [(line["seconds"], line["test_error"]) for line in lines if line["method"] == method]
            adam = [line["test_error"] for line in lines if line["method"] == "adam"]
            expected.append(np.interp(end, *zip(*own, strict=True)) - adam[-1])
            shown = [error for seconds, error in own if seconds <= end]
            lowest.append(min(*shown, expected[-1] + adam[-1]) - min(adam))
        assert found.equal_time["test_error"][method].value == pytest.approx(np.mean(expected), abs=1e-12)
        assert found.stopped_early["test_error"][method].value == pytest.approx(np.mean(lowest), abs=1e-12)


def test_balanced_errors_are_told_where_they_are_others_than_the_plain_ones(tmp_path: Path):
    without = analyse(fixtures.write_run(tmp_path / "old"))
    assert list(without.metrics) == ["train_loss", "train_error", "test_error"]
    assert "balanced_test_error" not in without.equal_time
    run = fixtures.write_run(tmp_path / "new", balanced=True)
    found = analyse(run)
    assert found.metrics["balanced_test_error"] == "balanced test error"
    last = [line for line in run.lines("slice") if line["step"] == 400]
    adams = [line["balanced_test_error"] for line in last if line["method"] == "adam"]
    assert found.finals["adam"]["balanced_test_error"].value == pytest.approx(np.mean(adams))
    assert found.equal_time["balanced_test_error"]["adam"].value == 0
    assert found.equal_time["balanced_test_error"]["adambs"].value < 0
    lines = [json.loads(line) for line in (run.path / records.FILE).read_text().splitlines()]
    for line in lines:
        if "balanced_test_error" in line:
            line["balanced_test_error"] = line["test_error"]  # a test set with as many of each class
    (tmp_path / "alike").mkdir()
    (tmp_path / "alike" / records.FILE).write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert "balanced_test_error" not in analyse(records.read(tmp_path / "alike")).metrics


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
