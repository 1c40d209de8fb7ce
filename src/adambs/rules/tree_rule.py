"""A base for rules that keep one weight for each example in a tree."""

import copy
from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices
from adambs.rules.base import Rule
from adambs.trees import SumTree


class WeightTree(Protocol):
    """What :class:`TreeRule` needs of a tree; each of :mod:`adambs.trees` has it."""

    @property
    def weights(self) -> Floats:
        """All n weights."""

    def draw_with_ratios(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], and n p of them."""

    def ratios(self, indices: Indices | None = None) -> Floats:
        """n p of some examples, or of all. A new array."""


class TreeRule(Rule):
    """A rule with p_j = w_j / sum(w), the weights w being in a tree.

    What is left for a rule to say is :meth:`update`, which writes weights, and :meth:`settings`. One that
    remembers more makes it in :meth:`start` and carries it through :meth:`state_dict` and :meth:`with_state`.
    """

    tree: WeightTree

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Begin with all examples equal, or as ``initial_weights`` has them. O(n)."""
        self.n, self.batch_size = n, batch_size
        self.tree = self.plant(np.ones(n) if initial_weights is None else initial_weights)

    def plant(self, weights: Floats) -> WeightTree:
        """A tree of these weights, which are copied: a :class:`SumTree` if not overridden. O(n)."""
        return SumTree(weights)

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], and their ratios. O(K log n)."""
        return self.tree.draw_with_ratios(u)

    def ratios(self, indices: Indices | None = None) -> Floats:
        """r_j = n p_j of some examples, or of all. A new array."""
        return self.tree.ratios(indices)

    def state_dict(self) -> dict[str, Any]:
        """The weights."""
        return {"weights": torch.from_numpy(np.array(self.tree.weights))}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule with the weights of ``state``, or ``ValueError``."""
        new = copy.copy(self)
        new.tree = self.plant(_check.array(state, "weights", (self.n,)))
        return new
