"""Candidates: score more examples than are trained on, and train on the best choice among them."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices, State
from adambs.draw import Draw
from adambs.moments import Scatter
from adambs.proposals import RandomStream

# The cost of a look is the median of the first looks over that of the last steps. No look is made to
# measure it before one could pay if scoring K examples took a tenth of a step.
_LOOKS, _STEPS, _CHEAP = 5, 20, 0.1

# Share of the uniform distribution in the choice among candidates: no weight grows by more than 1/this.
_UNIFORM_CHOICE = 0.1


Score = Callable[[torch.Tensor], Any]
"""From the indices of some examples to their scores: a forward pass without gradients."""

Look = Callable[[Draw], Any]
"""From some candidates to their scores, likewise."""


class Candidates:
    """Decides whether to look: to score some candidates first and train on a choice among them.

    Of B = m K examples drawn from p, forward passes tell the present scores s; K of them are then chosen in
    proportion to a = s / (n p). With T = tau^2 = E[a^2] / E[a]^2, the variance of the batch falls by

        gain = 1 / (1/T + (1 - 1/T) / m),

    as if the batch were so many times larger: the choice leaves 1/T of the variance, that B is finite adds
    the rest. For each K candidates a look costs ``cost`` = c of a plain step: to score them, to learn from
    them and to choose. A look pays while the batch grows by more than the time of the step,

        gain > 1 + m c.

    A candidate that was drawn several times is scored once, so that a look costs less than m c where p is
    concentrated on few examples.

    (Katharopoulos and Fleuret, ICML 2018, with p uniform, m = 3 and c = 1/3, look while tau > 2.)

    The cost is a recorded number. If it is not given, the first looks are timed and their cost is written
    down once; from then on no decision depends on a clock. A state carries the number, and
    ``sampler.candidates.cost = ...`` tells it to another process.

    Args:
        multiple: m.
        cost: c, if it is not to be measured. It also stands when a state with another cost is loaded.
        ahead: for how many steps a look chooses. Their candidates, ``ahead`` x m x K of them, are scored at
            once: a larger forward batch costs less for each. The scores are then up to ``ahead`` - 1 steps
            old, and the choice is as unbiased: it needs some scores, not the present ones.
    """

    def __init__(self, multiple: int = 3, cost: float | None = None, ahead: int = 4) -> None:
        self.multiple = _check.whole("multiple", multiple, least=2)
        self.ahead = _check.whole("ahead", ahead, least=1)
        self._given = cost is not None
        self._cost = None if cost is None else _check.positive("cost", cost)
        self.scatter = Scatter()
        self._look_seconds: list[float] = []
        self._step_seconds: deque[float] = deque(maxlen=_STEPS)
        self._left_at: float | None = None

    @property
    def cost(self) -> float | None:
        """What a look takes for each K candidates, in units of a plain step; None until it is known."""
        return self._cost

    @cost.setter
    def cost(self, value: float) -> None:
        self._cost, self._given = _check.positive("cost", value), True

    @property
    def gain(self) -> float:
        """By how much a look would lower the variance of the batch."""
        left = 1 / (self.tau * self.tau)  # a power would raise where a product is infinite
        return 1 / (left + (1 - left) / self.multiple)

    @property
    def tau(self) -> float:
        """How much the scores scatter around p; 1 if p is perfect, or nothing is known."""
        return self.scatter.tau

    def pays(self) -> bool:
        """Whether to look this time."""
        if self._cost is not None:
            return self.gain > 1 + self.multiple * self._cost
        return len(self._step_seconds) == _STEPS and self.gain > 1 + self.multiple * _CHEAP

    def entered(self) -> None:
        """A draw begins that may look: what has passed since :meth:`left` was a step."""
        if self._cost is None and self._left_at is not None:
            self._step_seconds.append(time.perf_counter() - self._left_at)

    def looked(self, seconds: float, share: float, agreed: Callable[[float], float] = float) -> None:
        """For K candidates a look took ``seconds`` x ``share``, all in all.

        When there are enough looks, the cost is recorded, as is ``agreed`` on.
        """
        if self._cost is None:
            self._look_seconds.append(seconds * share)
            if len(self._look_seconds) == _LOOKS:
                ratio = statistics.median(self._look_seconds) / statistics.median(self._step_seconds)
                self._cost = agreed(max(ratio, 1e-6))

    def left(self) -> None:
        """The draw is done: what follows until the next is the step."""
        if self._cost is None:
            self._left_at = time.perf_counter()

    def settings(self) -> dict[str, Any]:
        """What a state must share with the sampler that loads it."""
        return {"multiple": self.multiple, "ahead": self.ahead}

    def state_dict(self) -> dict[str, Any]:
        """The cost, or what is known of it, and the scatter."""
        return {
            "cost": self._cost,
            **self.scatter.state_dict(),
            "look_seconds": list(self._look_seconds),
            "step_seconds": list(self._step_seconds),
        }

    def with_state(self, state: State) -> "Candidates":
        """One like this, in a state from :meth:`state_dict`; or an error. A given cost is kept."""
        saved = None if _check.entry(state, "cost") is None else _check.number(state, "cost", 1e-300)
        new = Candidates(self.multiple, self._cost if self._given else saved, self.ahead)
        new._given = self._given
        new.scatter = self.scatter.with_state(state)
        new._look_seconds = _check.numbers(state, "look_seconds", most=_LOOKS)
        new._step_seconds.extend(_check.numbers(state, "step_seconds", most=_STEPS))
        return new

    def __repr__(self) -> str:
        return f"Candidates(multiple={self.multiple}, cost={self._cost}, ahead={self.ahead})"


def choose(
    random: RandomStream, ratios: Floats, scores: Floats, K: int, correction: float
) -> tuple[Indices, Floats]:
    """Positions of K of the B candidates, chosen by their scores, and the ratios of the chosen.

    Candidate i came with n p_i = r_i, so s_i / r_i is its share in the sum of all norms, and it is taken with
    probability g_i, nearly in proportion to that. In the end it stands for 1 / (B g_i) of the candidates,
    each of which stands for 1 / r_i of the examples: its ratio is r_i B g_i. (For less correction read
    r_i^correction.) One is drawn from each K-th of the mass, which still draws i K g_i times on average.
    """
    B = len(scores)
    a = scores.clip(max=1e100) / ratios**correction
    total = a.sum()
    g = (1 - _UNIFORM_CHOICE) * a / total + _UNIFORM_CHOICE / B if total > 0 else np.full(B, 1 / B)
    sums = g.cumsum()
    positions = np.searchsorted(sums, random.stratified(K) * sums[-1], side="right").clip(max=B - 1)
    return positions, ratios[positions] * (B * g[positions])
