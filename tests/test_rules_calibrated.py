"""Calibrated, against a dense version of itself that knows nothing of groups in order."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import taught
from hypothesis import given
from hypothesis import strategies as st

import adambs
from adambs.rules import grouping


class DenseCalibrated:
    """The definition, in dictionaries: the group of a score is floor(3 log2(score / top))."""

    def __init__(self, n, uniform, memory, prior):
        self.n, self.uniform, self.memory, self.prior = n, uniform, memory, prior
        self.group = ["unseen"] * n
        self.mean, self.draws = {}, {}
        self.top = None

    def value(self, group):
        draws, mean = self.draws.get(group, 0.0), self.mean.get(group, 0.0)
        if group == "unseen":
            return mean if draws else 1.0
        middle = 2.0 ** ((group + 0.5) / 3)
        return (draws * mean + self.prior * middle**2) / (draws + self.prior)

    def p(self):
        roots = np.array([math.sqrt(self.value(group)) for group in self.group])
        return ((1 - self.uniform) * roots / roots.mean() + self.uniform) / self.n

    def update(self, indices, scores):
        self.top = max(scores) if self.top is None else self.top
        known = [s / self.top for s in scores]
        for group, s in zip([self.group[j] for j in indices], known, strict=True):
            self.draws[group] = min(self.draws.get(group, 0.0) + 1, self.memory)
            old = self.mean.get(group, 0.0)
            self.mean[group] = old + (s**2 - old) / max(self.draws[group], 1)
        for j, s in zip(indices, known, strict=True):
            self.group[j] = min(max(math.floor(3 * np.log2(s)), -60), 29) if s > 0 else -60


@given(
    n=st.integers(1, 80),
    K=st.integers(1, 12),
    uniform=st.floats(0.01, 0.99),
    memory=st.sampled_from([0.5, 3.0, 300.0]),
    prior=st.sampled_from([0.1, 5.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_its_dense_version(n, K, uniform, memory, prior, scale, seed):
    K = min(K, n)
    rule = adambs.Calibrated(uniform=uniform, memory=memory, prior=prior)
    sampler = adambs.BanditSampler(n, K, rule=rule, seed=seed)
    dense = DenseCalibrated(n, uniform, memory, prior)
    rng = np.random.default_rng(seed)
    for _ in range(40):
        draw = sampler.draw()
        np.testing.assert_allclose(draw.probabilities, dense.p()[draw.indices], rtol=1e-9)
        scores = scale * rng.gamma(0.3, 1.0, K) ** 3  # over more octaves than there are groups for
        sampler.update(draw, scores)
        dense.update(draw.indices.tolist(), scores)
        np.testing.assert_allclose(sampler.probabilities(), dense.p(), rtol=1e-9)


def assert_consistent(members):
    """Each example has one slot, in a chunk of its group; the list has all of them, group after group."""
    n, everyone = members.n, np.arange(members.n)
    listed, groups, sizes = members.listed(), members.groups(), members.sizes
    np.testing.assert_array_equal(np.sort(listed), everyone)
    np.testing.assert_array_equal(groups[listed], np.repeat(np.arange(grouping.GROUPS), sizes))
    slots = members.place ^ everyone
    np.testing.assert_array_equal(members.order[slots] ^ slots, everyone)
    np.testing.assert_array_equal(members.owner[slots >> members.shift], groups)
    runs = members.table[grouping._RUN]
    np.testing.assert_array_equal(np.diff(runs), sizes >> members.shift)
    chunks = np.concatenate([members.full[:-1], members.table[grouping._TAIL, : grouping.GROUPS]])
    np.testing.assert_array_equal(np.sort(chunks), np.arange((n >> members.shift) + grouping.GROUPS))
    worth = np.ones((4, grouping.GROUPS))  # each member is found once, in its place of the list
    worth[grouping.SUMS] = np.cumsum(sizes)
    found, _ = members.draw(worth, (everyone + 0.5) / n)
    np.testing.assert_array_equal(found, listed)


@given(
    n=st.sampled_from([1, 255, 256, 257, 512, 3000]),
    crowded=st.integers(1, grouping.SCORED),
    seed=st.integers(0, 2**32 - 1),
)
def test_members_move_as_in_a_dense_version_and_resume_in_order(n, crowded, seed):
    """Waves between few groups fill chunks and empty them; a copy made from the list goes on alike."""
    random = np.random.default_rng(seed)
    members, groups = grouping.Members(n), np.full(n, grouping.SCORED)
    for wave in range(6):
        indices = random.integers(0, n, random.integers(1, 2 * n + 1))
        targets = random.choice(random.integers(0, grouping.SCORED, crowded), len(indices))
        loaded = grouping.Members.of(members.listed(), members.sizes.copy(), "order")
        for each in (members, loaded):
            each.move(indices + 7, 7, targets)
        for j, target in zip(indices, targets, strict=True):
            groups[j] = target
        np.testing.assert_array_equal(members.groups(), groups)
        np.testing.assert_array_equal(members.sizes, np.bincount(groups, minlength=grouping.GROUPS))
        np.testing.assert_array_equal(loaded.listed(), members.listed(), err_msg=f"wave {wave}")
        assert_consistent(members)
        assert_consistent(loaded)


def test_the_group_of_a_score_is_exact_at_every_border():
    """The cube of a score is between two powers of two, in exact arithmetic; what is beyond is clamped."""
    borders = [2.0 ** (k / 3) for k in range(-65, 35)]
    scores = [0.0, 5e-324, 1e-310, 1e50, 0.3, 0.7, *borders]
    scores += [np.nextafter(border, far) for border in borders for far in (0.0, np.inf)]

    def expected(score):
        lowest, highest = -60, 29
        if Fraction(score) ** 3 < Fraction(2) ** lowest:
            return 0
        reached = [g for g in range(lowest, highest + 1) if Fraction(score) ** 3 >= Fraction(2) ** g]
        return reached[-1] - lowest

    found = grouping.Members.by_score(np.array(scores), 1.0).groups()
    assert found.tolist() == [expected(score) for score in scores]


def test_more_examples_than_stay_near_the_processor_learn_the_same():
    """Their slots are read before they are written to."""
    n, K, rng = 70_000, 3000, np.random.default_rng(4)
    rule = adambs.Calibrated()
    rule.start(n, K, None)
    scores = np.full(n, np.nan)
    for _ in range(30):
        indices = rng.integers(0, n, K)
        seen = rng.gamma(0.3, 1.0, K)
        rule.update(indices, np.ones(K), seen)
        scores[indices] = seen / rule.unit  # of several for one example the last
    with np.errstate(divide="ignore"):
        groups = np.clip(np.floor(3 * np.log2(scores)), -60, 29) + 60
    np.testing.assert_array_equal(rule.groups(), np.where(np.isnan(scores), grouping.SCORED, groups))
    assert_consistent(rule.members)


def test_every_example_has_a_slot_of_a_chunk_of_its_group():
    rule = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 200).rule
    assert_consistent(rule.members)
    assert len(np.unique(rule.groups())) > 10


def test_examples_are_numbered_with_four_bytes_each():
    rule = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 200).rule
    assert rule.state_dict()["order"].dtype == torch.int32
    assert rule.members.order.dtype == rule.members.place.dtype == np.int32


def test_more_examples_than_four_bytes_can_number(monkeypatch):
    """The same rule with 8 bytes each: only what is stored differs."""
    few = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 100)
    monkeypatch.setattr(grouping, "_MOST_INT32", 299)
    many = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 100)
    state = many.rule.state_dict()
    assert state["order"].dtype == torch.int64
    assert torch.equal(state["order"], few.rule.state_dict()["order"])
    assert torch.equal(many.draw().indices, few.draw().indices)
    with pytest.raises(ValueError, match=r"state\['order'\] must be a tensor .* \(int64\)"):
        many.rule.with_state(few.rule.state_dict())


@pytest.mark.parametrize(
    ("position", "value"), [(0, 1), (7, 299), (299, -1), (5, 300), (5, 2**31 - 1), (5, -(2**31))]
)
def test_an_order_that_is_no_permutation_is_refused(position, value):
    rule = taught(adambs.BanditSampler(300, 20, rule=adambs.Calibrated()), 100).rule
    state = rule.state_dict()
    if 0 <= value < 300:
        value = int(state["order"][value])  # an example that stands somewhere else, too
    state["order"][position] = value
    with pytest.raises(ValueError, match=r"state\['order'\] must hold each of 300 examples once"):
        rule.with_state(state)


def test_a_hundred_million_examples_are_drawn_one_by_one():
    """Middles of members at all ends of uneven groups, in exact arithmetic."""
    n = 10**8
    sizes = np.zeros(grouping.GROUPS, np.int64)
    sizes[[0, 7, 30, 60, 89, 90]] = [1, 40_000_000, 3, 9_999_999, 1, n - 50_000_004]
    bounds = np.concatenate([[0], sizes.cumsum()])
    worth = grouping.nothing_known()
    worth[grouping.MEANS] = 1.0
    grouping.settle(worth, sizes, 5.0, 0.05)
    ratios, sums = worth[grouping.RATIOS], worth[grouping.SUMS]
    assert sums[-1] == pytest.approx(n, rel=1e-12)
    exact = [Fraction(float(r)) for r in ratios]
    total = sum(int(size) * r for size, r in zip(sizes, exact, strict=True))
    u, expected, before = [], [], Fraction(0)
    for g in np.flatnonzero(sizes):
        for member in {0, 1, sizes[g] // 3, sizes[g] - 2, sizes[g] - 1} & set(range(sizes[g])):
            for part in (Fraction(1, 1000), Fraction(1, 2), Fraction(999, 1000)):
                u.append(float((before + (int(member) + part) * exact[g]) / total))
                expected.append(bounds[g] + member)
        before += int(sizes[g]) * exact[g]
    members = grouping.Members.of(np.arange(n, dtype=np.int32), sizes, "order")
    indices, drawn = members.draw(worth, np.array(u))
    np.testing.assert_array_equal(indices, expected)
    assert ratios.min() < 0.06 < 1 < ratios.max()
    assert set(drawn) == set(ratios[sizes > 0])


def test_starting_from_a_hundred_million_writes_nothing():
    rule = adambs.Calibrated()
    rule.start(10**8, 128, None)
    assert rule.draw(np.array([0.0, 0.123456785, 1.0]))[0].tolist() == [0, 12345678, 10**8 - 1]
    assert rule.spread() == pytest.approx((1, 0), abs=1e-15)


@given(n=st.integers(1, 2000), seed=st.integers(0, 2**32 - 1))
def test_initial_weights_are_grouped_like_scores(n, seed):
    """Counting sort in start, against moving each example from group to group in observe."""
    weights = np.random.default_rng(seed).gamma(0.2, 1.0, n) ** 3 + 1e-300
    sorted_, moved = adambs.Calibrated(), adambs.Calibrated()
    sorted_.start(n, 1, weights)
    moved.start(n, 1, None)
    moved.observe(np.arange(n), weights)
    assert np.array_equal(sorted_.groups(), moved.groups())
    assert np.array_equal(sorted_.group_sizes, moved.group_sizes)
    assert sorted_.unit == moved.unit
    assert_consistent(sorted_.members)
    assert_consistent(moved.members)


@pytest.mark.parametrize("first", [1e-300, 1e-308, 1.0])
def test_scores_may_rise_and_fall_by_any_factor(first):
    """Far above the unit all scores look alike; far below, all look like zero. Neither warns."""
    sampler = adambs.BanditSampler(50, 5, rule=adambs.Calibrated())
    for scale in (first, 1.0, 1e300, 1e-300):
        for _ in range(100):
            sampler.update(sampler.draw(), scale * np.array([0.1, 0.2, 0.5, 1.0, 1.5]))
        assert sampler.probabilities().sum() == pytest.approx(1, rel=1e-12)
        assert sampler.probabilities().min() >= 0.05 / 50


def test_quantiles_at_the_ends_are_valid_and_all_members_are_reached():
    sampler = taught(adambs.BanditSampler(37, 3, rule=adambs.Calibrated()), 40)
    indices, ratios = sampler.rule.draw(np.linspace(0, 1, 5001))
    assert set(indices) == set(range(37))
    np.testing.assert_array_equal(ratios, sampler.rule.ratios(indices))


def test_stale_scores_are_worth_what_they_have_proved_to_be():
    """Every draw finds an example hard or easy by a coin: a score says nothing, and p must not follow it."""
    n, K = 1000, 50
    rng = np.random.default_rng(1)
    sampler = adambs.BanditSampler(n, K, rule=adambs.Calibrated(), seed=0)
    naive = adambs.BanditSampler(n, K, rule=adambs.Tracking(uniform=0.1), seed=0)
    for trained in (sampler, naive):
        for _ in range(3000):
            draw = trained.draw()
            trained.update(draw, np.where(rng.random(K) < 0.5, 1.0, 0.01))  # whatever it was before
    assert 0.9 < sampler.diagnostics().variance_reduction < 1.1  # it has found out: uniform
    assert naive.diagnostics().variance_reduction < 0.5  # it believes each score
    p = n * sampler.probabilities()
    assert p.max() / p.min() < 1.5


def test_it_reaches_the_variance_reduction_of_known_norms():
    """With norms that never change it loses only the width of a group and the uniform share."""
    n, rng = 2000, np.random.default_rng(0)
    norms = rng.gamma(0.3, 1.0, n)
    sampler = adambs.BanditSampler(n, 50, rule=adambs.Calibrated(), seed=1)
    for _ in range(2000):
        draw = sampler.draw()
        sampler.update(draw, norms[draw.indices])
    p = 0.9 * norms / norms.sum() + 0.1 / n
    best = n * (norms**2).sum() / (norms**2 / p).sum()
    assert sampler.diagnostics().variance_reduction == pytest.approx(best, rel=0.1)


def test_a_teachers_weights_count_as_seen_scores():
    sampler = adambs.BanditSampler(3, 1, rule=adambs.Calibrated(), initial_weights=[0.1, 1.0, 4.0])
    p = sampler.probabilities()
    assert p[0] < p[1] < p[2]
    assert p[2] / p[1] > 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"uniform": 0.0}, "uniform must lie strictly between"),
        ({"uniform": 1.0}, r"use Uniform\(\)"),
        ({"memory": 0}, "memory must be positive"),
        ({"prior": -1}, "prior must be positive"),
    ],
)
def test_it_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        adambs.Calibrated(**arguments)
