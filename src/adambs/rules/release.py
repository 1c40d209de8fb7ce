"""The rule of the published code, which is not Algorithm 2."""

import math
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs.floor import LastingFloor
from adambs.rules.base import Floats, Indices, Rule

# The published code's clips of p, as fractions of 1/n.
_LOW, _HIGH = 1e-5, 1000.0

# The least running range that scores are divided by.
_SMALLEST_RANGE = 1e-12


class Release(Rule):
    """The rule of the code that the paper's authors published: described, not copied.

    *Adam with Bandit Sampling for Deep Learning*, Liu, Wu and Mozafari, NeurIPS 2020, published code. It has
    no offset, no bound L and no projection. With r_j = n p_j at the time of the draw,

        g_j = (s_j - low) / max(high - low, 1e-12),    low, high: least and greatest score so far,
        p_j <- p_j exp(g_j^2 / r_j^3)                  for each drawn example, once,
        p   <- clip(p, 1e-5/n, 1000/n), then p / sum p.

    The published code trains with weights of one, so its gradient estimate is biased. The rule only says
    how p moves: with the weights 1/(n p) that the library gives a draw, the estimate is unbiased.

    Undrawn examples meet the lower clip as the sum grows, and :class:`adambs.floor.LastingFloor` lifts
    them. They never meet the upper one: if all p_j <= 1000/n, then no step lowers a weight before the
    division, so the sum is at least one and after it p_j <= 1000/n again. :meth:`start` sees to the first.
    Amortised O(K log n) a step.
    """

    floor: LastingFloor
    low: float
    """The least score so far."""
    high: float
    """The greatest score so far."""

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Begin with all examples equal, or as ``initial_weights`` has them, within the clips."""
        self.n, self.batch_size = n, batch_size
        self.low, self.high = math.inf, -math.inf
        self.floor = LastingFloor(np.ones(n) if initial_weights is None else _within_clips(initial_weights))

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], and their ratios. O(K log n)."""
        return self.floor.draw(u)

    def ratios(self, indices: Indices | None = None) -> Floats:
        """r_j = n p_j of some examples, or of all. A new array."""
        return self.floor.ratios(indices)

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """One step; of an example that was drawn twice, the last score counts. Clips no score."""
        self.low, self.high = min(self.low, float(scores.min())), max(self.high, float(scores.max()))
        g = (scores - self.low) / max(self.high - self.low, _SMALLEST_RANGE)
        drawn, last = np.unique(indices[::-1], return_index=True)
        mean = self.floor.total / self.n
        with np.errstate(over="ignore"):  # infinity is clipped like anything else above 1000/n
            grown = self.floor.weights(drawn) * np.exp((g**2 / ratios**3)[::-1][last])
        self.floor.write(drawn, np.minimum(grown, _HIGH * mean))
        self.floor.lift(_LOW * mean)
        return 0

    def settings(self) -> dict[str, Any]:
        """Nothing to set."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The weights, and the range of the scores."""
        return {"weights": torch.from_numpy(self.floor.weights()), "low": self.low, "high": self.high}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise ``ValueError`` and change nothing."""
        floor = LastingFloor(_check.vector("state['weights']", state["weights"], self.n))
        low, high = float(state["low"]), float(state["high"])
        if not (0.0 <= low <= high < math.inf or (low, high) == (math.inf, -math.inf)):
            raise ValueError(f"state has scores from {low} to {high}: not a range")
        self.floor, self.low, self.high = floor, low, high


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
