"""Calibrated: a bandit with few arms. Examples whose last scores were alike share what is learned."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from adambs import _check
from adambs._jit import kernel
from adambs._types import INT64, Floats, Indices
from adambs.rules.base import Rule, first_unit

# Groups by last score: three to an octave, from 2^-20 to 2^10 of the first batch's largest score; what is
# below or above goes into the first or the last. Groups from _SCORED on hold examples not yet seen; there is
# one of them, and nothing below depends on that.
_PER_OCTAVE = 3
_LOWEST = -20 * _PER_OCTAVE
_SCORED = 30 * _PER_OCTAVE
_UNSEEN_GROUPS = 1

# The square of the middle of each group, in units.
_MIDDLES_SQUARED = np.array([(2.0 ** ((g + _LOWEST + 0.5) / _PER_OCTAVE)) ** 2 for g in range(_SCORED)])

# Scores are at most so many units, so that their squares are finite.
_LARGEST = 1e50

# A mean below this is zero: its root is beneath notice, and subnormal numbers are slow.
_SMALLEST_MEAN = 1e-300

# Examples are numbered by the smallest integers that can: half the memory, for up to two thousand million.
_MOST_INT32 = 2**31 - 1

Numbers = NDArray[np.int32] | NDArray[np.int64]


class Calibrated(Rule):
    """p follows what a remembered score has turned out to mean.

    The p of least variance, given what is remembered of each example, is p_j ~ sqrt(E[s_j^2 | memory]). The
    memory of an example is its last score, rounded to a third of an octave: that makes it a member of one
    of some ninety groups, and one more is for the examples not yet seen. Whenever a member of a group is
    drawn, its score tells what scores of that group are worth now. So each group keeps a running mean m_g
    of the squared scores of its drawn members, and

        r_j = (1 - uniform) sqrt(m_g(j)) / (mean over all examples) + uniform.

    A stale score is thereby worth exactly what stale scores have proved to be worth. If examples that once
    were easy come back hard, their group's mean rises for all of them at once; if scores tell nothing, all
    means are equal and p is uniform by itself. Algorithm 2 learns each of n arms from its own few draws;
    here ninety arms learn from all draws.

    The rule is ours; the optimum is eq. (4) of the paper with an expectation for the unknown norm.
    O(K) a step plus O(number of groups), whatever n is; 8 bytes an example, taken as they are first written.

    Args:
        uniform: share of the uniform distribution in p, against surprises within a group.
        memory: over how many draws of a group its mean of squared scores runs.
        prior: how many draws the middle of a group counts for, before there are real ones.
    """

    unit: float
    """The largest score of the first batch that had a positive one, in which scores are measured; or 0."""
    means: Floats
    """For each group, the running mean of squared scores, in squared units."""
    draws: Floats
    """For each group, how many draws are in its mean, at most ``memory``."""
    bounds: Indices
    """Group g holds the examples at bounds[g] ... bounds[g + 1] of :attr:`order`."""

    def __init__(self, *, uniform: float = 0.05, memory: float = 300.0, prior: float = 5.0) -> None:
        self.uniform = _check.fraction(
            "uniform", uniform, "it is the uniform share of p; for all of it use Uniform()"
        )
        self.memory = _check.positive("memory", memory)
        self.prior = _check.positive("prior", prior)

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Nothing seen: one group, O(1). Initial weights are taken for scores that have been seen, O(n)."""
        self.n, self.batch_size = n, batch_size
        groups = _SCORED + _UNSEEN_GROUPS
        self.unit = 0.0
        self.means = np.append(np.zeros(_SCORED), np.ones(_UNSEEN_GROUPS))
        self.draws = np.zeros(groups)
        self.bounds = np.zeros(groups + 1, np.int64)
        self.bounds[_SCORED + 1 :] = n
        # Which example is where, and where each example is, both kept as the XOR with the position: all zero
        # means that nothing has moved, and the system hands out zeros, page by page, when they are written.
        self._order, self._place = _zeros(n), _zeros(n)
        if initial_weights is not None:
            self.unit = float(initial_weights.max())
            _group_all(self._order, self._place, self.bounds, initial_weights, self.unit)
        self._settle()

    def in_context(self, context: Any) -> Rule:
        """One with the same settings that groups unseen examples by their labels."""
        from adambs.rules.contextual import Contextual  # which is one of these

        return Contextual(context, uniform=self.uniform, memory=self.memory, prior=self.prior)

    def _settle(self) -> None:
        """The ratio of each group from its mean, and the running sums of their masses. O(groups)."""
        self.group_ratios, self.group_sums = np.empty_like(self.means), np.empty_like(self.means)
        _settle(
            self.group_ratios,
            self.group_sums,
            self.bounds,
            self.means,
            self.draws,
            self.prior,
            self.uniform,
        )

    @property
    def order(self) -> Numbers:
        """All examples, group after group. A new array, O(n)."""
        return _unfolded(self._order)

    def groups(self, indices: Indices | None = None) -> Indices:
        """The group of some examples, or of all."""
        places = _unfolded(self._place) if indices is None else self._place[indices] ^ indices
        return np.searchsorted(self.bounds, places, side="right") - 1

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The quantile falls into a group by its mass and onto a member by what is left. O(K log groups)."""
        indices, ratios = np.empty(len(u), INT64), np.empty(len(u))
        _draw(self._order, self.bounds, self.group_sums, self.group_ratios, u, indices, ratios)
        return indices, ratios

    def ratios(self, indices: Indices | None = None) -> Floats:
        """That of the group."""
        if indices is None:
            return self.group_ratios[self.groups()]
        return _ratios(self._place, self.bounds, self.group_ratios, indices)

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Learn what the groups of the drawn are worth, then put each into the group of its new score."""
        return self.observe(indices, scores)

    def observe(self, indices: Indices, scores: Floats) -> int:
        """The same for scores of any examples. O(K + groups)."""
        if not self.unit:
            self.unit = first_unit(scores)
        _learn(
            self.group_ratios,
            self.group_sums,
            self._order,
            self._place,
            self.bounds,
            self.means,
            self.draws,
            indices,
            scores,
            self.unit,
            self.memory,
            self.prior,
            self.uniform,
        )
        return 0

    def spread(self) -> tuple[float, float]:
        """The means of r^2 and of r log r, from the sizes of the groups and their ratios. O(groups)."""
        shares, r = np.diff(self.bounds) / self.n, self.group_ratios
        return float(shares @ r**2), float(shares @ (r * np.log(r)))

    def settings(self) -> dict[str, Any]:
        """The three arguments."""
        return {"uniform": self.uniform, "memory": self.memory, "prior": self.prior}

    def state_dict(self) -> dict[str, Any]:
        """Which examples are in which group, in their order (4 bytes each), and what the groups are worth."""
        return {
            "order": torch.from_numpy(self.order),
            "bounds": torch.from_numpy(self.bounds.copy()),
            "means": torch.from_numpy(self.means.copy()),
            "draws": torch.from_numpy(self.draws.copy()),
            "unit": self.unit,
        }

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, or ``ValueError``. Beside the state it takes 8 bytes an example."""
        new, groups = copy.copy(self), len(self.means)
        new.bounds = _check.array(state, "bounds", (groups + 1,), "int64").copy()
        if new.bounds[0] or new.bounds[-1] != self.n or (np.diff(new.bounds) < 0).any():
            raise ValueError(f"state['bounds'] must rise from 0 to {self.n} in {groups} steps")
        new.means = _check.array(state, "means", (groups,), most=_LARGEST**2, normal=True).copy()
        new.draws = _check.array(state, "draws", (groups,), most=self.memory, normal=True).copy()
        new.unit = _check.number(state, "unit", normal=True)
        order = _check.array(state, "order", (self.n,), self._order.dtype.name)
        new._order, new._place = _zeros(self.n), _zeros(self.n)
        bad = _take_order(order, new._order, new._place)
        if bad >= 0:
            raise ValueError(
                f"state['order'] must hold each of {self.n} examples once, but it has {order[bad]} at {bad}"
            )
        new._settle()
        return new


def _zeros(n: int) -> Numbers:
    return np.zeros(n, np.int32) if n <= _MOST_INT32 else np.zeros(n, np.int64)


# ------------------------------------------------------------------------------------------------
# Kernels. ``order`` and ``place`` are XORed with the position: example order[i] ^ i is at position i, and
# example j at position place[j] ^ j.
# ------------------------------------------------------------------------------------------------


@kernel
def _unfolded(numbers: Numbers) -> Numbers:
    """numbers[i] ^ i, in a new array of the same kind."""
    plain = np.empty_like(numbers)
    for i in range(len(numbers)):
        plain[i] = numbers[i] ^ i
    return plain


@kernel
def _take_order(given: Numbers, order: Numbers, place: Numbers) -> int:
    """Take over a permutation; or return the first position that has no example, or one that came before."""
    place[:] = -1  # no XOR of two positions is negative
    for i in range(len(given)):
        j = given[i]
        if not 0 <= j < len(given) or place[j] != -1:
            return i
        order[i] = place[j] = i ^ j
    return -1


@kernel
def _draw(
    order: Numbers,
    bounds: Indices,
    sums: Floats,
    group_ratios: Floats,
    u: Floats,
    indices: Indices,
    ratios: Floats,
) -> None:
    """Fill ``indices`` and ``ratios``.

    Group g covers sums[g - 1] ... sums[g] of [0, sums[-1]], each member an equal part of it.
    sums[-1] is n up to rounding, so a position is known to n / 2^53 of a uniform example's part: 1e-8 of it
    for a hundred million. Beyond the last member, by rounding, the last member is meant.
    """
    last = len(sums) - 1
    while bounds[last] == bounds[last + 1]:  # u = 1, or rounding, means the last member of all
        last -= 1
    for k in range(len(u)):
        wanted = u[k] * sums[-1]
        g, length = 0, last + 1  # the first group whose sum is larger, by steps as in :func:`_group`
        while length > 1:
            half = length >> 1
            g = g + half if sums[g + half - 1] <= wanted else g
            length -= half
        before = sums[g - 1] if g > 0 else 0.0
        size = bounds[g + 1] - bounds[g]
        # The minimum is taken of floats: if a ratio is tiny, the quotient may be beyond any integer.
        member = int(min((wanted - before) / group_ratios[g], size - 1.0))
        position = bounds[g] + member
        indices[k] = order[position] ^ position
        ratios[k] = group_ratios[g]


@kernel
def _group(bounds: Indices, position: int) -> int:
    """The last group that begins at or before ``position``.

    A binary search over a fixed number of steps, without branches that could be guessed wrong.
    """
    first, length = 0, len(bounds) - 1
    while length > 1:
        half = length >> 1
        first = first + half if bounds[first + half] <= position else first
        length -= half
    return first


@kernel
def _in_units(score: float, unit: float) -> float:
    """The score as a multiple of the unit; zero while there is none."""
    return min(score / unit, _LARGEST) if unit > 0.0 else 0.0


@kernel
def _group_of(known: float) -> int:
    """The group of a score in units."""
    if known <= 0.0:
        return 0
    octave_thirds = np.floor(_PER_OCTAVE * np.log2(known))
    return int(min(max(octave_thirds - _LOWEST, 0.0), _SCORED - 1.0))


@kernel
def _calibrate(
    place: Numbers,
    bounds: Indices,
    means: Floats,
    draws: Floats,
    indices: Indices,
    scores: Floats,
    unit: float,
    memory: float,
) -> None:
    """Blend each squared score into the mean of the group that its example is in."""
    for k in range(len(indices)):
        g = _group(bounds, place[indices[k]] ^ indices[k])
        known = _in_units(scores[k], unit)
        draws[g] = min(draws[g] + 1.0, memory)
        means[g] += (known * known - means[g]) / max(draws[g], 1.0)
        if means[g] < _SMALLEST_MEAN:
            means[g] = 0.0


@kernel
def _settle(
    ratios: Floats,
    sums: Floats,
    bounds: Indices,
    means: Floats,
    draws: Floats,
    prior: float,
    uniform: float,
) -> None:
    """Fill in r of each group, and the running sum of (members) x r: n in the end.

    A scored group's mean is blended with its middle, which counts for ``prior`` draws. The unseen have no
    middle: their mean, 1 at the start, gives way to the first draw.
    """
    groups = len(means)
    total = 0.0
    for g in range(groups):
        value = means[g]
        if g < _SCORED:
            value += (_MIDDLES_SQUARED[g] - value) * (prior / (draws[g] + prior))
        ratios[g] = np.sqrt(value)
        total += ratios[g] * (bounds[g + 1] - bounds[g])
    scale = (1.0 - uniform) * bounds[groups] / total if total > 0.0 else 0.0
    running = 0.0
    for g in range(groups):
        ratios[g] = scale * ratios[g] + uniform if total > 0.0 else 1.0
        running += ratios[g] * (bounds[g + 1] - bounds[g])
        sums[g] = running


@kernel
def _move(order: Numbers, place: Numbers, bounds: Indices, j: int, target: int) -> None:
    """Move an example to another group, one group at a time: one swap and one bound each."""
    here = place[j] ^ j
    g = _group(bounds, here)
    while g != target:
        if g < target:  # to the end of its group, which then ends before it
            bounds[g + 1] -= 1
            there = bounds[g + 1]
            g += 1
        else:  # to the beginning of its group, which then begins after it
            there = bounds[g]
            bounds[g] += 1
            g -= 1
        if there != here:  # else there is nobody else in the group
            other = order[there] ^ there
            order[here], place[other] = other ^ here, here ^ other
            order[there], place[j] = j ^ there, there ^ j
            here = there


@kernel
def _move_all(order: Numbers, place: Numbers, bounds: Indices, indices: Indices, targets: Indices) -> None:
    """Move each example to the group that is told."""
    for k in range(len(indices)):
        _move(order, place, bounds, indices[k], targets[k])


@kernel
def _regroup(
    order: Numbers, place: Numbers, bounds: Indices, indices: Indices, scores: Floats, unit: float
) -> None:
    """Move each example to the group of its score."""
    for k in range(len(indices)):
        _move(order, place, bounds, indices[k], _group_of(_in_units(scores[k], unit)))


@kernel
def _group_all(order: Numbers, place: Numbers, bounds: Indices, scores: Floats, unit: float) -> None:
    """Put every example into the group of its score, members in the order of their numbers. O(n)."""
    bounds[:] = 0
    for j in range(len(scores)):
        bounds[_group_of(_in_units(scores[j], unit)) + 1] += 1
    for g in range(1, len(bounds)):
        bounds[g] += bounds[g - 1]
    following = bounds.copy()
    for j in range(len(scores)):
        g = _group_of(_in_units(scores[j], unit))
        order[following[g]] = place[j] = following[g] ^ j
        following[g] += 1


@kernel
def _ratios(place: Numbers, bounds: Indices, group_ratios: Floats, indices: Indices) -> Floats:
    """The ratio of the group of each example."""
    ratios = np.empty(len(indices))
    for k in range(len(indices)):
        ratios[k] = group_ratios[_group(bounds, place[indices[k]] ^ indices[k])]
    return ratios


@kernel
def _learn(
    ratios: Floats,
    sums: Floats,
    order: Numbers,
    place: Numbers,
    bounds: Indices,
    means: Floats,
    draws: Floats,
    indices: Indices,
    scores: Floats,
    unit: float,
    memory: float,
    prior: float,
    uniform: float,
) -> None:
    """A whole update in one call, which costs less than three."""
    _calibrate(place, bounds, means, draws, indices, scores, unit, memory)
    _regroup(order, place, bounds, indices, scores, unit)
    _settle(ratios, sums, bounds, means, draws, prior, uniform)
