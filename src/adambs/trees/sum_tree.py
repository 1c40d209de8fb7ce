"""A tree of sums: draw one of n weighted examples, or change its weight, in O(log n).

Every node has 16 children and holds the sum of their weights; the leaves are the weights::

    level 2 (root)                      [ 13.5 ]                          1 node = the total
                                       /        \\
    level 1               [ 6.0 ]  [ 7.5 ]  0  0  ...  0                  n / 16 nodes
                         /                \\
    level 0   [ 1.0 | 0.5 | ... | 2.0 ]  [ 3.0 | 4.5 | 0 | ... | 0 ]      n leaves

All levels lie in one flat float64 buffer, leaves first, each padded with zeros to whole nodes::

    buffer    | leaf 0 ... leaf n-1, 0 ... | level 1, 0 ... | ... | root |
              ^ offsets[0] = 0             ^ offsets[1]           ^ offsets[-1] = len(buffer) - 1

Node j of a level has its children at 16 j ... 16 j + 15 of the level below: 128 bytes, two cache
lines. The inner levels add 1/15 to the leaves: 8.53 bytes an example.

Costs, for K draws or changed weights:

======================  ===============  ========================================================
build, ``rescale``      O(n)
``draw``                O(16 K log16 n)  five levels for a million examples, seven for 100 million
``update``              O(16 K log16 n)  on every level at most min(K, nodes of the level) sums
``total``, ``weights``  O(1)
======================  ===============  ========================================================

Three choices make it fast; ``adambs.lab.bench.plain_tree`` is the same tree without them.

- All draws of a batch take one level before any takes the next, and ask for the memory of the next
  level as they go: K cache misses overlap, where one draw after the other waits for each.
- A node is scanned without branches, since which child is wanted is what no processor can predict.
- An update sums each level once, in any order, and never the same small level more than once.

Three keep it right. A parent is always recomputed from its children, in the one order of
:func:`node_sum`, never adjusted by a difference: nothing drifts, and the updated tree is bit for
bit the tree that would be built from its leaves. A child of weight zero is never entered, whatever
the rounding. A call that raises has changed nothing.
"""

import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import ArrayLike, NDArray

from adambs._jit import kernel
from adambs._types import Floats, Indices

FANOUT = 16
_BITS = 4  # 2**_BITS == FANOUT

# ``x & _NODE`` is x for every first child of a node. It tells the compiler that x is not negative
# and divisible by 16, so that it drops Python's handling of negative indices from x ... x + 15.
_NODE = 0x3FFF_FFFF_FFFF_FFF0

# n weights of at most _LARGEST / n have a finite sum; the half leaves room for rounding.
_LARGEST = sys.float_info.max / 2

_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)
_DONE, _ALL_ZERO = -1, -2  # what a checking kernel returns, if not the position of the offender


# ------------------------------------------------------------------------------------------------
# Kernels. Those without an underscore are for other kernels to call; none checks its arguments.
# ------------------------------------------------------------------------------------------------


