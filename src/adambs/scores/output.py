"""The output bound: the norm of each example's loss gradient at the model's output.

Katharopoulos & Fleuret (2018), 'Not all samples are created equal': up to a factor that is common
to all examples, it bounds the norm of the parameters' gradient, and it costs next to nothing.

The closed forms follow `torch.nn.functional`'s losses with `reduction="none"`; `output_norms` reads
the gradient that the training step's own backward pass left at the output, whatever the loss. On a
device nothing here reads a value, so the host never waits; on the CPU `on_cpu.py` does the same in
compiled loops.
"""

import torch
from torch import Tensor

from . import on_cpu
from .weighting import HasWeights, beside, coefficients, wide


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ‖∂loss_k/∂logits_k‖ for softmax cross-entropy; arguments as `F.cross_entropy`'s.

    Args:
        logits: (K, C).
        target: (K,) class indices, or (K, C) class probabilities.
        weight: (C,) weight of each class.
        ignore_index: Examples of this class index have loss and score 0.
        label_smoothing: In [0, 1]: the share of the target that is spread evenly over the classes.

    Returns:
        (K,) scores, at most √2 times the largest class weight. A class that does not exist is a
        ValueError on the CPU, and a NaN on a device, where looking would be a wait.
    """
    if weight is None and label_smoothing == 0.0 and on_cpu.usual(logits, target):
        return on_cpu.one_class_norms(logits, target, ignore_index)
    z = wide(logits)
    if z.dim() != 2:
        raise ValueError(
            f"logits must have shape (K, C), got {tuple(z.shape)}; for losses at many positions add up each "
            "example's over those that are not padding, and use output_norms"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if target.is_floating_point():
        return _mass_norms(z, _given_mass(z, target, label_smoothing), weight)
    if target.shape != z.shape[:1]:
        raise ValueError(f"target indices must have shape ({len(z)},), got {tuple(target.shape)}")
    plain = weight is None and label_smoothing == 0.0
    known = on_cpu.readable(logits, target)
    if known and plain:
        return on_cpu.one_class_norms(z.resolve_neg().contiguous(), target.long().contiguous(), ignore_index)
    if known:
        on_cpu.check_classes(target, ignore_index, z.shape[1])
    index = target.long().clamp(0, max(z.shape[1] - 1, 0)).unsqueeze(1)
    if plain:
        norms = _one_class_norms(z, index)
    else:
        norms = _mass_norms(z, _class_mass(z, index, label_smoothing), weight)
    if not known:
        # Raising would have to wait for the device. A NaN is refused, by the example's index, when the
        # scores reach the sampler.
        norms = norms.masked_fill((target < 0) | (target >= z.shape[1]), torch.nan)
    return norms.masked_fill(target == ignore_index, 0.0)


def _one_class_norms(z: Tensor, index: Tensor) -> Tensor:
    """The common case in half the operations: g_c = p_c but for the target's, g_y = -(their sum)."""
    others = z.softmax(1).scatter(1, index, 0.0)
    total = others.sum(1)
    unit = total.clamp_min(torch.finfo(z.dtype).tiny)  # in units of g_y no square underflows
    ratio: Tensor = torch.linalg.vector_norm(others / unit.unsqueeze(1), dim=1)
    return total * (1 + ratio**2).sqrt()


def _mass_norms(z: Tensor, t: Tensor, weight: Tensor | None) -> Tensor:
    """Return ‖∂loss_k/∂z_k‖ for loss_k = -Σ_c w_c t_kc log softmax(z_k)_c, with any mass t ≥ 0."""
    if weight is not None:
        t = t * weight.detach().to(t)
    # g_c = p_c sum(t) - t_c, and the g_c add up to zero. Where t is largest the difference would cancel
    # (1 - p_y of a confident example): take the negated sum of the others there, which does not.
    g = z.softmax(1) * t.sum(1, keepdim=True) - t
    top = t.argmax(1, keepdim=True)
    others = g.scatter(1, top, 0.0)
    return _norms(others.scatter(1, top, -others.sum(1, keepdim=True)))


