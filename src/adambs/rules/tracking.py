"""Tracking: p follows the last seen scores."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.rules.base import first_unit
from adambs.rules.mixed import MixedRule

# A remembered score is at least this share of the first batch's largest, so that p exists even when every
# score is zero.
_SMALLEST = 1e-30
# And at most this, so that n of them have a sum.
_LARGEST = 1e100


class Tracking(MixedRule):
    """p mixes the uniform distribution with the scores that were last seen.

    The distribution of least variance is p_j ~ s_j, s_j being the gradient norm of example j (the paper's
    eq. (4)). A norm changes slowly, so the last one seen is a good guess of it, and the uniform part bounds
    what a wrong guess can cost: with r_j = n p_j,

        r_j = (1 - uniform) s_j / mean(s) + uniform,

    no weight 1/r_j is above 1/uniform and the second moment of the gradient is at most 1/uniform times
    that of uniform sampling. An example not yet seen counts with the largest score of the first batch, so
    it is drawn soon: optimism. The rule is free of units: scores may have any scale.

    After Katharopoulos and Fleuret (2017) and Alain et al. (2015), who draw by remembered losses and
    gradient norms, and Schaul et al. (ICLR 2016), who keep new examples at the largest priority.
    O(K log n) a step.

    Args:
        uniform: share of the uniform distribution in p.
        smoothing: how much of the old score is kept when a new one is seen; 0 remembers the last.
        forgetting: how far a score moves towards the mean of all in the time of an epoch, if it is not
            seen anew. Each step visits the next K examples of a fixed cycle, so that the cost stays at
            O(K log n).
    """

    def __init__(self, *, uniform: float = 0.3, smoothing: float = 0.0, forgetting: float = 0.0) -> None:
        super().__init__(uniform)
        self.smoothing = _check.share("smoothing", smoothing)
        self.forgetting = _check.share("forgetting", forgetting)

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Nothing seen: all alike. Initial weights are taken for scores that have been seen."""
        # Scores are kept in units of the first batch's largest, in which an unseen example has 1.
        self.unit = 0.0
        if initial_weights is not None:
            self.unit = float(initial_weights.max())
            initial_weights = (initial_weights / self.unit).clip(min=_SMALLEST)
        super().start(n, batch_size, initial_weights)
        self.seen = np.full(n, initial_weights is not None)
        self.next_visit = 0

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Remember the scores; which odds they were drawn with does not matter."""
        if self.forgetting:
            visited = (self.next_visit + np.arange(len(indices))) % self.n
            self.next_visit = int(visited[-1] + 1) % self.n
            _forget(self.tree.leaves, self.seen, self.tree.total / self.n, visited, self.forgetting)
            self.tree.refresh(visited)
        return self.observe(indices, scores)

    def observe(self, indices: Indices, scores: Floats) -> int:
        """Remember the scores. O(K log n)."""
        if not self.unit:
            self.unit = first_unit(scores)
        _remember(self.tree.leaves, self.seen, indices, scores, self.unit, self.smoothing)
        self.tree.refresh(indices)
        return 0

    def settings(self) -> dict[str, Any]:
        """The three arguments."""
        return {"uniform": self.uniform, "smoothing": self.smoothing, "forgetting": self.forgetting}

    def state_dict(self) -> dict[str, Any]:
        """The scores, which examples have been seen, the unit, and where the cycle stands."""
        return {
            **super().state_dict(),
            "seen": torch.from_numpy(self.seen.copy()),
            "unit": self.unit,
            "next_visit": self.next_visit,
        }

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, or ``ValueError``."""
        # Blending two scores may round below the smallest or above the largest.
        _check.array(state, "weights", (self.n,), least=_SMALLEST / 2, most=_LARGEST * 2)
        new = super().with_state(state)
        new.seen = _check.array(state, "seen", (self.n,), "bool").copy()
        new.unit = _check.number(state, "unit", normal=True)
        new.next_visit = _check.count(state, "next_visit", 0, self.n - 1)
        return new


@kernel
def _remember(
    leaves: Floats, seen: Any, indices: Indices, scores: Floats, unit: float, smoothing: float
) -> None:
    """Write the scores one after the other, so of duplicates the last comes out on top."""
    for k in range(indices.shape[0]):
        j = indices[k]
        score = min(max(scores[k] / unit, _SMALLEST), _LARGEST) if unit > 0.0 else _SMALLEST
        if seen[j]:
            score = smoothing * leaves[j] + (1.0 - smoothing) * score
        leaves[j] = score
        seen[j] = True


@kernel
def _forget(leaves: Floats, seen: Any, mean: float, visited: Indices, share: float) -> None:
    """Move the remembered scores of ``visited`` towards the mean; unseen examples are left unchanged."""
    for j in visited:
        if seen[j]:
            leaves[j] += share * (mean - leaves[j])
