"""Examples that have not been seen, by what is known of them beforehand; and the labels that say it."""

import copy
import hashlib
from collections.abc import Hashable, Iterable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices

# A mean below this is zero, and scores are at most so many units: as in Calibrated.
_SMALLEST_MEAN = 1e-300
_LARGEST = 1e50

Numbers = NDArray[np.int32]
_MOST = 2**31 - 1


def numbered(labels: Any) -> Numbers:
    """Labels of any hashable kind as numbers 0, 1, ... in the order of first appearance, one an example.

    Equal labels get equal numbers, so the same division of the examples gives the same numbers, whatever
    the labels are called. Arrays of numbers or strings are sorted, O(n log n); others are hashed, O(n).
    """
    if isinstance(labels, torch.Tensor):
        labels = labels.numpy(force=True)
    elif hasattr(labels, "__array__"):  # a column of a table is one, too
        labels = np.asarray(labels)
    if isinstance(labels, np.ndarray):
        if labels.ndim != 1:
            raise ValueError(f"context must be one label for each example, not of shape {labels.shape}")
        if labels.dtype != object:
            _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
            rank = np.empty(len(first), np.int32)
            rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
            return rank[inverse]
    elif isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise TypeError(f"context must be one label for each example, not {labels!r:.60}")
    known: dict[Hashable, int] = {}
    try:
        return np.array([known.setdefault(_plain(label), len(known)) for label in labels], np.int32)
    except TypeError:
        raise TypeError(
            "context must hold labels that can be hashed, such as numbers, strings or tuples of them"
        ) from None


