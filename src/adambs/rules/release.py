"""The rule of the published code, which is not Algorithm 2."""

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from adambs import _check
from adambs._types import Floats, Indices
from adambs.rules.tree_rule import TreeRule
from adambs.trees import LastingFloor

# The published code's clips of p, as fractions of 1/n.
_LOW, _HIGH = 1e-5, 1000.0

# The least running range that scores are divided by.
_SMALLEST_RANGE = 1e-12


class Release(TreeRule):
    """The rule of the code that the paper's authors published: described, not copied.

    *Adam with Bandit Sampling for Deep Learning*, Liu, Wu and Mozafari, NeurIPS 2020, published code. It has
    no offset, no bound L and no projection. With r_j = n p_j at the time of the draw,

        g_j = (s_j - low) / max(high - low, 1e-12),    low, high: least and greatest score so far,
        p_j <- p_j exp(g_j^2 / r_j^3)                  for each drawn example, once,
        p   <- clip(p, 1e-5/n, 1000/n), then p / sum p.

    The published code trains with weights of one, so its gradient estimate is biased. The rule only says
    how p moves: with the weights 1/(n p) that the library gives a draw, the estimate is unbiased.

    Undrawn examples meet the lower clip as the sum grows, and :class:`adambs.trees.LastingFloor` lifts
    them. They never meet the upper one: if all p_j <= 1000/n, then no step lowers a weight before the
    division, so the sum is at least one and after it p_j <= 1000/n again. :meth:`start` sees to the first.
    Amortised O(K log n) a step.
    """

    tree: LastingFloor
    low: float
    """The least score so far."""
    high: float
    """The greatest score so far."""

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Begin with all examples equal, or as ``initial_weights`` has them, within the clips."""
        super().start(n, batch_size, None if initial_weights is None else _within_clips(initial_weights))
        self.low, self.high = math.inf, -math.inf

    def plant(self, weights: Floats) -> LastingFloor:
        """All of them meet the lower clip, drawn or not."""
        return LastingFloor(weights)

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """One step; of an example that was drawn twice, the last score counts. Clips no score."""
        self.low, self.high = min(self.low, float(scores.min())), max(self.high, float(scores.max()))
        g = (scores - self.low) / max(self.high - self.low, _SMALLEST_RANGE)
        drawn, last = np.unique(indices[::-1], return_index=True)
        mean = self.tree.total / self.n
        with np.errstate(over="ignore"):  # infinity is clipped like anything else above 1000/n
            grown = self.tree.weights_at(drawn) * np.exp((g**2 / ratios**3)[::-1][last])
        self.tree.write(drawn, np.minimum(grown, _HIGH * mean))
        self.tree.lift(_LOW * mean)
        return 0

    def settings(self) -> dict[str, Any]:
        """Nothing to set."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The weights, and the range of the scores."""
        return {**super().state_dict(), "low": self.low, "high": self.high}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, or ``ValueError``."""
        new = super().with_state(state)
        r = new.ratios()  # the sum grows at most 1000-fold in a step, after which the lightest are lifted
        if not (r.min() >= _LOW / _HIGH * 0.999 and r.max() <= _HIGH * 1.001):
            raise ValueError(f"state['weights'] make p from {r.min():g}/n to {r.max():g}/n, beyond the clips")
        new.low = _check.number(state, "low", 0.0, math.inf)
        new.high = _check.number(state, "high", -math.inf)
        if new.low > new.high and (new.low, new.high) != (math.inf, -math.inf):
            raise ValueError(f"state['low'] is {new.low} and state['high'] {new.high}: not a range of scores")
        return new


def _within_clips(weights: Floats) -> Floats:
    """p_j = min(1000/n, c w_j) after w_j is lifted to 1e-5 of the mean; c >= 1 so that it sums to one.

    With the m heaviest at the cap, c = (1 - m cap) / (sum of the others); m is right when the heaviest of
    the others stays at or below it. O(n log n).
    """
    n = len(weights)
    cap = _HIGH / n
    p = weights / weights.max()
    p = np.maximum(p, _LOW * p.mean())
    descending = np.sort(p)[::-1]
    rest = np.cumsum(descending[::-1])[::-1]
    c = (1 - np.arange(n) * cap) / rest
    m = int(np.argmax(c * descending <= cap))
    clipped: Floats = np.minimum(cap, c[m] * p)
    return clipped
