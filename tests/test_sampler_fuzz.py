"""Random sequences of operations on a sampler, against a slow and plain copy of what it should do.

``ADAMBS_FUZZ=100000`` in the environment runs so many sequences; the suite runs fewer. A failure names the
number of its sequence, and ``run(number)`` repeats it alone.
"""

import copy
import math
import os
import pickle
import time
import warnings
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import same, saved_and_loaded, taken_on_average

import adambs
from adambs import reference

SEQUENCES = int(os.environ.get("ADAMBS_FUZZ", "2500"))


def close(found, expected):
    """Equal up to rounding. ``np.testing.assert_allclose`` takes longer than all that it compares."""
    assert (np.abs(found - expected) <= 1e-8 * np.abs(expected) + 1e-12).all(), (found, expected)


# ------------------------------------------------------------------------------------------------
# The rules, dense. ``ratios`` is n p of all examples, computed anew each time.
# ------------------------------------------------------------------------------------------------


def first_positive(scores):
    """The largest score, if it is a number to measure others by; else None."""
    return max(scores) if max(scores) >= 2.3e-308 else None


class DenseRule:
    remembers = False

    def __init__(self, n, batch_size, weights):
        self.n, self.K = n, batch_size
        self.begin(weights)


class DenseUniform(DenseRule):
    def begin(self, weights):
        pass

    def ratios(self):
        return np.ones(self.n)

    def update(self, indices, ratios, scores):
        return 0

    def library(self):
        return adambs.rules.Uniform()


class DenseTracking(DenseRule):
    remembers = True
    uniform, smoothing, forgetting = 0.3, 0.0, 0.0

    def begin(self, weights):
        self.unit, self.visit = None, 0
        self.last = [1.0] * self.n
        self.seen = [weights is not None] * self.n
        if weights is not None:
            self.unit = max(weights)
            self.last = [max(w / self.unit, 1e-30) for w in weights]

    def ratios(self):
        last = np.array(self.last)
        return (1 - self.uniform) * last / last.mean() + self.uniform

    def update(self, indices, ratios, scores):
        if self.forgetting:
            mean = sum(self.last) / self.n
            for _ in indices:
                if self.seen[self.visit]:
                    self.last[self.visit] += self.forgetting * (mean - self.last[self.visit])
                self.visit = (self.visit + 1) % self.n
        return self.observe(indices, scores)

    def observe(self, indices, scores):
        if self.unit is None:
            self.unit = first_positive(scores)
        for j, score in zip(indices, scores, strict=True):
            new = min(max(score / self.unit, 1e-30), 1e100) if self.unit else 1e-30
            keep = self.smoothing if self.seen[j] else 0.0
            self.last[j] = keep * self.last[j] + (1 - keep) * new
            self.seen[j] = True
        return 0

    def library(self):
        return adambs.rules.Tracking(
            uniform=self.uniform, smoothing=self.smoothing, forgetting=self.forgetting
        )


class DenseForgettingTracking(DenseTracking):
    uniform, smoothing, forgetting = 0.1, 0.4, 0.3


class DenseCalibrated(DenseRule):
    """The group of a score is floor(3 log2(score / unit)), from -60 to 29."""

    remembers = True
    uniform, memory, prior = 0.05, 300.0, 5.0

    def begin(self, weights):
        self.unit = None if weights is None else max(weights)
        self.group = ["unseen"] * self.n if weights is None else [self.group_of(w) for w in weights]
        self.mean, self.draws = {}, {}

    def known(self, score):
        return min(score / self.unit, 1e50) if self.unit else 0.0

    def group_of(self, score):
        s = self.known(score)
        return min(max(math.floor(3 * np.log2(s)), -60), 29) if s > 0 else -60

    def value(self, group):
        draws, mean = self.draws.get(group, 0.0), self.mean.get(group, 0.0)
        if group == "unseen":
            return mean if draws else 1.0
        middle = 2.0 ** ((group + 0.5) / 3)
        return (draws * mean + self.prior * middle**2) / (draws + self.prior)

    def ratios(self):
        value = {group: math.sqrt(self.value(group)) for group in set(self.group)}
        roots = np.array([value[group] for group in self.group])
        return (1 - self.uniform) * roots / roots.mean() + self.uniform if roots.any() else np.ones(self.n)

    def update(self, indices, ratios, scores):
        return self.observe(indices, scores)

    def observe(self, indices, scores):
        if self.unit is None:
            self.unit = first_positive(scores)
        for group, score in zip([self.group[j] for j in indices], scores, strict=True):
            self.draws[group] = min(self.draws.get(group, 0.0) + 1, self.memory)
            old = self.mean.get(group, 0.0)
            self.mean[group] = old + (self.known(score) ** 2 - old) / max(self.draws[group], 1)
        for j, score in zip(indices, scores, strict=True):
            self.group[j] = self.group_of(score)
        return 0

    def library(self):
        return adambs.rules.Calibrated(uniform=self.uniform, memory=self.memory, prior=self.prior)


