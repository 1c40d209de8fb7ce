"""Reshuffled passes over the examples: what a DataLoader with ``shuffle=True`` does, for a sampler."""

from typing import Any

import numpy as np

from adambs import _check
from adambs._types import Indices


class Passes:
    """Every example once in a random order, then all again in a new one.

    The order depends on the seed and the number of the pass alone, so a state is two numbers. A new order
    costs O(n), once in n draws.
    """

    def __init__(self, n: int, seed: int, number: int = 0, position: int = 0) -> None:
        self._n, self._seed = n, seed
        self._number, self._position = number, position
        self._order: Indices | None = None  # made when it is needed, replaced and never written into

    def take(self, count: int) -> Indices:
        """The next ``count`` examples. Where a pass ends the next begins."""
        parts = []
        while count > 0:
            if self._order is None:
                random = np.random.Generator(np.random.PCG64([self._seed, self._number]))
                self._order = random.permutation(self._n)
            part = self._order[self._position : self._position + count]
            parts.append(part)
            count -= len(part)
            self._position += len(part)
            if self._position == self._n:
                self._number, self._position, self._order = self._number + 1, 0, None
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"seed": self._seed, "number": self._number, "position": self._position}

    def with_state(self, state: dict[str, Any]) -> "Passes":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        seed, number, position = (
            _check.whole(f"state['passes'][{name!r}]", state[name], least=0)
            for name in ("seed", "number", "position")
        )
        if position >= self._n:
            raise ValueError(f"state['passes'] is at {position} of {self._n} examples")
        return Passes(self._n, seed, number, position)
