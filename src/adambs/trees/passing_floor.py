"""A tree of weights under a passing floor: it counts for as long as it stands above them.

An example counts as max(w_j, floor) while the floor stands above w_j, and as w_j again once it has fallen.
Unlike :mod:`adambs.trees.lasting_floor` it remembers the weight.

16 children to a node; :mod:`adambs.trees._floors` says how nodes are numbered. A leaf has its weight and is
either free or low (at the floor). An inner node has the sum of its free weights, the number of its low
examples, the least free weight and the greatest low one: the next to meet the floor when it rises, and the
next to leave it when it falls.
"""

import sys

import numpy as np
from numpy.typing import NDArray

from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.trees._floors import SMALLEST_REST, levels, raised

Flags = NDArray[np.bool_]

_BITS = 4  # 16 children

# Smaller weights are zero, so that p_min of their sum does not underflow.
SMALLEST_WEIGHT = 1e-200


@kernel
def _children(starts: Indices, level: int, node: int) -> tuple[int, int]:
    """The first child of ``node``, which is on ``level``, and the end of its children."""
    first = starts[level - 1] + ((node - starts[level]) << _BITS)
    return first, min(first + (1 << _BITS), starts[level])


@kernel
def _count_up(
    weights: Floats,
    low: Flags,
    free_sum: Floats,
    low_count: Indices,
    least_free: Floats,
    most_low: Floats,
    starts: Indices,
    level: int,
    node: int,
) -> None:
    """Compute an inner node from its children."""
    n = starts[1]
    first, end = _children(starts, level, node)
    total, number, least, most = 0.0, 0, np.inf, -np.inf
    for child in range(first, end):
        if level > 1:
            total += free_sum[child - n]
            number += low_count[child - n]
            least = min(least, least_free[child - n])
            most = max(most, most_low[child - n])
        elif low[child]:
            number += 1
            most = max(most, weights[child])
        else:
            total += weights[child]
            least = min(least, weights[child])
    k = node - n
    free_sum[k], low_count[k], least_free[k], most_low[k] = total, number, least, most


@kernel
def _build(
    weights: Floats,
    low: Flags,
    free_sum: Floats,
    low_count: Indices,
    least_free: Floats,
    most_low: Floats,
    starts: Indices,
) -> None:
    """Compute all inner nodes. O(n)."""
    for level in range(1, len(starts) - 1):
        for node in range(starts[level], starts[level + 1]):
            _count_up(weights, low, free_sum, low_count, least_free, most_low, starts, level, node)


@kernel
def _write(
    weights: Floats,
    low: Flags,
    free_sum: Floats,
    low_count: Indices,
    least_free: Floats,
    most_low: Floats,
    starts: Indices,
    indices: Indices,
    values: Floats,
    floor: float,
) -> None:
    """Set the weights of ``indices``, each on its side of ``floor``. O(16 K log16 n)."""
    for k in range(len(indices)):
        weights[indices[k]] = values[k]
        low[indices[k]] = values[k] <= floor
    for level in range(1, len(starts) - 1):
        for k in range(len(indices)):
            node = starts[level] + (indices[k] >> (_BITS * level))
            _count_up(weights, low, free_sum, low_count, least_free, most_low, starts, level, node)


@kernel
def _cross(
    weights: Floats,
    low: Flags,
    free_sum: Floats,
    low_count: Indices,
    least_free: Floats,
    most_low: Floats,
    starts: Indices,
    opened: Indices,
    floor: float,
    release: bool,
) -> int:
    """Make the free weights up to ``floor`` low and, if ``release``, the low ones above it free.

    Returns how many examples changed sides. Only nodes with such an example are opened.
    """
    n, top = starts[1], len(starts) - 2
    root = starts[top] - n
    if not (least_free[root] <= floor or (release and most_low[root] > floor)):
        return 0
    opened[0] = starts[top]
    begin, end, crossed = 0, 1, 0
    for level in range(top, 0, -1):
        level_end = end
        for i in range(begin, level_end):
            first, beyond = _children(starts, level, opened[i])
            for child in range(first, beyond):
                if level > 1:
                    k = child - n
                    if least_free[k] <= floor or (release and most_low[k] > floor):
                        opened[end] = child
                        end += 1
                elif low[child]:
                    if release and weights[child] > floor:
                        low[child] = False
                        crossed += 1
                elif weights[child] <= floor:
                    low[child] = True
                    crossed += 1
        begin = level_end
    level = 1
    for i in range(end - 1, -1, -1):  # from the lowest level up
        while opened[i] >= starts[level + 1]:
            level += 1
        _count_up(weights, low, free_sum, low_count, least_free, most_low, starts, level, opened[i])
    return crossed


