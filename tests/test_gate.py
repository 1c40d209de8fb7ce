"""The gate: reshuffled passes while p does not pay, and draws from p as soon as it does."""

import numpy as np
import pytest
import scipy.stats
from helpers import same, saved_and_loaded

import adambs
from adambs.passes import Passes


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


def test_it_opens_exactly_when_the_estimated_variance_reduction_is_above_the_gate():
    """Against the estimate by hand, from p as it was before each update."""
    n, K, gate = 400, 16, 1.5
    truth = heavy(n)
    sampler = adambs.BanditSampler(n, K, gate=gate, seed=1)
    uniform = ours = 0.0
    closed = []
    for _ in range(150):
        p = sampler.probabilities().numpy()
        draw = sampler.draw()
        closed.append(bool((draw.probabilities == 1 / n).all()))
        assert closed[-1] == (not uniform > gate * ours)
        i, q = draw.indices.numpy(), draw.probabilities.numpy()
        uniform = 0.99 * uniform + 0.01 * np.mean(truth[i] ** 2 / (n * q))
        ours = 0.99 * ours + 0.01 * np.mean(truth[i] ** 2 / (n * q * n * p[i]))
        sampler.update(draw, truth[i])
    assert closed[:20] == [True] * 20  # everything is unseen, or nearly
    assert not any(closed[-20:])
    assert sampler.diagnostics().reshuffled == sum(closed)


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
    assert not sampler._closed()
    rng = np.random.default_rng(1)
    before = sampler.diagnostics().reshuffled
    for _ in range(400):  # from now on nobody can foresee a score
        sampler.update(sampler.draw(), rng.gamma(2.0, 1.0, K))
    assert sampler._closed()
    assert sampler.diagnostics().reshuffled > before


def test_a_look_through_a_closed_gate_takes_its_candidates_from_the_pass():
    n, K = 90, 10
    sampler = adambs.BanditSampler(n, K, looking=adambs.Looking(3, cost=1e-9), seed=0)
    truth = heavy(n)
    sampler.update(sampler.draw(), np.arange(1.0, K + 1))  # tau is above one from now on
    seen = []

    def score(indices):
        seen.append(indices.numpy())
        return truth[indices]

    sampler.draw(score)
    assert np.array_equal(seen[0], Passes(n, seed=0).take(40)[10:])
    assert sampler.diagnostics().reshuffled == 2


def test_a_look_that_fails_leaves_the_pass_where_it_was():
    sampler = adambs.BanditSampler(90, 10, looking=adambs.Looking(3, cost=1e-9), seed=0)
    sampler.update(sampler.draw(), np.arange(1.0, 11))
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="scores"):
        sampler.draw(lambda indices: np.full(len(indices), np.nan))
    assert same(sampler.state_dict(), before)
    assert np.array_equal(sampler.draw().indices, Passes(90, seed=0).take(20)[10:])


def test_it_resumes_in_the_middle_of_a_pass_and_after_opening():
    n, K = 210, 20
    truth = heavy(n)
    straight = adambs.BanditSampler(n, K, seed=5)
    for steps in (3, 150):
        trained(straight, truth, steps)
        resumed = adambs.BanditSampler(n, K, seed=99)
        resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
        pairs = zip(trained(straight, truth, 30), trained(resumed, truth, 30), strict=True)
        assert all(same(a.indices, b.indices) and same(a.weights, b.weights) for a, b in pairs)
        assert same(straight.state_dict(), resumed.state_dict())
    assert 0 < straight.diagnostics().reshuffled < 213


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"position": 50}, "at 50 of 50"),
        ({"position": -1}, "position"),
        ({"number": 0.5}, "number"),
        ({"seed": None}, "seed"),
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
    assert adambs.BanditSampler(10, 2).gate == 1.1
    assert adambs.BanditSampler(10, 2, rule=adambs.Exp3()).gate == 0
    assert adambs.BanditSampler(10, 2, initial_weights=weights).gate == 0
    assert adambs.BanditSampler(10, 2, rule=adambs.Tracking(), gate=1.3).gate == 1.3
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
