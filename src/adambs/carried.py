"""Carried: a draw as tensors inside a batch, for frameworks that pass batches on."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from adambs import _check
from adambs.shares import capped_shares

HALF = (torch.float16, torch.bfloat16)
"""Too coarse to add up losses in."""

# Set on the number of a draw whose weights the cap was applied to.
_CAPPED = "adambs_capped"

# Set on the number of a draw: True once its weights may have been used, False as long as they were not. It is
# missing from a number that did not come out of a Carried: whoever has that may have the weights as well.
_WEIGHTED = "adambs_weighted"


class _Entries(NamedTuple):
    number: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor
    limits: torch.Tensor
    units: torch.Tensor


class Carried(_Entries):
    """A draw inside a batch: five tensors with one entry for each example, wherever the batch goes.

    ``indices`` are examples of the data set. ``limits`` is what weight x score may be where :meth:`mean` is
    given scores, times ``units``; infinite: no cap. ``units`` are one; in unequal parts of a batch such that
    the mean of the parts' means is the batch's.
    """

    # What is asked for is noted on the number, so that a loop without weights can be told. Where that is not
    # certain, as when all five are taken apart, the weights count as used: a warning to somebody who is right
    # is worse than none. Trainers take batches apart to move them: an adapter says when that is over.

    __slots__ = ()

    @property
    def number(self) -> torch.Tensor:
        """The draw's number, repeated: ``sampler.update`` takes it in the place of the draw."""
        number = _entry(self, 0)
        if not hasattr(number, _WEIGHTED):
            setattr(number, _WEIGHTED, False)
        return number

    @property
    def weights(self) -> torch.Tensor:
        """1/(n p) as float32, times ``units``."""
        self.lies_open()
        return _entry(self, 2)

    def __getitem__(self, which: Any) -> Any:
        self.lies_open()
        return tuple.__getitem__(self, which)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.lies_open()
        return tuple.__iter__(self)

    def lies_open(self) -> None:
        """The weights may be used by hand, where nobody sees it."""
        setattr(_entry(self, 0), _WEIGHTED, True)

    def handed_over(self) -> None:
        """It was the trainer that took it apart; from now on it is the user."""
        setattr(_entry(self, 0), _WEIGHTED, False)

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


def _entry(carried: Carried, which: int) -> torch.Tensor:
    """One of the five tensors, without a note."""
    entry: torch.Tensor = tuple.__getitem__(carried, which)
    return entry


def was_capped(number: Any) -> bool:
    """Whether the cap was applied to the weights of the draw whose carried number this is."""
    return bool(getattr(number, _CAPPED, False))


def tells_of_weights(number: Any) -> bool:
    """Whether this number came out of a :class:`Carried`, so that :func:`was_weighted` is certain."""
    return hasattr(number, _WEIGHTED)


def was_weighted(number: Any) -> bool:
    """Whether the weights of the draw whose carried number this is were used, or may have been."""
    return bool(getattr(number, _WEIGHTED, True))
