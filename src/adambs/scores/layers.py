"""The formulas of feed-forward layers: from input x and output gradient d to each parameter's gradients.

Every function takes a `RecordedCall` and returns the forms of `gradients.py` by parameter name. Names of
frozen parameters may be among them; the caller leaves them aside.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .gradients import Dense, Gradients, OuterProducts, TableRows
from .recorded import RecordedCall


def linear(call: RecordedCall) -> dict[str, Gradients]:
    """y_t = W x_t + b for all positions t:  W: Σ_t d_t ⊗ x_t,  b: Σ_t d_t."""
    x, d = call.x, call.d
    call.batched(x, max(2, x.dim()))
    x = x.reshape(len(x), -1, x.shape[-1])
    d = d.reshape(len(d), -1, d.shape[-1])
    return {"weight": OuterProducts(d.mT.unsqueeze(1), x.mT.unsqueeze(1)), "bias": Dense(d.sum(1))}


def transposed_linear(call: RecordedCall) -> dict[str, Gradients]:
    """y_t = x_t W + b, as GPT-2 has it:  W: Σ_t x_t ⊗ d_t,  b: Σ_t d_t."""
    found = linear(call)
    weight = found["weight"]
    assert isinstance(weight, OuterProducts)
    return {**found, "weight": OuterProducts(weight.right, weight.left)}


def embedding(call: RecordedCall) -> dict[str, Gradients]:
    """y_t = W[x_t]:  row x_t of W gets d_t, unless x_t is the padding."""
    module = call.module
    assert isinstance(module, nn.Embedding)
    index, d = call.x, call.d
    call.batched(index, max(1, index.dim()))
    index = index.reshape(len(index), -1)
    d = d.reshape(len(d), -1, d.shape[-1])
    if module.padding_idx is not None:
        d = d * (index != module.padding_idx).unsqueeze(2)
    return {"weight": TableRows(index.long(), d, module.num_embeddings)}


def convolution(call: RecordedCall) -> dict[str, Gradients]:
    """A Linear on the windows: y_t = W window_t + b at every position t, in each group apart."""
    module = call.module
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    d = call.d.flatten(2)  # (K, out, T)
    found: dict[str, Gradients] = {"bias": Dense(d.sum(2))}
    if "weight" in call.names:
        x = call.batched(call.x, 2 + len(module.kernel_size))
        left = d.reshape(len(d), module.groups, -1, d.shape[2])
        found["weight"] = OuterProducts(left, _windows(x, module))
    return found


def _windows(x: Tensor, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Tensor:
    """View x as (K, group, channel, *kernel, *positions): what each output position sees."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padding = _padding(module)
    if any(padding):
        x = F.pad(x, padding, mode=mode)
    n = len(module.kernel_size)
    for axis in range(n):
        dilation = module.dilation[axis]
        span = dilation * (module.kernel_size[axis] - 1) + 1
        x = x.unfold(2 + axis, span, module.stride[axis])[..., ::dilation]
    x = x.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
    return x.view(len(x), module.groups, -1, *x.shape[2:])


def _padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """Return the padding in F.pad's order: last axis first, before and after."""
    padding = module.padding
    sides: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):
        if padding == "valid":
            sides += [0, 0]
        elif padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [int(padding[axis])] * 2
    return sides


def layer_norm(call: RecordedCall) -> dict[str, Gradients]:
    """y = W x̂ + b, x̂ the normalised input:  W: Σ d x̂,  b: Σ d, over the positions."""
    module = call.module
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    shape = module.normalized_shape
    x = call.batched(call.x, max(1 + len(shape), call.x.dim()))
    if isinstance(module, nn.LayerNorm):
        unit = F.layer_norm(x, shape, eps=module.eps)
    else:
        unit = F.rms_norm(x, shape, eps=module.eps)
    positions = tuple(range(1, x.dim() - len(shape)))
    return _scale_and_shift(call.d, unit, positions)


def group_norm(call: RecordedCall) -> dict[str, Gradients]:
    """As layer_norm, with one scale and shift for each channel (dimension 1)."""
    module = call.module
    assert isinstance(module, nn.GroupNorm)
    x = call.x
    unit = F.group_norm(x, module.num_groups, eps=module.eps)
    return _scale_and_shift(call.d, unit, tuple(range(2, x.dim())))


_CHANNEL_NORM_DIMS: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}


def channel_norm(call: RecordedCall) -> dict[str, Gradients]:
    """InstanceNorm, and BatchNorm by its running statistics: as group_norm."""
    module = call.module
    assert isinstance(module, nn.modules.batchnorm._NormBase)
    x = call.x
    call.batched(x, _CHANNEL_NORM_DIMS.get(type(module), x.dim()))
    mean, var = module.running_mean, module.running_var
    if mean is None or var is None or module.training:  # InstanceNorm: of this very instance
        unit = F.instance_norm(x, eps=module.eps)
    else:
        shape = (-1, *[1] * (x.dim() - 2))
        unit = (x - mean.view(shape)) * (var + module.eps).rsqrt().view(shape)
    return _scale_and_shift(call.d, unit, tuple(range(2, x.dim())))


def _scale_and_shift(d: Tensor, unit: Tensor, positions: tuple[int, ...]) -> dict[str, Gradients]:
    scale, shift = d * unit, d
    if positions:
        scale, shift = scale.sum(positions), shift.sum(positions)
    return {"weight": Dense(scale), "bias": Dense(shift)}
