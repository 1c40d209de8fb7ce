"""Rules: how p comes from feedback. Each rule is one class; :class:`Rule` says what it owes.

:class:`TreeRule` is a base for rules that keep one weight for each example.
"""

from adambs.rules.avare import Avare
from adambs.rules.base import Rule
from adambs.rules.calibrated import Calibrated
from adambs.rules.exp3 import Exp3
from adambs.rules.exp3m import Exp3M
from adambs.rules.release import Release
from adambs.rules.tracking import Tracking
from adambs.rules.tree_rule import TreeRule
from adambs.rules.uniform import Uniform
from adambs.rules.vrb import VRB

__all__ = [
    "VRB",
    "Avare",
    "Calibrated",
    "Exp3",
    "Exp3M",
    "Release",
    "Rule",
    "Tracking",
    "TreeRule",
    "Uniform",
]
