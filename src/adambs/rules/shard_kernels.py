"""Kernels of :mod:`adambs.rules.sharded`: as those of ``calibrated``, for scores of examples elsewhere."""

import numpy as np
from numpy.typing import NDArray

from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.rules.calibrated import _LARGEST, _LOWEST, _PER_OCTAVE, _SCORED, _SMALLEST_MEAN, Numbers

FROM_A_PASS = 255
"""In the place of a group: drawn from a reshuffled pass, with a ratio of one."""

LAST = 128
"""Marks the last of an example's places in a batch; groups are below."""
GROUP = 127

Bytes = NDArray[np.uint8]


@kernel
def ratios_of(groups: Bytes, group_ratios: Floats) -> Floats:
    """The ratio of each group; of an example from a pass, one."""
    ratios = np.ones(len(groups))
    for k in range(len(groups)):
        if groups[k] != FROM_A_PASS:
            ratios[k] = group_ratios[groups[k]]
    return ratios


@kernel
def add_up(sizes: Indices, bounds: Indices) -> None:
    """Where each group begins if all shards are one."""
    for g in range(sizes.shape[1]):
        bounds[g + 1] = bounds[g]
        for v in range(sizes.shape[0]):
            bounds[g + 1] += sizes[v, g]


@kernel
def masses_of(sizes: Indices, group_ratios: Floats) -> Floats:
    """n times the probability of each shard. Added up in the same order on every processor."""
    masses = np.zeros(sizes.shape[0])
    for v in range(sizes.shape[0]):
        for g in range(sizes.shape[1]):
            masses[v] += sizes[v, g] * group_ratios[g]
    return masses


@kernel
def groups_at(place: Numbers, bounds: Indices, indices: Indices, first: int) -> Bytes:
    """The last group that begins at or before the place of each example."""
    groups = np.empty(len(indices), np.uint8)
    for k in range(len(indices)):
        j = indices[k] - first
        groups[k] = np.searchsorted(bounds, place[j] ^ j, side="right") - 1
    return groups


@kernel
def told(indices: Indices, groups: Bytes, drawn: Bytes) -> Bytes:
    """Groups, marked where an example has its last place in the batch, and the groups drawn from."""
    rows = np.empty((len(indices), 2), np.uint8)
    order = np.argsort(indices, kind="mergesort")  # stable: of equal ones the last is the last place
    for k in range(len(order)):
        i = order[k]
        last = k + 1 == len(order) or indices[order[k + 1]] != indices[i]
        rows[i, 0] = groups[i] | LAST if last else groups[i]
        rows[i, 1] = drawn[i]
    return rows


@kernel
def absorb(
    scores: Floats,
    told: Bytes,
    counts: Indices,
    sizes: Indices,
    means: Floats,
    draws: Floats,
    unit: float,
    memory: float,
) -> Indices:
    """Blend the squared scores into the means of their groups, and count who moves where.

    Returns the group of each score. Of an example that is in a batch twice the last place counts.
    """
    targets = np.empty(len(scores), np.int64)
    v, end = -1, 0
    for k in range(len(scores)):
        while k >= end:
            v += 1
            end += counts[v]
        g = told[k, 0] & GROUP
        known = min(scores[k] / unit, _LARGEST) if unit > 0.0 else 0.0
        draws[g] = min(draws[g] + 1.0, memory)
        means[g] += (known * known - means[g]) / max(draws[g], 1.0)
        if means[g] < _SMALLEST_MEAN:
            means[g] = 0.0
        targets[k] = 0
        if known > 0.0:
            octave_thirds = np.floor(_PER_OCTAVE * np.log2(known))
            targets[k] = int(min(max(octave_thirds - _LOWEST, 0.0), _SCORED - 1.0))
        if told[k, 0] & LAST:
            sizes[v, g] -= 1
            sizes[v, targets[k]] += 1
    return targets
