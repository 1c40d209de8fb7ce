"""Per-example scores: the gradient norms that the bandit learns from.

`cross_entropy`, `binary_cross_entropy_with_logits`, `mse_loss` and `output_norms` are the bound at
the model's output; `ExactNorms` is the norm of the whole gradient. All return detached tensors of
shape (K,). `causal_lm` returns the losses of a language model with them. `forward_only` is for looks,
which score examples before they are drawn.
"""

from .exact import ExactNorms
from .forward import forward_only
from .output import binary_cross_entropy_with_logits, cross_entropy, mse_loss, output_norms
from .text import TokenLosses, causal_lm

__all__ = [
    "ExactNorms",
    "TokenLosses",
    "binary_cross_entropy_with_logits",
    "causal_lm",
    "cross_entropy",
    "forward_only",
    "mse_loss",
    "output_norms",
]
