"""Calibrated: a bandit with few arms. Examples whose last scores were alike share what is learned."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices
from adambs.rules import grouping
from adambs.rules.base import Rule, first_unit
from adambs.rules.grouping import GROUPS, LARGEST, Members, Numbers

_NO_RATIOS = np.empty(0)


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
    members: Members
    """Who is in which group."""

    def __init__(self, *, uniform: float = 0.05, memory: float = 300.0, prior: float = 5.0) -> None:
        self.uniform = _check.fraction(
            "uniform", uniform, "it is the uniform share of p; for all of it use Uniform()"
        )
        self.memory = _check.positive("memory", memory)
        self.prior = _check.positive("prior", prior)

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Nothing seen: O(chunks). Initial weights are taken for scores that have been seen: O(n)."""
        self.n, self.batch_size = n, batch_size
        self.unit, self._worth = 0.0, grouping.nothing_known()
        if initial_weights is None:
            self.members = Members(n)
        else:
            self.unit = float(initial_weights.max())
            self.members = Members.by_score(initial_weights, self.unit)
        self._settle()

    def in_context(self, context: Any) -> Rule:
        """One with the same settings that groups unseen examples by their labels."""
        from adambs.rules.contextual import Contextual  # which is one of these

        return Contextual(context, uniform=self.uniform, memory=self.memory, prior=self.prior)

    def _settle(self) -> None:
        """The ratio of each group from its mean, and the running sums of their masses. O(groups)."""
        grouping.settle(self._worth, self.group_sizes, self.prior, self.uniform)

    @property
    def group_sizes(self) -> Indices:
        """How many examples are in each group. A view, as the next four are: for reading."""
        return self.members.sizes

    def _row(self, row: int) -> Floats:
        found: Floats = self._worth[row]
        return found

    @property
    def means(self) -> Floats:
        """For each group, the running mean of squared scores, in squared units."""
        return self._row(grouping.MEANS)

    @property
    def draws(self) -> Floats:
        """For each group, how many draws are in its mean, at most ``memory``."""
        return self._row(grouping.DRAWS)

    @property
    def group_ratios(self) -> Floats:
        """n p of a member of each group."""
        return self._row(grouping.RATIOS)

    @property
    def group_sums(self) -> Floats:
        """The running sum of (members) x ratio: n in the end."""
        return self._row(grouping.SUMS)

    @property
    def order(self) -> Numbers:
        """All examples, group after group. A new array, O(n)."""
        return self.members.listed()

    def groups(self, indices: Indices | None = None) -> Indices:
        """The group of some examples, or of all."""
        return self.members.groups(indices).astype(np.int64)

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The quantile falls into a group by its mass and onto a member by what is left. O(K log groups)."""
        return self.members.draw(self._worth, u)

    def ratios(self, indices: Indices | None = None) -> Floats:
        """That of the group."""
        chosen, members = np.arange(self.n) if indices is None else indices, self.members
        ratios = np.empty(len(chosen))
        grouping.fill_ratios(members.place, members.owner, members.shift, self._worth, chosen, ratios)
        return ratios

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Learn what the groups of the drawn are worth, then put each into the group of its new score.

        Odds play no part in that. O(K + groups).
        """
        if not self.unit:
            self.unit = first_unit(scores)
        members = self.members
        grouping.learn(
            members.order,
            members.place,
            members.full,
            members.owner,
            members.table,
            members.shift,
            self._worth,
            indices,
            scores,
            self.unit,
            self.memory,
            self.prior,
            self.uniform,
        )
        return 0

    def observe(self, indices: Indices, scores: Floats) -> int:
        """The same for scores of any examples."""
        return self.update(indices, _NO_RATIOS, scores)

    def spread(self) -> tuple[float, float]:
        """The means of r^2 and of r log r, from the sizes of the groups and their ratios. O(groups)."""
        shares, r = self.group_sizes / self.n, self.group_ratios
        return float(shares @ r**2), float(shares @ (r * np.log(r)))

    def settings(self) -> dict[str, Any]:
        """The three arguments."""
        return {"uniform": self.uniform, "memory": self.memory, "prior": self.prior}

    def state_dict(self) -> dict[str, Any]:
        """Which examples are in which group, in their order (4 bytes each), and what the groups are worth."""
        return {
            "order": torch.from_numpy(self.order),
            "bounds": torch.from_numpy(self.members.bounds),
            "means": torch.from_numpy(self.means.copy()),
            "draws": torch.from_numpy(self.draws.copy()),
            "unit": self.unit,
        }

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, or ``ValueError``. Beside the state it takes 8 bytes an example."""
        new = copy.copy(self)
        bounds = _check.array(state, "bounds", (GROUPS + 1,), "int64")
        if bounds[0] or bounds[-1] != self.n or (np.diff(bounds) < 0).any():
            raise ValueError(f"state['bounds'] must rise from 0 to {self.n} in {GROUPS} steps")
        new._worth = self._worth_of(state)
        new.unit = _check.number(state, "unit", normal=True)
        order = _check.array(state, "order", (self.n,), self.members.order.dtype.name)
        new.members = Members.of(order, np.diff(bounds), "state['order']")
        new._settle()
        return new

    def _worth_of(self, state: Mapping[str, Any]) -> Floats:
        """What groups are worth by a state; or an error. What follows from it is not filled in yet."""
        worth = grouping.nothing_known()
        worth[grouping.MEANS] = _check.array(state, "means", (GROUPS,), most=LARGEST**2, normal=True)
        worth[grouping.DRAWS] = _check.array(state, "draws", (GROUPS,), most=self.memory, normal=True)
        return worth
