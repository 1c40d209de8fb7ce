"""What every rule owes the sampler."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices


class Rule(ABC):
    """How p comes from feedback, and how it is drawn from.

    A rule speaks in *ratios*, r_j = n p_j: how many times likelier than under uniform sampling an
    example is. The uniform distribution is r = 1 exactly, the unbiased weight of a drawn example is 1/r,
    and a floor p_min = c/n is simply r >= c.

    A sampler copies the rule it is given (``copy.copy``) and starts the copy, so one rule object can
    configure many samplers: everything that changes is made in :meth:`start`. For a rule with one weight for
    each example, :class:`adambs.rules.TreeRule` does most of this.
    """

    n: int
    batch_size: int
    distinct: ClassVar[bool] = False
    """Whether a batch has no example twice; r_j is then n/K times the probability that j is in it."""

    @abstractmethod
    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Begin with all n examples equal, or as ``initial_weights`` has them, which are not all zero."""

    def in_context(self, context: Any) -> "Rule":
        """A new rule with the same settings that groups unseen examples by their labels in ``context``."""
        raise TypeError(
            f"{type(self).__name__} has no use for a context: it does not tell unseen examples from others. "
            "Use Calibrated(), the default, or leave the context out"
        )

    @abstractmethod
    def draw(self, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles ``u`` in [0, 1], and their ratios: those of :meth:`ratios`."""

    @abstractmethod
    def ratios(self, indices: Indices | None = None) -> Floats:
        """r_j = n p_j of some examples, or of all. A new array."""

    @abstractmethod
    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Learn from the ``scores`` of examples that were drawn with ``ratios``.

        All three are checked: same length, scores finite and not negative, indices in range, duplicates
        allowed. Returns how many scores had to be clipped.
        """

    def observe(self, indices: Indices, scores: Floats) -> int:
        """Take scores that were computed for their own sake, not of a draw: the truth about ``indices``.

        For rules that remember a score for each example; one that learns from the odds of a draw alone
        cannot use them. Checked as in :meth:`update`; returns how many scores had to be clipped.
        """
        raise TypeError(
            f"{type(self).__name__} learns from draws alone and cannot take scores of other examples: "
            "use a rule that remembers scores, such as Tracking()"
        )

    def spread(self) -> tuple[float, float]:
        """The means over all examples of r^2 and of r log r, with 0 log 0 = 0. O(n) if not overridden.

        n / (mean of r^2) is the effective sample size 1 / sum p^2, and log n - (mean of r log r) the entropy.
        """
        return _spread(self.ratios())

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the rule was configured with: printed, saved, and compared when a state is loaded.

        Plain numbers and strings.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that changes, as tensors and plain numbers. A copy."""

    @abstractmethod
    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule like this one, in a state from :meth:`state_dict`, or ``ValueError``.

        This rule stays as it is, and the two share nothing that changes. It has been started.
        """

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value:.6g}"
            for name, value in self.settings().items()
        )
        return f"{type(self).__name__}({settings})"


def first_unit(scores: Floats) -> float:
    """The largest score, to measure later ones by; 0 if it is zero or subnormal, which tells nothing."""
    largest = float(scores.max(initial=0.0))
    return largest if largest >= _check.SMALLEST_NORMAL else 0.0


@kernel
def _spread(ratios: Floats) -> tuple[float, float]:
    """The means of r^2 and of r log r."""
    squares = 0.0
    r_log_r = 0.0
    for r in ratios:
        squares += r * r
        if r > 0.0:
            r_log_r += r * np.log(r)
    return squares / len(ratios), r_log_r / len(ratios)
