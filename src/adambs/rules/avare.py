"""The last score of each example, and the distribution that would have been best for it."""

import copy
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices
from adambs.rules.tree_rule import TreeRule
from adambs.trees import PassingFloor
from adambs.trees.passing_floor import SMALLEST_WEIGHT


class Avare(TreeRule):
    """The best p above a floor for the scores as they were last seen.

    *Adaptive Importance Sampling for Finite-Sum Optimization and Sampling with Decreasing Step-Sizes*,
    El Hanchi and Stephens, NeurIPS 2020. With a_j the last score of example j, p minimises the second
    moment of the gradient estimate,

        p = argmin over {p: sum p = 1, p_j >= p_min} of sum_j a_j^2 / p_j,

    whose solution is p_j = max(p_min, c a_j), with the one c that makes it sum to one. (Where p_j > p_min
    the Lagrangian has a_j^2 / p_j^2 the same for all, elsewhere it is at most that.)

    The floor is what keeps an example with a small score in view. The paper lets it decrease as the step
    sizes do; here it stays. An example not yet seen counts as the largest score of the first batch that has
    a positive one: optimistic, so that it is looked at soon, and free of the scores' scale. If all scores
    are zero, p is uniform.

    O(K log n) a step, and log n for each example that meets or leaves the floor: see
    :class:`adambs.trees.PassingFloor`.

    Args:
        p_min: smallest probability, as a fraction of 1/n.

    ``initial_weights`` are taken for first scores, so they should be on the scores' scale.
    """

    tree: PassingFloor

    def __init__(self, *, p_min: float = 0.1) -> None:
        self.p_min = _check.fraction(
            "p_min", p_min, "it is a fraction of 1/n; for the uniform distribution use Uniform()"
        )

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Begin with all examples unseen, or with ``initial_weights`` as their scores. O(n)."""
        super().start(n, batch_size, initial_weights)
        self._scaled = initial_weights is not None

    def plant(self, weights: Floats) -> PassingFloor:
        """p_j = max(p_min, c a_j)."""
        return PassingFloor(weights, self.p_min / self.n)

    @property
    def last_scores(self) -> Floats:
        """a_j of all examples, a copy; of an unseen one, what it counts as."""
        return self.tree.weights.copy()

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Remember the scores, whatever the odds of the draw; of duplicates, the last."""
        return self.observe(indices, scores)

    def observe(self, indices: Indices, scores: Floats) -> int:
        """Remember the scores. Those above float_max / 2n, which would have no sum, are clipped."""
        if not self._scaled and scores.any():
            # So far all scores are zero (seen) or one (unseen): this gives the unseen theirs. O(n), once.
            self._scaled = True
            self.tree = self.plant(self.tree.weights * min(float(scores.max()), self.tree.largest))
        self.tree.write(indices, scores)
        return int(np.count_nonzero(scores > self.tree.largest))

    def settings(self) -> dict[str, Any]:
        """p_min."""
        return {"p_min": self.p_min}

    def state_dict(self) -> dict[str, Any]:
        """The last scores, which of them are below the floor, and the floor."""
        return {
            "scores": torch.from_numpy(self.tree.weights.copy()),
            "low": torch.from_numpy(self.tree.low.copy()),
            "floor": self.tree.floor,
            "scaled": self._scaled,
        }

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, or ``ValueError``."""
        scores = _check.array(state, "scores", (self.n,), most=self.tree.largest)
        if ((scores > 0) & (scores < SMALLEST_WEIGHT)).any():
            raise ValueError(f"state['scores'] must be zero or at least {SMALLEST_WEIGHT:g}")
        low = _check.array(state, "low", (self.n,), "bool")
        floor = _check.number(state, "floor", normal=True)
        beyond = np.where(low, scores > floor * (1 + 1e-9), scores < floor * (1 - 1e-9))
        if beyond.any():
            raise ValueError(f"state['low'] does not fit state['floor'], {floor}, at {int(beyond.argmax())}")
        p_min, total = self.p_min / self.n, float(scores[~low].sum()) + int(low.sum()) * floor
        if not math.isclose(floor, p_min * total, rel_tol=1e-9):
            raise ValueError(
                f"state['floor'] is {floor}, which is not p_min of what state['scores'] add up to"
            )
        scaled = _check.flag(state, "scaled")
        if not scaled and ((scores != 0) & (scores != 1)).any():
            raise ValueError("state['scaled'] is False, but some of state['scores'] are neither 0 nor 1")
        new = copy.copy(self)
        new.tree = PassingFloor(scores, p_min, low=low, floor=floor)
        new._scaled = scaled
        return new
