"""What every rule owes the sampler: one line in ``RULES`` and a rule is tested for all of it."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import adambs
from adambs import VRB, Avare, Calibrated, Exp3, Exp3M, Release, Tracking, Uniform, _check


class LastSeen(adambs.rules.TreeRule):
    """A rule of a user's own: weights follow the last scores, and it counts how often each was seen."""

    def start(self, n, batch_size, initial_weights):
        super().start(n, batch_size, initial_weights)
        self.seen = np.zeros(n, np.int64)

    def update(self, indices, ratios, scores):
        self.seen[indices] += 1
        self.tree.update(indices, 0.1 + scores.clip(max=1e100))
        return int((scores > 1e100).sum())

    def settings(self):
        return {}

    def state_dict(self):
        return {**super().state_dict(), "seen": torch.from_numpy(self.seen.copy())}

    def with_state(self, state):
        new = super().with_state(state)
        new.seen = _check.array(state, "seen", (self.n,), "int64", least=0).copy()
        return new


RULES = [
    Uniform(),
    Exp3(step=0.5),
    Exp3(p_min=0.999, step=3.0),
    Exp3(p_min=1 - 1e-9, horizon=1000),
    Exp3(p_min=1e-6, step=30.0),
    Exp3(step=3.0, offset="none"),
    Exp3(p_min=0.999, step=300.0, offset="none"),
    Exp3(step=3.0, offset="baseline"),
    Exp3M(),
    Exp3M(gamma=1e-3, step=30.0),
    Exp3M(gamma=1 - 1e-9, step=3.0),
    Release(),
    Avare(p_min=0.3),
    Avare(p_min=0.999),
    Tracking(),
    Tracking(uniform=0.01, smoothing=0.5, forgetting=0.3),
    VRB(),
    VRB(uniform=1e-6, prior=20.0, forgetting=0.9),
    Calibrated(),
    Calibrated(uniform=0.3, memory=0.5, prior=1e-3),
    Calibrated(uniform=1e-9, memory=1e6, prior=5e-324),
    LastSeen(),
]
LEARNS = [rule for rule in RULES if not isinstance(rule, Uniform)]
OBSERVES = (Avare, Tracking, Calibrated)

# Entries in which a subnormal number or any whole number makes sense: nothing is divided by them.
ANY_SIZE = {(Release, "low"), (LastSeen, "weights"), (LastSeen, "seen")}

every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)
every_learner = pytest.mark.parametrize("rule", LEARNS, ids=repr)

EXTREMES = [0.0, 5e-324, 1e-310, 1e-300, 1e-160, 1e-12, 0.3, 1.0, 1e12, 1e160, 1e300, 1.7e308]


def started(rule, n=60, K=6, initial_weights=None):
    rule = copy.copy(rule)
    rule.start(n, K, initial_weights)
    return rule


def taught(rule, steps, seed=0):
    rng = np.random.default_rng(seed)
    norms = rng.gamma(0.5, 0.5, rule.n)
    for _ in range(steps):
        indices, ratios = rule.draw(rng.random(rule.batch_size))
        rule.update(indices, ratios, norms[indices] * rng.uniform(0.5, 1.5, rule.batch_size))
    return rule


def assert_distribution(rule):
    r = rule.ratios()
    assert r.dtype == np.float64
    assert r.shape == (rule.n,)
    assert np.isfinite(r).all()
    assert (r > 0).all() or isinstance(rule, LastSeen)
    assert r.mean() == pytest.approx(1, rel=1e-9)
    if isinstance(rule, Exp3 | Avare):
        assert r.min() >= rule.p_min
    if isinstance(rule, Tracking | VRB | Calibrated):
        assert r.min() >= rule.uniform
    if isinstance(rule, Exp3M):
        assert r.min() >= rule.gamma * (1 - 1e-15)
        assert r.max() <= rule.n / rule.batch_size * (1 + 1e-11)


# ---------------------------------------------------------------------------------------- start


@every_rule
@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_a_rule_starts_uniform(rule, n):
    np.testing.assert_allclose(started(rule, n, 1).ratios(), 1, rtol=1e-15)


