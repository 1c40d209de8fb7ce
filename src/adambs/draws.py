"""Draw: one mini-batch with the p it was drawn with; Epoch: the draws that a loader has on their way."""

from collections import deque
from dataclasses import dataclass, field

import torch

from adambs._types import Floats, Indices


class Draw:
    """K examples drawn from p, and the probabilities with which they were drawn.

    The probabilities are those of the time of drawing and never change: they make the estimate unbiased
    however late the batch is used.
    """

    __slots__ = ("_indices", "_learned", "_owner", "_p_ratios", "_ratios", "correction", "n")

    def __init__(
        self,
        indices: Indices,
        ratios: Floats,
        n: int,
        owner: str,
        *,
        correction: float = 1.0,
        p_ratios: Floats | None = None,
        learned: bool = False,
    ) -> None:
        self._indices = indices
        self._ratios = ratios  # n times the probability of being drawn, see Rule
        self._p_ratios = ratios if p_ratios is None else p_ratios  # n p_j, before a choice among candidates
        self.n = n
        self._owner = owner
        self.correction = correction
        self._learned = learned  # its candidates' scores have taught the rule already

    @property
    def indices(self) -> torch.Tensor:
        """Which examples: int64, shape (K,), duplicates possible."""
        return torch.from_numpy(self._indices)

    @property
    def probabilities(self) -> torch.Tensor:
        """p_j of each drawn example: float64, shape (K,)."""
        return torch.from_numpy(self._ratios / self.n)

    @property
    def weights(self) -> torch.Tensor:
        """1/(n p_j) of each drawn example: float64, shape (K,).

        With a ``correction`` below one, (1/(n p_j))^correction, divided by their mean over the batch; a
        choice among candidates is always corrected in full.
        """
        weights = 1.0 / self._ratios
        if self.correction != 1.0:
            weights *= self._p_ratios ** (1.0 - self.correction)
            weights /= weights.mean()
        return torch.from_numpy(weights)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """(1/K) sum_k losses[k] / (n p_k), eq. (1): its gradient is the unbiased estimate G_hat.

        ``losses`` is one loss for each drawn example, in the order of the batch: ``reduction="none"``.
        """
        if not isinstance(losses, torch.Tensor):
            raise TypeError(f"losses must be a tensor, not {type(losses).__name__}")
        if losses.shape != (len(self),):
            reason = (
                'it looks reduced already; compute it with reduction="none"'
                if losses.ndim == 0
                else "reduce each example's losses to one number first, e.g. losses.flatten(1).mean(1)"
            )
            raise ValueError(
                f"losses must have shape ({len(self)},), one loss for each drawn example, "
                f"not {tuple(losses.shape)}: {reason}"
            )
        if not losses.is_floating_point():
            raise TypeError(f"losses must be floating point, not {losses.dtype}")
        if losses.dtype in (torch.float16, torch.bfloat16):
            losses = losses.float()
        return (losses * self.weights.to(losses)).mean()

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        return f"Draw({len(self)} of {self.n})"


@dataclass(eq=False)
class Epoch:
    """Where a loader stands in its epoch. Saved with the sampler, so that a run can stop anywhere."""

    number: int
    delivered: int = 0
    """Batches handed to the training loop."""
    ahead: deque[Draw] = field(default_factory=deque)
    """Draws whose batches are being prefetched, oldest first."""
    finished: bool = False

    def deliver(self) -> Draw:
        """The draw of the batch that arrives now."""
        self.delivered += 1
        return self.ahead.popleft()
