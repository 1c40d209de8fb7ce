"""What every rule owes the sampler."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adambs.tree import SumTree

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Rule(ABC):
    """How feedback changes the weights of the examples.

    A rule speaks in *ratios*, r_j = n p_j: how many times likelier than under uniform sampling an
    example is. The uniform distribution is r = 1 exactly, the unbiased weight of a drawn example is 1/r,
    and a floor p_min = c/n is simply r >= c.

    A sampler copies the rule it is given and starts the copy, so one rule object can configure many
    samplers. The base class keeps one weight per example in a :class:`SumTree` and draws from it; a rule
    adds :meth:`update` and :meth:`settings`. A rule with more state per example allocates it in
    :meth:`start` and carries it through :meth:`state_dict` and :meth:`load_state_dict`; a rule with
    another way to draw overrides :meth:`draw` and :meth:`ratios` together.
    """

    n: int
    batch_size: int
    tree: SumTree

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Begin with all examples equal, or as ``initial_weights`` has them. O(n)."""
        self.n, self.batch_size = n, batch_size
        self.tree = SumTree(np.ones(n) if initial_weights is None else initial_weights)

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], and their ratios. O(K log n)."""
        indices, weights = self.tree.draw_with_weights(u)
        weights *= self.n
        weights /= self.tree.total
        return indices, weights

    def ratios(self, indices: Indices | None = None) -> Floats:
        """r_j = n p_j of some examples, or of all. A new array."""
        weights = self.tree.weights if indices is None else self.tree.weights[indices]
        return weights * self.n / self.tree.total

    @abstractmethod
    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Learn from the ``scores`` of examples that were drawn with ``ratios``.

        All three are checked: same length, scores finite and not negative, indices in range, duplicates
        allowed. Returns how many scores had to be clipped.
        """

    def observe(self, indices: Indices, scores: Floats) -> int:
        """Take scores that were computed for their own sake, not of a draw: the truth about ``indices``.

        For rules that remember a score for each example; one that learns from the odds of a draw alone
        cannot use them. Checked as in :meth:`update`; returns how many scores had to be clipped.
        """
        raise TypeError(
            f"{type(self).__name__} learns from draws alone and cannot take scores of other examples: "
            "use a rule that remembers scores, such as Tracking()"
        )

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the rule was configured with: printed, saved, and compared when a state is loaded.

        Plain numbers and strings.
        """

    def state_dict(self) -> dict[str, Any]:
        """The rule's state as tensors, a copy."""
        return {"weights": torch.from_numpy(self.tree.weights.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise.

        The sampler calls this on a copy: replace what the rule holds, do not write into it.
        """
        weights = state["weights"].numpy()
        if weights.shape != (self.n,):
            raise ValueError(f"state['weights'] has shape {weights.shape}, not ({self.n},)")
        self.tree = SumTree(weights)

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value:.6g}"
            for name, value in self.settings().items()
        )
        return f"{type(self).__name__}({settings})"
