"""BanditSampler and Draw: distribution, unbiasedness, state, diagnostics, errors."""

import copy
import math
import pickle
import random

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded, taught
from scipy import stats

import adambs
from adambs.rules import TreeRule

UNEVEN = np.random.default_rng(7).gamma(0.4, 1.0, 40) + 0.01


def uneven_sampler(K=8, **options):
    return adambs.BanditSampler(40, K, rule=adambs.Exp3(p_min=0.05), initial_weights=UNEVEN, **options)


@pytest.mark.parametrize("stratified", [False, True])
def test_draws_follow_p(stratified):
    sampler = uneven_sampler(stratified=stratified)
    indices = torch.cat([sampler.draw().indices for _ in range(5000)])
    counts = torch.bincount(indices, minlength=40).numpy()
    expected = sampler.probabilities().numpy() * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_independent_draws_are_independent():
    """Pairs of places in a batch: the joint counts are those of independent draws."""
    sampler = adambs.BanditSampler(4, 2, initial_weights=[1, 2, 3, 4])
    pairs = torch.stack([sampler.draw().indices for _ in range(8000)])
    counts = np.zeros((4, 4))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    p = sampler.probabilities().numpy()
    assert stats.chisquare(counts.ravel(), (np.outer(p, p) * len(pairs)).ravel()).pvalue > 1e-3


def test_stratified_draws_take_one_example_from_each_kth_of_the_mass():
    sampler = uneven_sampler(stratified=True)
    cdf = np.concatenate([[0], np.cumsum(sampler.probabilities().numpy())])
    orders = set()
    for _ in range(50):
        indices = sampler.draw().indices.numpy()
        orders.add(tuple(np.argsort(np.argsort(indices, kind="stable"), kind="stable")))
        for k, j in enumerate(np.sort(indices)):
            assert cdf[j] < (k + 1) / 8 + 1e-12
            assert cdf[j + 1] > k / 8 - 1e-12
    assert len(orders) > 10  # and shuffles them: no place in the batch belongs to one stratum


@pytest.mark.parametrize("stratified", [False, True])
def test_the_weighted_mean_is_unbiased(stratified):
    values = np.random.default_rng(0).normal(size=(40, 3))
    sampler = uneven_sampler(stratified=stratified, seed=3)
    estimates = []
    for _ in range(6000):
        draw = sampler.draw()
        estimates.append((draw.weights[:, None].numpy() * values[draw.indices]).mean(0))
    estimates = np.array(estimates)
    z = (estimates.mean(0) - values.mean(0)) / (estimates.std(0, ddof=1) / math.sqrt(len(estimates)))
    assert np.abs(z).max() < 4


def test_stratified_draws_have_less_variance():
    values = UNEVEN  # with p close to UNEVEN, and smooth along the order of the examples
    order = np.argsort(values)
    variance = {}
    for stratified in (False, True):
        sampler = adambs.BanditSampler(40, 8, stratified=stratified, seed=1, gate=0)
        means = [
            (draw.weights.numpy() * values[order][draw.indices]).mean()
            for draw in (sampler.draw() for _ in range(2000))
        ]
        variance[stratified] = np.var(means)
    assert variance[True] < 0.5 * variance[False]


def test_weights_are_exactly_one_over_n_p_of_the_time_of_drawing():
    sampler = uneven_sampler()
    draw = sampler.draw()
    p = sampler.probabilities()[draw.indices]
    taught(sampler, 50)
    assert torch.equal(draw.probabilities, p)
    np.testing.assert_allclose(draw.weights, 1 / (40 * p), rtol=1e-15)
    assert not torch.allclose(sampler.probabilities()[draw.indices], p)


def test_seeds():
    def stream(seed):
        sampler = adambs.BanditSampler(1000, 16, seed=seed)
        return torch.cat([taught(sampler, 1, seed=9).draw().indices for _ in range(20)])

    assert torch.equal(stream(1), stream(1))
    assert not torch.equal(stream(1), stream(2))


