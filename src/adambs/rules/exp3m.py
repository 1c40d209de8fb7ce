"""Exp3.M with the loss of Algorithm 2: K distinct examples a batch. The rule of AdamCB."""

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices
from adambs.rules.base import Rule
from adambs.trees.capped import CappedTree, positive

# Exponents beyond this are as good as infinite.
_LARGEST_EXPONENT = 1e290

# What weights can be: see CappedTree, which keeps their sum above 2^-300 and each above 2^-300 of it.
_LEAST, _MOST = 2.0**-1000, 1e280


class Exp3M(Rule):
    """K distinct examples in each batch: the rule of AdamCB.

    *Adam Optimization with Adaptive Batch Selection*, Kim and Oh, ICLR 2025, after Exp3.M of Uchiya, Nakamura
    and Kudo, 2010. Example j is in the batch with probability

        P_j = K ((1 - gamma) w_j / sum(w) + gamma / n),

    and these sum to K. So that none is above one, the largest weights are lowered, for the draw, to the level
    at which P_j = 1. With r_j = n P_j / K the weight of a drawn example is 1/r_j as for any rule, and

        w_j <- w_j exp(-e),    e = (step / r_j) (1 - (gamma s / (L r_j))^2),    s = min(score, L),

    for the drawn examples, but not for those whose P_j is one. This is the loss of Algorithm 2 with
    p_min = gamma / n, scaled to [0, 1] and divided by P_j, times K gamma / n if ``step`` is gamma.

    Weights only shrink, so who has P_j = 1 once has it for ever. O(K log n) a step, and O(m log n) more if m
    weights are lowered; m is less than K. Draws of more than K examples, as for candidates, consist of
    independent batches of K: an example can be in several of them.

    The draw is dependent rounding in the order of the examples (:mod:`adambs.trees.capped`): a batch has one
    example from each K-th of the mass of P, so ``stratified=True`` has nothing to add and is refused.

    Args:
        L: bound on the scores. Larger ones are clipped for the rule, and counted.
        gamma: share of the uniform distribution, and the floor r_j >= gamma.
        step: of the exponent; gamma, as published, if nothing is given.
    """

    distinct: ClassVar[bool] = True
    tree: CappedTree

    def __init__(self, *, L: float = math.sqrt(2.0), gamma: float = 0.4, step: float | None = None) -> None:
        self.L = _check.positive("L", L)
        self.gamma = _check.fraction("gamma", gamma, "for the uniform distribution use Uniform()")
        self.step = _check.positive("step", self.gamma if step is None else step)

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Begin with all examples equal, or as ``initial_weights`` has them."""
        self.n, self.batch_size = n, batch_size
        self.tree = self._plant(np.ones(n) if initial_weights is None else positive(initial_weights))

    def _plant(self, weights: Floats) -> CappedTree:
        """A tree in which no weight makes P_j larger than one."""
        K, n = self.batch_size, self.n
        share = (1.0 - self.gamma * K / n) / ((1.0 - self.gamma) * K)
        return CappedTree(weights, share if n > K else 1.0)

    @property
    def certain(self) -> int:
        """How many examples are in every batch, P_j being one."""
        return self.n if self.n == self.batch_size else self.tree.lowered

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """As many distinct examples as there are independent ``u``, if these are at most K. O(K log n).

        More are drawn in batches of K, each of them distinct.
        """
        K = self.batch_size
        if len(u) <= K:
            indices = self.tree.draw(u, self.gamma)
        else:
            parts = [self.tree.draw(u[start : start + K], self.gamma) for start in range(0, len(u), K)]
            indices = np.concatenate(parts)
        return indices, self.ratios(indices)

    def ratios(self, indices: Indices | None = None) -> Floats:
        """r_j = n P_j / K of some examples, or of all. A new array."""
        if self.n == self.batch_size:
            return np.ones(self.n if indices is None else len(indices))
        weights = self.tree.weights if indices is None else self.tree.weights[indices]
        return weights * ((1.0 - self.gamma) * self.n / self.tree.total) + self.gamma

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Shrink the weights of the drawn examples. O(K log n)."""
        if self.n > self.batch_size:  # else all are in every batch, and there is nothing to learn
            x = self.gamma * (np.minimum(scores, self.L) / self.L) / ratios
            with np.errstate(over="ignore"):
                size = np.minimum(self.step / ratios, _LARGEST_EXPONENT)
            self.tree.shrink(indices, np.maximum(0.0, size * (1.0 - x * x)))
        return int((scores > self.L).sum())

    def settings(self) -> dict[str, Any]:
        """L, gamma and step."""
        return {"L": self.L, "gamma": self.gamma, "step": self.step}

    def state_dict(self) -> dict[str, Any]:
        """The weights, those of examples with P_j = 1 at the level that makes it so."""
        return {"weights": torch.from_numpy(self.tree.weights.copy())}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule with the weights of ``state``, or ``ValueError``."""
        new = copy.copy(self)
        new.tree = self._plant(_check.array(state, "weights", (self.n,), least=_LEAST, most=_MOST / self.n))
        return new
