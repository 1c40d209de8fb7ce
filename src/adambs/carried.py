"""Carried: a draw as tensors inside a batch, for frameworks that pass batches on."""

from typing import Any, NamedTuple

import torch

from adambs import _check
from adambs.cap import capped_shares

HALF = (torch.float16, torch.bfloat16)
"""Too coarse to add up losses in."""

# Set on the number of a draw whose weights the cap was applied to.
_CAPPED = "adambs_capped"


class Carried(NamedTuple):
    """A draw inside a batch: five tensors with one entry for each example, wherever the batch goes."""

    number: torch.Tensor
    """The draw's number, repeated: ``sampler.update`` takes it in the place of the draw."""
    indices: torch.Tensor
    """Which examples of the data set."""
    weights: torch.Tensor
    """1/(n p) as float32, times ``units``."""
    limits: torch.Tensor
    """What weight x score may be where :meth:`mean` is given scores, times ``units``; infinite: no cap."""
    units: torch.Tensor
    """One; in unequal parts of a batch such that the mean of the parts' means is the batch's."""

    def mean(self, losses: torch.Tensor, scores: Any = None) -> torch.Tensor:
        """(1/K) sum_k losses[k] / (n p_k), as :meth:`Draw.mean`; with ``scores`` the sampler's cap holds."""
        _check.losses(losses, len(self.indices))
        losses = losses.float() if losses.dtype in HALF else losses
        weights = self.weights.to(losses) if scores is None else self.capped(scores).to(losses)
        return (losses * weights).mean()

    def capped(self, scores: Any) -> torch.Tensor:
        """The weights, lowered by the sampler's cap. The sampler is told with the number."""
        setattr(self.number, _CAPPED, True)  # the batch may have been taken apart, its tensors are the same
        return capped_shares(self.weights, scores, self.limits, self.units)


def was_capped(number: Any) -> bool:
    """Whether the cap was applied to the weights of the draw whose carried number this is."""
    return bool(getattr(number, _CAPPED, False))
