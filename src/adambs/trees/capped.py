"""A tree of weights of which none has more than a given share of their sum, and K distinct draws from it.

16 children to a node; :mod:`adambs.trees._floors` says how nodes are numbered. A leaf has its weight, an
inner node the sum and the largest of the weights below it. Weights only ever shrink.

The largest weights are lowered to the level ``w'`` with

    w' = share * (m w' + sum of the others),    that is    w' = share * (sum of the others) / (1 - m share),

m being the number of those that are lowered. They are found by taking the heaviest out of the tree as long as
it is above the level that this leaves. While weights only shrink, the level only falls, so who was lowered
once stays so, and the original weight need not be remembered.

======================  ===============  ===============================================================
build                   O(n)
``shrink``              O(16 K log16 n)  the same again for each weight that is lowered; fewer than 1/share
``draw``                O(16 K log16 n)  two descents for each example
======================  ===============  ===============================================================
"""

import math

import numpy as np

from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.trees._floors import levels

_BITS = 4  # 16 children

# Rounding must not decide whether a weight that was lowered to the level stands at it.
_TOLERANCE = 1e-12

# No weight shrinks below this part of the sum: it is never drawn by its weight, and the sum stays positive.
_SMALLEST_PART = 2.0**-300
_SMALL_TOTAL_EXPONENT = -300

NO_LEVEL = math.inf


@kernel
def _count_up(weights: Floats, sums: Floats, largest: Floats, starts: Indices, level: int, node: int) -> None:
    """Compute an inner node, number ``node`` of its level, from its children."""
    n = starts[1]
    first = starts[level - 1] + (node << _BITS)
    end = min(first + (1 << _BITS), starts[level])
    total, most = 0.0, 0.0
    for child in range(first, end):
        if level > 1:
            total += sums[child - n]
            most = max(most, largest[child - n])
        else:
            total += weights[child]
            most = max(most, weights[child])
    sums[starts[level] + node - n] = total
    largest[starts[level] + node - n] = most


@kernel
def _build(weights: Floats, sums: Floats, largest: Floats, starts: Indices) -> None:
    for level in range(1, len(starts) - 1):
        for node in range(starts[level + 1] - starts[level]):
            _count_up(weights, sums, largest, starts, level, node)


@kernel
def _renew(weights: Floats, sums: Floats, largest: Floats, starts: Indices, indices: Indices) -> None:
    """Compute the ancestors of the leaves ``indices`` anew."""
    for level in range(1, len(starts) - 1):
        for j in indices:
            _count_up(weights, sums, largest, starts, level, j >> (_BITS * level))


@kernel
def _heaviest(weights: Floats, largest: Floats, starts: Indices) -> int:
    """The first leaf of the largest weight."""
    n, wanted = starts[1], largest[-1]
    node = 0
    for level in range(len(starts) - 3, -1, -1):
        node <<= _BITS
        child = starts[level] + node
        if level > 0:
            while largest[child - n] != wanted:
                child += 1
        else:
            while weights[child] != wanted:
                child += 1
        node = child - starts[level]
    return node


@kernel
def _lower(
    weights: Floats, sums: Floats, largest: Floats, starts: Indices, share: float
) -> tuple[int, float]:
    """Lower what is above the level; return how many that are, and the level."""
    lowered = np.empty(max(1, int(1.0 / share) + 1), np.int64)
    m = 0
    while (m + 1) * share < 1.0 - _TOLERANCE:
        if largest[-1] * (1.0 - m * share) < share * sums[-1] * (1.0 - _TOLERANCE):
            break
        lowered[m] = _heaviest(weights, largest, starts)
        weights[lowered[m]] = 0.0
        _renew(weights, sums, largest, starts, lowered[m : m + 1])
        m += 1
    if m == 0:
        return 0, np.inf
    level = share * sums[-1] / (1.0 - m * share)
    for k in range(m):
        weights[lowered[k]] = level
    _renew(weights, sums, largest, starts, lowered[:m])
    return m, level


@kernel
def _shrink(weights: Floats, total: float, level: float, indices: Indices, exponents: Floats) -> None:
    """Multiply weights by exp(-exponent), except those at the level. Of duplicates, each counts."""
    smallest = _SMALLEST_PART * total
    for k in range(len(indices)):
        w = weights[indices[k]]
        if w < level * (1.0 - _TOLERANCE):
            weights[indices[k]] = max(w * np.exp(-exponents[k]), min(w, smallest))


