"""What a sampler counts, and what it says of itself."""

import math
from dataclasses import dataclass, fields
from typing import Any

from adambs import _check
from adambs._types import State
from adambs.candidates import Candidates
from adambs.cap import Cap
from adambs.moments import SecondMoments
from adambs.rules.base import Rule

_NAMES = ("draws", "updates", "scores", "clipped", "looks", "reshuffled")


@dataclass(frozen=True)
class Diagnostics:
    """What the distribution looks like and what it is worth."""

    draws: int
    """Batches drawn."""
    updates: int
    """Batches whose scores came back."""
    effective_sample_size: float
    """1 / sum p^2: how many examples p is spread over; n when uniform."""
    entropy: float
    """-sum p log p, in nats; log n when uniform."""
    variance_reduction: float
    """Running estimate of n sum s^2 / (sum s^2 / p): how many times smaller than under uniform sampling
    is the second moment of the gradient estimate, which the paper minimises. Above 1, p helps. NaN before
    the first positive score. It is that of single draws: that a choice among candidates takes nobody twice
    lowers the variance further, which this does not see."""
    scores: int
    """Scores seen."""
    clipped_scores: int
    """Scores above the rule's bound L."""
    looks: int
    """Batches that were chosen among candidates."""
    reshuffled: int
    """Batches from a reshuffled pass, while p did not pay."""
    tau: float
    """Running estimate of how much scores scatter around p: what a look would win. See
    :class:`Candidates`."""
    capped_weights: int
    """Weights that ``draw.mean(losses, scores)`` has lowered; see :class:`adambs.cap.Cap`."""
    capped_share: float
    """What that took away of the sum of all weight x score: the bias, as a share of the gradient's length at
    most."""

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """A flat dict for loggers; what is not known yet (NaN) is left out."""
        found = {prefix + field.name: float(getattr(self, field.name)) for field in fields(self)}
        return {name: value for name, value in found.items() if math.isfinite(value)}


class Counters:
    """How often what has happened, and the second moments of the batches that were trained on."""

    def __init__(self) -> None:
        self.draws = self.updates = self.scores = self.clipped = self.looks = self.reshuffled = 0
        self.trained = SecondMoments()

    def state_dict(self) -> dict[str, Any]:
        """The counts and the moments."""
        return {name: getattr(self, name) for name in _NAMES} | {"trained": self.trained.state_dict()}

    def with_state(self, state: State) -> "Counters":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        new = Counters()
        for name in _NAMES:
            setattr(new, name, _check.count(state, name))
        new.trained = self.trained.with_state(_check.mapping(state, "trained"))
        return new


def diagnose(n: int, counters: Counters, rule: Rule, candidates: Candidates, cap: Cap) -> Diagnostics:
    """Put together what the parts know. As cheap as ``rule.spread()``."""
    mean_square, mean_log = rule.spread()
    return Diagnostics(
        draws=counters.draws,
        updates=counters.updates,
        effective_sample_size=n / mean_square,
        entropy=math.log(n) - mean_log,
        variance_reduction=counters.trained.reduction,
        scores=counters.scores,
        clipped_scores=counters.clipped,
        looks=counters.looks,
        reshuffled=counters.reshuffled,
        tau=candidates.tau,
        capped_weights=cap.capped,
        capped_share=cap.taken,
    )
