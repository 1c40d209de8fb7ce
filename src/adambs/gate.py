"""The gate: whether p is worth drawing from."""

import math
from typing import Any

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, State

# Memory of the running estimate: about the last hundred updates.
_DECAY = 0.99


class SecondMoments:
    """Running second moments of the gradient estimate: under uniform sampling, and under some p.

    They are the means over all examples of s^2 and of s^2 / r, here estimated from examples that were drawn
    with n times the probability q: (1/K) sum s^2 / q and (1/K) sum s^2 / (q r).
    """

    def __init__(self, uniform: float = 0.0, ours: float = 0.0) -> None:
        self.uniform, self.ours = uniform, ours

    @property
    def reduction(self) -> float:
        """How many times smaller than under uniform sampling the second moment is; NaN if unknown."""
        return self.uniform / self.ours if self.ours > 0 else math.nan

    def blend(self, drawn: Floats, ratios: Floats, scores: Floats) -> None:
        """Learn from scores of examples that were drawn with ``drawn``, when p is ``ratios``. O(K)."""
        self.mix(*_second_moments(drawn, ratios, scores))

    def mix(self, uniform: float, ours: float) -> None:
        """Learn from the two means of a batch."""
        self.uniform = _DECAY * self.uniform + (1.0 - _DECAY) * uniform
        self.ours = _DECAY * self.ours + (1.0 - _DECAY) * ours

    def state_dict(self) -> dict[str, Any]:
        """Two numbers."""
        return {"uniform": self.uniform, "ours": self.ours}

    def with_state(self, state: State) -> "SecondMoments":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        return SecondMoments(_check.number(state, "uniform"), _check.number(state, "ours"))


class Gate:
    """Open while p lowers the second moment of the gradient enough; closed, batches are reshuffled ones.

    It is asked only where no reshuffled pass is under way: a pass that is left half way would bias the
    gradient (see :class:`adambs.proposals.Passes`). So once closed it stays so for a whole pass. That it
    does not close for a moment's noise, it opens above ``threshold`` and closes below its square root.

    Args:
        threshold: what p must lower the second moment by; 0 is a gate that is always open.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = _check.at_least("gate", threshold, 0.0)
        self.moments = SecondMoments()
        self.open = threshold == 0

    def decide(self) -> bool:
        """Whether to draw from p now."""
        if self.threshold > 0:
            bar = min(self.threshold, math.sqrt(self.threshold)) if self.open else self.threshold
            self.open = self.moments.uniform > bar * self.moments.ours
        return self.open

    def state_dict(self) -> dict[str, Any]:
        """The moments, and whether it is open."""
        return {**self.moments.state_dict(), "open": self.open}

    def with_state(self, state: State) -> "Gate":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        gate = Gate(self.threshold)
        gate.moments = self.moments.with_state(state)
        gate.open = _check.flag(state, "open")
        return gate

    def __repr__(self) -> str:
        return f"Gate({self.threshold}, {'open' if self.open else 'closed'})"


@kernel
def moments_as_drawn(ratios: Floats, scores: Floats) -> tuple[float, float, float, float]:
    """Of examples drawn with r = ``ratios``: the means of s^2 / r and s^2 / r^2, of a^2 and a; a = s / r.

    The first two are the second moments under uniform sampling and as drawn, the others how the scores
    scatter around p. All in one call, because each batch that comes back needs them.
    """
    uniform, ours, squares, total = 0.0, 0.0, 0.0, 0.0
    for k in range(scores.shape[0]):
        s, r = scores[k], ratios[k]
        a = min(s / r, 1e100)  # squares, and their sums, stay finite
        squares += a * a
        total += a
        s = min(s, 1e100)
        uniform += min(s * s / r, 1e250)
        ours += min(s * s / (r * r), 1e250)
    K = scores.shape[0]
    return uniform / K, ours / K, squares / K, total / K


@kernel
def _second_moments(drawn: Floats, ratios: Floats, scores: Floats) -> tuple[float, float]:
    uniform = 0.0
    ours = 0.0
    for k in range(scores.shape[0]):
        s = min(scores[k], 1e100)  # squares, and their sums, stay finite
        uniform += min(s * s / drawn[k], 1e250)
        ours += min(s * s / (drawn[k] * ratios[k]), 1e250)
    return uniform / scores.shape[0], ours / scores.shape[0]
