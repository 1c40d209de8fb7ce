"""Two trees of weights above a floor, for rules that hold *every* example there and not only the drawn.

Both have 16 children to a node, like :mod:`adambs.tree`, and differ in what becomes of a weight that the
floor has lifted:

- :class:`LastingFloor` forgets it. w_j = max(w_j, floor), for good: a projection after each step, as
  line 5 of Algorithm 2 has it.
- :class:`PassingFloor` remembers it. The example counts as max(w_j, floor) for as long as the floor
  stands above w_j, and as w_j again once it has fallen.

Thousands of examples may sit at a floor that moves a little with every step, and none of them is written.
A node knows its lightest examples, how many they are, and apart from them the sum of the others; where the
floor has passed only those, one number is raised in the place of all.

Every inner node is a function of the weights below it, summed in one fixed order and never adjusted by a
difference. So nothing drifts, and a tree rebuilt from a checkpoint is the same to the last bit. (The sum
apart from the lightest is what makes this so: raising them does not touch it.)

Nodes are numbered level by level, leaves first: ``starts[d]`` is the first node of level d, and node i of
level d has the children 16 i ... 16 i + 15 of the level below, as far as there are any. ``starts[-1]`` is
the number of all nodes, so the root is ``starts[-1] - 1``. What only inner nodes have is kept without room
for the leaves: node k has it at k - n.
"""

import math
import sys

import numpy as np
from numpy.typing import NDArray

from adambs._jit import kernel

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

_BITS = 4  # 16 children

# A floor that is solved for is raised by this fraction, far above the rounding of a total and far below
# anything that matters, so that p_j >= p_min holds as computed and not only in exact arithmetic.
_LIFT = 1.0 + 1e-13

# The total is brought back to about one by a power of two, which changes no probability by even a bit,
# long before it could over- or underflow.
_FAR_EXPONENT = 512

# Smaller weights are zero to a PassingFloor, so that p_min of their sum does not underflow.
_SMALLEST = 1e-200


def _levels(n: int) -> Indices:
    """Where each level of a tree with n leaves starts, and the end. At least one level above the leaves."""
    starts, nodes = [0, n], n
    while nodes > 1 or len(starts) == 2:
        nodes = -(-nodes >> _BITS)
        starts.append(starts[-1] + nodes)
    return np.array(starts, np.int64)


@kernel
def _children(starts: Indices, level: int, node: int) -> tuple[int, int]:
    """The first child of ``node``, which is on ``level``, and the end of its children."""
    first = starts[level - 1] + ((node - starts[level]) << _BITS)
    return first, min(first + (1 << _BITS), starts[level])


# ------------------------------------------------------------------------------------------------
# LastingFloor. least[k] is the smallest weight below node k (of a leaf: its weight); for inner nodes,
# next_least is the second smallest *different* weight, count how many examples have the smallest, rest
# the sum of all others. The mass of a node is rest + count * least.
#
# Raising the floor to f, where least < f < next_least, writes ``least`` and nothing else: neither count
# nor rest is changed by it. The children learn of it when somebody goes there, for least of a parent is
# what every example below it has at least: the weight of an example is the largest number on the way
# from its leaf to the root.
# ------------------------------------------------------------------------------------------------


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
def _build_lasting(least: Floats, next_least: Floats, count: Indices, rest: Floats, starts: Indices) -> None:
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
def _lasting_weights(least: Floats, starts: Indices, indices: Indices) -> Floats:
    """The weights of ``indices``: the largest number on the way to the root. O(K log n)."""
    weights = np.empty(len(indices))
    for k in range(len(indices)):
        weight = 0.0
        for level in range(len(starts) - 1):
            weight = max(weight, least[starts[level] + (indices[k] >> (_BITS * level))])
        weights[k] = weight
    return weights


