"""A cap on weights: an example that was thought easy and is hard must not throw the model."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from adambs import _check
from adambs._types import State

Applied = Callable[[], bool]
"""Whether the cap was applied to a draw."""

# Memory of the running mean: about the last hundred draws.
_DECAY = 0.99


# What nobody knows anything of has no limit; nor has what is so small that float32 would take it for zero.
_LEAST = 1e-30

# A mean may be taken after the feedback; so many draws later it should have been.
_PATIENCE = 4


class Cap:
    """Limits weight x score to ``factor`` times its running mean, and never a weight below one.

    Once p is learned, weight x score is nearly the same for all examples, by construction, so what is far
    above the mean is a surprise: an example of small p that has become hard and comes with a weight of
    twenty. ``draw.mean(losses, scores)`` lowers such weights. The gradient is biased by what that takes away;
    the score is remembered all the same, so the example comes back soon with a weight that it deserves.
    :attr:`capped` and :attr:`taken` say how many weights were lowered, and how much of the sum of all
    weight x score was taken away.

    The mean runs over all draws, whoever uses the cap and whenever: so it is the same in all processes. What
    was lowered is counted when it is known that a draw's mean was given scores.

    Args:
        factor: infinity is no cap.
    """

    def __init__(self, factor: float) -> None:
        self.factor = math.inf if factor == math.inf else _check.at_least("cap", factor, 1.0)
        self._taken = self._all = 0.0
        self._capped = 0
        self._set_mean(0.0)
        self._uncounted: deque[tuple[Applied, float, int, float]] = deque(maxlen=_PATIENCE)

    def _set_mean(self, mean: float) -> None:
        self._mean = mean
        self.limit = self.factor * mean if mean >= _LEAST else math.inf
        """What weight x score may be in the next draw; infinite before anything is known."""

    @property
    def capped(self) -> int:
        """How many weights were lowered."""
        self._count()
        return self._capped

    @property
    def taken(self) -> float:
        """What was taken away, as a share of the sum of weight x score over all draws with a cap."""
        self._count()
        return self._taken / self._all if self._all > 0 else 0.0

    def learn(self, applied: Literal[True] | Applied, K: int, mean: float, capped: int, taken: float) -> None:
        """Learn from a batch: its mean of weight x score; how many weights its limit lowers, and what it
        takes away of the sum, if it was ``applied``, or will be. See :func:`adambs.moments.batch_moments`."""
        decay = _DECAY if self._mean > 0 else 0.0
        self._set_mean(decay * self._mean + (1 - decay) * mean)
        if self._uncounted:
            self._count()
        if applied is True:
            self._add(mean * K, capped, taken)
        else:
            self._uncounted.append((applied, mean * K, capped, taken))

    def _count(self) -> None:
        """Count the draws whose cap was applied since they came back, and forget the oldest others."""
        waiting, self._uncounted = self._uncounted, deque(maxlen=_PATIENCE)
        for applied, total, capped, taken in waiting:
            if applied():
                self._add(total, capped, taken)
            else:
                self._uncounted.append((applied, total, capped, taken))

    def _add(self, total: float, capped: int, taken: float) -> None:
        self._all = min(self._all + total, 1e300)
        self._capped += capped
        self._taken = min(self._taken + taken, 1e300)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        self._count()
        return {"mean": self._mean, "capped": self._capped, "taken": self._taken, "all": self._all}

    def with_state(self, state: State) -> "Cap":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        new = Cap(self.factor)
        new._set_mean(_check.number(state, "mean"))
        new._capped = _check.count(state, "capped")
        new._taken, new._all = _check.number(state, "taken"), _check.number(state, "all")
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Without what is not counted yet: a copy of a draw does not know what is done with the original."""
        return {**self.__dict__, "_uncounted": deque(maxlen=_PATIENCE)}
