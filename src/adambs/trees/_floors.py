"""What the two trees with a floor have in common, apart from kernels: their shape, and the raised floor.

Nodes are numbered level by level, leaves first: ``starts[d]`` is the first node of level d, and node i of
level d has the children 16 i ... 16 i + 15 of the level below, as far as there are any. ``starts[-1]`` is
the number of all nodes, so the root is ``starts[-1] - 1``. What only inner nodes have is kept without room
for the leaves: node k has it at k - n.

Every inner node is a function of the weights below it, summed in one fixed order and never adjusted by a
difference. So nothing drifts, and a tree rebuilt from a checkpoint is the same to the last bit.
"""

import numpy as np

from adambs._types import Indices

# Far above the rounding of a total and far below anything that matters.
_RAISE = 1e-13

# What is left beside the floors is at least this: 1 - n p_min may round to zero if p_min n does to one.
SMALLEST_REST = 2.0**-60


def levels(n: int) -> Indices:
    """Where each level of a tree with n leaves starts, and the end. At least one level above the leaves."""
    starts, nodes = [0, n], n
    while nodes > 1 or len(starts) == 2:
        nodes = -(-nodes >> 4)
        starts.append(starts[-1] + nodes)
    return np.array(starts, np.int64)


def raised(p_min: float, n: int) -> float:
    """The p_min to solve for, so that p_j >= p_min holds as computed and not only in exact arithmetic.

    p_min itself has to move, not the floor that was found for it: with m examples at the floor, a floor that
    is 1e-13 too high raises their p by only (1 - m p_min) of that, since it raises the total as well. It
    never moves more than half the way to 1/n.
    """
    return min(p_min * (1.0 + _RAISE), 0.5 * (p_min + 1.0 / n))