@every_learner
@pytest.mark.parametrize("scale", [1e-190, 1.0, 1e300])
def test_initial_weights_of_any_scale_are_followed(rule, scale):
    weights = scale * np.array([0.0, 1e-6, 0.1, 1.0, 4.0])
    rule = started(rule, 5, 1, weights)
    assert_distribution(rule)
    assert (np.diff(rule.ratios()) >= -1e-12).all() or rule.spread()[0] < 1 + 1e-9
    alike = started(rule, 5, 1, weights / scale * 7.0)
    np.testing.assert_allclose(rule.ratios(), alike.ratios(), rtol=1e-9, atol=1e-25)
    assert_distribution(taught(rule, 20))


@every_rule
def test_one_rule_object_configures_many(rule):
    before = copy.copy(vars(rule))
    first = taught(started(rule), 30)
    second = started(rule, 90)
    np.testing.assert_allclose(second.ratios(), 1, rtol=1e-15)
    assert isinstance(rule, Uniform) or np.ptp(first.ratios()) > 0
    assert vars(rule) == before


@every_rule
def test_settings_are_plain_and_printed(rule):
    rule = started(rule)
    assert all(isinstance(value, int | float | str) for value in rule.settings().values())
    assert repr(rule).startswith(type(rule).__name__ + "(")
    assert all(f"{name}=" in repr(rule) for name in rule.settings())
    assert rule.settings() == taught(rule, 10).settings()


# ----------------------------------------------------------------------------------------- draw


@every_rule
def test_draws_follow_the_ratios(rule):
    rule = taught(started(rule), 200)
    r = rule.ratios()
    indices, ratios = rule.draw(np.random.default_rng(1).random(300_000))
    assert indices.dtype == np.int64
    assert np.array_equal(ratios, r[indices])
    assert np.array_equal(ratios[:9], rule.ratios(indices[:9]))
    expected = r * 300_000 / 60
    often = expected > 5
    seen = np.bincount(indices, minlength=60)
    expected[often] *= seen[often].sum() / expected[often].sum()
    assert stats.chisquare(seen[often], expected[often]).pvalue > 1e-3
    assert seen[~often].sum() <= 10 * (expected[~often].sum() + 1)


@every_rule
def test_the_ends_of_the_quantiles_are_examples(rule):
    for n, K in ((1, 1), (7, 7), (60, 6)):
        started_rule = taught(started(rule, n, K), 40)
        u = np.array([0.0, 5e-324, 0.5, np.nextafter(1.0, 0.0), 1.0])
        indices, ratios = started_rule.draw(u)
        assert indices.min() >= 0
        assert indices.max() < n
        assert np.array_equal(ratios, started_rule.ratios(indices))
        assert all(len(part) == 0 for part in started_rule.draw(np.empty(0)))


@every_rule
@pytest.mark.parametrize(("n", "K"), [(60, 6), (9, 7), (5, 5), (40, 1)])
def test_a_rule_says_whether_a_batch_has_an_example_twice(rule, n, K):
    rule, rng = taught(started(rule, n, K), 60), np.random.default_rng(0)
    repeated = 0
    for count in [*range(K + 1), *([K] * 300)]:
        indices, ratios = rule.draw(rng.random(count))
        assert len(indices) == len(ratios) == count
        repeated += len(set(indices.tolist())) < count
    assert (repeated == 0) == (rule.distinct or K == 1)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.distinct], ids=repr)
def test_quantiles_in_order_reach_every_example(rule):
    """A fine grid: each example is met n p times a point, to within the points at its ends."""
    rule = taught(started(rule, 20, 4), 30)
    r = rule.ratios()
    met = np.bincount(rule.draw(np.linspace(0, 1, 20_001))[0], minlength=20)
    assert (abs(met - 1000 * r) <= 3).all()


# --------------------------------------------------------------------------------------- update


@every_rule
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_p_stays_a_distribution(rule, data):
    n = data.draw(st.integers(1, 40))
    K = data.draw(st.integers(1, n))
    rule = started(rule, n, K)
    for _ in range(data.draw(st.integers(1, 6))):
        indices = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=K, max_size=K)))
        scores = np.array(data.draw(st.lists(st.sampled_from(EXTREMES), min_size=K, max_size=K)))
        clipped = rule.update(indices, rule.ratios(indices), scores)
        assert isinstance(clipped, int)
        assert 0 <= clipped <= K
        assert_distribution(rule)
        drawn, ratios = rule.draw(np.linspace(0, 1, 5))
        assert np.array_equal(ratios, rule.ratios(drawn))
        again = rule.with_state(saved_and_loaded(rule.state_dict()))
        assert same(again.state_dict(), rule.state_dict())


