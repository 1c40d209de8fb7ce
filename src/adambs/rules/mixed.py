"""What rules that mix the uniform distribution into p have in common."""

import numpy as np

from adambs import _check
from adambs._types import Floats, Indices
from adambs.rules.tree_rule import TreeRule
from adambs.trees import SumTree


class MixedRule(TreeRule):
    """p = (1 - uniform) w / sum(w) + uniform / n, with the weights w in the tree.

    No unbiased weight 1/(n p) is then above 1/uniform, whatever the rule believes.
    """

    tree: SumTree

    def __init__(self, uniform: float) -> None:
        self.uniform = _check.fraction(
            "uniform", uniform, "it is the uniform share of p; for all of it use Uniform()"
        )

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """Quantiles below ``uniform`` choose among all alike, the others by weight. O(K log n)."""
        indices, weights = self.tree.draw_with_weights(
            ((u - self.uniform) / (1 - self.uniform)).clip(min=0.0)
        )
        even = u < self.uniform
        indices[even] = np.minimum(u[even] / self.uniform * self.n, self.n - 1).astype(np.int64)
        weights[even] = self.tree.weights[indices[even]]
        return indices, self._mixed(weights)

    def ratios(self, indices: Indices | None = None) -> Floats:
        """(1 - uniform) w / mean(w) + uniform."""
        return self._mixed(self.tree.weights if indices is None else self.tree.weights[indices])

    def _mixed(self, weights: Floats) -> Floats:
        mixed: Floats = weights * ((1 - self.uniform) * self.n / self.tree.total) + self.uniform
        return mixed
