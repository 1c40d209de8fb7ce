"""VRB: follow the regularised leader, with squared norms added up over all draws."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.rules.base import first_unit
from adambs.rules.mixed import MixedRule
from adambs.trees import SumTree

# With forgetting new losses are written ever larger instead of all old ones ever smaller. Beyond this
# they are brought back, O(n), once in thousands of steps.
_LARGE_INFLATION = 1e100

# Sums stay between these, so that their roots are neither all zero nor without a sum.
_SMALLEST, _LARGEST = 1e-300, 1e300


class VRB(MixedRule):
    """The Variance Reducer Bandit of Borsos, Krause and Levy (COLT 2018).

    The sum of all unbiased estimates of an example's squared norm, 1(j drawn) s_j^2 / p_j, estimates what
    the best fixed p would have been; with V_j that sum and a regulariser,

        p_j = (1 - uniform) sqrt(V_j + regulariser) / sum + uniform / n.

    Their theorem sets the regulariser to L^2 n / uniform, which in a mini-batch of K means that an example
    has to be drawn some K / uniform times before p notices. ``prior`` is the number of such draws; the
    default is 1, and their own is ``prior=K / uniform``. O(K log n) a step.

    Args:
        uniform: share of the uniform distribution in p, their theta.
        prior: how many draws of the first batch's largest score each example is said to have had.
        forgetting: the share of every sum, prior included, that is forgotten within an epoch of n/K steps;
            0, as published, forgets nothing.
    """

    def __init__(self, *, uniform: float = 0.3, prior: float = 1.0, forgetting: float = 0.0) -> None:
        super().__init__(uniform)
        self.prior = _check.positive("prior", prior)
        self.forgetting = _check.share("forgetting", forgetting)

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """All sums are the prior; initial weights are taken for norms of so many draws."""
        self.n, self.batch_size = n, batch_size
        self.unit, self.inflation = 0.0, 1.0
        norms = np.ones(n)
        if initial_weights is not None:
            self.unit = float(initial_weights.max())
            norms = initial_weights / self.unit
        self._hold(self.prior * norms**2)

    def _hold(self, sums: Floats) -> None:
        """Keep V of each example, in units of the first batch's largest squared score. O(n)."""
        self.sums = sums.clip(_SMALLEST, _LARGEST)
        self.tree = SumTree(np.sqrt(self.sums))

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Add s^2 / r of every drawn example. O(K log n)."""
        if not self.unit:
            self.unit = first_unit(scores)
        self.inflation *= (1 - self.forgetting) ** (-len(indices) / self.n)
        if self.inflation > _LARGE_INFLATION:
            self._hold(self.sums / self.inflation)
            self.inflation = 1.0
        _add(self.tree.leaves, self.sums, indices, ratios, scores, self.unit, self.inflation)
        self.tree.refresh(indices)
        return 0

    def settings(self) -> dict[str, Any]:
        """The three arguments."""
        return {"uniform": self.uniform, "prior": self.prior, "forgetting": self.forgetting}

    def state_dict(self) -> dict[str, Any]:
        """The sums, with their unit and inflation."""
        return {
            "sums": torch.from_numpy(self.sums.copy()),
            "unit": self.unit,
            "inflation": self.inflation,
        }

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, or ``ValueError``."""
        new = copy.copy(self)
        new._hold(_check.array(state, "sums", (self.n,), least=_SMALLEST, most=_LARGEST))
        new.unit = _check.number(state, "unit", normal=True)
        new.inflation = _check.number(state, "inflation", 1.0, _LARGE_INFLATION)
        return new


@kernel
def _add(
    leaves: Floats,
    sums: Floats,
    indices: Indices,
    ratios: Floats,
    scores: Floats,
    unit: float,
    inflation: float,
) -> None:
    for k in range(indices.shape[0]):
        score = min(scores[k] / unit, 1e50) if unit > 0.0 else 0.0
        j = indices[k]
        sums[j] = min(sums[j] + inflation * score * score / ratios[k], _LARGEST)
        leaves[j] = np.sqrt(sums[j])