@kernel
def _find(
    weights: Floats, sums: Floats, starts: Indices, scale: float, even: float, position: float
) -> tuple[int, float]:
    """The leaf in which ``position`` lies, and how far in, when leaf j is scale * w_j + even long."""
    n = starts[1]
    node = 0
    for level in range(len(starts) - 3, -1, -1):
        first = node << _BITS
        last = min(first + (1 << _BITS), starts[level + 1] - starts[level]) - 1
        node = last
        for child in range(first, last):
            if level > 0:
                leaves = min((child + 1) << (_BITS * level), n) - (child << (_BITS * level))
                length = scale * sums[starts[level] + child - n] + even * leaves
            else:
                length = scale * weights[child] + even
            if position < length:
                node = child
                break
            position -= length
    return node, position


@kernel
def _draw(
    weights: Floats, sums: Floats, starts: Indices, uniform: float, u: Floats, indices: Indices
) -> None:
    """len(u) = c distinct leaves; leaf j with probability c ((1 - uniform) w_j / sum w + uniform / n).

    The probabilities lie side by side on a line of length c, cut into c pieces of length one; one leaf is
    drawn from each piece. A leaf that straddles a border has the part ``a`` before it and ``b`` behind it. It
    is drawn from the piece before with probability a; if it was not, from the piece behind with b / (1 - a),
    which makes a + b in all. If it was, the piece behind is drawn from without it. What is left of the piece
    behind is drawn from evenly in either case, so every other leaf has its own length for a probability.
    (Deville's systematic sampling, which is dependent rounding of the leaves in their order.)
    """
    n, c = starts[1], len(u)
    scale, even = c * (1.0 - uniform) / sums[-1], c * uniform / n
    straddling, before, behind, taken, previous = -1, 0.0, 0.0, False, -1
    for k in range(c):
        following, a, b = -1, 0.0, 0.0
        if k + 1 < c:
            following, a = _find(weights, sums, starts, scale, even, k + 1.0)
            length = scale * weights[following] + even
            a = min(a, length)
            b = min(length, 1.0) - a
        again = 0.0
        if straddling >= 0 and not taken and behind > 0.0:
            again = min(behind / (1.0 - before), 1.0) if before < 1.0 else 1.0
        if u[k] < again or again == 1.0:
            j = straddling
        else:
            z = behind + (u[k] - again) / (1.0 - again) * (1.0 - behind)
            if following >= 0 and z >= 1.0 - a:
                j = following
            else:
                j, _ = _find(weights, sums, starts, scale, even, k + z)
        j = max(j, previous + 1)  # distinct and in range whatever the rounding
        j = min(j, n - c + k)
        indices[k] = j
        straddling, before, behind, taken, previous = following, a, max(b, 0.0), j == following, j


class CappedTree:
    """n positive weights of which none has more than ``share`` of the sum. See the module for how."""

    def __init__(self, weights: Floats, share: float) -> None:
        self._starts = levels(len(weights))
        self.share = share
        inner = int(self._starts[-1] - self._starts[1])
        self._weights = np.array(weights, np.float64)
        self._sums, self._largest = np.empty(inner), np.empty(inner)
        _build(*self._arrays)
        self._lower()

    @property
    def _arrays(self) -> tuple[Floats, Floats, Floats, Indices]:
        return self._weights, self._sums, self._largest, self._starts

    def _lower(self) -> None:
        self.lowered, self._level = 0, NO_LEVEL
        if self.share < 1.0:
            self.lowered, self._level = _lower(*self._arrays, self.share)

    @property
    def weights(self) -> Floats:
        """All n weights, those above the level lowered to it. A view."""
        return self._weights

    @property
    def total(self) -> float:
        """The sum of all weights. O(1)."""
        return float(self._sums[-1])

    def shrink(self, indices: Indices, exponents: Floats) -> None:
        """Multiply the weights of ``indices`` by exp(-exponents), but for those that are at the level.

        Exponents are not negative. O(K log n), and O(n) when the sum has shrunk to 2^-300.
        """
        _shrink(self._weights, self.total, self._level, indices, exponents)
        _renew(*self._arrays, indices)
        self._lower()
        exponent = math.frexp(self.total)[1]
        if exponent < _SMALL_TOTAL_EXPONENT:  # by a power of two, which changes no bit of any share
            self._weights *= 2.0**-exponent
            _build(*self._arrays)
            if self.lowered:
                self._level *= 2.0**-exponent

    def draw(self, u: Floats, uniform: float) -> Indices:
        """len(u) distinct examples, in random order; see :func:`_draw`. ``u`` are independent."""
        indices = np.empty(len(u), np.int64)
        _draw(self._weights, self._sums, self._starts, uniform, u, indices)
        return indices[u.argsort(kind="stable")]


def positive(weights: Floats) -> Floats:
    """The same in proportion, each at least 2^-300 of the sum."""
    weights = weights / weights.max()
    raised: Floats = np.maximum(weights, _SMALLEST_PART * weights.sum())
    return raised
