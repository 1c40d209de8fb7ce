"""Calibrated: a bandit with few arms. Examples whose last scores were alike share what is learned."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adambs import _check
from adambs._jit import kernel
from adambs.rules.base import Floats, Indices, Rule

# Groups by last score: three to an octave, from 2^-20 to 2^10 of the first batch's largest score; what is
# below or above goes into the first or the last. The group after them holds the examples not yet seen.
_PER_OCTAVE = 3
_LOWEST = -20 * _PER_OCTAVE
_SCORED = 30 * _PER_OCTAVE
_UNSEEN = _SCORED
_GROUPS = _SCORED + 1

# The middle of each group, in units of the first batch's largest score, and how much it counts. The unseen
# have none: theirs gives way to the first draw.
_CENTRES = np.append(2.0 ** ((np.arange(_SCORED) + _LOWEST + 0.5) / _PER_OCTAVE), 1.0)
_PRIOR = np.append(np.ones(_SCORED), 1e-290)


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
    O(K) a step plus O(number of groups), whatever n is.

    Args:
        uniform: share of the uniform distribution in p, against surprises within a group.
        memory: over how many draws of a group its mean of squared scores runs.
        prior: how many draws the middle of a group counts for, before there are real ones.
    """

    def __init__(self, *, uniform: float = 0.05, memory: float = 300.0, prior: float = 5.0) -> None:
        self.uniform = _check.fraction(
            "uniform", uniform, "it is the uniform share of p; for all of it use Uniform()"
        )
        self.memory = _check.positive("memory", memory)
        self.prior = _check.positive("prior", prior)

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Nothing seen: one group. Initial weights are taken for scores that have been seen."""
        self.n, self.batch_size = n, batch_size
        self.unit = 0.0
        self.means = np.zeros(_GROUPS)  # of squared scores, in squared units
        self.draws = np.zeros(_GROUPS)  # how many are in the mean, at most ``memory``
        # ``order`` holds the examples group after group, group g at bounds[g] ... bounds[g + 1];
        # ``place`` is where each of them stands.
        self.order = np.arange(n)
        self.place = np.arange(n)
        self.bounds = np.zeros(_GROUPS + 1, np.int64)
        self.bounds[-1] = n
        if initial_weights is not None:
            self.unit = float(initial_weights.max())
            _regroup(self.order, self.place, self.bounds, np.arange(n), initial_weights / self.unit)
        self._settle()

    def _settle(self) -> None:
        """The ratio of each group from its mean, and the sums of their masses. O(groups)."""
        self.group_ratios, self.group_sums = _settled(
            self.bounds, self.means, self.draws, self.prior, self.uniform
        )

    def groups(self, indices: Indices | None = None) -> NDArray[np.int64]:
        """The group of some examples, or of all."""
        places = self.place if indices is None else self.place[indices]
        return np.searchsorted(self.bounds, places, side="right") - 1

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The quantile falls into a group by its mass and onto a member by what is left. O(K log groups)."""
        return _draw(self.order, self.bounds, self.group_sums, self.group_ratios, u)

    def ratios(self, indices: Indices | None = None) -> Floats:
        """That of the group."""
        return self.group_ratios[self.groups(indices)]

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Learn what the groups of the drawn are worth, then put each into the group of its new score."""
        return self.observe(indices, scores)

    def observe(self, indices: Indices, scores: Floats) -> int:
        """The same for scores of any examples. O(K + groups)."""
        if not self.unit:
            self.unit = float(scores.max(initial=0.0))
        known = np.minimum(scores / self.unit, 1e50) if self.unit else scores  # squares stay finite
        _calibrate(self.place, self.bounds, self.means, self.draws, indices, known, self.memory)
        _regroup(self.order, self.place, self.bounds, indices, known)
        self._settle()
        return 0

    def settings(self) -> dict[str, Any]:
        """The three arguments."""
        return {"uniform": self.uniform, "memory": self.memory, "prior": self.prior}

    def state_dict(self) -> dict[str, Any]:
        """Who is in which group, in their order, and what the groups are worth."""
        return {
            "order": torch.from_numpy(self.order.copy()),
            "bounds": torch.from_numpy(self.bounds.copy()),
            "means": torch.from_numpy(self.means.copy()),
            "draws": torch.from_numpy(self.draws.copy()),
            "unit": self.unit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state, or raise."""
        order, bounds = (state[name].numpy().astype(np.int64) for name in ("order", "bounds"))
        means, draws = (state[name].numpy().astype(np.float64) for name in ("means", "draws"))
        unit = float(state["unit"])
        if not np.array_equal(np.sort(order), np.arange(self.n)):
            raise ValueError(f"state['order'] must hold every example of {self.n} once")
        if bounds.shape != (_GROUPS + 1,) or bounds[0] or bounds[-1] != self.n or (np.diff(bounds) < 0).any():
            raise ValueError(f"state['bounds'] must rise from 0 to {self.n} in {_GROUPS} steps")
        for name, array in (("means", means), ("draws", draws)):
            if array.shape != (_GROUPS,) or not ((array >= 0) & (array < np.inf)).all():
                raise ValueError(f"state[{name!r}] must be {_GROUPS} numbers, finite and not negative")
        if not 0 <= unit < np.inf:
            raise ValueError(f"state['unit'] must be finite and not negative, not {unit}")
        self.order, self.bounds, self.means, self.draws = (a.copy() for a in (order, bounds, means, draws))
        self.place = np.empty(self.n, np.int64)
        self.place[self.order] = np.arange(self.n)
        self.unit = unit
        self._settle()