@kernel
def _draw_lasting(
    least: Floats, count: Indices, rest: Floats, starts: Indices, u: Floats
) -> tuple[Indices, Floats]:
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
    >>> tree.weights(), tree.total
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
        self._starts = _levels(n)
        inner = int(self._starts[-1]) - n
        self._least = np.concatenate([weights, np.empty(inner)])
        self._next_least, self._count, self._rest = (
            np.empty(inner),
            np.empty(inner, np.int64),
            np.empty(inner),
        )
        self._opened = np.empty(inner, np.int64)
        self.opened_nodes = 0
        _build_lasting(self._least, self._next_least, self._count, self._rest, self._starts)

    @property
    def total(self) -> float:
        """The sum of all weights. O(1)."""
        return float(self._rest[-1] + self._count[-1] * self._least[-1])

    def weights(self, indices: Indices | None = None) -> Floats:
        """The weights of ``indices``, O(K log n), or of all, O(n). A new array."""
        if indices is not None:
            return _lasting_weights(self._least, self._starts, indices)
        _settle(self._least, self._starts)
        return self._least[: self.n].copy()

    def ratios(self, indices: Indices | None = None) -> Floats:
        """n p_j of ``indices``, or of all."""
        return self.weights(indices) * self.n / self.total

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], in the order of the indices, and their ratios."""
        indices, weights = _draw_lasting(self._least, self._count, self._rest, self._starts, u)
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

        With m weights at the floor, f = p_min (sum of the others) / (1 - m p_min). Begin with the lightest
        and take in those that the floor reaches. This is Newton's method on the convex function
        p_min sum_j max(w_j, f) - f, which from the left never goes beyond the root; so to lift on the way
        is safe, and every round but the last opens a node.
        """
        while True:
            least = float(self._least[-1])
            if least >= p_min * self.total:
                break
            floor = p_min * _LIFT * float(self._rest[-1]) / (1.0 - float(self._count[-1]) * p_min)
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


# ------------------------------------------------------------------------------------------------
# PassingFloor. A leaf has its weight and is either free or low (at the floor). An inner node has the sum
# of its free weights, the number of its low examples, the least free weight and the greatest low one: the
# next to meet the floor when it rises, and the next to leave it when it falls.
# ------------------------------------------------------------------------------------------------


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
def _build_passing(
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
def _write_passing(
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
def _draw_passing(
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
        self._starts = _levels(self.n)
        inner = int(self._starts[-1]) - self.n
        self._free_sum, self._low_count = np.empty(inner), np.empty(inner, np.int64)
        self._least_free, self._most_low = np.empty(inner), np.empty(inner)
        self._opened = np.empty(inner, np.int64)
        _build_passing(*self._columns())
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

    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], in the order of the indices, and their ratios."""
        indices, masses = _draw_passing(
            self.weights, self.low, self._free_sum, self._low_count, self._starts, self._low_mass(), u
        )
        return indices, masses * self.n / self.total

    def write(self, indices: Indices, weights: Floats) -> None:
        """Set weights and let the floor follow; of duplicates, the last wins."""
        _write_passing(*self._columns(), indices, self._representable(weights), self.floor)
        self._find_floor()

    def _find_floor(self) -> None:
        """f = p_min sum_j max(w_j, f), that is p_min (free sum) / (1 - (number of low) p_min).

        Newton's method on the convex function p_min sum_j max(w_j, f) - f. The first step may go either
        way and lands on the left of the root, the others go right; so after the first none is set free,
        and it ends when nobody crosses.
        """
        crossed, release = 1, True
        while crossed:
            low_share = float(self._low_count[-1]) * self.p_min
            self.floor = self.p_min * _LIFT * float(self._free_sum[-1]) / (1.0 - low_share)
            crossed = _cross(*self._columns(), self._opened, self.floor, release)
            self.crossings += crossed
            release = False

    def _low_mass(self) -> float:
        """What a low example counts as: the floor or, if no weight is positive, one."""
        return self.floor if self.floor > 0 else 1.0

    def _representable(self, weights: Floats) -> Floats:
        """A copy with weights that have a sum and a positive floor."""
        return np.where(weights < _SMALLEST, 0.0, np.minimum(weights, self.largest))

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
