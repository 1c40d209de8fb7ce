"""Candidates: score more examples than are trained on, and train on the best choice among them."""

import math
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
# measure it before one could pay if scoring K examples took a twelfth of a step.
_LOOKS, _STEPS, _CHEAP = 5, 20, 1 / 12

# So many examples are taken to have as much noise as signal, unless the user says otherwise.
NOISE = 100.0

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
    the rest. Noise is not all that holds training up, so a step does not go as many times as far. If N
    examples have as much noise as signal, K have N/K times as much, and a step with a look goes

        worth = (1 + N/K) / (1 + N/(K gain))

    times as far (McCandlish et al. 2018). N changes from task to task and grows as training goes on, and no
    step tells it for free, so it is taken to be ``noise``. For each K candidates a look costs ``cost`` = c of
    a plain step: to score them, to learn from them and to choose. It pays while it takes the step farther
    than the time would,

        worth > 1 + m c.

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
        noise: N. Infinity takes noise for all that holds training up, whatever the batch size.
    """

    def __init__(
        self, multiple: int = 3, cost: float | None = None, ahead: int = 4, noise: float = NOISE
    ) -> None:
        self.multiple = _check.whole("multiple", multiple, least=2)
        self.ahead = _check.whole("ahead", ahead, least=1)
        self.noise = math.inf if noise == math.inf else _check.positive("noise", noise)
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

    def worth(self, batch_size: int) -> float:
        """How many times as far a step would go with a look."""
        return worth(self.gain, batch_size, self.noise)

    def pays(self, batch_size: int) -> bool:
        """Whether to look this time."""
        if self._cost is None and len(self._step_seconds) < _STEPS:
            return False
        return self.worth(batch_size) > 1 + self.multiple * (_CHEAP if self._cost is None else self._cost)

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
        return {"multiple": self.multiple, "ahead": self.ahead, "noise": self.noise}

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
        new = Candidates(self.multiple, self._cost if self._given else saved, self.ahead, self.noise)
        new._given = self._given
        new.scatter = self.scatter.with_state(state)
        new._look_seconds = _check.numbers(state, "look_seconds", most=_LOOKS)
        new._step_seconds.extend(_check.numbers(state, "step_seconds", most=_STEPS))
        return new

    def __repr__(self) -> str:
        settings = f"multiple={self.multiple}, cost={self._cost}, ahead={self.ahead}, noise={self.noise:g}"
        return f"Candidates({settings})"


def worth(gain: float, batch_size: int, noise: float = NOISE) -> float:
    """How many times as far a step goes whose batch has ``gain`` times less variance. See Candidates."""
    if noise == math.inf:
        return gain
    return (batch_size + noise) / (batch_size + noise / gain)


def choose(
    random: RandomStream, ratios: Floats, scores: Floats, copies: Indices, K: int, correction: float
) -> tuple[Indices, Floats]:
    """Positions of K of some candidates, chosen by their scores, and the ratios of the chosen.

    Candidate i came ``copies[i]`` = d_i times among B, each time with n p_i = r_i, so d_i s_i / r_i is its
    share in the sum of all norms; g_i is nearly that. It is taken with a probability of q_i = min(1, h g_i),
    h being such that they add up to K: nobody is taken twice, which would be the same gradient twice. Who is
    taken stands for d_i / q_i of the B candidates, and each of those for 1 / r_i of the examples: its ratio
    is r_i B q_i / (K d_i). (With less correction its share is d_i s_i / r_i^correction.) Where there are not
    more than K candidates, q_i = K g_i is how often each is taken on average.

    One number decides for all (systematic sampling), and the batch is put into a random order.
    """
    B = copies.sum()
    a = copies * scores.clip(max=1e100) / ratios**correction
    total = a.sum()
    even = copies / B
    g = (1 - _UNIFORM_CHOICE) * a / total + _UNIFORM_CHOICE * even if total > 0 else even
    q = _inclusion(g, K) if len(g) > K else K * g
    sums = q.cumsum()
    marks = (random.uniform(1) + np.arange(K)) * (sums[-1] / K)
    positions = np.searchsorted(sums, marks, side="right").clip(max=len(q) - 1)
    positions = positions[random.uniform(K).argsort()]
    return positions, ratios[positions] * (B / K) * (q[positions] / copies[positions])


def _inclusion(g: Floats, K: int) -> Floats:
    """min(1, h g), with the h for which they add up to K. For more than K positive numbers.

    With the k largest at one, the others share K - k in proportion to g: k is the first number for which
    none of these is above one.
    """
    largest_first = np.sort(g)[::-1]
    rest = largest_first[::-1].cumsum()[::-1]
    h = (K - np.arange(len(g))) / rest
    most: Floats = np.minimum(1.0, h[np.argmax(h * largest_first <= 1.0)] * g)
    return most