@every_rule
@pytest.mark.parametrize(
    "batches",
    [
        [[0.0] * 4],
        [[5e-324] * 4],
        [[1e-310, 5e-324, 0.0, 1e-320], [1.0, 2.0, 3.0, 4.0]],
        [[1e-300] * 4, [1.0] * 4, [1e300] * 4],
        [[1e300] * 4, [1.0] * 4, [1e-300] * 4],
        [[1.0, 1.0, 1.0, 1.7e308], [1.0] * 4],
        [[0.0] * 4, [1.0, 2.0, 0.0, 0.0], [0.0] * 4],
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [4, 50])
def test_extreme_scores_for_many_steps(rule, batches, n):
    rule, rng = started(rule, n, 4), np.random.default_rng(0)
    for batch in batches:
        for _ in range(300):
            indices, ratios = rule.draw(rng.random(4))
            rule.update(indices, ratios, np.array(batch))
        assert_distribution(rule)
        assert same(rule.with_state(rule.state_dict()).state_dict(), rule.state_dict())


@every_rule
def test_arguments_are_left_alone(rule):
    rule = taught(started(rule), 20)
    indices, ratios, scores = (
        np.array([3, 3, 9]),
        rule.ratios(np.array([3, 3, 9])),
        np.array([0.1, 2.0, 1e300]),
    )
    u = np.array([0.3, 0.9])
    arrays = indices, ratios, scores, u
    before = [array.copy() for array in arrays]
    rule.draw(u)
    rule.update(indices, ratios, scores)
    if isinstance(rule, OBSERVES):
        rule.observe(indices, scores)
    assert all(map(np.array_equal, arrays, before))


# -------------------------------------------------------------------------------------- observe


@every_rule
def test_scores_from_outside_a_draw_are_taken_or_refused(rule):
    rule = started(rule)
    before = rule.state_dict()
    scores = np.random.default_rng(0).gamma(0.5, 1.0, 60)
    if isinstance(rule, OBSERVES):
        assert rule.observe(np.arange(60), scores) == 0
        assert_distribution(rule)
        assert np.ptp(rule.ratios()) > 0 or rule.settings().get("uniform", 0) == 1
        best, worst = scores.argmax(), scores.argmin()
        assert rule.ratios()[best] > rule.ratios()[worst]
    else:
        with pytest.raises(TypeError, match=f"{type(rule).__name__} learns from draws alone.*Tracking"):
            rule.observe(np.arange(60), scores)
        assert same(rule.state_dict(), before)


# --------------------------------------------------------------------------------------- spread


@every_rule
@pytest.mark.parametrize("steps", [0, 1, 150])
def test_the_spread_is_that_of_the_ratios(rule, steps):
    rule = taught(started(rule), steps)
    r = rule.ratios()
    assert rule.spread() == (
        pytest.approx(np.mean(r**2), rel=1e-12),
        pytest.approx(np.mean(r * np.log(r)), rel=1e-9, abs=1e-12),
    )


def test_zero_times_its_logarithm_is_zero():
    rule = started(LastSeen(), 4, 1, np.array([0.0, 0.0, 1.0, 3.0]))
    assert rule.spread() == pytest.approx((2.5, (math.log(1) + 3 * math.log(3)) / 4))


# ---------------------------------------------------------------------------------------- state


@every_rule
@pytest.mark.parametrize("steps", [0, 1, 137])
def test_a_rule_goes_on_from_its_state_bit_for_bit(rule, steps):
    straight = taught(started(rule, 700, 10), steps)
    state = saved_and_loaded(straight.state_dict())
    resumed = started(rule, 700, 10).with_state(state)
    rng = np.random.default_rng(1)
    for _ in range(60):
        u, scores = rng.random(10), rng.gamma(0.5, 0.5, 10)
        (indices, ratios), drawn = straight.draw(u), resumed.draw(u)
        assert same((indices, ratios), drawn)
        straight.update(indices, ratios, scores)
        resumed.update(*drawn, scores)
    assert same(straight.state_dict(), resumed.state_dict())
    assert np.array_equal(straight.ratios(), resumed.ratios())
    assert straight.spread() == resumed.spread()


@every_rule
def test_a_state_is_a_copy_and_saving_changes_nothing(rule):
    watched, left_alone = started(rule), started(rule)
    for seed in range(30):
        taught(watched, 2, seed)
        taught(left_alone, 2, seed)
        for value in watched.state_dict().values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        watched.ratios()[:] = 7.0
        watched.spread()
    assert same(watched.state_dict(), left_alone.state_dict())


@every_rule
def test_with_state_makes_a_new_rule_that_shares_nothing(rule):
    old = taught(started(rule), 30)
    before, state = old.state_dict(), old.state_dict()
    new = old.with_state(state)
    assert type(new) is type(old)
    assert new.settings() == old.settings()
    after = taught(new, 30, seed=5).state_dict()
    assert same(old.state_dict(), before)
    assert same(state, before)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    assert same(new.state_dict(), after)
    assert isinstance(rule, Uniform) or not same(after, before)


def changed(tensor, position, value):
    tensor = tensor.clone()
    tensor[position] = value
    return tensor


def damages(value):
    """Everything that can have happened to an entry, by its kind."""
    yield from (None, "x", [0.0], {}, torch.tensor(1.0))
    if isinstance(value, torch.Tensor):
        yield from (value.tolist(), value.numpy(), value[:-1], torch.cat([value, value[:1]]), value[None])
        yield from (value.to(torch.float32), value.to(torch.complex64), value.to("meta"), value.to_sparse())
    if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
        for bad in (math.nan, -1.0, -5e-324, math.inf, -math.inf, 5e-324, 1.7e308):
            yield changed(value, 3, bad)
        yield value * math.nan
    elif isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64):
        other = torch.int64 if value.dtype == torch.int32 else torch.int32
        yield from (value.to(other), changed(value, 3, -1), changed(value, 3, 2**31 - 1), value * 0)
        yield changed(value, 3, value[4]) if value[3] != value[4] else changed(value, 3, value[4] + 1)
    elif isinstance(value, torch.Tensor):
        yield ~value
    elif isinstance(value, bool):
        yield from (0, 1, 1.0)
    elif isinstance(value, int):
        yield from (-1, 10**30, 0.5, True, math.nan)
    else:
        yield from (math.nan, -1.0, -5e-324, math.inf, 5e-324, 10**400, True)