@kernel
def _draw(
    weights: Floats,
    low: Flags,
    free_sum: Floats,
    low_count: Indices,
    starts: Indices,
    floor: float,
    u: Floats,
) -> tuple[Indices, Floats]:
    """For each u[k] in [0, 1] the leaf it falls on, in the order of the indices, and its mass."""
    n, top = starts[1], len(starts) - 2
    root = starts[top]
    indices, masses = np.empty(len(u), np.int64), np.empty(len(u))
    for k in range(len(u)):
        node, mass = root, free_sum[root - n] + low_count[root - n] * floor
        left = u[k] * mass
        for level in range(top, 0, -1):
            first, end = _children(starts, level, node)
            for child in range(first, end):
                if level > 1:
                    mass = free_sum[child - n] + low_count[child - n] * floor
                else:
                    mass = floor if low[child] else weights[child]
                node = child
                if left < mass or child == end - 1:  # the last, if rounding has made ``left`` too large
                    break
                left -= mass
        indices[k], masses[k] = node, mass
    return indices, masses


class PassingFloor:
    """n weights that count as max(w_j, floor), the floor being p_min of the total, to draw from.

    >>> tree = PassingFloor(np.array([0.0, 1.0, 7.0]), p_min=0.2)
    >>> tree.ratios() / 3
    array([0.2, 0.2, 0.6])
    >>> tree.write(np.array([2]), np.array([2.0]))
    >>> tree.ratios() / 3
    array([0.2       , 0.26666667, 0.53333333])

    So p_j = max(p_min, c w_j) with the one c that makes it sum to one. If no weight is positive, all count
    as the same. Weights are at most :attr:`largest`, so that they have a sum, and below 1e-200 are zero, so
    that the floor is positive.

    Drawing, reading and writing K weights is O(K log n), and log n for each example that crosses the floor.
    How many cross is up to the weights: about as many as are written, while each is a small part of the
    total; all of them, if one weight outgrows the sum of all others and shrinks again. ``crossings`` counts
    them. About 12 bytes an example. Not safe for concurrent updates from several threads.
    """

    def __init__(
        self, weights: Floats, p_min: float, *, low: Flags | None = None, floor: float = 0.0
    ) -> None:
        """``low`` and ``floor`` are those of a tree that was saved, to be it again to the bit."""
        self.n, self.p_min, self.floor = len(weights), p_min, floor
        self.largest = sys.float_info.max / (2 * self.n)
        self.crossings = 0
        self.weights: Floats = self._representable(weights)
        self.low: Flags = self.weights <= floor if low is None else low.copy()
        self._starts = levels(self.n)
        inner = int(self._starts[-1]) - self.n
        self._free_sum, self._low_count = np.empty(inner), np.empty(inner, np.int64)
        self._least_free, self._most_low = np.empty(inner), np.empty(inner)
        self._opened = np.empty(inner, np.int64)
        _build(*self._columns())
        if low is None:
            self._find_floor()

    @property
    def total(self) -> float:
        """The sum of what all examples count as. O(1)."""
        return float(self._free_sum[-1] + self._low_count[-1] * self._low_mass())

    def ratios(self, indices: Indices | None = None) -> Floats:
        """n p_j of ``indices``, or of all. A new array."""
        chosen = slice(None) if indices is None else indices
        masses = np.where(self.low[chosen], self._low_mass(), self.weights[chosen])
        ratios: Floats = masses * self.n / self.total
        return ratios

    def draw_with_ratios(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], in the order of the indices, and their ratios."""
        indices, masses = _draw(
            self.weights, self.low, self._free_sum, self._low_count, self._starts, self._low_mass(), u
        )
        return indices, masses * self.n / self.total

    def write(self, indices: Indices, weights: Floats) -> None:
        """Set weights and let the floor follow; of duplicates, the last wins."""
        _write(*self._columns(), indices, self._representable(weights), self.floor)
        self._find_floor()

    def _find_floor(self) -> None:
        """f = p_min sum_j max(w_j, f), that is p_min (free sum) / (1 - (number of low) p_min).

        p_min is slightly :func:`raised`.

        Newton's method on the convex function p_min sum_j max(w_j, f) - f. The first step may go either
        way and lands on the left of the root, the others go right; so after the first none is set free,
        and it ends when nobody crosses.
        """
        target = raised(self.p_min, self.n)
        crossed, release = 1, True
        while crossed:
            rest = max(1.0 - float(self._low_count[-1]) * target, SMALLEST_REST)
            self.floor = target * float(self._free_sum[-1]) / rest
            crossed = _cross(*self._columns(), self._opened, self.floor, release)
            self.crossings += crossed
            release = False

    def _low_mass(self) -> float:
        """What a low example counts as: the floor or, if no weight is positive, one."""
        return self.floor if self.floor > 0 else 1.0

    def _representable(self, weights: Floats) -> Floats:
        """A copy with weights that have a sum and a positive floor."""
        return np.where(weights < SMALLEST_WEIGHT, 0.0, np.minimum(weights, self.largest))

    def _columns(
        self,
    ) -> tuple[Floats, Flags, Floats, Indices, Floats, Floats, Indices]:
        return (
            self.weights,
            self.low,
            self._free_sum,
            self._low_count,
            self._least_free,
            self._most_low,
            self._starts,
        )