def _given_mass(z: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return (K, C): the class probabilities, smoothed."""
    if target.shape != z.shape:
        raise ValueError(
            f"target probabilities must have the logits' shape {tuple(z.shape)}, got {tuple(target.shape)}"
        )
    return wide(target).to(z) * (1 - smoothing) + smoothing / z.shape[1]


def _class_mass(z: Tensor, index: Tensor, smoothing: float) -> Tensor:
    """Return (K, C): all mass on the class of ``index`` (K, 1), smoothed."""
    spread = smoothing / z.shape[1]
    return torch.full_like(z, spread).scatter(1, index, 1 - smoothing + spread)


def binary_cross_entropy_with_logits(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Return ‖∂loss_k/∂logits_k‖ for sigmoid cross-entropy.

    An example's loss is the sum over its m outputs. `weight` and `pos_weight` broadcast against the
    logits as in `F.binary_cross_entropy_with_logits`.

    Args:
        logits: (K,), (K, 1) or (K, m).
        target: The same shape, in [0, 1].
        weight: Weight of each loss.
        pos_weight: Weight of the positive part of each loss.

    Returns:
        (K,) scores, at most √m when nothing is weighted.
    """
    if logits.dim() not in (1, 2):
        raise ValueError(f"logits must have shape (K,) or (K, m), got {tuple(logits.shape)}")
    _same_shape("logits", logits, target)
    z = wide(logits)
    y = target.detach().to(z)
    if weight is None and pos_weight is None and on_cpu.readable(logits, target):
        return on_cpu.sigmoid_norms(z, y)
    positive = y if pos_weight is None else y * pos_weight.detach().to(z)
    # loss = positive softplus(-z) + (1 - y) softplus(z)
    g = (1 - y) * z.sigmoid() - positive * (-z).sigmoid()
    if weight is not None:
        g = g * weight.detach().to(z)
    return _norms(g)


def mse_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return ‖∂loss_k/∂output_k‖ = 2 ‖output_k - target_k‖ for loss_k = ‖output_k - target_k‖².

    Args:
        output: (K, ...).
        target: The same shape.
    """
    _same_shape("output", output, target)
    return _norms(wide(output) - wide(target), 2.0)


def output_norms(draw: HasWeights, output: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return ‖∂loss_k/∂output_k‖ for any loss, from the gradient that training left at `output`.

    ::

        output = model(x)
        output.retain_grad()
        draw.mean(losses(output, y)).backward()
        score = output_norms(draw, output)

    Args:
        draw: The draw whose `mean` of the losses was backpropagated.
        output: (K, ...); example k's loss may depend on output[k] alone.
        scale: What the loss was multiplied by besides: `scaler.get_scale()` of a GradScaler.
    """
    c = coefficients(draw, scale)
    if output.dim() == 0 or len(output) != len(c):
        raise ValueError(
            f"output has shape {tuple(output.shape)}, its first dimension must be the draw's "
            f"K = {len(c)} examples"
        )
    # Reading .grad where it was not retained would warn: ask first.
    grad = output.grad if output.is_leaf or output.retains_grad else None
    if grad is None:
        raise ValueError(
            "output has no gradient: call output.retain_grad() before backward(), and output_norms after it"
        )
    norms = _norms(wide(grad))
    # backward() left c_k ∂loss_k/∂output_k
    return norms / beside(c, norms)


def _norms(g: Tensor, factor: float = 1.0) -> Tensor:
    """Return factor times the Euclidean norm of each g[k]; in units of its largest entry no square
    underflows or overflows."""
    if on_cpu.readable(g) and (found := on_cpu.row_norms(g, factor)) is not None:
        return found
    g = g.unsqueeze(1) if g.dim() == 1 else g.flatten(1)
    if g.shape[1] <= 1:
        return factor * g.abs().sum(1)
    largest: Tensor = torch.linalg.vector_norm(g, torch.inf, dim=1, keepdim=True)
    unit = largest.clamp_min(torch.finfo(g.dtype).tiny)
    norms: Tensor = torch.linalg.vector_norm(g / unit, dim=1)
    return factor * unit.squeeze(1) * norms


def _same_shape(name: str, output: Tensor, target: Tensor) -> None:
    if output.dim() == 0 or output.shape != target.shape:
        raise ValueError(
            f"{name} and target must have the same shape (K, ...), "
            f"got {tuple(output.shape)} and {tuple(target.shape)}"
        )
