"""One recorded call of a module: what a layer's formula computes the gradients from."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .weighting import wide


@dataclass(frozen=True)
class RecordedCall:
    """A module's recorded inputs, and the gradients that came back to its outputs."""

    label: str  # for messages: 'encoder.conv (Conv2d)'
    module: nn.Module
    names: frozenset[str]  # the trainable parameters, by their name in the module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grads: tuple[Tensor | None, ...]  # one for each leaf of the output; None where unused

    @property
    def x(self) -> Tensor:
        """The input."""
        x = self.args[0] if self.args else self.kwargs["input"]
        assert isinstance(x, Tensor)
        return wide(x)

    @property
    def d(self) -> Tensor:
        """The gradient at the only output."""
        [grad] = self.grads
        assert grad is not None
        return wide(grad)

    def batched(self, x: Tensor, dim: int) -> Tensor:
        """Return x if it has the number of dimensions that a batch has."""
        if x.dim() != dim:
            raise ValueError(
                f"{self.label} got an input of shape {tuple(x.shape)}, without a batch dimension: "
                "per-example gradients need one, the first"
            )
        return x
