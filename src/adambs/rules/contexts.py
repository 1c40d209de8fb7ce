"""Examples that have not been seen, by what is known of them beforehand."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices, State
from adambs.rules.labels import Numbers

# A mean below this is zero, and scores are at most so many units: as in Calibrated.
_SMALLEST_MEAN = 1e-300
_LARGEST = 1e50

_MOST = 2**31 - 1


class Arrays(NamedTuple):
    """What the kernels work on."""

    labels: Numbers
    starts: Indices
    left: Indices
    members: NDArray[Any]
    slots: NDArray[Any]
    means: Floats
    draws: Floats
    fresh: Floats
    known: Floats
    new: Floats


class Contexts:
    """The examples that have not been seen, by context, and what examples of a context turned out to score.

    Each of C contexts has a running mean of the squared scores of its members that were drawn while unseen.
    A context of which none was drawn yet is *fresh*: all fresh ones share one mean, that of the first draws
    of all others, and a context begins with this mean, counted for ``prior`` draws, when it is first drawn.

    The *root* of a context is that of its mean. Members are kept context by context, unseen ones first::

        members   | context 0: unseen ... seen | context 1: unseen ... seen | ...
                  ^ starts[0]     ^ + left[0]  ^ starts[1]

    and two trees of sums over the contexts have the leaves left x root (zero for fresh ones) and left
    (zero for all others). So a step costs O(K log C), 12 bytes an example and some 50 a context, and what was
    never drawn costs nothing when the mean of the fresh changes. Of the other arrays, ``means`` and ``draws``
    are a context's running mean and how many draws are in it, 0 if fresh; ``fresh`` the same two numbers for
    all fresh ones; ``slots`` says where in ``members`` an example is.
    """

    def __init__(self, labels: Numbers) -> None:
        sizes = np.bincount(labels)
        kind = np.int32 if len(labels) <= _MOST else np.int64
        members = np.argsort(labels, kind="stable").astype(kind)
        means, draws = np.zeros(len(sizes)), np.zeros(len(sizes))
        self._take(labels, members, np.ones(len(labels), np.bool_), means, draws, np.array([1.0, 0.0]))

    def _take(
        self,
        labels: Numbers,
        members: NDArray[Any],
        unseen: NDArray[np.bool_],
        means: Floats,
        draws: Floats,
        fresh: Floats,
    ) -> None:
        starts = np.concatenate([[0], np.bincount(labels).cumsum()])
        left = np.bincount(labels[unseen], minlength=len(means)).astype(np.int64)
        slots = np.empty_like(members)
        bad = _find_slots(labels, starts, left, members, slots, unseen)
        if bad >= 0:
            raise ValueError(
                "state['members'] must hold each example once, by context and unseen ones first, but it has "
                f"{members[bad]} at {bad}"
            )
        known, new = _built(left, means, draws)
        self.arrays = Arrays(labels, starts, left, members, slots, means, draws, fresh, known, new)

    def __len__(self) -> int:
        return len(self.arrays.means)

    @property
    def total(self) -> float:
        """The sum of the roots of all unseen examples."""
        a = self.arrays
        return float(a.known[1] + np.sqrt(a.fresh[0]) * a.new[1])

    def learn(self, indices: Indices, scores: Floats, unit: float, memory: float, prior: float) -> None:
        """Learn from the scores of those that are unseen; from now on they are seen. O(K log C)."""
        _learn(self.arrays, indices, scores, unit, memory, prior)

    def draw_into(
        self,
        u: Floats,
        before: float,
        total: float,
        count: int,
        scale: float,
        share: float,
        indices: Indices,
        ratios: Floats,
    ) -> None:
        """Where the quantile u[k] falls on the unseen, write the example to indices[k], r to ratios[k].

        Each of the ``count`` unseen examples has r = scale x root + share, and their quantiles are those from
        ``before`` to ``total`` of ``total``. The uniform share comes first: all unseen examples in some
        order, and indices[k] is the one already. Then come the contexts, each with left x root, and the fresh
        ones. O(K log C).
        """
        _draw_into(self.arrays, u, before, total, count, scale, share, indices, ratios)

    def ratios_into(self, indices: Indices, scale: float, share: float, ratios: Floats) -> None:
        """Write r = scale x root + share to ratios[k] if indices[k] is unseen. O(K)."""
        _ratios_into(self.arrays, indices, scale, share, ratios)

    def spread(self, scale: float, share: float) -> tuple[float, float]:
        """The sums over the unseen of r^2 and of r log r. O(C)."""
        return _spread(self.arrays, scale, share)

    def state_dict(self) -> dict[str, Any]:
        """The members in their order, and what contexts are worth. A copy."""
        saved = ("members", "means", "draws", "fresh")
        return {name: torch.from_numpy(getattr(self.arrays, name).copy()) for name in saved}

    def with_state(self, state: State, unseen: NDArray[np.bool_], memory: float) -> "Contexts":
        """New contexts of the same labels in this state, when these examples are unseen; or an error."""
        C, members = len(self), self.arrays.members
        most = _LARGEST**2
        means = _check.array(state, "means", (C,), most=most, normal=True).copy()
        draws = _check.array(state, "draws", (C,), most=memory, normal=True).copy()
        fresh = _check.array(state, "fresh", (2,), most=most, normal=True).copy()
        if fresh[1] > memory:
            raise ValueError(f"state['fresh'] must count at most {memory} draws, not {fresh[1]}")
        members = _check.array(state, "members", members.shape, members.dtype.name).copy()
        new = Contexts.__new__(Contexts)
        new._take(self.arrays.labels, members, unseen, means, draws, fresh)
        return new


# ------------------------------------------------------------------------------------------------
# Kernels. A tree over C contexts is an array of 2 x size numbers, size the power of two that is at least C:
# the leaves from ``size`` on, node i the sum of nodes 2i and 2i + 1, the root at 1. (Sixteen children a node,
# as SumTree has, were no faster: few draws fall on unseen examples for long.)
# ------------------------------------------------------------------------------------------------


@kernel
def _built(left: Indices, means: Floats, draws: Floats) -> tuple[Floats, Floats]:
    """The trees of left x root of the known, and of left of the fresh. O(C)."""
    size = 1
    while size < len(left):
        size *= 2
    known, new = np.zeros(2 * size), np.zeros(2 * size)
    for c in range(len(left)):
        if draws[c] > 0.0:
            known[size + c] = left[c] * np.sqrt(means[c])
        else:
            new[size + c] = left[c]
    for i in range(size - 1, 0, -1):
        known[i] = known[2 * i] + known[2 * i + 1]
        new[i] = new[2 * i] + new[2 * i + 1]
    return known, new


@kernel
def _write(tree: Floats, leaf: int, value: float) -> None:
    """Set a leaf and sum its ancestors anew. O(log C)."""
    i = (len(tree) >> 1) + leaf
    tree[i] = value
    while i > 1:
        i >>= 1
        tree[i] = tree[2 * i] + tree[2 * i + 1]


@kernel
def _find(tree: Floats, wanted: float) -> tuple[int, float]:
    """The leaf on which ``wanted`` falls, and what is left of it. A node of zero is never entered."""
    i, size = 1, len(tree) >> 1
    while i < size:
        i *= 2
        if (wanted >= tree[i] and tree[i + 1] > 0.0) or tree[i] == 0.0:
            wanted -= tree[i]
            i += 1
    return i - size, wanted


@kernel
def _root(a: Arrays, c: int) -> float:
    return float(np.sqrt(a.means[c] if a.draws[c] > 0.0 else a.fresh[0]))


@kernel
def _unseen(a: Arrays, j: int) -> bool:
    return bool(a.slots[j] - a.starts[a.labels[j]] < a.left[a.labels[j]])


@kernel
def _blend(mean: float, score: float, draws: float) -> float:
    """A running mean of squares after one more; what is beneath notice is zero."""
    mean += (score * score - mean) / max(draws, 1.0)
    return mean if mean >= _SMALLEST_MEAN else 0.0


@kernel
def _learn(a: Arrays, indices: Indices, scores: Floats, unit: float, memory: float, prior: float) -> None:
    """Blend the squared scores of the unseen into the means, then move them behind the unseen."""
    touched = np.zeros(len(indices), np.bool_)
    for k in range(len(indices)):
        if not _unseen(a, indices[k]):
            continue
        touched[k], c = True, a.labels[indices[k]]
        score = min(scores[k] / unit, _LARGEST) if unit > 0.0 else 0.0
        if a.draws[c] == 0.0:
            a.fresh[1] = min(a.fresh[1] + 1.0, memory)
            a.fresh[0] = _blend(a.fresh[0], score, a.fresh[1])
            a.means[c], a.draws[c] = a.fresh[0], min(prior, memory)
        a.draws[c] = min(a.draws[c] + 1.0, memory)
        a.means[c] = _blend(a.means[c], score, a.draws[c])
    for k in range(len(indices)):
        j = indices[k]
        c = a.labels[j]
        here, last = a.slots[j], a.starts[c] + a.left[c] - 1
        if touched[k] and here <= last:  # of duplicates the first
            other = a.members[last]
            a.members[here], a.slots[other] = other, here
            a.members[last], a.slots[j] = j, last
            a.left[c] -= 1
    for k in range(len(indices)):
        if touched[k]:
            c = a.labels[indices[k]]
            _write(a.known, c, a.left[c] * np.sqrt(a.means[c]))
            if a.new[(len(a.new) >> 1) + c] > 0.0:
                _write(a.new, c, 0.0)


@kernel
def _draw_into(
    a: Arrays,
    u: Floats,
    before: float,
    total: float,
    count: int,
    scale: float,
    share: float,
    indices: Indices,
    ratios: Floats,
) -> None:
    if count == 0:
        return
    fresh_root = np.sqrt(a.fresh[0])
    roots = a.known[1] + fresh_root * a.new[1]
    for k in range(len(u)):
        wanted = u[k] * total - before
        if wanted < 0.0:
            continue
        if wanted < share * count or scale * roots == 0.0:
            j = indices[k]
            c = a.labels[j]
        else:
            wanted = (wanted - share * count) / scale
            if (wanted < a.known[1] and a.known[1] > 0.0) or fresh_root * a.new[1] == 0.0:
                c, rest = _find(a.known, wanted)
                rest /= np.sqrt(a.means[c])
            else:
                c, rest = _find(a.new, (wanted - a.known[1]) / fresh_root)
            j = a.members[a.starts[c] + int(max(min(rest, a.left[c] - 1.0), 0.0))]
        indices[k] = j
        ratios[k] = scale * _root(a, c) + share


@kernel
def _ratios_into(a: Arrays, indices: Indices, scale: float, share: float, ratios: Floats) -> None:
    for k in range(len(indices)):
        if _unseen(a, indices[k]):
            ratios[k] = scale * _root(a, a.labels[indices[k]]) + share


@kernel
def _spread(a: Arrays, scale: float, share: float) -> tuple[float, float]:
    squares, r_log_r = 0.0, 0.0
    for c in range(len(a.left)):
        if a.left[c] > 0:
            r = scale * _root(a, c) + share
            squares += a.left[c] * r * r
            r_log_r += a.left[c] * r * np.log(r)
    return squares, r_log_r


@kernel
def _find_slots(
    labels: Numbers,
    starts: Indices,
    left: Indices,
    members: NDArray[Any],
    slots: NDArray[Any],
    unseen: NDArray[np.bool_],
) -> int:
    """Find the slot of each member; or return the first position where there must be another."""
    slots[:] = -1
    for c in range(len(left)):
        for i in range(starts[c], starts[c + 1]):
            j = members[i]
            if not 0 <= j < len(labels) or labels[j] != c or slots[j] != -1:
                return i
            if unseen[j] != (i - starts[c] < left[c]):
                return i
            slots[j] = i
    return -1
