"""Rules: how feedback changes the weights. Each rule is one class; :class:`Rule` says what it owes."""

from adambs.rules.base import Rule
from adambs.rules.exp3 import Exp3
from adambs.rules.tracking import Tracking
from adambs.rules.uniform import Uniform
from adambs.rules.vrb import VRB

__all__ = ["VRB", "Exp3", "Rule", "Tracking", "Uniform"]
