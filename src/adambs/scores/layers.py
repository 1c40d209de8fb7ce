"""The algebra of feed-forward layers: from input x and output gradient d to each parameter's piece.

Every function takes a `Use` and returns the pieces of `pieces.py` by parameter name. Names of
frozen parameters may be among them; the caller leaves them aside.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ._use import Use
from .pieces import Dense, Outer, Piece, Rows


def linear(use: Use) -> dict[str, Piece]:
    """y_t = W x_t + b for all positions t:  W: Σ_t d_t ⊗ x_t,  b: Σ_t d_t."""
    x, d = use.x, use.d
    use.batched(x, max(2, x.dim()))
    x = x.reshape(len(x), -1, x.shape[-1])
    d = d.reshape(len(d), -1, d.shape[-1])
    return {"weight": Outer(d.mT.unsqueeze(1), x.mT.unsqueeze(1)), "bias": Dense(d.sum(1))}


def embedding(use: Use) -> dict[str, Piece]:
    """y_t = W[x_t]:  row x_t of W gets d_t, unless x_t is the padding."""
    module = use.module
    assert isinstance(module, nn.Embedding)
    index, d = use.x, use.d
    use.batched(index, max(1, index.dim()))
    index = index.reshape(len(index), -1)
    d = d.reshape(len(d), -1, d.shape[-1])
    if module.padding_idx is not None:
        d = d * (index != module.padding_idx).unsqueeze(2)
    return {"weight": Rows(index.long(), d, module.num_embeddings)}


def convolution(use: Use) -> dict[str, Piece]:
    """A Linear on the windows: y_t = W window_t + b at every position t, in each group apart."""
    module = use.module
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    d = use.d.flatten(2)  # (K, out, T)
    pieces: dict[str, Piece] = {"bias": Dense(d.sum(2))}
    if "weight" in use.names:
        x = use.batched(use.x, 2 + len(module.kernel_size))
        left = d.reshape(len(d), module.groups, -1, d.shape[2])
        pieces["weight"] = Outer(left, _windows(x, module))
    return pieces


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


def layer_norm(use: Use) -> dict[str, Piece]:
    """y = W x̂ + b, x̂ the normalised input:  W: Σ d x̂,  b: Σ d, over the positions."""
    module = use.module
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    shape = module.normalized_shape
    x = use.batched(use.x, max(1 + len(shape), use.x.dim()))
    if isinstance(module, nn.LayerNorm):
        unit = F.layer_norm(x, shape, eps=module.eps)
    else:
        unit = F.rms_norm(x, shape, eps=module.eps)
    positions = tuple(range(1, x.dim() - len(shape)))
    return _scale_and_shift(use.d, unit, positions)


def group_norm(use: Use) -> dict[str, Piece]:
    """As layer_norm, with one scale and shift for each channel (dimension 1)."""
    module = use.module
    assert isinstance(module, nn.GroupNorm)
    x = use.x
    unit = F.group_norm(x, module.num_groups, eps=module.eps)
    return _scale_and_shift(use.d, unit, tuple(range(2, x.dim())))


_CHANNEL_NORM_DIMS: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}


def channel_norm(use: Use) -> dict[str, Piece]:
    """InstanceNorm, and BatchNorm by its running statistics: as group_norm."""
    module = use.module
    assert isinstance(module, nn.modules.batchnorm._NormBase)
    x = use.x
    use.batched(x, _CHANNEL_NORM_DIMS.get(type(module), x.dim()))
    mean, var = module.running_mean, module.running_var
    if mean is None or var is None or module.training:  # InstanceNorm: of this very instance
        unit = F.instance_norm(x, eps=module.eps)
    else:
        shape = (-1, *[1] * (x.dim() - 2))
        unit = (x - mean.view(shape)) * (var + module.eps).rsqrt().view(shape)
    return _scale_and_shift(use.d, unit, tuple(range(2, x.dim())))


def _scale_and_shift(d: Tensor, unit: Tensor, positions: tuple[int, ...]) -> dict[str, Piece]:
    scale, shift = d * unit, d
    if positions:
        scale, shift = scale.sum(positions), shift.sum(positions)
    return {"weight": Dense(scale), "bias": Dense(shift)}
