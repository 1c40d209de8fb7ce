"""The gate: whether p is worth drawing from."""

import math
from typing import Any

from adambs import _check
from adambs._types import Floats, State
from adambs.moments import SecondMoments, second_moments


class Gate:
    """Open while p lowers the second moment of the gradient enough; closed, batches are reshuffled ones.

    It is asked only where no reshuffled pass is under way: a pass that is left half way would bias the
    gradient (see :class:`adambs.proposals.Passes`). So once closed it stays so for a whole pass. That it
    does not close for a moment's noise, it opens above ``threshold`` and closes below its square root.

    Where p can learn in the first epoch, as it can from a context, the gate begins open and is open for so
    many decisions as an epoch has batches, whatever the estimate is: a pass would have taken as long. Draws
    from p are unbiased whenever they end, so this biases nothing.

    Args:
        threshold: what p must lower the second moment by; 0 is a gate that is always open.
        head_start: for so many decisions it is open in any case.
    """

    def __init__(self, threshold: float, head_start: int = 0) -> None:
        self.threshold = _check.at_least("gate", threshold, 0.0)
        self.moments = SecondMoments()
        self.head_start = 0 if threshold == 0 else head_start
        self.open = threshold == 0 or head_start > 0

    def decide(self) -> bool:
        """Whether to draw from p now."""
        if self.head_start > 0:
            self.head_start -= 1
        elif self.threshold > 0:
            bar = min(self.threshold, math.sqrt(self.threshold)) if self.open else self.threshold
            uniform, ours = self.moments.means
            self.open = uniform > bar * ours
        return self.open

    def learn(self, drawn: Floats, ratios: Floats, scores: Floats, limit: float = math.inf) -> None:
        """From scores of examples that were drawn with ``drawn``, when p is ``ratios``. O(K).

        ``limit`` is that of weight x score: a surprise does not close the gate if it cannot throw the model.
        """
        self.moments.mix(*second_moments(drawn, ratios, scores, limit))

    def state_dict(self) -> dict[str, Any]:
        """The moments, whether it is open, and for how many decisions in any case."""
        return {**self.moments.state_dict(), "open": self.open, "head_start": self.head_start}

    def with_state(self, state: State) -> "Gate":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        gate = Gate(self.threshold)
        gate.moments = self.moments.with_state(state)
        gate.open = _check.flag(state, "open")
        gate.head_start = _check.count(state, "head_start")
        return gate

    def __repr__(self) -> str:
        return f"Gate({self.threshold}, {'open' if self.open else 'closed'})"
