"""Contextual: Calibrated, with the examples not yet seen grouped by what is known of them beforehand."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.rules.base import Rule
from adambs.rules.calibrated import _MIDDLES_SQUARED, _SCORED, Calibrated
from adambs.rules.contexts import Contexts
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
        self.group_ratios, self.group_sums, self._scale, self._share = _settled(
            self.bounds, self.means, self.draws, self.prior, self.uniform, self.contexts.total
        )

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """As of :class:`Calibrated`; a quantile of the unseen falls into a context. O(K log C)."""
        indices, ratios = super().draw(u)
        before, total = self.group_sums[_SCORED - 1], self.group_sums[_SCORED]
        self.contexts.draw_into(
            u,
            before,
            total,
            self._order,
            int(self.bounds[_SCORED]),
            self._scale,
            self._share,
            indices,
            ratios,
        )
        return indices, ratios

    def ratios(self, indices: Indices | None = None) -> Floats:
        """That of the group or, of an unseen example, of the context."""
        ratios = super().ratios(indices)
        chosen = np.arange(self.n) if indices is None else indices
        self.contexts.ratios_into(chosen, self._scale, self._share, ratios)
        return ratios

    def observe(self, indices: Indices, scores: Floats) -> int:
        """Groups learn as in :class:`Calibrated`, and contexts from those that were unseen. O(K log C)."""
        super().observe(indices, scores)
        self.contexts.learn(indices, scores, self.unit, self.memory, self.prior)
        self._settle()
        return 0

    def spread(self) -> tuple[float, float]:
        """The means of r^2 and of r log r. O(groups + contexts)."""
        sizes, r = np.diff(self.bounds)[:_SCORED], self.group_ratios[:_SCORED]
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
        unseen = np.zeros(self.n, np.bool_)
        unseen[new.order[new.bounds[_SCORED] :]] = True
        new.contexts = self.contexts.with_state(_check.mapping(state, "contexts"), unseen, self.memory)
        new._settle()
        return new


def chosen(rule: Rule | None, context: Any) -> Rule:
    """A rule to start, for a sampler that was given this rule, or none, and this context, or none."""
    rule = Calibrated() if rule is None else copy.copy(rule)
    return rule if context is None else rule.in_context(context)


@kernel
def _settled(
    bounds: Indices, means: Floats, draws: Floats, prior: float, uniform: float, unseen: float
) -> tuple[Floats, Floats, float, float]:
    """As of :class:`Calibrated`, with the sum of the roots of all ``unseen`` examples given.

    The last two numbers are the scale and the share: an unseen example has r = scale x root + share.
    """
    ratios, sums = np.empty(_SCORED + 1), np.empty(_SCORED + 1)
    total = unseen
    for g in range(_SCORED):
        value = means[g] + (_MIDDLES_SQUARED[g] - means[g]) * (prior / (draws[g] + prior))
        ratios[g] = np.sqrt(value)
        total += ratios[g] * (bounds[g + 1] - bounds[g])
    n, count = bounds[_SCORED + 1], bounds[_SCORED + 1] - bounds[_SCORED]
    scale = (1.0 - uniform) * n / total if total > 0.0 else 0.0
    share = uniform if total > 0.0 else 1.0
    running = 0.0
    for g in range(_SCORED):
        ratios[g] = scale * ratios[g] + share
        running += ratios[g] * (bounds[g + 1] - bounds[g])
        sums[g] = running
    sums[_SCORED] = running + (scale * unseen + share * count)
    ratios[_SCORED] = (scale * unseen + share * count) / max(count, 1)  # the mean over all of them
    return ratios, sums, scale, share
