"""Any other module: run it again for each example, vectorised by torch.func.

Exact, but every per-example gradient is formed: K times the size of the module's own parameters.
A module that holds parameters beside child modules is run with its children's parameters fixed, for
they have gradients of their own.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .gradients import Dense, Gradients
from .recorded import RecordedCall
from .weighting import wide


def per_example(call: RecordedCall) -> dict[str, Gradients]:
    """A module whose inputs and outputs all have the batch as dimension 0; an input tensor of
    another length there is common to all examples."""
    K = next(len(grad) for grad in call.grads if grad is not None)
    leaves, _ = tree_flatten((call.args, call.kwargs))
    batched = [isinstance(v, Tensor) and v.dim() > 0 and len(v) == K for v in leaves]
    return _pull_back(call, [0 if b else None for b in batched], [0] * len(call.grads))


def attention(call: RecordedCall) -> dict[str, Gradients]:
    """nn.MultiheadAttention: the batch is dimension 0 or 1, and a mask may belong to all."""
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    signature = inspect.signature(nn.MultiheadAttention.forward)
    named = signature.bind(module, *call.args, **call.kwargs).arguments
    del named["self"]
    batch = 0 if module.batch_first else 1
    dims = dict.fromkeys(("query", "key", "value"), batch) | {"key_padding_mask": 0}
    mask = named.get("attn_mask")
    if named["query"].dim() != 3 or (mask is not None and mask.dim() != 2):
        raise ValueError(
            f"{call.label} needs inputs with a batch dimension, and an attn_mask of two dimensions "
            "(for a mask of each example's own use key_padding_mask)"
        )
    again = RecordedCall(call.label, module, call.names, (), dict(named), call.grads)
    in_dims = [dims.get(name) if isinstance(v, Tensor) else None for name, v in named.items()]
    return _pull_back(again, in_dims, [batch, 0][: len(call.grads)])


def _pull_back(
    call: RecordedCall, in_dims: Sequence[int | None], out_dims: Sequence[int]
) -> dict[str, Gradients]:
    """Return the vector-Jacobian product of each example's outputs with their gradients."""
    module = call.module
    inputs, spec = tree_flatten((call.args, call.kwargs))
    inputs = [wide(v) if isinstance(v, Tensor) else v for v in inputs]
    mapped = {n: dim for n, dim in enumerate(in_dims) if dim is not None}
    used = [n for n, grad in enumerate(call.grads) if grad is not None]
    # Names of one and the same parameter are kept apart, for a child's use is the child's to count.
    state = {n: wide(t) for n, t in module.named_parameters(remove_duplicate=False)}
    state |= {n: wide(t).clone() for n, t in module.named_buffers()}  # what changes is the copy
    moving = {n: state.pop(n) for n in call.names}

    def one(xs: list[Tensor], grads: tuple[Tensor, ...]) -> Any:
        def outputs(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
            filled = list(inputs)
            for (n, dim), x in zip(mapped.items(), xs, strict=True):
                filled[n] = x.unsqueeze(dim)
            args, kwargs = tree_unflatten(filled, spec)
            everything = {**state, **parameters}
            result = functional_call(module, everything, args, kwargs, tie_weights=False)
            leaves = tree_leaves(result)
            return tuple(leaves[n].squeeze(out_dims[n]) for n in used)

        return vjp(outputs, moving)[1](grads)[0]

    xs = [inputs[n] for n in mapped]
    grads = tuple(wide(grad) for grad in call.grads if grad is not None)
    over = (list(mapped.values()), tuple(out_dims[n] for n in used))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            found = vmap(one, in_dims=over)(xs, grads)
    except Exception as error:
        raise ValueError(
            f"{call.label} cannot be run for each example by torch.func, see the error above; move "
            f"its parameters ({', '.join(sorted(call.names))}) to a module that can, freeze them, "
            "or use the output bound"
        ) from error
    return {name: Dense(value) for name, value in found.items()}


def check(label: str, module: nn.Module, names: Sequence[str]) -> None:
    """Refuse a dropout in training mode: run again, it would draw another mask."""
    for child_name, child in module.named_modules():
        dropout = isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0
        attention = isinstance(child, nn.MultiheadAttention) and child.dropout > 0
        if child.training and (dropout or attention):
            inside = f" in {child_name!r}" if child_name else ""
            raise ValueError(
                f"{label} must be run again for the gradients of {', '.join(names)}, and its "
                f"dropout{inside} would draw another mask: set that dropout to 0, move the "
                "parameters to a module without dropout, or use the output bound"
            )
