"""Carried: a draw as tensors that travel inside a batch."""

from typing import NamedTuple

import torch

from adambs import _check

HALF = (torch.float16, torch.bfloat16)


class Carried(NamedTuple):
    """A draw inside a batch: three tensors with one entry for each example, wherever the batch goes."""

    number: torch.Tensor
    """The draw's number, repeated: ``sampler.update`` takes it in the place of the draw."""
    indices: torch.Tensor
    """Which examples of the data set."""
    weights: torch.Tensor
    """1/(n p) as float32; in unequal parts of a batch scaled so that the mean of means is the batch's."""

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """(1/K) sum_k losses[k] / (n p_k), as :meth:`Draw.mean`."""
        _check.losses(losses, len(self.indices))
        losses = losses.float() if losses.dtype in HALF else losses
        return (losses * self.weights.to(losses)).mean()