@kernel
def _draw(
    order: Indices, bounds: Indices, sums: Floats, group_ratios: Floats, u: Floats
) -> tuple[Indices, Floats]:
    """Group g covers sums[g - 1] ... sums[g] of [0, sums[-1]], each member an equal part of it."""
    indices, ratios = np.empty(len(u), np.int64), np.empty(len(u))
    last = len(sums) - 1
    while bounds[last] == bounds[last + 1]:  # u = 1, or rounding, means the last member of all
        last -= 1
    for k in range(len(u)):
        wanted = u[k] * sums[-1]
        g = min(np.searchsorted(sums, wanted, side="right"), last)
        before = sums[g - 1] if g > 0 else 0.0
        size = bounds[g + 1] - bounds[g]
        member = int((wanted - before) / group_ratios[g])
        indices[k] = order[bounds[g] + min(max(member, 0), size - 1)]
        ratios[k] = group_ratios[g]
    return indices, ratios


@kernel
def _group(bounds: Indices, place: int) -> int:
    """The last group that begins at or before ``place``: binary search."""
    low, high = 0, len(bounds) - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if bounds[middle] <= place:
            low = middle
        else:
            high = middle
    return low


@kernel
def _calibrate(
    place: Indices,
    bounds: Indices,
    means: Floats,
    draws: Floats,
    indices: Indices,
    scores: Floats,
    memory: float,
) -> None:
    """Blend each squared score into the mean of the group that its example is in."""
    for k in range(len(indices)):
        g = _group(bounds, place[indices[k]])
        draws[g] = min(draws[g] + 1.0, memory)
        means[g] += (scores[k] * scores[k] - means[g]) / max(draws[g], 1.0)


@kernel
def _settled(
    bounds: Indices, means: Floats, draws: Floats, prior: float, uniform: float
) -> tuple[Floats, Floats]:
    """r of each group, and the running sum of (members) x r: n in the end."""
    ratios, sums = np.empty(_GROUPS), np.empty(_GROUPS)
    total = 0.0
    for g in range(_GROUPS):
        weight = prior * _PRIOR[g]
        ratios[g] = np.sqrt((draws[g] * means[g] + weight * _CENTRES[g] ** 2) / (draws[g] + weight))
        total += ratios[g] * (bounds[g + 1] - bounds[g])
    scale = (1.0 - uniform) * bounds[_GROUPS] / total
    running = 0.0
    for g in range(_GROUPS):
        ratios[g] = scale * ratios[g] + uniform
        running += ratios[g] * (bounds[g + 1] - bounds[g])
        sums[g] = running
    return ratios, sums


@kernel
def _regroup(order: Indices, place: Indices, bounds: Indices, indices: Indices, scores: Floats) -> None:
    """Move each example to the group of its score, one group at a time: one swap and one bound each."""
    for k in range(len(indices)):
        j = indices[k]
        target = 0
        if scores[k] > 0.0:
            target = int(np.floor(_PER_OCTAVE * np.log2(scores[k]))) - _LOWEST
            target = min(max(target, 0), _SCORED - 1)
        g = _group(bounds, place[j])
        while g != target:
            if g < target:  # to the end of its group, which then ends before it
                bounds[g + 1] -= 1
                other_place = bounds[g + 1]
                g += 1
            else:  # to the beginning of its group, which then begins after it
                other_place = bounds[g]
                bounds[g] += 1
                g -= 1
            other = order[other_place]
            order[place[j]], place[other] = other, place[j]
            order[other_place], place[j] = j, other_place
