"""A cap on weights: an example that was thought easy and is hard must not throw the model."""

import math
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs._jit import carray, kernel, pointer
from adambs._types import Floats, State

# Memory of the running mean: about the last hundred draws.
_DECAY = 0.99


class Cap:
    """Limits weight x score to ``factor`` times its running mean, and never a weight below one.

    Once p is learned, weight x score is nearly the same for all examples, by construction, so what is far
    above the mean is a surprise: an example of small p that has become hard and comes with a weight of
    twenty. ``draw.mean(losses, scores)`` lowers such weights. The gradient is biased by what that takes away;
    the score is remembered all the same, so the example comes back soon with a weight that it deserves.
    :attr:`capped` and :attr:`taken` say how many weights were lowered, and how much of the sum of all
    weight x score was taken away.

    Args:
        factor: infinity is no cap.
    """

    def __init__(self, factor: float) -> None:
        self.factor = math.inf if factor == math.inf else _check.at_least("cap", factor, 1.0)
        self._taken = self._all = 0.0
        self.capped = 0
        """How many weights were lowered."""
        self._set_mean(0.0)

    def _set_mean(self, mean: float) -> None:
        self._mean = mean
        self.limit = self.factor * mean if mean > 0 else math.inf
        """What weight x score may be in the next draw; infinite before anything is known."""

    @property
    def taken(self) -> float:
        """What was taken away, as a share of the sum of all weight x score."""
        return self._taken / self._all if self._all > 0 else 0.0

    def learn(self, ratios: Floats, scores: Floats, limit: float) -> None:
        """Learn from a draw of this limit, infinite if no weights were lowered. O(K)."""
        mean, capped, taken = _moments(ratios, scores, limit)
        decay = _DECAY if self._mean > 0 else 0.0
        self._set_mean(decay * self._mean + (1 - decay) * mean)
        self._all = min(self._all + mean * len(scores), 1e300)
        if capped:
            self.capped += capped
            self._taken = min(self._taken + taken, 1e300)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"mean": self._mean, "capped": self.capped, "taken": self._taken, "all": self._all}

    def with_state(self, state: State) -> "Cap":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        new = Cap(self.factor)
        new._set_mean(_check.number(state, "mean"))
        new.capped = _check.count(state, "capped")
        new._taken, new._all = _check.number(state, "taken"), _check.number(state, "all")
        return new


def capped_shares(shares: torch.Tensor, scores: Any, limit: Any, one: Any) -> torch.Tensor:
    """Weights in units of ``one``, lowered: weight x score at most ``limit`` in the same units, and no weight
    below one. ``limit`` and ``one`` are numbers or tensors of the shape of the shares, which are contiguous.

    Nothing waits for a device. On the CPU it is one compiled loop, if the arguments are of the usual kinds.
    """
    if (
        type(limit) is type(one) is float
        and type(scores) is torch.Tensor
        and scores.dtype is shares.dtype is torch.float32
        and scores.is_cpu
        and shares.is_cpu
        and (shape := scores.shape) == shares.shape
        and scores.is_contiguous()
    ):
        lowered = torch.empty_like(shares)
        _capped_at(shares.data_ptr(), scores.data_ptr(), lowered.data_ptr(), shape[0], limit, one)
        return lowered
    s = torch.as_tensor(scores).detach().to(shares)
    if s.shape != shares.shape:
        raise ValueError(
            f"scores must have shape {tuple(shares.shape)}, one number an example, not {tuple(s.shape)}"
        )
    return torch.minimum(shares, (limit / s).clamp(min=one))


@kernel
def _moments(ratios: Floats, scores: Floats, limit: float) -> tuple[float, int, float]:
    """The mean of s / r; how many weights 1 / r the limit lowers, and what it takes of the sum of s / r."""
    total, capped, taken = 0.0, 0, 0.0
    for k in range(len(scores)):
        a = min(scores[k] / ratios[k], 1e100)
        total += a
        left = max(limit, min(scores[k], 1e100))  # a weight of one is left
        if a > left:
            capped += 1
            taken += a - left
    return total / len(scores), capped, taken


@kernel
def _capped_at(shares_at: int, scores_at: int, lowered_at: int, K: int, most_of: float, unit: float) -> None:
    """The same from addresses of float32. A score that is NaN makes its share NaN, as there."""
    limit, one = np.float32(most_of), np.float32(unit)
    shares = carray(pointer(shares_at), (K,), np.float32)
    scores = carray(pointer(scores_at), (K,), np.float32)
    lowered = carray(pointer(lowered_at), (K,), np.float32)
    for k in range(K):
        most = limit / scores[k]
        most = one if most < one else most
        lowered[k] = shares[k] if most > shares[k] else most
