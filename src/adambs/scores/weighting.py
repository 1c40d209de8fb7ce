"""What a score needs to know of a draw, and how a recorded gradient is freed of its weight."""

import math
from typing import Protocol

import torch
from torch import Tensor

from adambs.carried import Carried
from adambs.draw import Draw


class HasWeights(Protocol):
    """A draw, seen from here: one importance weight w_k = 1 / (n p_k) > 0 per drawn example."""

    @property
    def weights(self) -> Tensor:
        """Shape (K,)."""
        ...


def coefficients(draw: HasWeights, scale: float) -> Tensor:
    """Return c_k = scale w_k / K: what `(scale * draw.mean(losses)).backward()` multiplies each
    example's own gradient by."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale!r}: scaler.get_scale()")
    if isinstance(draw, Draw):
        if draw.capped and draw.limit < math.inf:
            raise ValueError(
                "draw.mean was given scores, so its cap may have lowered weights, and gradients of single "
                "examples cannot be told from that: call draw.mean(losses) without scores"
            )
        # Not by its weights: who asks for those counts as somebody who trains with them.
        return torch.from_numpy(draw._coefficients()) * scale
    weights = tuple.__getitem__(draw, 2) if isinstance(draw, Carried) else draw.weights
    return weights.detach().to(torch.float64) * (scale / len(weights))


def beside(c: Tensor, norms: Tensor) -> Tensor:
    """Return the host's coefficients in the dtype and on the device of the norms, without a wait.

    CUDA copies pageable memory before the call returns, so that c may be freed at once. MPS does not: there
    it is the copy that waits, or c would be garbage (pytorch issue 189690).
    """
    return c.to(norms, non_blocking=norms.device.type != "mps")


def wide(tensor: Tensor) -> Tensor:
    """Return a detached tensor of float32 or wider; half and bfloat16 have no room for squares."""
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().float() if narrow else tensor.detach()