@pytest.mark.filterwarnings("ignore:an epoch of 10 batches is over")
def test_no_global_random_stream_is_read_or_changed():
    def streams():
        return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002

    torch.manual_seed(0)
    before = streams()
    sampler = taught(adambs.BanditSampler(100, 10, seed=5, stratified=True), 5)
    loader = adambs.BanditLoader(torch.utils.data.TensorDataset(torch.arange(100)), sampler)
    drawn = [draw.indices for _, draw in loader]
    after = streams()
    assert before[0] == after[0]
    assert same(before[1], after[1])
    assert torch.equal(before[2], after[2])
    torch.manual_seed(1)
    again = taught(adambs.BanditSampler(100, 10, seed=5, stratified=True), 5)
    loader = adambs.BanditLoader(torch.utils.data.TensorDataset(torch.arange(100)), again)
    assert same(drawn, [draw.indices for _, draw in loader])


@pytest.mark.parametrize("rule", [adambs.Exp3(step=0.7), adambs.Uniform()])
@pytest.mark.parametrize("stratified", [False, True])
def test_a_loaded_state_continues_bit_for_bit(rule, stratified):
    def fresh():
        return adambs.BanditSampler(70, 9, rule=rule, seed=4, stratified=stratified)

    straight = taught(taught(fresh(), 500), 500, seed=1)
    resumed = fresh()
    resumed.load_state_dict(saved_and_loaded(taught(fresh(), 500).state_dict()))
    taught(resumed, 500, seed=1)
    assert same(straight.state_dict(), resumed.state_dict())
    for _ in range(20):
        a, b = straight.draw(), resumed.draw()
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.probabilities, b.probabilities)


def test_a_state_is_a_copy():
    sampler = taught(uneven_sampler(), 10)
    state = sampler.state_dict()
    frozen = copy.deepcopy(state)
    taught(sampler, 10)
    assert same(state, frozen)
    other = uneven_sampler()
    other.load_state_dict(state)
    taught(other, 10)
    assert same(state, frozen)


def test_copies_and_pickles_go_on_alike():
    sampler = taught(uneven_sampler(), 10)
    draw = sampler.draw()
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        twin.update(pickle.loads(pickle.dumps(draw)), torch.ones(8))
        assert twin.diagnostics().updates == 11
    assert sampler.diagnostics().updates == 10


def test_diagnostics():
    sampler = uneven_sampler()
    p = sampler.probabilities().numpy()
    assert math.isnan(sampler.diagnostics().variance_reduction)
    norms = np.random.default_rng(1).gamma(1.0, 0.3, 40)
    means = np.zeros(2)
    for _ in range(3000):
        draw = sampler.draw()
        draw.mean(torch.ones(8))
        sampler.update(draw, norms[draw.indices] * 1e-3)  # too small to move p much
        r = 40 * draw.probabilities.numpy()
        s = norms[draw.indices] * 1e-3
        means = 0.99 * means + 0.01 * np.array([(s**2 / r).mean(), (s**2 / r**2).mean()])
    found = sampler.diagnostics()
    assert (found.draws, found.updates, found.scores, found.clipped_scores) == (
        3000,
        3000,
        24000,
        0,
    )
    assert found.variance_reduction == pytest.approx(means[0] / means[1], rel=1e-9)
    p = sampler.probabilities().numpy()
    assert found.effective_sample_size == pytest.approx(1 / (p**2).sum(), rel=1e-9)
    assert found.entropy == pytest.approx(stats.entropy(p), rel=1e-9)


def test_variance_reduction_is_estimated_rightly():
    """With scores that never change, the running estimate must come close to the true ratio."""
    norms = UNEVEN * np.random.default_rng(1).uniform(0.7, 1.4, 40)
    sampler = adambs.BanditSampler(40, 32, rule=LazyRule(), initial_weights=UNEVEN)
    p = sampler.probabilities().numpy()
    found = []
    for _ in range(3000):
        draw = sampler.draw()
        draw.mean(torch.ones(32))
        sampler.update(draw, norms[draw.indices])
        found.append(sampler.diagnostics().variance_reduction)
    truth = 40 * (norms**2).sum() / (norms**2 / p).sum()
    assert np.mean(found[500:]) == pytest.approx(truth, rel=0.05)
    assert truth > 1.5


class LazyRule(TreeRule):
    """Keeps the weights that it was given."""

    def update(self, indices, ratios, scores):
        return 0

    def settings(self):
        return {}


