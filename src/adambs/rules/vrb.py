"""VRB: follow the regularised leader, with squared norms added up over all draws."""

from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs._jit import kernel
from adambs.rules.base import Floats, Indices
from adambs.rules.mixed import MixedRule
from adambs.tree import SumTree

# With forgetting new losses are written ever larger instead of all old ones ever smaller. Beyond this
# they are brought back, O(n), once in thousands of steps.
_LARGE = 1e100
_SMALLEST = 1e-300


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
        super().start(n, batch_size, initial_weights)
        self.sums = self.prior * self.tree.weights**2  # in units of the first batch's largest squared score
        self.tree = SumTree(np.sqrt(self.sums))
        self.unit = 0.0 if initial_weights is None else 1.0
        self.inflation = 1.0

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Add s^2 / r of every drawn example. O(K log n)."""
        if not self.unit:
            self.unit = float(scores.max(initial=0.0))
        self.inflation *= (1 - self.forgetting) ** (-len(indices) / self.n)
        if self.inflation > _LARGE:
            self.sums = np.maximum(self.sums / self.inflation, _SMALLEST)
            self.tree = SumTree(np.sqrt(self.sums))
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state, or raise."""
        sums = state["sums"].numpy().astype(np.float64)
        unit, inflation = float(state["unit"]), float(state["inflation"])
        if sums.shape != (self.n,) or not (sums >= 0).all():
            raise ValueError(f"state['sums'] must be {self.n} numbers, none negative")
        if not (0 <= unit < np.inf and 0 < inflation < np.inf):
            raise ValueError("state['unit'] or state['inflation'] is not of a sampler")
        self.sums, self.unit, self.inflation = sums.copy(), unit, inflation
        self.tree = SumTree(np.sqrt(self.sums))


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
        sums[j] += inflation * score * score / ratios[k]
        leaves[j] = np.sqrt(sums[j])
