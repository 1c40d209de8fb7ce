"""The rule that never learns."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from adambs._types import Floats, Indices
from adambs.rules.base import Rule


class Uniform(Rule):
    """Every example is as likely as any other, for ever: r = 1, weights 1.

    Keeps nothing per example and costs nothing beyond the random numbers. With it the library is a no-op
    (Adam on batches drawn with replacement), which is what the parity tests compare with.
    """

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """There is nothing to allocate."""
        if initial_weights is not None:
            raise ValueError(
                "initial_weights has no meaning for Uniform(), whose weights never differ: "
                "leave it out or choose another rule"
            )
        self.n, self.batch_size = n, batch_size

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """floor(u n), u = 1 included. O(K)."""
        indices = np.minimum((u * self.n).astype(np.int64), self.n - 1)
        return indices, np.ones(len(u))

    def ratios(self, indices: Indices | None = None) -> Floats:
        """All one."""
        return np.ones(self.n if indices is None else len(indices))

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Nothing to learn."""
        return 0

    def spread(self) -> tuple[float, float]:
        """That of all ones. O(1)."""
        return 1.0, 0.0

    def settings(self) -> dict[str, Any]:
        """Nothing to set."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """Nothing to load."""
        if not isinstance(state, Mapping):
            raise ValueError(f"state must be a dict from state_dict(), not {type(state).__name__}")
        return copy.copy(self)
