"""Contextual, against a dense version of itself; its labels, its state, and what a sampler does with it."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded, taught
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import adambs
from adambs.rules.contexts import Contexts
from adambs.rules.contextual import Contextual
from adambs.rules.labels import fingerprint, numbered


class DenseContextual:
    """The definition, in dictionaries: a seen example has the group of its score, an unseen one its label."""

    def __init__(self, labels, uniform, memory, prior):
        self.labels, self.uniform, self.memory, self.prior = labels, uniform, memory, prior
        self.group = [None] * len(labels)
        self.mean, self.draws = {"fresh": 1.0}, {}
        self.top = None

    def value(self, j):
        group = self.group[j]
        if group is None:
            label = ("context", self.labels[j])
            return self.mean[label if label in self.mean else "fresh"]
        draws, mean = self.draws.get(group, 0.0), self.mean.get(group, 0.0)
        return (draws * mean + self.prior * 2.0 ** ((group + 0.5) / 1.5)) / (draws + self.prior)

    def p(self):
        n = len(self.labels)
        roots = np.array([math.sqrt(self.value(j)) for j in range(n)])
        return ((1 - self.uniform) * roots / roots.mean() + self.uniform) / n

    def blend(self, name, s):
        self.draws[name] = min(self.draws.get(name, 0.0) + 1, self.memory)
        old = self.mean.get(name, 0.0)
        self.mean[name] = old + (s**2 - old) / max(self.draws[name], 1)

    def update(self, indices, scores):
        self.top = max(scores) if self.top is None else self.top
        known = [s / self.top for s in scores]
        for j, s in zip(indices, known, strict=True):
            if self.group[j] is not None:
                self.blend(self.group[j], s)
                continue
            label = ("context", self.labels[j])
            if label not in self.mean:
                self.blend("fresh", s)
                self.mean[label], self.draws[label] = self.mean["fresh"], min(self.prior, self.memory)
            self.blend(label, s)
        for j, s in zip(indices, known, strict=True):
            self.group[j] = min(max(math.floor(3 * np.log2(s)), -60), 29) if s > 0 else -60


@given(
    n=st.integers(1, 80),
    K=st.integers(1, 12),
    C=st.sampled_from([1, 2, 5, 17, 80]),
    uniform=st.floats(0.01, 0.99),
    memory=st.sampled_from([0.5, 3.0, 300.0]),
    prior=st.sampled_from([0.1, 5.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_its_dense_version(n, K, C, uniform, memory, prior, scale, seed):
    K, rng = min(K, n), np.random.default_rng(seed)
    labels = rng.integers(0, C, n).tolist()
    rule = adambs.Calibrated(uniform=uniform, memory=memory, prior=prior)
    sampler = adambs.BanditSampler(n, K, rule=rule, context=labels, seed=seed)
    dense = DenseContextual(labels, uniform, memory, prior)
    for _ in range(30):
        draw = sampler.draw()
        np.testing.assert_allclose(draw.probabilities, dense.p()[draw.indices], rtol=1e-9)
        scores = scale * (1 + np.array(labels)[draw.indices]) * rng.gamma(0.3, 1.0, K) ** 3
        sampler.update(draw, scores)
        dense.update(draw.indices.tolist(), scores)
        p = sampler.probabilities()
        np.testing.assert_allclose(p, dense.p(), rtol=1e-9)
        squares, r_log_r = sampler.rule.spread()
        r = n * p.numpy()
        assert squares == pytest.approx(np.mean(r**2), rel=1e-9)
        assert r_log_r == pytest.approx(np.mean(r * np.log(r)), rel=1e-9, abs=1e-12)
        assert_consistent(sampler.rule)


def assert_consistent(rule):
    """Members are by context, unseen ones first; trees are the sums of what they stand for."""
    contexts, a = rule.contexts, rule.contexts.arrays
    unseen = np.zeros(rule.n, bool)
    unseen[rule.order[rule.members.bounds[-2] :]] = True
    for c in range(len(contexts)):
        members = a.members[a.starts[c] : a.starts[c + 1]]
        assert sorted(members) == np.flatnonzero(a.labels == c).tolist()
        assert a.left[c] == unseen[members].sum()
        assert unseen[members[: a.left[c]]].all()
    np.testing.assert_array_equal(a.slots[a.members], np.arange(rule.n))
    roots = np.sqrt(np.where(a.draws > 0, a.means, a.fresh[0]))
    assert contexts.total == pytest.approx((a.left * roots).sum(), rel=1e-12)


@given(
    n=st.integers(1, 60), C=st.sampled_from([1, 3, 40]), steps=st.integers(0, 12), seed=st.integers(0, 9999)
)
def test_each_example_covers_its_share_of_the_quantiles(n, C, steps, seed):
    """A fine grid of quantiles finds every example in proportion to p, up to the ends of its intervals."""
    labels = np.random.default_rng(seed).integers(0, C, n)
    sampler = adambs.BanditSampler(n, min(n, 3), context=labels, gate=0, seed=seed)
    rule = taught(sampler, steps, seed).rule
    grid = (np.arange(20_000) + 0.5) / 20_000
    indices, ratios = rule.draw(grid)
    np.testing.assert_array_equal(ratios, rule.ratios(indices))
    counts = np.bincount(indices, minlength=n)
    assert np.abs(counts - 20_000 * rule.ratios() / n).max() <= 4.001  # uniform part and context part
    ends = rule.draw(np.array([0.0, 1.0]))[0]
    assert ((ends >= 0) & (ends < n)).all()


def test_independent_draws_follow_p():
    sampler = adambs.BanditSampler(60, 6, context=["a", "b", "c"] * 20, gate=0)
    taught(sampler, 4)
    drawn = sampler.rule.draw(np.random.default_rng(3).random(200_000))[0]
    expected = 200_000 * sampler.probabilities().numpy()
    assert stats.chisquare(np.bincount(drawn, minlength=60), expected).pvalue > 1e-3


def test_with_one_context_unseen_examples_are_one_group():
    """Then it is Calibrated, but for the prior of the one context, which is its own first score."""
    n, K = 200, 10
    plain = adambs.BanditSampler(n, K, rule=adambs.Calibrated(prior=1e-12), seed=1)
    one = adambs.BanditSampler(n, K, rule=adambs.Calibrated(prior=1e-12), context=[7] * n, gate=0, seed=1)
    norms = np.random.default_rng(0).gamma(0.3, 1.0, n)
    for _ in range(3):
        np.testing.assert_allclose(one.probabilities(), plain.probabilities(), rtol=1e-9)
        draw = plain.draw()
        plain.update(draw, norms[draw.indices])
        one.rule.observe(draw.indices.numpy(), norms[draw.indices])


def test_unseen_examples_of_a_hard_context_are_drawn_more_and_a_context_never_drawn_as_the_first_of_others():
    labels = np.repeat([0, 1, 2], [500, 480, 20])
    truth = np.array([0.01, 1.0, 5.0])[labels]
    sampler = adambs.BanditSampler(1000, 10, context=labels, seed=0)
    np.testing.assert_allclose(sampler.probabilities(), 1 / 1000)
    sampler.rule.observe(np.array([0, 1, 2, 600, 601]), truth[[0, 1, 2, 600, 601]])
    p = sampler.probabilities().numpy()
    assert p[100] < p[700]  # unseen, easy and hard
    assert p[100] < p[990] < p[700]  # of the third nothing is known yet
    for _ in range(30):
        draw = sampler.draw()
        sampler.update(draw, truth[draw.indices])
    assert draw.weights.min() < 1  # p was drawn from in the first third of an epoch
    p = sampler.probabilities().numpy()
    seen = sampler.rule.groups() < sampler.rule.groups().max()
    unseen = {c: p[(labels == c) & ~seen] for c in (0, 1)}
    assert unseen[1].min() > 5 * unseen[0].max()


def test_extreme_scores_keep_p_a_distribution():
    for scores in ([0.0, 0.0], [1e308, 1e-308], [5e-324, 0.0], [1e160, 1e-160]):
        sampler = adambs.BanditSampler(20, 2, context=[0, 1] * 10, gate=0)
        for _ in range(30):
            sampler.update(sampler.draw(), scores)
            assert sampler.probabilities().sum() == pytest.approx(1, rel=1e-12)
            assert sampler.probabilities().min() >= 0.05 / 20


# ---------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    "labels",
    [
        [5, 3, 5, 9, 3],
        (5, 3, 5, 9, 3),
        np.array([5, 3, 5, 9, 3], np.uint8),
        torch.tensor([5, 3, 5, 9, 3]),
        torch.tensor([5.0, 3.0, 5.0, 9.0, 3.0]),
        [torch.tensor(x) for x in (5, 3, 5, 9, 3)],
        ["e", "c", "e", "i", "c"],
        np.array(["e", "c", "e", "i", "c"]),
        np.array(["e", None, "e", ("x", 1), None], object),
        [("a", 1), ("b", 1), ("a", 1), frozenset(), ("b", 1)],
        (x for x in "ecEic".lower()),
    ],
)
def test_labels_of_any_kind_are_numbered_by_first_appearance(labels):
    assert numbered(labels).tolist() == [0, 1, 0, 2, 1]
    assert numbered([0, 1, 0, 2, 1]).dtype == np.int32


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40))
def test_sorted_and_hashed_labels_get_the_same_numbers(labels):
    hashed, by_sorting = numbered(labels), numbered(np.array(labels))
    np.testing.assert_array_equal(hashed, by_sorting)
    assert fingerprint(hashed) == fingerprint(numbered([f"label {x}" for x in labels]))


@pytest.mark.parametrize(
    ("context", "error", "words"),
    [
        ([1, 2, 3], ValueError, "context must have n = 4 labels, one an example, not 3"),
        (np.zeros((4, 2)), ValueError, r"one label for each example, not of shape \(4, 2\)"),
        ("abcd", TypeError, "one label for each example, not 'abcd'"),
        (7, TypeError, "one label for each example, not 7"),
        ([[1], [2], [3], [4]], TypeError, "can be hashed"),
    ],
)
def test_bad_labels_are_refused(context, error, words):
    with pytest.raises(error, match=words):
        adambs.BanditSampler(4, 2, context=context)


@pytest.mark.parametrize(
    "rule",
    [adambs.Exp3(), adambs.Tracking(), adambs.VRB(), adambs.Avare(), adambs.Release(), adambs.Uniform()],
)
def test_rules_that_cannot_use_a_context_say_so(rule):
    with pytest.raises(
        TypeError, match=rf"{type(rule).__name__} has no use for a context: .* Calibrated\(\)"
    ):
        adambs.BanditSampler(4, 2, rule=rule, context=[0, 0, 1, 1])


def test_a_teachers_weights_and_a_context_exclude_each_other():
    with pytest.raises(ValueError, match="give one of the two"):
        adambs.BanditSampler(4, 2, initial_weights=[1, 2, 3, 4], context=[0, 0, 1, 1])


def test_the_rule_given_keeps_its_settings_and_is_not_changed():
    rule = adambs.Calibrated(uniform=0.2, memory=50, prior=2)
    sampler = adambs.BanditSampler(4, 2, rule=rule, context=list("aabb"))
    assert isinstance(sampler.rule, Contextual)
    assert sampler.rule.settings() == {**rule.settings(), "context": fingerprint(numbered([0, 0, 1, 1]))}
    again = adambs.BanditSampler(4, 2, rule=sampler.rule, context=list("abab"))
    assert again.rule.settings()["context"] == fingerprint(numbered([0, 1, 0, 1]))
    assert "context='" in repr(sampler)


# ---------------------------------------------------------------------------------------- state


def in_context(seed=0, labels=None, steps=0):
    labels = np.arange(90) % 7 if labels is None else labels
    return taught(adambs.BanditSampler(90, 6, context=labels, seed=seed), steps)


@pytest.mark.parametrize("steps", [0, 4, 60])
def test_it_resumes_bit_for_bit(steps):
    straight = in_context(steps=steps)
    resumed = in_context()
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    assert_consistent(resumed.rule)
    for twin in (resumed, copy.deepcopy(straight)):
        other = copy.deepcopy(straight)
        taught(other, 20, seed=1)
        taught(twin, 20, seed=1)
        assert same(other.state_dict(), twin.state_dict())
        assert not same(twin.state_dict(), straight.state_dict())


def test_a_state_of_another_context_is_refused():
    state = in_context(steps=5).state_dict()
    renamed = in_context(labels=[f"kind {j % 7}" for j in range(90)])
    renamed.load_state_dict(state)  # the same division under other names
    other = in_context(labels=np.arange(90) % 6)
    before = other.state_dict()
    with pytest.raises(ValueError, match="rule_settings"):
        other.load_state_dict(state)
    plain = adambs.BanditSampler(90, 6)
    with pytest.raises(ValueError, match="rule_name"):
        plain.load_state_dict(state)
    with pytest.raises(ValueError, match="rule_name"):
        other.load_state_dict(plain.state_dict())
    assert same(other.state_dict(), before)


def swap_members(contexts):
    contexts["members"][0], contexts["members"][-1] = (
        contexts["members"][-1].item(),
        contexts["members"][0].item(),
    )


def seen_first(contexts):
    contexts["members"][:13] = contexts["members"][:13].flip(0)


DAMAGES = {
    "other contexts": (swap_members, "by context and unseen ones first"),
    "seen ones first": (seen_first, "by context and unseen ones first"),
    "twice": (lambda c: c["members"].__setitem__(1, c["members"][0].item()), "each example once"),
    "outside": (lambda c: c["members"].__setitem__(0, 90), "each example once"),
    "negative": (lambda c: c["members"].__setitem__(0, -1), "each example once"),
    "means": (lambda c: c["means"].__setitem__(0, math.nan), "means"),
    "draws": (lambda c: c["draws"].__setitem__(0, 301.0), "draws"),
    "fresh": (lambda c: c["fresh"].__setitem__(0, -1.0), "fresh"),
    "many fresh": (lambda c: c["fresh"].__setitem__(1, 1e9), "at most 300.0 draws"),
    "short": (lambda c: c.__setitem__("means", torch.zeros(3, dtype=torch.float64)), "means"),
    "missing": (lambda c: c.pop("members"), "no 'members'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    change, words = DAMAGES[damage]
    sampler = in_context(steps=4)
    state = sampler.state_dict()
    change(state["rule"]["contexts"])
    other = in_context(seed=0, steps=2)
    before = other.state_dict()
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(state)
    assert same(other.state_dict(), before)


def test_more_examples_than_four_bytes_can_number(monkeypatch):
    from adambs.rules import contexts

    few = Contexts(numbered([0, 1, 0]))
    monkeypatch.setattr(contexts, "_MOST", 2)
    many = Contexts(numbered([0, 1, 0]))
    assert few.arrays.members.dtype == np.int32
    assert many.arrays.members.dtype == many.arrays.slots.dtype == np.int64
    few.learn(np.array([2]), np.array([1.0]), 1.0, 300.0, 5.0)
    many.learn(np.array([2]), np.array([1.0]), 1.0, 300.0, 5.0)
    assert few.total == many.total


# ---------------------------------------------------------------------------------------- the gate


def test_p_is_drawn_from_in_the_first_epoch_and_then_the_gate_decides():
    n, K = 200, 10
    rng = np.random.default_rng(0)
    sampler = adambs.BanditSampler(n, K, context=np.arange(n) % 3, seed=2)
    for _ in range(20):  # scores that nobody can foresee
        draw = sampler.draw()
        sampler.update(draw, rng.gamma(2.0, 1.0, K))
        assert sampler.gate.open
        assert not sampler.passes.under_way
        assert draw.weights.min() > 0
    assert sampler.diagnostics().reshuffled == 0
    sampler.draw()
    assert sampler.diagnostics().reshuffled == 1
    ungated = adambs.BanditSampler(n, K, context=np.arange(n) % 3, gate=0)
    assert ungated.gate.open
    assert ungated.gate.head_start == 0


def test_a_head_start_survives_a_checkpoint_and_a_look_that_fails():
    sampler = adambs.BanditSampler(60, 6, context=[0, 1] * 30, candidates=adambs.Candidates(3, cost=1e-9))
    sampler.candidates.scatter.add(np.ones(10), np.arange(1.0, 11))
    taught(sampler, 4)
    assert sampler.gate.head_start == 6
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="scores"):
        sampler.draw(lambda indices: np.full(len(indices), np.nan))
    assert same(sampler.state_dict(), before)
    other = adambs.BanditSampler(60, 6, context=[0, 1] * 30, candidates=adambs.Candidates(3, cost=1e-9))
    other.load_state_dict(saved_and_loaded(before))
    assert other.gate.head_start == 6