def _prefetch_code(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of ``array[index]`` without waiting for it: LLVM's instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        builder.call(prefetch, [address, word(0), word(3), word(1)])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


_prefetch: Any = intrinsic(_prefetch_code)


@kernel
def total(buffer: Floats) -> float:
    """Return the sum of all weights: the root. O(1)."""
    return float(buffer[len(buffer) - 1])


@kernel
def node_sum(buffer: Floats, first: int) -> float:
    """Return the sum of the 16 children from ``first`` on, always added in this order.

    Four running sums side by side: the compiler makes one vector of them without reordering.
    """
    i = first & _NODE
    a = (buffer[i + 0] + buffer[i + 4]) + (buffer[i + 8] + buffer[i + 12])
    b = (buffer[i + 1] + buffer[i + 5]) + (buffer[i + 9] + buffer[i + 13])
    c = (buffer[i + 2] + buffer[i + 6]) + (buffer[i + 10] + buffer[i + 14])
    d = (buffer[i + 3] + buffer[i + 7]) + (buffer[i + 11] + buffer[i + 15])
    return float((a + b) + (c + d))


@kernel
def _sum_level(buffer: Floats, below: int, here: int) -> None:
    """Sum every node of the level at ``here`` from its children, which start at ``below``."""
    for node in range((here - below) >> _BITS):
        buffer[here + node] = node_sum(buffer, below + (node << _BITS))


@kernel
def build(buffer: Floats, offsets: Indices) -> None:
    """Sum all levels from the leaves. O(n)."""
    for level in range(1, len(offsets)):
        _sum_level(buffer, offsets[level - 1], offsets[level])


@kernel
def refresh(buffer: Floats, offsets: Indices, indices: Indices) -> None:
    """Recompute the ancestors of the leaves ``indices``, after the caller has written the leaves.

    Duplicates and any order are fine. A level with fewer nodes than there are indices is summed
    whole: sooner done than telling which of its nodes have changed. O(16 K log16 n) at most.
    """
    for level in range(1, len(offsets)):
        below, here = offsets[level - 1], offsets[level]
        if (here - below) >> _BITS <= len(indices):
            _sum_level(buffer, below, here)
        else:
            for k in range(len(indices)):
                node = indices[k] >> (_BITS * level)
                buffer[here + node] = node_sum(buffer, below + (node << _BITS))


@kernel
def _choose(buffer: Floats, first: int, u: float) -> tuple[int, float]:
    """Return where the child on which ``u`` falls is in the buffer, and what of ``u`` is left.

    The child c of the node with children from ``first`` on has w_0 + ... + w_{c-1} <= u < w_0 +
    ... + w_c. Stepping over a child takes a comparison that is 0.0 or 1.0, not a jump: first over
    quarters of the node, then over the children in one. (The masks are floats on purpose: the
    compiler turns a comparison that selects both an integer and a float into a jump.)
    """
    i = first & _NODE
    a = (buffer[i + 0] + buffer[i + 1]) + (buffer[i + 2] + buffer[i + 3])
    b = (buffer[i + 4] + buffer[i + 5]) + (buffer[i + 6] + buffer[i + 7])
    c = (buffer[i + 8] + buffer[i + 9]) + (buffer[i + 10] + buffer[i + 11])
    over_a = 1.0 if a <= u else 0.0
    over_b = 1.0 if a + b <= u else 0.0
    over_c = 1.0 if (a + b) + c <= u else 0.0
    u -= (over_a * a + over_b * b) + over_c * c
    i += 4 * int(over_a + over_b + over_c)

    a, b, c = buffer[i], buffer[i + 1], buffer[i + 2]
    over_a = 1.0 if a <= u else 0.0
    over_b = 1.0 if a + b <= u else 0.0
    over_c = 1.0 if (a + b) + c <= u else 0.0
    u -= (over_a * a + over_b * b) + over_c * c
    i += int(over_a + over_b + over_c)
    return i, u


@kernel
def _last_positive(buffer: Floats, i: int) -> int:
    """Return where the last child at or before ``i`` is that weighs anything.

    Stepping over all that comes before it leads to the last child of a quarter, which may weigh
    nothing when rounding has made u too large. The last child with a weight is meant then. There is
    one in the node, because only nodes of positive weight are entered.
    """
    while buffer[i] == 0.0:
        i -= 1
    return i


@kernel
def draw_into(buffer: Floats, offsets: Indices, u: Floats, indices: Indices, weights: Floats) -> None:
    """For each u[k] in [0, 1] write the leaf it falls on to indices[k], its weight to weights[k].

    On the way down, indices[k] is the node that draw k has reached on its level and weights[k] how
    far into that node it goes.
    """
    for k in range(len(u)):
        indices[k] = 0
        weights[k] = u[k] * total(buffer)
    for level in range(len(offsets) - 2, -1, -1):
        here = offsets[level]
        for k in range(len(u)):
            child, left = _choose(buffer, here + (indices[k] << _BITS), weights[k])
            if buffer[child] == 0.0:
                child = _last_positive(buffer, child)
                left = buffer[child]
            indices[k] = child - here
            weights[k] = left
            if level > 0:  # ask for the two cache lines in which this draw goes on
                children = offsets[level - 1] + ((child - here) << _BITS)
                _prefetch(buffer, children)
                _prefetch(buffer, children + 8)
    for k in range(len(u)):
        weights[k] = buffer[indices[k]]


@kernel
def _first_outside(values: Floats, largest: float) -> int:
    """Return the position of the first value that is not in [0, largest], NaN included."""
    for k in range(len(values)):
        if not 0.0 <= values[k] <= largest:
            return k
    return _DONE


@kernel
def _update(buffer: Floats, offsets: Indices, n: int, indices: Indices, weights: Floats) -> int:
    """Set the weights, or change nothing and return the first bad position or ``_ALL_ZERO``."""
    largest = _LARGEST / n
    for k in range(len(indices)):
        if not (0 <= indices[k] < n and 0.0 <= weights[k] <= largest):
            return k
    before = np.empty(len(indices))
    for k in range(len(indices)):
        before[k] = buffer[indices[k]]
        buffer[indices[k]] = weights[k]
    refresh(buffer, offsets, indices)
    if total(buffer) > 0.0:
        return _DONE
    for k in range(len(indices) - 1, -1, -1):  # backwards: of duplicates, the first has the old one
        buffer[indices[k]] = before[k]
    refresh(buffer, offsets, indices)
    return _ALL_ZERO


@kernel
def _rescale(buffer: Floats, offsets: Indices, n: int, factor: float) -> int:
    """Multiply by a power of two, or change nothing and return where that would be inexact."""
    for i in range(n):
        scaled = buffer[i] * factor
        if not (scaled <= _LARGEST / n and scaled / factor == buffer[i]):
            return i
    for i in range(n):
        buffer[i] *= factor
    build(buffer, offsets)
    return _DONE


# ------------------------------------------------------------------------------------------------
# The class: memory, checks and messages.
# ------------------------------------------------------------------------------------------------


def _checked(name: str, array: NDArray[Any], kinds: str) -> NDArray[Any]:
    """Return ``array`` if it is one-dimensional and of one of the dtype ``kinds``."""
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, but must have one dimension: flatten it")
    if array.size and array.dtype.kind not in kinds:
        wanted = "integers" if kinds == "iu" else "real numbers"
        raise TypeError(f"{name} has dtype {array.dtype}, but must hold {wanted}: convert it first")
    return array


def _vector(name: str, value: Any, dtype: np.dtype[Any], kinds: str) -> NDArray[Any]:
    """Return ``value`` as the kernels want it: itself if it is that, a copy otherwise.

    A read-only array is copied too: it may be :attr:`SumTree.weights`, which an update overwrites.
    """
    if (
        type(value) is np.ndarray
        and value.dtype is dtype
        and value.ndim == 1
        and value.flags.carray  # contiguous, aligned and writeable
    ):
        return value
    return np.array(_checked(name, np.asarray(value), kinds), dtype=dtype)


def _bad_weight(position: int, weight: float, n: int) -> ValueError:
    return ValueError(
        f"weights[{position}] is {weight!r}, but must be finite, not negative and at most "
        f"{_LARGEST / n:.6g} (float_max / 2n, so that {n} of them have a sum): clip or rescale it"
    )


class SumTree:
    """The weights of n examples, to draw from in proportion to weight. See the module for how.

    >>> tree = SumTree([1.0, 0.0, 3.0])
    >>> tree.draw([0.0, 0.24, 0.26, 1.0])
    array([0, 0, 2, 2])
    >>> tree.update([1, 2], [4.0, 0.0])
    >>> tree.total, tree.draw([0.0, 0.24, 0.26, 1.0])
    (5.0, array([0, 1, 1, 1]))

    Not safe for concurrent updates from several threads: the kernels release the GIL.
    """

    __slots__ = ("_buffer", "_leaves", "_n", "_offsets", "_weights")

    def __init__(self, weights: ArrayLike) -> None:
        given = _checked("weights", np.asarray(weights), "fiu")
        n = given.size
        if n == 0:
            raise ValueError("weights is empty, but must hold at least one weight")
        starts, nodes = [0], n
        while nodes > 1 or len(starts) == 1:
            nodes = -(-nodes // FANOUT)  # whole nodes above, padded leaves below
            starts.append(starts[-1] + nodes * FANOUT)
        spare = np.zeros(starts[-1] + 1 + 7)  # up to 7 of them to begin at a cache line
        begin = -spare.ctypes.data % 64 // 8
        self._buffer: Floats = spare[begin : begin + starts[-1] + 1]
        self._offsets: Indices = np.array(starts, dtype=np.int64)
        self._n = n
        self._leaves: Floats = self._buffer[:n]
        leaves = self._leaves
        leaves[:] = given
        bad = _first_outside(leaves, _LARGEST / n)
        if bad != _DONE:
            raise _bad_weight(bad, float(leaves[bad]), n)
        build(self._buffer, self._offsets)
        if self.total == 0.0:
            raise ValueError("weights are all zero: at least one must be positive to be drawn")
        self._weights: Floats = self._buffer[:n]
        self._weights.flags.writeable = False

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"SumTree(n={self._n}, total={self.total:.6g})"

    def __reduce__(self) -> tuple[type["SumTree"], tuple[Floats]]:
        return SumTree, (self._weights,)  # rebuilt from its leaves, it is the same to the bit

    @property
    def total(self) -> float:
        """The sum of all weights. O(1)."""
        return float(self._buffer[-1])

    @property
    def weights(self) -> Floats:
        """The n weights: a read-only view that follows every change. O(1)."""
        return self._weights

    @property
    def nbytes(self) -> int:
        """The memory of the tree in bytes: 8.53 an example when there are many."""
        return self._buffer.nbytes + self._offsets.nbytes

    def draw(self, u: ArrayLike) -> Indices:
        """Return for each u[k] in [0, 1] the index it falls on. O(K log n).

        Index i covers the share weights[i] / total of [0, 1], in the order of the indices and up to
        rounding: if u is uniform, i is drawn with that probability. Weight zero is never drawn.
        """
        numbers = _vector("u", u, _FLOAT64, "fiu")
        bad = _first_outside(numbers, 1.0)
        if bad != _DONE:
            raise ValueError(f"u[{bad}] is {float(numbers[bad])!r}, but must be in [0, 1]")
        return self.draw_with_weights(numbers)[0]

    def draw_with_weights(self, u: Floats) -> tuple[Indices, Floats]:
        """Like :meth:`draw`, with the weights of the drawn indices and without checks.

        ``u`` must be a contiguous one-dimensional float64 array of numbers in [0, 1].
        """
        indices, weights = np.empty(len(u), np.int64), np.empty(len(u))
        draw_into(self._buffer, self._offsets, u, indices, weights)
        return indices, weights

    def draw_with_ratios(self, u: Floats) -> tuple[Indices, Floats]:
        """Like :meth:`draw_with_weights`, with n p of the drawn indices in the place of their weights."""
        indices, ratios = self.draw_with_weights(u)
        ratios *= self._n
        ratios /= self.total
        return indices, ratios

    def ratios(self, indices: Indices | None = None) -> Floats:
        """n p_j = n weights[j] / total of ``indices``, or of all. A new array."""
        weights = self._weights if indices is None else self._weights[indices]
        return weights * self._n / self.total

    def update(self, indices: ArrayLike, weights: ArrayLike) -> None:
        """Set the weight of indices[k] to weights[k]; of duplicates, the last wins. O(K log n)."""
        where = _vector("indices", indices, _INT64, "iu")
        values = _vector("weights", weights, _FLOAT64, "fiu")
        if len(where) != len(values):
            raise ValueError(
                f"indices has length {len(where)} and weights {len(values)}: one weight for each"
            )
        bad = _update(self._buffer, self._offsets, self._n, where, values)
        if bad == _DONE:
            return
        if bad == _ALL_ZERO:
            raise ValueError(
                "weights would make all weights of the tree zero: at least one must stay positive"
            )
        if not 0 <= where[bad] < self._n:
            raise ValueError(
                f"indices[{bad}] is {where[bad]}, but must be in 0 ... {self._n - 1} (no negative indices)"
            )
        raise _bad_weight(bad, float(values[bad]), self._n)

    @property
    def leaves(self) -> Floats:
        """The n weights, writable. Unchecked, for rules: call :meth:`refresh` with what was written."""
        return self._leaves

    def refresh(self, indices: Indices) -> None:
        """Sum the ancestors of the :attr:`leaves` at ``indices`` anew. O(K log n)."""
        refresh(self._buffer, self._offsets, indices)

    def rescale(self, exponent: int) -> None:
        """Multiply every weight by 2**exponent, exactly; probabilities stay as they are. O(n)."""
        if not isinstance(exponent, (int, np.integer)):
            raise TypeError(f"exponent is {exponent!r}, but must be an integer")
        if not -1022 <= exponent <= 1023:
            raise ValueError(f"exponent is {exponent}, but must be in -1022 ... 1023: rescale in two steps")
        bad = _rescale(self._buffer, self._offsets, self._n, 2.0 ** int(exponent))
        if bad != _DONE:
            raise ValueError(
                f"exponent is {exponent}, which weights[{bad}] = {float(self._weights[bad])!r} does"
                f" not survive: the product must be exact and at most {_LARGEST / self._n:.6g}"
            )