def test_probabilities_of_some():
    sampler = uneven_sampler()
    everything = sampler.probabilities()
    assert everything.sum().item() == pytest.approx(1, abs=1e-12)
    for indices in ([3, 3, 39], np.array([0, 5]), torch.tensor([1]), []):
        assert torch.equal(sampler.probabilities(indices), everything[torch.as_tensor(indices).long()])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, not 0"),
        ({"n": -3}, ValueError, "n must be at least 1, not -3"),
        ({"n": 10.0}, TypeError, "n must be a whole number, not 10.0"),
        ({"n": True}, TypeError, "n must be a whole number, not True"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, not 0"),
        ({"batch_size": 11}, ValueError, "batch_size must be at most n = 10, not 11"),
        ({"rule": "exp3"}, TypeError, "rule must be a Rule such as Exp3"),
        ({"rule": adambs.Exp3}, TypeError, "rule must be a Rule such as Exp3"),
        ({"seed": -1}, ValueError, "seed must be at least 0, not -1"),
        ({"seed": None}, TypeError, "seed must be a whole number, not None"),
        ({"initial_weights": np.zeros(10)}, ValueError, "initial_weights are all zero"),
        ({"initial_weights": np.ones(9)}, ValueError, r"initial_weights must have shape \(10,\)"),
        ({"initial_weights": [-1.0] + [1.0] * 9}, ValueError, r"initial_weights\[0\] is -1"),
        ({"initial_weights": "hard"}, TypeError, "initial_weights must be 10 numbers"),
    ],
)
def test_the_constructor_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        adambs.BanditSampler(**{"n": 10, "batch_size": 2, **arguments})


def other_samplers_draw(sampler):
    return uneven_sampler().draw()


BAD_UPDATES = [
    (None, [1.0] * 7, ValueError, r"scores must have shape \(8,\).*not \(7,\)"),
    (None, torch.ones(8, 1), ValueError, r"scores must have shape \(8,\).*not \(8, 1\)"),
    (None, torch.tensor(1.0), ValueError, r"scores must have shape \(8,\).*not \(\)"),
    (None, [1.0] * 7 + [math.nan], ValueError, r"scores\[7\] is nan"),
    (None, [math.inf] + [1.0] * 7, ValueError, r"scores\[0\] is inf"),
    (None, [1.0, -0.5] + [1.0] * 6, ValueError, r"scores\[1\] is -0.5"),
    (None, torch.ones(8, device="meta"), ValueError, "scores is on the meta device"),
    (None, torch.ones(8, dtype=torch.complex64), TypeError, "scores must be real numbers"),
    (None, np.ones(8, complex), TypeError, "scores must be 8 numbers"),
    (None, ["a"] * 8, TypeError, "scores must be 8 numbers"),
    (None, None, TypeError, "scores must be 8 numbers"),
    (None, [[1.0], [1.0, 2.0]], TypeError, "scores must be 8 numbers"),
    (lambda s: "3", [1.0] * 8, TypeError, "draw must be a Draw or its number, not str"),
    (lambda s: 99, [1.0] * 8, ValueError, "draw 99 was drawn by another sampler: this one has drawn 20"),
    (lambda s: 3, [1.0] * 8, ValueError, "draw 3 is not awaited: it has had its feedback already"),
    (lambda s: torch.tensor([3, 4]), [1.0] * 8, ValueError, r"numbers of several draws, \[3, 4\]"),
    (lambda s: torch.tensor([3.0]), [1.0] * 8, TypeError, "not a tensor of torch.float32"),
    (other_samplers_draw, [1.0] * 8, ValueError, "not awaited: .* drawn by another sampler"),
]


@pytest.mark.parametrize(("make_draw", "scores", "error", "words"), BAD_UPDATES)
def test_a_refused_update_changes_nothing(make_draw, scores, error, words):
    sampler = taught(uneven_sampler(), 20)
    draw = sampler.draw() if make_draw is None else make_draw(sampler)
    before = sampler.state_dict()
    with pytest.raises(error, match=words):
        sampler.update(draw, scores)
    assert same(sampler.state_dict(), before)
    following = taught(uneven_sampler(), 20)
    if make_draw is None:
        following.draw()
    assert torch.equal(sampler.draw().indices, following.draw().indices)


