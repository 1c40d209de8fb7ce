"""The last score of each example, and the distribution that would have been best for it."""

import math
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs.floor import PassingFloor
from adambs.rules.base import Floats, Indices, Rule


class Avare(Rule):
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
    :class:`adambs.floor.PassingFloor`.

    Args:
        p_min: smallest probability, as a fraction of 1/n.

    ``initial_weights`` are taken for first scores, so they should be on the scores' scale.
    """

    floor: PassingFloor

    def __init__(self, *, p_min: float = 0.1) -> None:
        self.p_min = _check.fraction(
            "p_min", p_min, "it is a fraction of 1/n; for the uniform distribution use Uniform()"
        )

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Begin with all examples unseen, or with ``initial_weights`` as their scores. O(n)."""
        self.n, self.batch_size = n, batch_size
        self._scaled = initial_weights is not None
        self._hold(np.ones(n) if initial_weights is None else initial_weights)

    @property
    def last_scores(self) -> Floats:
        """a_j of all examples, a copy; of an unseen one, what it counts as."""
        return self.floor.weights.copy()

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], and their ratios. O(K log n)."""
        return self.floor.draw(u)

    def ratios(self, indices: Indices | None = None) -> Floats:
        """r_j = n p_j of some examples, or of all. A new array."""
        return self.floor.ratios(indices)

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Remember the scores, whatever the odds of the draw; of duplicates, the last."""
        return self.observe(indices, scores)

    def observe(self, indices: Indices, scores: Floats) -> int:
        """Remember the scores. Those above float_max / 2n, which would have no sum, are clipped."""
        if not self._scaled and scores.any():
            # So far all scores are zero (seen) or one (unseen): this gives the unseen theirs. O(n), once.
            self._scaled = True
            self._hold(self.floor.weights * min(float(scores.max()), self.floor.largest))
        self.floor.write(indices, scores)
        return int(np.count_nonzero(scores > self.floor.largest))

    def settings(self) -> dict[str, Any]:
        """p_min."""
        return {"p_min": self.p_min}

    def state_dict(self) -> dict[str, Any]:
        """The last scores, which of them are below the floor, and the floor."""
        return {
            "scores": torch.from_numpy(self.floor.weights.copy()),
            "low": torch.from_numpy(self.floor.low.copy()),
            "floor": self.floor.floor,
            "scaled": self._scaled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise ``ValueError`` and change nothing."""
        scores = _check.vector("state['scores']", state["scores"], self.n)
        low, floor, scaled = state["low"].numpy(), float(state["floor"]), state["scaled"]
        if low.shape != (self.n,) or low.dtype != np.bool_ or not isinstance(scaled, bool):
            raise ValueError(f"state['low'] must be {self.n} flags and state['scaled'] one")
        expected = PassingFloor(scores, self.p_min / self.n).floor
        beyond = np.where(low, scores > floor * (1 + 1e-9), scores < floor * (1 - 1e-9))
        if not math.isclose(floor, expected, rel_tol=1e-9) or beyond.any():
            raise ValueError(f"state['floor'] is {floor} and does not fit the scores: {expected} does")
        self.floor = PassingFloor(scores, self.p_min / self.n, low=low, floor=floor)
        self._scaled = scaled

    def _hold(self, scores: Floats) -> None:
        self.floor = PassingFloor(scores, self.p_min / self.n)
