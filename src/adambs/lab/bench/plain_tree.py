"""The yardstick for :class:`adambs.SumTree`: the same tree, written the obvious way.

Fan-out 16, float64, compiled with the same decorator. One draw at a time goes from the root to a
leaf and stops scanning a node at the child it wants; one update at a time goes from its leaf to
the root and sums sixteen children on every level. Nothing is wrong with it: it is what
``adambs bench`` compares with, to tell what the layout of the work is worth.
"""

import numpy as np
from numpy.typing import NDArray

from adambs._jit import kernel

FANOUT = 16


@kernel
def _sum_children(tree: NDArray[np.float64], first: int) -> float:
    total = 0.0
    for child in range(first, first + FANOUT):
        total += tree[child]
    return total


@kernel
def _build(tree: NDArray[np.float64], offsets: NDArray[np.int64]) -> None:
    for level in range(1, len(offsets)):
        nodes = (offsets[level] - offsets[level - 1]) // FANOUT
        for node in range(nodes):
            first = offsets[level - 1] + node * FANOUT
            tree[offsets[level] + node] = _sum_children(tree, first)


@kernel
def _draw(
    tree: NDArray[np.float64], offsets: NDArray[np.int64], u: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    indices = np.empty(len(u), np.int64)
    weights = np.empty(len(u), np.float64)
    top = len(offsets) - 1
    for k in range(len(u)):
        remaining = u[k] * tree[offsets[top]]
        node = 0
        for level in range(top - 1, -1, -1):
            first = offsets[level] + node * FANOUT
            chosen = 0
            for child in range(FANOUT - 1):
                if remaining < tree[first + child]:
                    break
                remaining -= tree[first + child]
                chosen = child + 1
            while tree[first + chosen] == 0.0:  # rounding ran off the end of the node
                chosen -= 1
            node = node * FANOUT + chosen
        indices[k] = node
        weights[k] = tree[node]
    return indices, weights


@kernel
def _update(
    tree: NDArray[np.float64],
    offsets: NDArray[np.int64],
    indices: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> None:
    for k in range(len(indices)):
        node = indices[k]
        tree[node] = weights[k]
        for level in range(1, len(offsets)):
            node >>= 4  # // FANOUT, and faster
            first = offsets[level - 1] + node * FANOUT
            tree[offsets[level] + node] = _sum_children(tree, first)


class PlainTree:
    """A 16-ary tree of sums without tricks and without checks of its arguments."""

    def __init__(self, weights: NDArray[np.float64]) -> None:
        sizes = [len(weights)]
        while sizes[-1] > 1 or len(sizes) == 1:
            sizes.append(-(-sizes[-1] // FANOUT))
        padded = [-(-size // FANOUT) * FANOUT for size in sizes[:-1]]
        self._offsets = np.cumsum([0, *padded], dtype=np.int64)
        self._tree = np.zeros(int(self._offsets[-1]) + 1)
        self._tree[: len(weights)] = weights
        _build(self._tree, self._offsets)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._tree[-1])

    def draw(self, u: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the index that each ``u`` in [0, 1) falls on, and its weight. O(K log n)."""
        return _draw(self._tree, self._offsets, u)

    def update(self, indices: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Set the weights of ``indices``; a later duplicate wins. O(K log n)."""
        _update(self._tree, self._offsets, indices, weights)
