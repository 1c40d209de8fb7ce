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


class RunningMeans(ABC):
    """Two running means over batches of scores and of the ratios that they were drawn with."""

    NAMES: ClassVar[tuple[str, str]]
    """Of the two means in a state."""
    FIRST_WHOLE: ClassVar[bool] = False
    """Whether the first batch that tells anything counts whole, and not as if zeros had come before it."""

    def __init__(self, first: float = 0.0, second: float = 0.0) -> None:
        self.means = (first, second)

    @staticmethod
    @abstractmethod
    def of_batch(ratios: Floats, scores: Floats) -> tuple[float, float]:
        """The two means of one batch. O(K)."""

    def add(self, ratios: Floats, scores: Floats) -> None:
        """Learn from a batch."""
        self.mix(*self.of_batch(ratios, scores))

    def mix(self, first: float, second: float) -> None:
        """Learn from the two means of a batch."""
        one, two = self.means
        decay = 0.0 if self.FIRST_WHOLE and two == 0.0 else _DECAY
        self.means = decay * one + (1.0 - decay) * first, decay * two + (1.0 - decay) * second

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
        uniform, squares, *_ = batch_moments(ratios, scores, math.inf)
        return uniform, squares

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
    FIRST_WHOLE = True

    @staticmethod
    def of_batch(ratios: Floats, scores: Floats) -> tuple[float, float]:
        """Of examples that were drawn from p, or from a pass, not chosen after a look."""
        _, squares, mean, *_ = batch_moments(ratios, scores, math.inf)
        return squares, mean

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
def batch_moments(ratios: Floats, scores: Floats, limit: float) -> tuple[float, float, float, int, float]:
    """All that is kept of a batch that was drawn with ``ratios``, in one pass. O(K).

    With a = s / r, weight x score: the means of s^2 / r and of a^2, which are the second moments under
    uniform sampling and under p; the mean of a; how many weights a ``limit`` of a lowers
    (:class:`adambs.cap.Cap`), and what that takes away of the sum of a.
    """
    uniform, squares, total, capped, taken = 0.0, 0.0, 0.0, 0, 0.0
    for k in range(len(scores)):
        s = min(scores[k], 1e100)  # squares, and their sums, stay finite
        a = min(s / ratios[k], 1e100)
        uniform += s * a
        squares += a * a
        total += a
        left = max(limit, s)  # a weight of one is left
        if a > left:
            capped += 1
            taken += a - left
    K = len(scores)
    return uniform / K, squares / K, total / K, capped, taken
