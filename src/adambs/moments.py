"""Running means over batches: what p does to the gradient's second moment, how scores scatter around p."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, State

# Memory of the running means: about the last hundred batches.
_DECAY = 0.99

# Batches are blended when so many wait, or so many examples in them; or when somebody asks.
_MOST_WAITING, _MOST_EXAMPLES = 64, 4096


class RunningMeans(ABC):
    """Two running means over batches of scores and of the ratios that they were drawn with.

    Nobody asks for them at every step, and a call of compiled code between two steps costs more than its
    arithmetic. So batches may wait, and are blended some at a time, in their order.
    """

    NAMES: ClassVar[tuple[str, str]]
    """Of the two means in a state."""

    def __init__(self, first: float = 0.0, second: float = 0.0) -> None:
        self._means = (first, second)
        self._waiting: list[tuple[Floats, Floats]] = []
        self._most = 1  # batches that may wait, for batches of at most so many scores
        self._largest = 0

    @staticmethod
    @abstractmethod
    def of_batch(ratios: Floats, scores: Floats) -> tuple[float, float]:
        """The two means of one batch. O(K)."""

    def decay(self) -> float:
        """The share of what is known when a batch is blended in."""
        return _DECAY

    def add(self, ratios: Floats, scores: Floats) -> None:
        """Learn from a batch, now or later. Neither array may change any more."""
        waiting = self._waiting
        waiting.append((ratios, scores))
        if len(waiting) >= self._most or len(scores) > self._largest:
            self._catch_up()
            self._largest = max(self._largest, len(scores))
            self._most = max(1, min(_MOST_WAITING, _MOST_EXAMPLES // max(self._largest, 1)))

    def _catch_up(self) -> None:
        for ratios, scores in self._waiting:
            self.mix(*self.of_batch(ratios, scores))
        self._waiting.clear()

    def mix(self, first: float, second: float) -> None:
        """Learn from the two means of a batch."""
        decay = self.decay()
        self._means = (
            decay * self._means[0] + (1.0 - decay) * first,
            decay * self._means[1] + (1.0 - decay) * second,
        )

    @property
    def means(self) -> tuple[float, float]:
        """Both, up to date."""
        if self._waiting:
            self._catch_up()
        return self._means

    def state_dict(self) -> dict[str, Any]:
        """Two numbers."""
        return dict(zip(self.NAMES, self.means, strict=True))

    def with_state(self, state: State) -> Self:
        """One like this, in a state from :meth:`state_dict`; or an error."""
        return type(self)(*(_check.number(state, name) for name in self.NAMES))


class SecondMoments(RunningMeans):
    """Second moments of the gradient estimate: under uniform sampling, and under some p.

    They are the means over all examples of s^2 and of s^2 / r, here estimated from examples that were drawn
    with n times the probability q: (1/K) sum s^2 / q and (1/K) sum s^2 / (q r).
    """

    NAMES = ("uniform", "ours")

    @staticmethod
    def of_batch(ratios: Floats, scores: Floats) -> tuple[float, float]:
        """Of examples drawn from p itself: q = r."""
        return second_moments(ratios, ratios, scores)

    @property
    def uniform(self) -> float:
        """Under uniform sampling."""
        return self.means[0]

    @property
    def ours(self) -> float:
        """Under p."""
        return self.means[1]

    @property
    def reduction(self) -> float:
        """How many times smaller than under uniform sampling the second moment is; NaN if unknown."""
        uniform, ours = self.means
        return uniform / ours if ours > 0 else math.nan


class Scatter(RunningMeans):
    """The means of a^2 and of a, with a = s / r of examples that were drawn with r: how good p is."""

    NAMES = ("squares", "sum")

    @staticmethod
    def of_batch(ratios: Floats, scores: Floats) -> tuple[float, float]:
        """Of examples that were drawn from p, or from a pass, not chosen after a look."""
        return _scatter(ratios, scores)

    def decay(self) -> float:
        """The first batch that tells anything counts whole."""
        return _DECAY if self._means[1] > 0 else 0.0

    @property
    def tau(self) -> float:
        """sqrt(E[a^2]) / E[a]: 1 if p is perfect, or nothing is known."""
        squares, mean = self.means
        return max(math.sqrt(squares) / mean, 1.0) if mean > 0 else 1.0


@kernel
def second_moments(
    drawn: Floats, ratios: Floats, scores: Floats, limit: float = np.inf
) -> tuple[float, float]:
    """Of a batch that was drawn with ``drawn``, when p is ``ratios``. See :class:`SecondMoments`.

    ``limit`` is that of weight x score, if weights are lowered (:class:`adambs.cap.Cap`): what p does to the
    gradient is judged with the weights that it would come with.
    """
    uniform, ours = 0.0, 0.0
    for k in range(scores.shape[0]):
        s = min(scores[k], 1e100)  # squares, and their sums, stay finite
        uniform += min(s * s / drawn[k], 1e250)
        if s > limit * ratios[k]:
            capped = min(s / ratios[k], max(limit, s))
            ours += min(capped * capped * ratios[k] / drawn[k], 1e250)
        else:
            ours += min(s * s / (drawn[k] * ratios[k]), 1e250)
    return uniform / scores.shape[0], ours / scores.shape[0]


@kernel
def _scatter(ratios: Floats, scores: Floats) -> tuple[float, float]:
    squares, total = 0.0, 0.0
    for k in range(scores.shape[0]):
        a = min(scores[k] / ratios[k], 1e100)
        squares += a * a
        total += a
    return squares / scores.shape[0], total / scores.shape[0]
