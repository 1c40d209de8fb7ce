"""Trees of n weights, to draw from in proportion to weight in O(log n).

:class:`SumTree` holds the weights as they are; :class:`LastingFloor` and :class:`PassingFloor` hold them
above a floor that moves with every step.
"""

from adambs.trees.lasting_floor import LastingFloor
from adambs.trees.passing_floor import PassingFloor
from adambs.trees.sum_tree import SumTree

__all__ = ["LastingFloor", "PassingFloor", "SumTree"]
