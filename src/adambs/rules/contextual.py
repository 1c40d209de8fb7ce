"""Contextual: Calibrated, with the examples not yet seen grouped by what is known of them beforehand."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.rules.base import Rule
from adambs.rules.calibrated import Calibrated
from adambs.rules.contexts import Contexts
from adambs.rules.grouping import DRAWS, GROUPS, MEANS, MIDDLES_SQUARED, RATIOS, SCORED, SUMS
from adambs.rules.labels import fingerprint, numbered


class Contextual(Calibrated):
    """:class:`Calibrated` for examples of which something is known: a class, a source, a length, a cluster.

    An example that has been seen is worth what its last score has proved to be worth. One that has not is
    worth what unseen examples of its context have turned out to be worth, instead of what all unseen ones
    have: r_j = (1 - uniform) sqrt(m_c(j)) / (mean over all examples) + uniform, with m_c the running mean of
    the squared scores of the unseen examples of context c that were drawn. So p learns in the first epoch.

    O(K log C) a step plus O(number of score groups), whatever n and the number C of contexts are; 20 bytes an
    example. ``BanditSampler(n, K, context=labels)`` makes one.

    Args:
        context: a label for each example, of any hashable kind.
        uniform: as for :class:`Calibrated`.
        memory: likewise; a context's mean runs over so many draws, too.
        prior: likewise; and for how many draws the mean of other contexts' first draws counts, before a
            context has real ones.
    """

    def __init__(
        self, context: Any, *, uniform: float = 0.05, memory: float = 300.0, prior: float = 5.0
    ) -> None:
        super().__init__(uniform=uniform, memory=memory, prior=prior)
        self._labels = numbered(context)
        self._fingerprint = fingerprint(self._labels)

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Nothing seen: all contexts are fresh, and p is uniform. O(n log n)."""
        if len(self._labels) != n:
            raise ValueError(f"context must have n = {n} labels, one an example, not {len(self._labels)}")
        if initial_weights is not None:
            raise ValueError(
                "initial_weights count as scores that were seen, and context is for examples that were not: "
                "give one of the two"
            )
        self.contexts = Contexts(self._labels)
        super().start(n, batch_size, None)

    def in_context(self, context: Any) -> Rule:
        """One with another context."""
        return Calibrated.in_context(self, context)

    def _settle(self) -> None:
        self._scale, self._share = _settle(
            self._worth, self.group_sizes, self.prior, self.uniform, self.contexts.total
        )

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """As of :class:`Calibrated`; a quantile of the unseen falls into a context. O(K log C)."""
        indices, ratios = super().draw(u)
        before, total = self.group_sums[SCORED - 1], self.group_sums[SCORED]
        count = int(self.group_sizes[SCORED])
        self.contexts.draw_into(u, before, total, count, self._scale, self._share, indices, ratios)
        return indices, ratios

    def ratios(self, indices: Indices | None = None) -> Floats:
        """That of the group or, of an unseen example, of the context."""
        ratios = super().ratios(indices)
        chosen = np.arange(self.n) if indices is None else indices
        self.contexts.ratios_into(chosen, self._scale, self._share, ratios)
        return ratios

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Groups learn as in :class:`Calibrated`, and contexts from those that were unseen. O(K log C)."""
        super().update(indices, ratios, scores)
        self.contexts.learn(indices, scores, self.unit, self.memory, self.prior)
        self._settle()
        return 0

    def spread(self) -> tuple[float, float]:
        """The means of r^2 and of r log r. O(groups + contexts)."""
        sizes, r = self.group_sizes[:SCORED], self.group_ratios[:SCORED]
        squares, r_log_r = self.contexts.spread(self._scale, self._share)
        return (
            (float(sizes @ r**2) + squares) / self.n,
            (float(sizes @ (r * np.log(r))) + r_log_r) / self.n,
        )

    def settings(self) -> dict[str, Any]:
        """Those of :class:`Calibrated`, and a fingerprint of the context."""
        return {**super().settings(), "context": self._fingerprint}

    def state_dict(self) -> dict[str, Any]:
        """That of :class:`Calibrated`, and what the contexts are worth."""
        return {**super().state_dict(), "contexts": self.contexts.state_dict()}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, or ``ValueError``."""
        new = super().with_state(state)
        unseen = new.members.groups() == SCORED
        new.contexts = self.contexts.with_state(_check.mapping(state, "contexts"), unseen, self.memory)
        new._settle()
        return new


def chosen(rule: Rule | None, context: Any) -> Rule:
    """A rule to start, for a sampler that was given this rule, or none, and this context, or none."""
    rule = Calibrated() if rule is None else copy.copy(rule)
    return rule if context is None else rule.in_context(context)


@kernel
def _settle(
    worth: Floats, sizes: Indices, prior: float, uniform: float, unseen: float
) -> tuple[float, float]:
    """As of :class:`Calibrated`, with the sum of the roots of all ``unseen`` examples given.

    Returns the scale and the share: an unseen example has r = scale x root + share. The share is what the
    group of the unseen gets for its ratio: by it :meth:`Contextual.draw` finds a member of the uniform part.
    """
    total, n = unseen, 0
    for g in range(GROUPS):
        n += sizes[g]
    for g in range(SCORED):
        value = worth[MEANS, g]
        value += (MIDDLES_SQUARED[g] - value) * (prior / (worth[DRAWS, g] + prior))
        worth[RATIOS, g] = np.sqrt(value)
        total += worth[RATIOS, g] * sizes[g]
    scale = (1.0 - uniform) * n / total if total > 0.0 else 0.0
    share = uniform if total > 0.0 else 1.0
    running = 0.0
    for g in range(SCORED):
        worth[RATIOS, g] = scale * worth[RATIOS, g] + share
        running += worth[RATIOS, g] * sizes[g]
        worth[SUMS, g] = running
    worth[RATIOS, SCORED] = share
    worth[SUMS, SCORED] = running + (scale * unseen + share * sizes[SCORED])
    return scale, share