class DenseShortCalibrated(DenseCalibrated):
    uniform, memory, prior = 0.3, 3.0, 0.5


class DenseExp3(DenseRule):
    """Algorithm 2 by ``reference.update``."""

    L, p_min, step = math.sqrt(2.0), 0.5, 0.1

    def begin(self, weights):
        self.p = np.full(self.n, 1 / self.n)
        if weights is not None:
            self.p = reference.project(np.array(weights) / sum(weights), self.p_min / self.n)

    def ratios(self):
        return self.n * self.p

    def update(self, indices, ratios, scores):
        n, floor = self.n, self.p_min / self.n
        alpha_p = self.step * self.K * self.p_min**2 / (n**3 * self.L**2)
        drawn_with = np.full(n, 1 / n)
        drawn_with[indices] = ratios / n
        if (drawn_with[indices] == ratios / n).all():
            # The reference divides by the number of scores, the library by K: more for candidates.
            self.p = reference.update(
                self.p,
                indices,
                scores,
                L=self.L,
                p_min=floor,
                alpha_p=alpha_p * len(indices) / self.K,
                drawn_with=drawn_with,
            )
        else:  # the end of a pass and then p: the same example with two probabilities
            h_hat = np.zeros(n)
            for j, p, score in zip(indices, ratios / n, scores, strict=True):
                h_hat[j] += ((self.L / floor) ** 2 - (min(score, self.L) / p) ** 2) / (self.K * p)
            self.p = reference.project(self.p * np.exp(-alpha_p * h_hat), floor)
        return sum(score > self.L for score in scores)

    def library(self):
        return adambs.rules.Exp3(L=self.L, p_min=self.p_min, step=self.step)


class DenseFastExp3(DenseExp3):
    L, p_min, step = 3.0, 0.1, 1.5


class DenseVRB(DenseRule):
    uniform, prior, forgetting = 0.3, 1.0, 0.2

    def begin(self, weights):
        self.unit = None if weights is None else max(weights)
        norms = np.ones(self.n) if weights is None else np.array(weights) / self.unit
        self.sums = np.maximum(self.prior * norms**2, 1e-300)

    def ratios(self):
        roots = np.sqrt(self.sums)
        return (1 - self.uniform) * roots / roots.mean() + self.uniform

    def update(self, indices, ratios, scores):
        if self.unit is None:
            self.unit = first_positive(scores)
        self.sums *= (1 - self.forgetting) ** (len(indices) / self.n)
        for j, ratio, score in zip(indices, ratios, scores, strict=True):
            self.sums[j] += (min(score / self.unit, 1e50) if self.unit else 0.0) ** 2 / ratio
        return 0

    def library(self):
        return adambs.rules.VRB(uniform=self.uniform, prior=self.prior, forgetting=self.forgetting)


class DenseAvare(DenseRule):
    remembers = True
    p_min = 0.1

    def begin(self, weights):
        self.last = [1.0] * self.n if weights is None else list(weights)
        self.scaled = weights is not None

    def ratios(self):
        """max(p_min, c a): with the m smallest at the floor, c follows; the first m that fits is right."""
        if not any(self.last):
            return np.ones(self.n)
        a, floor = np.array(self.last) / max(self.last), self.p_min / self.n
        for m in range(self.n):
            free = np.sort(a)[m:]
            c = (1 - m * floor) / free.sum()
            if c * free[0] >= floor:
                return self.n * np.maximum(floor, c * a)
        raise AssertionError("p_min is below 1/n, so somebody is free")

    def update(self, indices, ratios, scores):
        return self.observe(indices, scores)

    def observe(self, indices, scores):
        if not self.scaled and max(scores) > 0:
            self.scaled = True
            self.last = [a * max(scores) for a in self.last]
        for j, score in zip(indices, scores, strict=True):
            self.last[j] = score
        return 0

    def library(self):
        return adambs.rules.Avare(p_min=self.p_min)


