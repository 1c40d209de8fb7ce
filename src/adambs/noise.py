"""Whether noise is the limit: one call that splits a batch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from adambs import _check

# Below this the mean gradient is most of what a batch shows, and p can lower only the rest.
_LITTLE = 0.5


@dataclass(frozen=True)
class NoiseScale:
    """The two parts of a batch gradient's mean square: ‖G‖² of its mean, and E‖g - G‖² around it."""

    signal: float
    """‖G‖²; by chance below 0 if it drowns in the noise."""
    noise: float
    """E‖g - G‖², of batches as they were drawn: by p, with their weights."""

    @property
    def ratio(self) -> float:
        """Noise over signal; infinite if the signal drowns."""
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else math.inf

    @property
    def most(self) -> float:
        """By how much the mean square would fall if p took all of the noise away: no p can win more."""
        return 1.0 + self.ratio

    def worth(self, reduction: float) -> float:
        """By how much it falls if the noise is lowered by ``reduction``, or a batch grows so many times."""
        if math.isinf(self.ratio):
            return reduction
        return (1.0 + self.ratio) / (1.0 + self.ratio / reduction)

    def __add__(self, other: "NoiseScale") -> "NoiseScale":
        """Both together, the larger gradients counting more."""
        return NoiseScale(self.signal + other.signal, self.noise + other.noise)

    def __str__(self) -> str:
        if self.ratio < _LITTLE:
            return (
                f"noise is {self.ratio:.2g} of the signal: it is not the limit, and no p can lower the mean "
                f"square of the gradient by more than {self.most:.2f} times. Smaller batches may pay"
            )
        return f"noise is {self.ratio:.2g} times the signal: a better p, or a larger batch, can help"


def noise_scale(losses: torch.Tensor, parameters: Iterable[torch.Tensor], parts: int = 2) -> NoiseScale:
    """Signal and noise of the gradient of one batch, from the gradients of its parts.

    With g_1 ... g_b the gradients of b equal parts, ‖G‖² is the mean of g_i . g_j over i != j, and the rest
    of their mean square is the noise of a part: b times that of the batch. Without bias if the examples are
    drawn independently; a little too much noise if they are distinct or come from a pass.

    It costs b backward passes, so call it now and then: before ``backward()``, whose graph it leaves as it
    is. No gradient is written. One call is as noisy as one batch: add up some, ``a + b``, to
    believe it.

    (Nothing at a step tells it for free. Adam's m and v were tried on the digits: within a factor of two at
    most of the early steps, hundreds of times too much noise at one of them, and no signal at all later.)

    Args:
        losses: those of the batch, one an example, times the weights of its draw: ``losses * draw.weights``.
        parameters: of the model.
        parts: b; what does not divide by it is left out.
    """
    b = _check.whole("parts", parts, least=2)
    _check.losses(losses, len(losses) if isinstance(losses, torch.Tensor) and losses.ndim else 0)
    size = len(losses) // b
    if size == 0:
        raise ValueError(f"losses has {len(losses)} examples, too few for {b} parts: give a larger batch")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    squares, sums = 0.0, None
    for k in range(b):
        mean = losses[k * size : (k + 1) * size].mean()
        found = torch.autograd.grad(mean, trained, retain_graph=True, allow_unused=True)
        part = torch.cat([each.detach().double().flatten() for each in found if each is not None])
        squares += float(part.square().sum())
        sums = part if sums is None else sums + part
    assert sums is not None
    signal = (float(sums.square().sum()) - squares) / (b * (b - 1))
    return NoiseScale(signal, (squares / b - signal) / b)
