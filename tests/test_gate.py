"""The gate: reshuffled passes while p does not pay, and draws from p as soon as it does."""

import math

import numpy as np
import pytest
import scipy.stats
from helpers import same, saved_and_loaded

import adambs
from adambs.proposals import Passes


def heavy(n, seed=0):
    """Scores of which p can make much."""
    return np.random.default_rng(seed).gamma(0.3, 1.0, n)


def trained(sampler, truth, steps):
    """So many draws with their scores; what was drawn."""
    drawn = []
    for _ in range(steps):
        draw = sampler.draw()
        sampler.update(draw, truth[draw.indices])
        drawn.append(draw)
    return drawn


def test_a_pass_has_every_example_once_and_each_order_is_new():
    n = 101
    passes = Passes(n, seed=3)
    orders = [np.concatenate([passes.take(25), passes.take(76)]) for _ in range(3)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(n))
    assert len({tuple(order) for order in orders}) == 3
    across = Passes(n, seed=3).take(3 * n)
    assert np.array_equal(across, np.concatenate(orders))
    assert not np.array_equal(across, Passes(n, seed=4).take(3 * n))


def test_all_orders_of_a_pass_are_equally_likely():
    passes = Passes(4, seed=0)
    orders = [tuple(passes.take(4)) for _ in range(4800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_while_nothing_is_known_the_batches_are_those_of_a_reshuffled_epoch():
    n, K = 60, 10
    sampler = adambs.BanditSampler(n, K, seed=7)
    draws = [sampler.draw() for _ in range(12)]  # none comes back
    for epoch in (draws[:6], draws[6:]):
        assert np.array_equal(np.sort(np.concatenate([d.indices for d in epoch])), np.arange(n))
    assert all((d.weights == 1).all() and (d.probabilities == 1 / n).all() for d in draws)
    assert sampler.diagnostics().reshuffled == 12


@pytest.mark.parametrize("gate", [1.5, 0.7])
def test_it_decides_by_the_estimated_variance_reduction_wherever_no_pass_is_under_way(gate):
    """Against the estimate by hand, from p as it was before each update."""
    n, K = 400, 16
    truth = heavy(n)
    sampler = adambs.BanditSampler(n, K, gate=gate, cap=math.inf, seed=1)
    uniform = ours = 0.0
    left = 0  # of a pass
    open_ = False
    closed = []
    for step in range(300):
        if step == 150:
            truth = np.random.default_rng(9).permutation(truth)  # p becomes wrong, and is learned anew
        p = sampler.probabilities().numpy()
        if left == 0:
            open_ = uniform > (min(gate, gate**0.5) if open_ else gate) * ours
            left = 0 if open_ else n
        draw = sampler.draw()
        closed.append(bool((draw.probabilities == 1 / n).all()))
        assert closed[-1] == (left > 0)
        left -= K * (left > 0)
        i, q = draw.indices.numpy(), draw.probabilities.numpy()
        uniform = 0.99 * uniform + 0.01 * np.mean(truth[i] ** 2 / (n * q))
        ours = 0.99 * ours + 0.01 * np.mean(truth[i] ** 2 / (n * q * n * p[i]))
        sampler.update(draw, truth[i])
    assert closed[:25] == [True] * 25  # the first pass
    assert not all(closed)
    assert sampler.diagnostics().reshuffled == sum(closed)


def test_a_batch_that_straddles_the_end_of_a_pass_is_filled_from_p_once_that_pays():
    n, K = 50, 8
    truth = heavy(n)
    sampler = adambs.BanditSampler(n, K, gate=1e-9, seed=3)  # opens at the first chance
    draws = trained(sampler, truth, 8)
    order = np.concatenate([d.indices for d in draws])[:n]
    assert np.array_equal(order, Passes(n, seed=3).take(n))
    straddling = draws[6]
    assert (straddling.weights[:2] == 1).all()
    assert (straddling.probabilities[2:] != 1 / n).any()
    assert sampler.diagnostics().reshuffled == 7
    closed = adambs.BanditSampler(n, K, gate=1e9, seed=3)
    order = np.concatenate([d.indices for d in trained(closed, truth, 25)])
    assert np.array_equal(order, Passes(n, seed=3).take(200))


def test_scores_that_tell_nothing_keep_it_closed_and_training_as_without_a_bandit():
    n, K = 200, 10
    sampler = adambs.BanditSampler(n, K, seed=2)
    rng = np.random.default_rng(0)
    for _ in range(300):
        draw = sampler.draw()
        assert (draw.weights == 1).all()
        sampler.update(draw, rng.gamma(2.0, 1.0, K))
    assert sampler.diagnostics().reshuffled == 300


def test_it_closes_again_when_p_becomes_wrong():
    n, K = 300, 20
    sampler = adambs.BanditSampler(n, K, seed=4)
    trained(sampler, heavy(n), 200)
    assert sampler.gate.open
    rng = np.random.default_rng(1)
    before = sampler.diagnostics().reshuffled
    for _ in range(400):  # from now on nobody can foresee a score
        sampler.update(sampler.draw(), rng.gamma(2.0, 1.0, K))
    assert not sampler.gate.open
    assert sampler.diagnostics().reshuffled > before


def looking_sampler():
    """The sampler looks whenever it may: scores have been seen to scatter."""
    sampler = adambs.BanditSampler(90, 10, candidates=adambs.Candidates(3, cost=1e-9), seed=0)
    sampler.candidates.scatter.add(np.ones(10), np.arange(1.0, 11))
    return sampler


def test_a_look_waits_for_the_end_of_a_pass():
    sampler = looking_sampler()
    order = Passes(90, seed=0).take(90)
    draws = [sampler.draw()]  # without a way to look, so a pass over all begins
    draws += [sampler.draw(lambda i: np.ones(len(i))) for _ in range(8)]
    assert np.array_equal(np.concatenate([draw.indices for draw in draws]), order)
    assert sampler.diagnostics().looks == 0
    assert sampler.draw(lambda i: np.ones(len(i))).learned
    assert (sampler.diagnostics().looks, sampler.diagnostics().reshuffled) == (1, 9)


def test_where_a_look_is_possible_passes_grow_and_end_with_whole_batches():
    """n/8, each a quarter more than the one before, less what is no whole batch, then all; each the beginning
    of an order of its own."""
    n, K = 103, 4
    sampler = adambs.BanditSampler(n, K, candidates=adambs.Candidates(3, cost=100.0), seed=3)
    for number, batches in enumerate((3, 4, 5, 6, 7, 9, 12, 15, 19, 23, 25, 25)):
        draws = [sampler.draw(lambda i: np.ones(len(i))) for _ in range(batches)]
        expected = Passes(n, seed=3, number=number).take(batches * K)
        assert np.array_equal(np.concatenate([draw.indices for draw in draws]), expected)
        assert not sampler.passes.under_way
    assert sampler.diagnostics().reshuffled == 153


def test_a_look_that_fails_changes_nothing():
    sampler = looking_sampler()
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="scores"):
        sampler.draw(lambda indices: np.full(len(indices), np.nan))
    assert same(sampler.state_dict(), before)
    assert np.array_equal(sampler.draw().indices, Passes(90, seed=0).take(10))


@pytest.mark.parametrize("steps", [2, 5, 11])
def test_a_pass_that_grows_is_resumed(steps):
    def go_on(sampler, steps):
        return [sampler.draw(lambda i: np.ones(len(i))).indices for _ in range(steps)]

    straight, resumed = (
        adambs.BanditSampler(103, 4, candidates=adambs.Candidates(3, cost=100.0), seed=3) for _ in range(2)
    )
    go_on(straight, steps)
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    assert same(go_on(straight, 60), go_on(resumed, 60))


def test_it_resumes_in_the_middle_of_a_pass_and_after_opening():
    n, K = 210, 20
    truth = heavy(n)
    straight = adambs.BanditSampler(n, K, seed=5)
    for steps in (3, 150):
        trained(straight, truth, steps)
        resumed = adambs.BanditSampler(n, K, seed=5)
        resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
        pairs = zip(trained(straight, truth, 30), trained(resumed, truth, 30), strict=True)
        assert all(same(a.indices, b.indices) and same(a.weights, b.weights) for a, b in pairs)
        assert same(straight.state_dict(), resumed.state_dict())
    assert 0 < straight.diagnostics().reshuffled < 213


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"position": 50}, "'position'.* from 0 to 49, not 50"),
        ({"position": -1}, "position"),
        ({"number": 0.5}, "number"),
        ({"growing": 1}, "growing"),
        ({"growing": True, "position": 5}, "'position'.* from 0 to 4, not 5"),
    ],
)
def test_a_damaged_pass_is_refused(damage, message):
    sampler = adambs.BanditSampler(50, 5)
    state = sampler.state_dict()
    state["passes"] = {**state["passes"], **damage}
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)


