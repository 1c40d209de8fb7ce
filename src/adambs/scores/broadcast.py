"""Lookups that a model makes once for the whole batch, as BERT and GPT-2 do for positions.

Their output has a first dimension of one and is broadcast when it is added to the rest, so that the gradient
that comes back is the sum over the batch. Repeated for each example before that, it comes back apart.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def batch_size(inputs: Any) -> int | None:
    """Return the first dimension that all tensors among a model's inputs share; None if they do not."""
    lengths = {len(v) for v in tree_leaves(inputs) if isinstance(v, Tensor) and v.dim() > 0}
    return lengths.pop() if len(lengths) == 1 else None


def for_each_example(
    module: nn.Module, K: int | None, args: tuple[Any, ...], outputs: list[Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """Return an Embedding's input and output of first dimension one as K rows (a view), all else as it is.

    Only where the input has two dimensions or more: of one, it may be a single example's.
    """
    single = isinstance(module, nn.Embedding) and len(args) == 1 and args[0].dim() > 1 and len(args[0]) == 1
    if not single or K is None or K == 1:
        return args, outputs
    return tuple(v.expand(K, *v.shape[1:]) for v in args), [v.expand(K, *v.shape[1:]) for v in outputs]