class DenseRelease(DenseRule):
    def begin(self, weights):
        self.p = np.full(self.n, 1 / self.n)
        if weights is not None:  # up to n = 60 nobody is above 1000/n
            self.p = np.maximum(np.array(weights), 1e-5 * np.mean(weights))
            self.p /= self.p.sum()
        self.low, self.high = math.inf, -math.inf

    def ratios(self):
        return self.n * self.p

    def update(self, indices, ratios, scores):
        self.low, self.high = min(self.low, *scores), max(self.high, *scores)
        last = {j: (r, s) for j, r, s in zip(indices, ratios, scores, strict=True)}
        for j, (r, s) in last.items():
            g = (s - self.low) / max(self.high - self.low, 1e-12)
            self.p[j] = min(self.p[j] * math.exp(min(g**2 / r**3, 700.0)), 1000 / self.n)
        self.p = np.maximum(self.p, 1e-5 / self.n)
        self.p /= self.p.sum()
        return 0

    def library(self):
        return adambs.rules.Release()


DENSE_RULES = (
    DenseUniform,
    DenseTracking,
    DenseForgettingTracking,
    DenseCalibrated,
    DenseCalibrated,
    DenseShortCalibrated,
    DenseExp3,
    DenseFastExp3,
    DenseVRB,
    DenseAvare,
    DenseRelease,
)


# ------------------------------------------------------------------------------------------------
# The sampler, dense.
# ------------------------------------------------------------------------------------------------


class Moments:
    """Running second moments under uniform sampling and under p."""

    def __init__(self):
        self.uniform = self.ours = 0.0

    def blend(self, drawn, ratios, scores, limit=math.inf):
        """Weight x score is at most ``limit``, unless the weight is one or less."""
        scores = np.minimum(scores, 1e100)
        product = np.minimum(scores / ratios, np.maximum(limit, scores / np.maximum(ratios, 1.0)))
        ours = np.minimum(product**2 * ratios / drawn, 1e250)
        self.uniform = 0.99 * self.uniform + 0.01 * np.minimum(scores**2 / drawn, 1e250).mean()
        self.ours = 0.99 * self.ours + 0.01 * ours.mean()


class Awaited:
    """What is remembered of a draw."""

    def __init__(self, draw, ratios, learned):
        self.draw, self.number, self.indices = draw, draw.number, draw.indices.numpy().copy()
        self.ratios, self.learned = ratios, learned


def nearly(a, b):
    """Whether rounding may decide which is larger."""
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b))


