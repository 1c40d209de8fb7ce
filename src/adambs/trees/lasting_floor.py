"""A tree of weights that are lifted to a floor for good: line 5 of Algorithm 2 for *every* example.

w_j = max(w_j, floor) after each step. Thousands of examples may sit at a floor that moves a little with every
step, and none of them is written: a node knows its lightest examples, how many they are, and apart from them
the sum of the others; where the floor has passed only those, one number is raised in the place of all. (The
sum apart from the lightest is what keeps sums exact: raising them does not touch it.)

16 children to a node; :mod:`adambs.trees._floors` says how nodes are numbered. least[k] is the smallest
weight below node k (of a leaf: its weight); for inner nodes, next_least is the second smallest *different*
weight, count how many examples have the smallest, rest the sum of all others. The mass of a node is
rest + count * least.

Raising the floor to f, where least < f < next_least, writes ``least`` and nothing else: neither count nor
rest is changed by it. The children learn of it when somebody goes there, for least of a parent is what
every example below it has at least: the weight of an example is the largest number on the way from its leaf
to the root.
"""

import math
import sys

import numpy as np

from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.trees._floors import SMALLEST_REST, levels, raised

_BITS = 4  # 16 children

# The total is brought back to about one by a power of two, which changes no probability by even a bit,
# long before it could over- or underflow.
_FAR_EXPONENT = 512


@kernel
def _children(starts: Indices, level: int, node: int) -> tuple[int, int]:
    """The first child of ``node``, which is on ``level``, and the end of its children."""
    first = starts[level - 1] + ((node - starts[level]) << _BITS)
    return first, min(first + (1 << _BITS), starts[level])


@kernel
def _tell_children(least: Floats, starts: Indices, level: int, node: int) -> None:
    """Raise the children to what their parent knows they have at least."""
    first, end = _children(starts, level, node)
    for child in range(first, end):
        least[child] = max(least[child], least[node])


@kernel
def _summarise(
    least: Floats, next_least: Floats, count: Indices, rest: Floats, starts: Indices, level: int, node: int
) -> None:
    """Compute an inner node from its children."""
    n = starts[1]
    first, end = _children(starts, level, node)
    smallest = least[first]
    for child in range(first + 1, end):
        smallest = min(smallest, least[child])
    following, number, others = np.inf, 0, 0.0
    for child in range(first, end):
        here = least[child]
        examples = 1
        if level > 1:
            examples = count[child - n]
            others += rest[child - n]
            following = min(following, next_least[child - n])
        if here == smallest:
            number += examples
        else:
            others += examples * here
            following = min(following, here)
    least[node], next_least[node - n], count[node - n], rest[node - n] = smallest, following, number, others


@kernel
def _build(least: Floats, next_least: Floats, count: Indices, rest: Floats, starts: Indices) -> None:
    """Compute all inner nodes. O(n)."""
    for level in range(1, len(starts) - 1):
        for node in range(starts[level], starts[level + 1]):
            _summarise(least, next_least, count, rest, starts, level, node)


@kernel
def _settle(least: Floats, starts: Indices) -> None:
    """Tell every leaf. O(n); changes no weight and no inner node's meaning."""
    for level in range(len(starts) - 2, 0, -1):
        for node in range(starts[level], starts[level + 1]):
            _tell_children(least, starts, level, node)


@kernel
def _write(
    least: Floats,
    next_least: Floats,
    count: Indices,
    rest: Floats,
    starts: Indices,
    indices: Indices,
    weights: Floats,
) -> None:
    """Set the weights of ``indices``. O(16 K log16 n)."""
    top = len(starts) - 2
    for level in range(top, 0, -1):  # the neighbours on the way must not forget what they were raised to
        for k in range(len(indices)):
            _tell_children(least, starts, level, starts[level] + (indices[k] >> (_BITS * level)))
    for k in range(len(indices)):
        least[indices[k]] = weights[k]
    for level in range(1, top + 1):
        for k in range(len(indices)):
            node = starts[level] + (indices[k] >> (_BITS * level))
            _summarise(least, next_least, count, rest, starts, level, node)


@kernel
def _lift(
    least: Floats,
    next_least: Floats,
    count: Indices,
    rest: Floats,
    starts: Indices,
    opened: Indices,
    floor: float,
) -> int:
    """Raise every weight below ``floor`` to it; return how many nodes had to be opened.

    A node is opened if the floor has reached its second smallest weight. ``opened`` is room for a list.
    """
    n, top = starts[1], len(starts) - 2
    root = starts[top]
    if not least[root] < floor:
        return 0
    if floor < next_least[root - n]:
        least[root] = floor
        return 0
    opened[0] = root
    begin, end = 0, 1
    for level in range(top, 0, -1):
        level_end = end
        for i in range(begin, level_end):
            _tell_children(least, starts, level, opened[i])
            first, beyond = _children(starts, level, opened[i])
            for child in range(first, beyond):
                if least[child] < floor:
                    if level == 1 or floor < next_least[child - n]:
                        least[child] = floor
                    else:
                        opened[end] = child
                        end += 1
        begin = level_end
    level = 1
    for i in range(end - 1, -1, -1):  # from the lowest level up
        while opened[i] >= starts[level + 1]:
            level += 1
        _summarise(least, next_least, count, rest, starts, level, opened[i])
    return end


@kernel
def _weights_at(least: Floats, starts: Indices, indices: Indices) -> Floats:
    """The weights of ``indices``: the largest number on the way to the root. O(K log n)."""
    weights = np.empty(len(indices))
    for k in range(len(indices)):
        weight = 0.0
        for level in range(len(starts) - 1):
            weight = max(weight, least[starts[level] + (indices[k] >> (_BITS * level))])
        weights[k] = weight
    return weights


