"""When does looking before drawing pay? The economics of scoring more examples than are trained on."""

import math
import statistics
import time
from collections import deque
from typing import Any

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats

# The cost of a look is the median of the first looks over that of the last steps. No look is made to
# measure it before one could pay if scoring K examples took a tenth of a step.
_LOOKS, _STEPS, _CHEAP = 5, 20, 0.1

# Memory of the running estimate of how much scores scatter: about the last hundred draws.
_DECAY = 0.99


class Looking:
    """Decides whether to score some candidates first and train on the best choice among them.

    Of B = m K examples drawn from p, forward passes tell the present scores s; K of them are then chosen in
    proportion to a = s / (n p). With T = tau^2 = E[a^2] / E[a]^2, the variance of the batch falls by

        gain = 1 / (1/T + (1 - 1/T) / m),

    as if the batch were so many times larger: the choice leaves 1/T of the variance, that B is finite adds
    the rest. Scoring K examples costs ``cost`` = c of a plain step. A look pays while the batch grows by more
    than the time of the step,

        gain > 1 + m c.

    (Katharopoulos and Fleuret, ICML 2018, with p uniform, m = 3 and c = 1/3, look while tau > 2.) The cost is
    measured by the clock in the first looks, unless it is given: with a number, a run repeats itself exactly.

    Args:
        candidates: m.
        cost: c, if it is not to be measured.
    """

    def __init__(self, candidates: int = 3, cost: float | None = None) -> None:
        self.candidates = _check.whole("candidates", candidates, least=2)
        self.cost = None if cost is None else _check.positive("cost", cost)
        self._squares = self._sum = 0.0
        self._looks: list[float] = []
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._left_at: float | None = None

    @property
    def gain(self) -> float:
        """By how much a look would lower the variance of the batch."""
        left = 1 / self.tau**2
        return 1 / (left + (1 - left) / self.candidates)

    @property
    def tau(self) -> float:
        """How much the scores scatter around p; 1 if p is perfect, or nothing is known."""
        return max(math.sqrt(self._squares) / self._sum, 1.0) if self._sum > 0 else 1.0

    def pays(self) -> bool:
        """Called at the start of each draw: whether to look this time."""
        if self.cost is not None:
            return self.gain > 1 + self.candidates * self.cost
        if self._left_at is not None:
            self._steps.append(time.perf_counter() - self._left_at)
        return len(self._steps) == _STEPS and self.gain > 1 + self.candidates * _CHEAP

    def looked(self, seconds: float) -> None:
        """A look took so long. When there are enough of them, their median becomes the cost."""
        if self.cost is None:
            self._looks.append(seconds)

    def left(self) -> None:
        """The draw is done: what follows until the next is the step."""
        if self.cost is not None:
            return
        if len(self._looks) == _LOOKS:
            ratio = statistics.median(self._looks) / statistics.median(self._steps)
            self.cost = max(ratio / self.candidates, 1e-6)
        self._left_at = time.perf_counter()

    def scattered(self, ratios: Floats, scores: Floats) -> None:
        """Learn from the scores of examples that were drawn from p, not chosen after a look."""
        squares, mean = _moments(ratios, scores)
        decay = _DECAY if self._sum > 0 else 0.0
        self._squares = decay * self._squares + (1 - decay) * squares
        self._sum = decay * self._sum + (1 - decay) * mean

    def settings(self) -> dict[str, Any]:
        """What a state must share with the sampler that loads it."""
        return {"candidates": self.candidates}

    def state_dict(self) -> dict[str, Any]:
        """The cost if it is known, and the scatter. A measurement that is not finished begins anew."""
        return {"cost": self.cost, "squares": self._squares, "sum": self._sum}

    def with_state(self, state: dict[str, Any]) -> "Looking":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        new = Looking(self.candidates, state["cost"])
        new._squares, new._sum = float(state["squares"]), float(state["sum"])
        if not (0 <= new._squares < math.inf and 0 <= new._sum < math.inf):
            raise ValueError(f"state['looking_state'] has a scatter of {new._squares}, {new._sum}")
        return new

    def __repr__(self) -> str:
        return f"Looking(candidates={self.candidates}, cost={self.cost})"


@kernel
def _moments(ratios: Floats, scores: Floats) -> tuple[float, float]:
    """Mean of a^2 and of a, with a = s / r."""
    squares = 0.0
    total = 0.0
    for k in range(len(scores)):
        a = min(scores[k], 1e100) / ratios[k]  # squares stay finite
        squares += a * a
        total += a
    return squares / len(scores), total / len(scores)
