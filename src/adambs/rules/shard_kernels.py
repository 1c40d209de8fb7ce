"""Kernels of :mod:`adambs.rules.sharded`: as those of ``calibrated``, for scores of examples elsewhere."""

import numpy as np
from numpy.typing import NDArray

from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.rules.grouping import LAST

FROM_A_PASS = 255
"""In the place of a group: drawn from a reshuffled pass, with a ratio of one."""

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
def add_up(sizes: Indices) -> Indices:
    """How many members each group has in all shards."""
    totals = np.zeros(sizes.shape[1], np.int64)
    for v in range(sizes.shape[0]):
        for g in range(sizes.shape[1]):
            totals[g] += sizes[v, g]
    return totals


@kernel
def masses_of(sizes: Indices, group_ratios: Floats) -> Floats:
    """n times the probability of each shard. Added up in the same order on every processor."""
    masses = np.zeros(sizes.shape[0])
    for v in range(sizes.shape[0]):
        for g in range(sizes.shape[1]):
            masses[v] += sizes[v, g] * group_ratios[g]
    return masses


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