@pytest.mark.parametrize("indices", [[40], [-1], [0, 99]])
def test_probabilities_refuse_an_index_out_of_range(indices):
    with pytest.raises(ValueError, match=rf"indices must lie in 0..39, not {indices[-1]}"):
        uneven_sampler().probabilities(indices)


@pytest.mark.parametrize("indices", [[0.5], 3, [[1]], "a"])
def test_probabilities_refuse_what_are_no_indices(indices):
    with pytest.raises(TypeError, match="indices must be a list of whole numbers"):
        uneven_sampler().probabilities(indices)


def damaged(**changes):
    """A state of the sampler below with some entries replaced, or removed with None."""
    state = taught(uneven_sampler(), 5).state_dict()
    for path, value in changes.items():
        place = state
        *way, last = path.split("__")
        for step in way:
            place = place[step]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return state


BAD_STATES = [
    (lambda: adambs.BanditSampler(41, 8).state_dict(), "n = 41, this one has 40"),
    (lambda: adambs.BanditSampler(40, 9).state_dict(), "batch_size = 9, this one has 8"),
    (lambda: uneven_sampler(stratified=True).state_dict(), "stratified = True"),
    (
        lambda: adambs.BanditSampler(40, 8, rule=adambs.Uniform()).state_dict(),
        "rule_name = 'Uniform', this one has 'Exp3'",
    ),
    (
        lambda: adambs.BanditSampler(40, 8, rule=adambs.Exp3(p_min=0.05, step=0.9)).state_dict(),
        "rule_settings",
    ),
    (lambda: {}, "state has no 'format'"),
    (lambda: damaged(random=None), r"state\['random'\] is damaged|no 'random'"),
    (lambda: damaged(random__state={}), "not that of a random stream"),
    (lambda: damaged(counters__draws=-1), "'draws'.* whole number from 0"),
    (lambda: damaged(rule__weights=torch.ones(39)), r"shape \(39,\)"),
    (lambda: damaged(rule__weights=torch.full((40,), math.nan, dtype=torch.float64)), "nan"),
    (lambda: damaged(rule__weights=torch.zeros(40, dtype=torch.float64)), "zero"),
    (
        lambda: damaged(epochs__ahead=[[5, 1.0, False, math.inf, [40] * 8, [1.0] * 8, [1.0] * 8]]),
        "outside the data set",
    ),
    (lambda: uneven_sampler(seed=1).state_dict(), "seed = 1, this one has 0"),
    (lambda: {"n": 40, "rule_state": {}}, "state is of adambs 0.1, which this version does not read"),
]


@pytest.mark.parametrize(("make_state", "words"), BAD_STATES)
def test_a_refused_state_changes_nothing(make_state, words):
    sampler = taught(uneven_sampler(), 20)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict(make_state())
    assert same(sampler.state_dict(), before)
    assert torch.equal(sampler.draw().indices, taught(uneven_sampler(), 20).draw().indices)


def test_draw_mean_is_equation_1():
    draw = uneven_sampler().draw()
    losses = torch.rand(8, dtype=torch.float64, requires_grad=True)
    loss = draw.mean(losses)
    loss.backward()
    expected = sum(l / (40 * p) for l, p in zip(losses, draw.probabilities, strict=True)) / 8
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    np.testing.assert_allclose(losses.grad, draw.weights / 8, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_draw_mean_does_not_round_weights_to_half_precision(dtype):
    draw = uneven_sampler().draw()
    mean = draw.mean(torch.ones(8, dtype=dtype))
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(draw.weights.mean().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("losses", "error", "words"),
    [
        (torch.tensor(0.7), ValueError, 'looks reduced already; compute it with reduction="none"'),
        (torch.ones(7), ValueError, r"losses must have shape \(8,\)"),
        (torch.ones(8, 5), ValueError, r"losses.flatten\(1\).sum\(1\) / T with a constant T"),
        (torch.ones(8, dtype=torch.int64), TypeError, "losses must be floating point"),
        (np.ones(8), TypeError, "losses must be a tensor, not ndarray"),
    ],
)
def test_draw_mean_refuses(losses, error, words):
    with pytest.raises(error, match=words):
        uneven_sampler().draw().mean(losses)


def test_the_smallest_sampler():
    sampler = taught(adambs.BanditSampler(1, 1), 100)
    assert sampler.draw().indices.tolist() == [0]
    assert sampler.probabilities().tolist() == [1.0]