class Oracle:
    """What a sampler should be after the operations so far. Which examples are drawn is not predicted."""

    def __init__(self, n, K, rule, threshold, multiple, cost, ahead, noise, most):
        self.n, self.K, self.rule = n, K, rule
        self.threshold, self.multiple, self.cost, self.most = threshold, multiple, cost, most
        self.noise = noise
        self.ahead = ahead
        self.ready = []  # batches that are still to be drawn from the last look's candidates
        self.left = set(range(n))  # of the present pass
        self.passes, self.growing = 0, False  # those that are over; whether they grow
        self.gate, self.trained = Moments(), Moments()
        self.mean = 0.0  # of weight x score
        self.open = threshold == 0
        self.count = dict.fromkeys(("draws", "updates", "scores", "clipped", "looks", "reshuffled"), 0)
        self.squares = self.sum = 0.0
        self.awaited: dict[int, Awaited] = {}
        self.late: list[tuple[Awaited, np.ndarray]] = []
        self.correction = 1.0

    @property
    def under_way(self):
        return len(self.left) < self.n

    @property
    def length(self):
        """Of the present pass: if they grow, n/8 and 5/4 of that and so on, less what is no whole batch."""
        if not self.growing:
            return self.n
        grown = Fraction(self.n, 8) * Fraction(5, 4) ** self.passes
        return max(self.K, min(int(grown), self.n) // self.K * self.K)

    @property
    def tau(self):
        return max(math.sqrt(self.squares) / self.sum, 1.0) if self.sum > 0 else 1.0

    def pays(self, did_look):
        left = 1 / self.tau**2
        gain = 1 / (left + (1 - left) / self.multiple)
        worth = (1 + self.noise / self.K) / (1 + self.noise / (self.K * gain))
        need = 1 + self.multiple * self.cost
        return did_look if nearly(worth, need) else worth > need

    def decide(self, sampler):
        if self.threshold > 0:
            bar = min(self.threshold, math.sqrt(self.threshold)) if self.open else self.threshold
            if self.gate.uniform > 0 and nearly(self.gate.uniform, bar * self.gate.ours):
                self.open = sampler.gate.open
            else:
                self.open = self.gate.uniform > bar * self.gate.ours
        return self.open

    def drawn(self, draw, sampler, asked):
        """``draw`` was made; ``asked`` are the calls of the score function, or None if there was none."""
        assert draw.number == self.count["draws"]
        assert len(draw) == self.K
        assert draw.n == self.n
        self.count["draws"] += 1
        indices = draw.indices.numpy()
        assert ((indices >= 0) & (indices < self.n)).all()
        look = asked is not None and not self.ready and not self.under_way and self.pays(bool(asked))
        assert bool(asked) == look
        if look:
            self._look(*asked[0])
        chosen = asked is not None and bool(self.ready)
        assert draw.learned == chosen
        if chosen:
            ratios, p_ratios = self._chosen(draw, indices)
        else:
            if not self.under_way:
                self.growing |= asked is not None
            ratios = p_ratios = self._batch(indices, sampler)
        close(draw.probabilities.numpy(), p_ratios / self.n)
        weights = p_ratios**-self.correction * (p_ratios / ratios)
        if self.correction != 1:
            weights /= weights.mean()
        close(draw.weights.numpy(), weights)
        self.awaited[draw.number] = Awaited(draw, ratios, chosen)
        if len(self.awaited) > self.most:
            del self.awaited[min(self.awaited)]

    def _batch(self, indices, sampler):
        """n p of each example of the batch."""
        n, K = self.n, self.K
        p_ratios = self.rule.ratios()[indices]
        if not self.under_way and self.decide(sampler):
            return p_ratios
        self.count["reshuffled"] += 1
        ratios = np.ones(K)
        for k, j in enumerate(indices.tolist()):
            if k > 0 and not self.under_way and self.decide(sampler):  # a pass has just ended
                ratios[k:] = p_ratios[k:]
                break
            assert j in self.left, "an example twice in one pass"
            self.left.remove(j)
            if n - len(self.left) == self.length:
                self.left = set(range(n))
                self.passes += 1
        return ratios

    def _look(self, drawn, asked, found):
        """For each batch there are candidates of its own, from p. What was drawn twice was scored once."""
        B = min(self.multiple * self.K, self.n)
        assert len(drawn) == self.ahead * B
        assert np.array_equal(asked, np.unique(drawn))
        scores = found[np.searchsorted(asked, drawn)]
        p_ratios = self.rule.ratios()
        r = p_ratios[drawn]
        parts = [slice(first, first + B) for first in range(0, len(drawn), B)]
        for part in parts:
            self._scatter(r[part], scores[part])
            once, where, copies = np.unique(drawn[part], return_index=True, return_counts=True)
            a = copies * np.minimum(scores[part][where], 1e100) / p_ratios[once] ** self.correction
            even = copies / B
            g = 0.9 * a / a.sum() + 0.1 * even if a.any() else even
            q = taken_on_average(g, self.K)
            ratios = dict(zip(once.tolist(), p_ratios[once] * q * B / (self.K * copies), strict=True))
            self.ready.append((asked, p_ratios, ratios))
        for part in parts:
            self._teach(drawn[part], r[part], scores[part])

    def _chosen(self, draw, indices):
        asked, p_ratios, ratios = self.ready.pop(0)
        self.count["looks"] += 1
        assert np.array_equal(asked[draw.positions], indices)
        return np.array([ratios[j] for j in indices.tolist()]), p_ratios[indices]

    def _scatter(self, ratios, scores):
        a = np.minimum(scores / ratios, 1e100)
        keep = 0.99 if self.sum > 0 else 0.0
        self.squares = keep * self.squares + (1 - keep) * (a**2).mean()
        self.sum = keep * self.sum + (1 - keep) * a.mean()

    @property
    def limit(self):
        """Of weight x score, by the default cap."""
        return 10 * self.mean if self.mean >= 1e-30 else math.inf

    def _teach(self, indices, ratios, scores):
        if self.threshold > 0:
            self.gate.blend(ratios, self.rule.ratios()[indices], scores, self.limit)
        self.count["clipped"] += self.rule.update(indices, ratios, scores)
        self.count["scores"] += len(indices)

    def taught(self, entry, scores):
        """The draw of ``entry`` has had its feedback, and it was good."""
        self.count["updates"] += 1
        self.trained.blend(entry.ratios, entry.ratios, scores)
        product = np.minimum(np.minimum(scores, 1e100) * entry.draw.weights.numpy(), 1e100).mean()
        self.mean = 0.99 * self.mean + 0.01 * product if self.mean > 0 else product
        if not entry.learned:
            self._scatter(entry.ratios, scores)
            self._teach(entry.indices, entry.ratios, scores)

    def settle(self):
        """Learn what has come late. True if that met bad scores, which are dropped."""
        while self.late:
            entry, scores = self.late.pop(0)
            if not all(0 <= s < math.inf for s in scores):
                return True
            self.taught(entry, scores)
        return False

    def compare(self, sampler):
        """That the sampler is where the oracle is. Asks for nothing that would change the sampler."""
        ratios, expected = sampler.rule.ratios(), self.rule.ratios()
        close(ratios, expected)
        assert abs(ratios.sum() / self.n - 1) < 1e-9
        assert (ratios > 0).all()
        assert sampler.awaited._draws.keys() == self.awaited.keys()
        assert sampler.awaited.following == self.count["draws"]
        assert len(sampler.feedback.late) == len(self.late)
        assert sampler.passes.position == self.n - len(self.left)
        assert sampler.passes.length == self.length
        assert sampler.passes.under_way == self.under_way
        assert sampler.gate.open == self.open
        all_moments = ((self.gate, sampler.gate.moments), (self.trained, sampler.counters.trained))
        for ours, theirs in (
            all_moments if self.count["draws"] % 3 else ()
        ):  # batches wait until somebody asks
            assert math.isclose(ours.uniform, theirs.uniform, rel_tol=1e-8, abs_tol=1e-300)
            assert math.isclose(ours.ours, theirs.ours, rel_tol=1e-8, abs_tol=1e-300)
        for name, value in self.count.items():
            assert getattr(sampler.counters, name) == value, name
        assert sampler.correction == self.correction

    def compare_diagnostics(self, found):
        p = self.rule.ratios() / self.n
        assert math.isclose(found.effective_sample_size, 1 / (p**2).sum(), rel_tol=1e-8)
        assert math.isclose(found.entropy, -(p * np.log(p)).sum(), rel_tol=1e-8, abs_tol=1e-8)
        assert math.isclose(found.tau, self.tau, rel_tol=1e-8)
        if self.trained.ours > 0:
            reduction = self.trained.uniform / self.trained.ours
            assert math.isclose(found.variance_reduction, reduction, rel_tol=1e-8)
        else:
            assert math.isnan(found.variance_reduction)
        counted = {**self.count, "clipped_scores": self.count["clipped"]}
        del counted["clipped"]
        assert counted == {name: getattr(found, name) for name in counted}


# ------------------------------------------------------------------------------------------------
# Sequences of operations.
# ------------------------------------------------------------------------------------------------


class Sequence:
    """One sampler, its oracle, and random operations on both."""

    def __init__(self, number):
        self.rng = rng = np.random.default_rng([number, 2024])
        n = int(rng.integers(1, 61)) if rng.random() < 0.8 else int(rng.integers(1, 6))
        K = int(rng.integers(1, min(n, 12) + 1)) if rng.random() < 0.95 else n
        dense = DENSE_RULES[rng.integers(len(DENSE_RULES))]
        weights = None
        if dense is not DenseUniform and rng.random() < 0.15:
            weights = rng.gamma(0.5, 1.0, n) * (rng.random(n) < 0.9) + 1e-9
        gate = self.one_of(None, 0.0, 0.5, 1.0, 1.1, 1.1, 1.5)
        default = dense is DenseCalibrated and weights is None and rng.random() < 0.5
        cost = self.one_of(1e-3, 0.1, 10.0)
        multiple, ahead, noise = (
            int(rng.integers(2, 5)),
            self.one_of(1, 1, 2, 4),
            self.one_of(1.0, 100.0, 1e6),
        )
        rule = dense(n, K, weights)
        self.make = lambda: adambs.BanditSampler(
            n,
            K,
            rule=None if default else rule.library(),
            seed=number,
            stratified=self.stratified,
            initial_weights=weights,
            gate=gate,
            candidates=adambs.Candidates(multiple, cost, ahead, noise),
            feedback=self.policy,
        )
        self.stratified = bool(rng.random() < 0.3)
        self.policy = self.one_of("automatic", "at once", "late", "late")
        self.sampler = self.make()
        most = self.one_of(self.sampler.awaited.most, 3)
        self.sampler.awaited.most = most
        threshold = gate if gate is not None else (1.1 if default else 0.0)
        self.oracle = Oracle(n, K, rule, threshold, multiple, cost, ahead, noise, most)
        self.scale = self.one_of(1e-6, 1.0, 1.0, 1e6)
        self.truth = self.scale * rng.gamma(0.3, 1.0, n)
        self.gone: list[adambs.Draw] = []  # draws that may not come back
        self.left_behind = []  # samplers that were copied, and their state at that time
        self.saved = None  # a state and its oracle

    def one_of(self, *values):
        return values[self.rng.integers(len(values))]

    def run(self):
        operations = {
            self.draw: 8,
            self.draw_with_a_score: 5,
            self.update: 8,
            self.refuse: 3,
            self.refuse_scores: 2,
            self.probabilities: 1,
            self.diagnostics: 1,
            self.refresh: 1,
            self.correction: 1,
            self.reload: 0.6,
            self.save: 0.4,
            self.roll_back: 0.4,
            self.deepcopy: 0.4,
            self.pickle: 0.4,
        }
        shares = np.array(list(operations.values())) / sum(operations.values())
        chosen = self.rng.choice(len(operations), int(self.rng.integers(5, 31)), p=shares)
        operations = list(operations)
        for step, k in enumerate(chosen):
            operation = operations[k]
            try:
                operation()
                self.oracle.compare(self.sampler)
            except Exception as error:
                error.add_note(f"in operation {step} ({operation.__name__})")
                raise
        self.diagnostics()
        for sampler, state in self.left_behind:
            assert same(sampler.state_dict(), state), "a copy has changed what it was copied from"

    def arrive(self, operation):
        """The operation waits for late scores first: bad ones raise, once, and the next try is good."""
        while self.oracle.settle():
            before = self.sampler.awaited.following
            with pytest.raises(ValueError, match="It came late"):
                operation()
            assert self.sampler.awaited.following == before
        return operation()

    def scores(self, indices):
        """Scores of all kinds, mostly those that the examples have."""
        kind = self.rng.random()
        if kind < 0.6:
            return self.truth[indices]
        if kind < 0.8:
            return self.scale * self.rng.gamma(0.3, 1.0, len(indices)) ** 2
        if kind < 0.88:
            return np.zeros(len(indices))
        if kind < 0.96:
            return self.truth[indices] * self.rng.integers(0, 2, len(indices))
        return np.full(len(indices), self.scale)

    # Operations that do something.

    def draw(self):
        draw = self.arrive(self.sampler.draw)
        self.oracle.drawn(draw, self.sampler, None)
        self.use(draw)

    def draw_with_a_score(self):
        asked = []

        def score(indices):
            assert not asked, "one call for each look"
            asked.extend([indices.numpy().copy(), self.scores(indices.numpy())])
            return torch.from_numpy(asked[1])

        draw, drawn = self.with_candidates(lambda: self.arrive(lambda: self.sampler.draw(score)))
        self.oracle.drawn(draw, self.sampler, [(drawn[-1], *asked)] if asked else [])
        self.use(draw)

    def with_candidates(self, operation):
        """Also the candidates that were drawn in the meantime, for each look, as often as they were drawn."""
        sources, drawn = self.sampler._sources, []
        propose = sources.candidates

        def spy(*arguments):
            window = propose(*arguments)
            drawn.append(window.indices)
            return window

        sources.candidates = spy
        try:
            return operation(), drawn
        finally:
            del sources.candidates

    def use(self, draw):
        """The draw as a training loop sees it."""
        weights = draw.weights
        losses = torch.from_numpy(self.rng.normal(size=len(draw)))
        mean = (losses * weights).mean().item()
        assert math.isclose(draw.mean(losses).item(), mean, rel_tol=1e-9, abs_tol=1e-9)
        carried = draw.carried()
        assert same(carried.indices, draw.indices)
        assert same(carried.weights, weights.float())
        assert (carried.number == draw.number).all()

    def update(self):
        if not self.oracle.awaited:
            return self.draw()
        numbers = list(self.oracle.awaited)
        number = numbers[0] if self.rng.random() < 0.5 else self.one_of(*numbers)
        entry = self.oracle.awaited.pop(number)
        scores = self.scores(entry.indices)
        as_tensor = self.rng.random() < 0.5
        if as_tensor and self.policy == "late" and self.rng.random() < 0.1:
            scores = scores.copy()
            scores[self.rng.integers(len(scores))] = self.one_of(math.nan, -1.0, math.inf)
        given = torch.from_numpy(scores.copy()) if as_tensor else self.one_of(scores, scores.tolist())
        self.sampler.update(self.name_of(entry), given)
        if as_tensor and self.policy == "late":
            self.oracle.late.append((entry, scores))
            given.fill_(-1)  # the copy was made already
        else:
            self.oracle.taught(entry, scores)
        self.gone.append(entry.draw)

    def name_of(self, entry):
        draw, number = entry.draw, entry.number
        kind = self.rng.integers(6)
        if kind == 0:
            return number
        if kind == 1:
            return np.int64(number)
        if kind == 2:
            return draw.carried().number
        if kind == 3:
            return torch.tensor(number)
        return pickle.loads(pickle.dumps(draw)) if kind == 4 else draw

    def refresh(self):
        some = self.rng.integers(0, self.oracle.n, self.rng.integers(0, self.oracle.n + 1))
        indices = self.one_of(None, some)
        chosen = np.arange(self.oracle.n) if indices is None else some
        size = int(self.rng.integers(1, self.oracle.n + 1))
        found = []

        def score(part):
            found.append((part.numpy().copy(), self.scores(part.numpy())))
            return found[-1][1]

        def operation():
            found.clear()
            self.sampler.refresh(score, indices, batch_size=size)

        if self.oracle.rule.remembers:
            self.arrive(operation)
            assert np.array_equal(np.concatenate([np.zeros(0), *(part for part, _ in found)]), chosen)
            for part, scores in found:
                self.oracle.rule.observe(part, scores)
        elif len(chosen):
            while self.oracle.settle():
                with pytest.raises(ValueError, match="It came late"):
                    operation()
            with pytest.raises(TypeError, match="learns from draws alone"):
                operation()

    def correction(self):
        self.oracle.correction = self.sampler.correction = self.one_of(1.0, 1.0, 0.5, 0.0)

    # Operations that only look in.

    def probabilities(self):
        some = self.rng.integers(0, self.oracle.n, self.rng.integers(0, 2 * self.oracle.n))
        p = self.arrive(self.sampler.probabilities).numpy()
        assert abs(p.sum() - 1) < 1e-9
        close(p, self.oracle.rule.ratios() / self.oracle.n)
        assert np.array_equal(self.sampler.probabilities(some).numpy(), p[some])
        p[:] = -1  # a copy

    def diagnostics(self):
        self.oracle.compare_diagnostics(self.arrive(self.sampler.diagnostics))

    # Operations that are refused.

    def refuse(self):
        """A draw that may not come back, or no draw at all."""
        n, K = self.oracle.n, self.oracle.K
        ones = np.ones(K)
        unknown = [self.oracle.count["draws"], -1, 10**9, torch.tensor([10**9] * K)]
        strange = [None, "0", 0.0, True, torch.zeros(K), torch.zeros(0, dtype=torch.int64), torch.arange(2)]
        whose = [*unknown, *strange, *self.gone[-3:], *[draw.number for draw in self.gone[-3:]]]
        for entry in self.oracle.awaited.values():  # the right number, but the draw of another sampler
            whose.append(adambs.Draw(entry.number, entry.indices, entry.draw._ratios * 0.5, n))
            whose.append(adambs.Draw(entry.number, entry.indices[::-1] + 1, entry.draw._ratios, n))
        self.refused(whose[self.rng.integers(len(whose))], self.one_of(ones, torch.from_numpy(ones)))

    def refuse_scores(self):
        """A draw that is awaited, and scores that are none."""
        if not self.oracle.awaited:
            return
        entry = self.one_of(*self.oracle.awaited.values())
        K = self.oracle.K
        bad = np.ones(K)
        bad[self.rng.integers(K)] = self.one_of(math.nan, -1.0, math.inf, -math.inf)
        wrong = [bad, bad.tolist(), np.ones(K + 1), torch.ones(K + 1), np.ones((K, 1)), torch.ones(K, 1)]
        wrong += [torch.ones(()), "x" * K, None, [None] * K, np.ones(K) * 1j]
        if self.policy != "late":
            wrong.append(torch.from_numpy(bad))
        self.refused(self.name_of(entry), wrong[self.rng.integers(len(wrong))])

    def refused(self, draw, scores):
        rule, before = self.sampler.rule, self.without_waiting()
        with pytest.raises((TypeError, ValueError)):
            self.sampler.update(draw, scores)
        assert self.sampler.rule is rule
        assert same(self.without_waiting(), before)

    def without_waiting(self):
        """The state of each part. ``state_dict`` would learn first what is late."""
        return {name: getattr(self.sampler, name).state_dict() for name in self.sampler.PARTS}

    # Operations that go on with another sampler.

    def reload(self):
        state = self.arrive(self.sampler.state_dict)
        stay = self.rng.random() < 0.2
        if not stay:
            self.left_behind.append((self.sampler, copy.deepcopy(state)))
            self.sampler = self.make()
            self.oracle.correction = self.sampler.correction
            if self.rng.random() < 0.5:
                self.sampler.draw()  # whatever it did before is forgotten
        self.sampler.load_state_dict(saved_and_loaded(state) if self.rng.random() < 0.2 else state)
        self.sampler.awaited.most = self.oracle.most
        self.oracle.correction = state["correction"]
        assert same(self.sampler.state_dict(), state)
        self.gone += [entry.draw for entry in self.oracle.awaited.values()]
        self.oracle.awaited.clear()

    def save(self):
        self.saved = copy.deepcopy((self.arrive(self.sampler.state_dict), self.oracle))

    def roll_back(self):
        """The same sampler in an older state. What is on its way is forgotten, and numbers come again."""
        if self.saved is None:
            return
        state, self.oracle = copy.deepcopy(self.saved)
        self.sampler.load_state_dict(state)
        self.sampler.awaited.most = self.oracle.most
        self.oracle.awaited.clear()
        self.gone = [draw for draw in self.gone if draw.number < self.oracle.count["draws"]]
        assert same(self.sampler.state_dict(), state)

    def deepcopy(self):
        self.go_on_with(self.arrive(lambda: copy.deepcopy(self.sampler)))

    def pickle(self):
        self.go_on_with(self.arrive(lambda: pickle.loads(pickle.dumps(self.sampler))))

    def go_on_with(self, sampler):
        state = self.sampler.state_dict()
        assert same(sampler.state_dict(), state)
        self.left_behind.append((self.sampler, state))
        self.sampler = sampler


def run(number):
    """A sequence, and what its sampler has counted: draws, updates, reshuffled batches and looks."""
    sequence = Sequence(number)
    try:
        sequence.run()
    except Exception as error:
        error.add_note(f"in sequence {number}")
        raise
    counters = sequence.sampler.counters
    return counters.draws, counters.updates, counters.reshuffled, counters.looks


def test_any_sequence_of_operations_does_what_the_oracle_does():
    start, counted = time.perf_counter(), np.zeros(4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "in each of the first")  # some of the batches have equal scores
        for number in range(SEQUENCES):
            counted += run(number)
            if number % 1000 == 999:
                print(f"{number + 1} sequences, {time.perf_counter() - start:.0f} s", flush=True)
    assert (counted > SEQUENCES / 4).all()  # each was compared, and not once in a while


# ------------------------------------------------------------------------------------------------
# What the oracle takes as given.
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stratified", [False, True], ids=["independent", "stratified"])
@pytest.mark.parametrize("dense", dict.fromkeys(DENSE_RULES), ids=lambda dense: dense.__name__[5:])
def test_draws_follow_p(dense, stratified):
    """Chi-square over 60,000 examples. Stratified ones lie closer to p than independent ones would."""
    n, K = 25, 20
    rule = dense(n, K, None).library()
    sampler = adambs.BanditSampler(n, K, rule=rule, seed=5, stratified=stratified)
    truth = np.random.default_rng(0).gamma(0.5, 0.5, n)
    for _ in range(30):
        draw = sampler.draw()
        sampler.update(draw.number, truth[draw.indices.numpy()])
    drawn = np.concatenate([sampler.draw().indices.numpy() for _ in range(3000)])
    expected = len(drawn) * sampler.probabilities().numpy()
    counts, rare = np.bincount(drawn, minlength=n), expected < 10
    groups = [*np.flatnonzero(~rare), np.flatnonzero(rare)]  # the rare ones together, if there are any
    found = scipy.stats.chisquare(
        [counts[group].sum() for group in groups if np.size(group)],
        [expected[group].sum() for group in groups if np.size(group)],
    )
    assert found.pvalue > 1e-3
    assert dense is DenseUniform or expected.max() > 1.2 * expected.min()


def test_passes_and_draws_have_different_random_bits():
    """Where the first pass began with the bits of the draws, its order would tell what comes after it."""
    sampler = adambs.BanditSampler(40, 4, seed=7)
    order = sampler.passes.take(40)
    assert not np.array_equal(order, np.random.Generator(np.random.PCG64(7)).permutation(40))
    assert not np.array_equal(order, sampler.random.uniform(40).argsort())


def test_a_copied_sampler_or_draw_raises_no_false_alarm():
    """Somebody who asks each draw for its weights is not told to do so, whatever was copied on the way."""
    truth = np.arange(1.0, 61.0)
    sampler = adambs.BanditSampler(60, 5, rule=adambs.rules.Tracking())
    for step in range(60):
        draw = sampler.draw()
        mine = pickle.loads(pickle.dumps(draw)) if step % 2 else draw
        assert len(mine.weights) == 5
        if step in (10, 12, 30):
            sampler = copy.deepcopy(sampler)
        sampler.update(mine, truth[draw.indices.numpy()])