def _plain(label: Any) -> Any:
    """A tensor of one number is that number: tensors hash by identity."""
    return label.item() if isinstance(label, torch.Tensor) else label


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
    never drawn costs nothing when the mean of the fresh changes.
    """

    means: Floats
    """For each context, the running mean of squared scores, in squared units; 0 if fresh."""
    draws: Floats
    """For each context, how many draws are in its mean, at most ``memory``; 0 if fresh."""
    fresh: Floats
    """The mean of the fresh contexts, and how many draws are in it."""

    def __init__(self, labels: Numbers) -> None:
        self.labels = labels
        sizes = np.bincount(labels)
        self._starts: Indices = np.concatenate([[0], sizes.cumsum()])
        self._left: Indices = sizes.astype(np.int64)
        kind = np.int32 if len(labels) <= _MOST else np.int64
        self._members: NDArray[Any] = np.argsort(labels, kind="stable").astype(kind)
        self._slots: NDArray[Any] = np.empty_like(self._members)
        self._slots[self._members] = np.arange(len(labels), dtype=kind)
        self.means, self.draws = np.zeros(len(sizes)), np.zeros(len(sizes))
        self.fresh = np.array([1.0, 0.0])
        self._build()

    def _build(self) -> None:
        self._known, self._new = _built(self._left, self.means, self.draws)

    def __len__(self) -> int:
        return len(self.means)

    @property
    def total(self) -> float:
        """The sum of the roots of all unseen examples."""
        return float(self._known[1] + np.sqrt(self.fresh[0]) * self._new[1])

    def learn(self, indices: Indices, scores: Floats, unit: float, memory: float, prior: float) -> None:
        """Learn from the scores of those that are unseen; from now on they are seen. O(K log C)."""
        _learn(
            self.labels,
            self._starts,
            self._left,
            self._members,
            self._slots,
            self.means,
            self.draws,
            self.fresh,
            self._known,
            self._new,
            indices,
            scores,
            unit,
            memory,
            prior,
        )

    def draw_into(
        self,
        u: Floats,
        before: float,
        total: float,
        order: NDArray[Any],
        begin: int,
        scale: float,
        share: float,
        indices: Indices,
        ratios: Floats,
    ) -> None:
        """Where the quantile u[k] falls on the unseen, write the example to indices[k], r to ratios[k].

        An unseen example has r = scale x root + share, and the quantiles of the unseen are those from
        ``before`` to ``total`` of ``total``. The uniform share comes first: all unseen examples, in the order
        of ``order`` from ``begin`` on (XORed with the position, as :class:`Calibrated` has it). Then come the
        contexts, each with left x root, and the fresh ones. O(K log C).
        """
        _draw_into(
            u,
            before,
            total,
            order,
            begin,
            scale,
            share,
            self._starts,
            self._left,
            self._members,
            self.means,
            self.fresh,
            self._known,
            self._new,
            self.labels,
            self.draws,
            indices,
            ratios,
        )

    def ratios_into(self, indices: Indices, scale: float, share: float, ratios: Floats) -> None:
        """Write r = scale x root + share to ratios[k] if indices[k] is unseen. O(K)."""
        _ratios_into(
            self.labels,
            self._starts,
            self._left,
            self._slots,
            self.means,
            self.draws,
            self.fresh,
            indices,
            scale,
            share,
            ratios,
        )

    def spread(self, scale: float, share: float) -> tuple[float, float]:
        """The sums over the unseen of r^2 and of r log r. O(C)."""
        return _spread(self._left, self.means, self.draws, self.fresh, scale, share)

    def state_dict(self) -> dict[str, Any]:
        """The members in their order, and what contexts are worth. A copy."""
        return {
            "members": torch.from_numpy(self._members.copy()),
            "means": torch.from_numpy(self.means.copy()),
            "draws": torch.from_numpy(self.draws.copy()),
            "fresh": torch.from_numpy(self.fresh.copy()),
        }

    def with_state(self, state: Any, unseen: NDArray[Any], memory: float) -> Self:
        """New contexts of the same labels in this state, when these examples are unseen; or an error."""
        new, n, C = copy.copy(self), len(self.labels), len(self)
        new.means = _check.array(state, "means", (C,), most=_LARGEST**2, normal=True).copy()
        new.draws = _check.array(state, "draws", (C,), most=memory, normal=True).copy()
        new.fresh = _check.array(state, "fresh", (2,), most=_LARGEST**2, normal=True).copy()
        if new.fresh[1] > memory:
            raise ValueError(f"state['fresh'] must count at most {memory} draws, not {new.fresh[1]}")
        members = _check.array(state, "members", (n,), self._members.dtype.name)
        new._left = np.bincount(self.labels[unseen], minlength=C).astype(np.int64)
        new._members, new._slots = members.copy(), np.empty_like(members)
        bad = _take_members(self.labels, self._starts, new._left, new._members, new._slots, unseen)
        if bad >= 0:
            raise ValueError(
                f"state['members'] must hold each example once, by context and unseen ones first, but it has "
                f"{members[bad]} at {bad}"
            )
        new._build()
        return new


def fingerprint(labels: Numbers) -> str:
    """The same for the same division of the examples, and for no other."""
    return hashlib.sha256(np.ascontiguousarray(labels, "<i4")).hexdigest()[:32]


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
def _root(c: int, means: Floats, draws: Floats, fresh: Floats) -> float:
    return np.sqrt(means[c] if draws[c] > 0.0 else fresh[0])


@kernel
def _learn(
    labels: Numbers,
    starts: Indices,
    left: Indices,
    members: NDArray[Any],
    slots: NDArray[Any],
    means: Floats,
    draws: Floats,
    fresh: Floats,
    known: Floats,
    new: Floats,
    indices: Indices,
    scores: Floats,
    unit: float,
    memory: float,
    prior: float,
) -> None:
    """Blend the squared scores of the unseen into the means, then move them behind the unseen."""
    touched = np.zeros(len(indices), np.bool_)
    for k in range(len(indices)):
        c = labels[indices[k]]
        if slots[indices[k]] - starts[c] >= left[c]:
            continue
        touched[k] = True
        score = min(scores[k] / unit, _LARGEST) if unit > 0.0 else 0.0
        if draws[c] == 0.0:
            fresh[1] = min(fresh[1] + 1.0, memory)
            fresh[0] += (score * score - fresh[0]) / max(fresh[1], 1.0)
            if fresh[0] < _SMALLEST_MEAN:
                fresh[0] = 0.0
            means[c], draws[c] = fresh[0], min(prior, memory)
        draws[c] = min(draws[c] + 1.0, memory)
        means[c] += (score * score - means[c]) / max(draws[c], 1.0)
        if means[c] < _SMALLEST_MEAN:
            means[c] = 0.0
    for k in range(len(indices)):
        j = indices[k]
        c = labels[j]
        here, last = slots[j], starts[c] + left[c] - 1
        if touched[k] and here <= last:  # of duplicates the first
            other = members[last]
            members[here], slots[other] = other, here
            members[last], slots[j] = j, last
            left[c] -= 1
    for k in range(len(indices)):
        if touched[k]:
            c = labels[indices[k]]
            _write(known, c, left[c] * np.sqrt(means[c]))
            if new[(len(new) >> 1) + c] > 0.0:
                _write(new, c, 0.0)


@kernel
def _draw_into(
    u: Floats,
    before: float,
    total: float,
    order: NDArray[Any],
    begin: int,
    scale: float,
    share: float,
    starts: Indices,
    left: Indices,
    members: NDArray[Any],
    means: Floats,
    fresh: Floats,
    known: Floats,
    new: Floats,
    labels: Numbers,
    draws: Floats,
    indices: Indices,
    ratios: Floats,
) -> None:
    count = len(order) - begin
    if count == 0:
        return
    fresh_root = np.sqrt(fresh[0])
    roots = known[1] + fresh_root * new[1]
    for k in range(len(u)):
        wanted = u[k] * total - before
        if wanted < 0.0:
            continue
        if wanted < share * count or scale * roots == 0.0:
            position = begin + int(min(wanted / share, count - 1.0))
            j = order[position] ^ position
            c = labels[j]
        else:
            wanted = (wanted - share * count) / scale
            if (wanted < known[1] and known[1] > 0.0) or fresh_root * new[1] == 0.0:
                c, rest = _find(known, wanted)
                rest /= np.sqrt(means[c])
            else:
                c, rest = _find(new, (wanted - known[1]) / fresh_root)
            j = members[starts[c] + int(max(min(rest, left[c] - 1.0), 0.0))]
        indices[k] = j
        ratios[k] = scale * _root(c, means, draws, fresh) + share


@kernel
def _ratios_into(
    labels: Numbers,
    starts: Indices,
    left: Indices,
    slots: NDArray[Any],
    means: Floats,
    draws: Floats,
    fresh: Floats,
    indices: Indices,
    scale: float,
    share: float,
    ratios: Floats,
) -> None:
    for k in range(len(indices)):
        c = labels[indices[k]]
        if slots[indices[k]] - starts[c] < left[c]:
            ratios[k] = scale * _root(c, means, draws, fresh) + share


@kernel
def _spread(
    left: Indices, means: Floats, draws: Floats, fresh: Floats, scale: float, share: float
) -> tuple[float, float]:
    squares, r_log_r = 0.0, 0.0
    for c in range(len(left)):
        if left[c] > 0:
            r = scale * _root(c, means, draws, fresh) + share
            squares += left[c] * r * r
            r_log_r += left[c] * r * np.log(r)
    return squares, r_log_r


@kernel
def _take_members(
    labels: Numbers,
    starts: Indices,
    left: Indices,
    members: NDArray[Any],
    slots: NDArray[Any],
    unseen: NDArray[Any],
) -> int:
    """Find the slot of each member; or return the first position where there must be another."""
    slots[:] = -1
    for c in range(len(left)):
        for i in range(starts[c], starts[c + 1]):
            j = members[i]
            if not 0 <= j < len(labels) or labels[j] != c or slots[j] != -1:
                return i
            slots[j] = i
    for j in unseen:
        if slots[j] - starts[labels[j]] >= left[labels[j]]:
            return int(slots[j])
    return -1