def is_fine(rule, name, damage, value):
    """Whether a damage happens to be a state in which the rule might be."""
    if not isinstance(value, torch.Tensor):
        return (type(rule), name) in ANY_SIZE and damage == 5e-324
    if not isinstance(damage, torch.Tensor) or damage.is_meta or damage.is_sparse:
        return False
    if damage.dtype != value.dtype or damage.shape != value.shape:
        return False
    if (type(rule), name) in ANY_SIZE:
        return bool(((damage >= 0) & (damage < 1e300)).all())
    return (type(rule), name) == (Tracking, "seen")


@every_learner
def test_a_damaged_state_is_refused_and_changes_nothing(rule):
    rule = taught(started(rule, 30, 5), 40)
    before = rule.state_dict()
    for name, value in before.items():
        refused = 0
        for damage in damages(value):
            if is_fine(rule, name, damage, value):
                continue
            with pytest.raises(ValueError, match=name):
                rule.with_state({**before, name: damage})
            refused += 1
        assert refused > 6
        with pytest.raises(ValueError, match=f"state has no '{name}'"):
            rule.with_state({key: entry for key, entry in before.items() if key != name})
        assert same(rule.state_dict(), before)


@every_rule
def test_a_state_that_is_not_a_mapping_is_refused(rule):
    rule = started(rule)
    for state in (None, [], "state", 3, torch.ones(3)):
        with pytest.raises(ValueError, match="state must be a dict"):
            rule.with_state(state)


@every_learner
def test_a_state_of_another_size_is_refused(rule):
    with pytest.raises(ValueError, match="state"):
        started(rule, 30).with_state(started(rule, 31).state_dict())


# ---------------------------------------------------------------------------- through a sampler


@every_rule
def test_a_sampler_resumes_in_the_middle(rule):
    straight, resumed = (adambs.BanditSampler(40, 5, rule=rule, seed=3) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(30):
        straight.update(straight.draw(), rng.gamma(0.5, 0.5, 5))
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    for _ in range(30):
        draws, scores = (straight.draw(), resumed.draw()), rng.gamma(0.5, 0.5, 5)
        assert torch.equal(draws[0].indices, draws[1].indices)
        assert torch.equal(draws[0].probabilities, draws[1].probabilities)
        straight.update(draws[0], scores)
        resumed.update(draws[1], scores)
    assert same(straight.state_dict(), resumed.state_dict())