def test_who_chooses_a_rule_or_weights_gets_no_gate_unless_asked_for():
    weights = np.arange(1.0, 11)
    assert adambs.BanditSampler(10, 2).gate.threshold == 1.1
    assert adambs.BanditSampler(10, 2, rule=adambs.Exp3()).gate.threshold == 0
    assert adambs.BanditSampler(10, 2, initial_weights=weights).gate.threshold == 0
    assert adambs.BanditSampler(10, 2, rule=adambs.Tracking(), gate=1.3).gate.threshold == 1.3
    for bad in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="gate"):
            adambs.BanditSampler(10, 2, gate=bad)
    ungated = adambs.BanditSampler(10, 2, gate=0)
    with pytest.raises(ValueError, match="gate"):
        ungated.load_state_dict(adambs.BanditSampler(10, 2).state_dict())


@pytest.mark.parametrize(
    "rule", [adambs.Exp3(step=0.5), adambs.Tracking(), adambs.VRB(), adambs.Avare(), adambs.Release()]
)
def test_every_rule_can_be_gated(rule):
    n, K = 100, 10
    truth = heavy(n)
    sampler = adambs.BanditSampler(n, K, rule=rule, gate=1.05, seed=6)
    first = trained(sampler, truth, 5)[0]
    assert (first.weights == 1).all()
    assert np.isclose(sampler.probabilities().sum(), 1)