@kernel
def _draw(least: Floats, count: Indices, rest: Floats, starts: Indices, u: Floats) -> tuple[Indices, Floats]:
    """For each u[k] in [0, 1] the leaf it falls on, in the order of the indices, and its weight."""
    n, top = starts[1], len(starts) - 2
    root = starts[top]
    indices, weights = np.empty(len(u), np.int64), np.empty(len(u))
    for k in range(len(u)):
        node, floor = root, least[root]
        left = u[k] * (rest[root - n] + count[root - n] * floor)
        for level in range(top, 0, -1):
            first, end = _children(starts, level, node)
            for child in range(first, end):
                mass = max(least[child], floor)
                if level > 1:
                    mass = rest[child - n] + count[child - n] * mass
                node = child
                if left < mass or child == end - 1:  # the last, if rounding has made ``left`` too large
                    break
                left -= mass
            floor = max(floor, least[node])
        indices[k], weights[k] = node, floor
    return indices, weights


class LastingFloor:
    """n positive weights that are lifted to a floor for good, to draw from in proportion to weight.

    >>> tree = LastingFloor(np.array([1.0, 2.0, 5.0]))
    >>> tree.lift(3.0)
    >>> tree.weights, tree.total
    (array([3., 3., 5.]), 11.0)

    Drawing, reading and writing K weights is O(K log n). Lifting is O(log n) for each weight written since
    it was last lifted, *amortised*, however many examples are at the floor. Proof: let D be the number of
    different weights below a node, summed over all inner nodes. Lifting opens a node only where it makes
    two different weights equal, which lowers D by one for that node, and raises D nowhere; writing a
    weight raises D by at most one for each of its log16 n ancestors; at the start D <= n log16 n. So all
    lifts together open at most (n + weights written) log16 n nodes. ``opened_nodes`` counts them.

    About 11 bytes an example. Not safe for concurrent updates from several threads.
    """

    def __init__(self, weights: Floats) -> None:
        n = len(weights)
        largest = sys.float_info.max / (2 * n)
        bad = np.flatnonzero(~((weights > 0) & (weights <= largest)))
        if len(bad):
            raise ValueError(
                f"weights[{bad[0]}] is {weights[bad[0]]}, but must be positive and at most {largest:.6g}"
            )
        self.n = n
        self._starts = levels(n)
        inner = int(self._starts[-1]) - n
        self._least = np.concatenate([weights, np.empty(inner)])
        self._next_least, self._count, self._rest = (
            np.empty(inner),
            np.empty(inner, np.int64),
            np.empty(inner),
        )
        self._opened = np.empty(inner, np.int64)
        self.opened_nodes = 0
        _build(self._least, self._next_least, self._count, self._rest, self._starts)

    @property
    def total(self) -> float:
        """The sum of all weights. O(1)."""
        return float(self._rest[-1] + self._count[-1] * self._least[-1])

    @property
    def weights(self) -> Floats:
        """The n weights, a new array. O(n)."""
        _settle(self._least, self._starts)
        return self._least[: self.n].copy()

    def weights_at(self, indices: Indices) -> Floats:
        """The weights of ``indices``, a new array. O(K log n)."""
        return _weights_at(self._least, self._starts, indices)

    def ratios(self, indices: Indices | None = None) -> Floats:
        """n p_j of ``indices``, or of all."""
        weights = self.weights if indices is None else self.weights_at(indices)
        return weights * self.n / self.total

    def draw_with_ratios(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], in the order of the indices, and their ratios."""
        indices, weights = _draw(self._least, self._count, self._rest, self._starts, u)
        return indices, weights * self.n / self.total

    def write(self, indices: Indices, weights: Floats) -> None:
        """Set weights, zero included if a lift follows. Unchecked; of duplicates, the last wins."""
        _write(self._least, self._next_least, self._count, self._rest, self._starts, indices, weights)

    def lift(self, floor: float) -> None:
        """w_j = max(w_j, floor) for all j."""
        self._lift(floor)
        self._keep_in_range()

    def project(self, p_min: float) -> None:
        """The KL projection onto {p >= p_min}: w_j = max(w_j, f) with f = p_min sum_j max(w_j, f).

        With m weights at the floor, f = p_min (sum of the others) / (1 - m p_min), where p_min is slightly
        :func:`raised`. Begin with the lightest
        and take in those that the floor reaches. This is Newton's method on the convex function
        p_min sum_j max(w_j, f) - f, which from the left never goes beyond the root; so to lift on the way
        is safe, and every round but the last opens a node.
        """
        target = raised(p_min, self.n)
        while True:
            least = float(self._least[-1])
            if least >= p_min * self.total:
                break
            rest = max(1.0 - float(self._count[-1]) * target, SMALLEST_REST)
            floor = target * float(self._rest[-1]) / rest
            if floor <= least:  # up to rounding, it is there
                break
            self._lift(floor)
        self._keep_in_range()

    def _lift(self, floor: float) -> None:
        self.opened_nodes += _lift(
            self._least, self._next_least, self._count, self._rest, self._starts, self._opened, floor
        )

    def _keep_in_range(self) -> None:
        """Rescale if need be: O(n), but only after the total has changed by a factor of 2^512."""
        exponent = math.frexp(self.total)[1]
        if abs(exponent) > _FAR_EXPONENT:
            for sums in (self._least, self._next_least, self._rest):
                sums *= 2.0**-exponent
