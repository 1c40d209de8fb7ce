"""The output bound: the norm of each example's loss gradient at the model's output.

Katharopoulos & Fleuret (2018), 'Not all samples are created equal': up to a factor that is common
to all examples, it bounds the norm of the parameters' gradient, and it costs next to nothing.

The closed forms follow `torch.nn.functional`'s losses with `reduction="none"`; `output_norms` reads
the gradient that the training step's own backward pass left at the output, whatever the loss.
"""

import torch
from torch import Tensor

from .weighting import HasWeights, coefficients, wide


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
        (K,) scores, at most √2 times the largest class weight.
    """
    z = wide(logits)
    if z.dim() != 2:
        raise ValueError(
            f"logits must have shape (K, C), got {tuple(z.shape)}; for a loss over many positions "
            "use output_norms"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if weight is None and label_smoothing == 0.0 and _one_class_each(target, z, ignore_index):
        return _one_class_norms(z, target)
    t = _target_mass(z, target.detach(), ignore_index, label_smoothing)
    if weight is not None:
        t = t * weight.detach().to(t)
    # loss = -sum_c t_c log p_c, hence g_c = p_c sum(t) - t_c, and the g_c add up to zero. Where t
    # is largest the difference would cancel (1 - p_y of a confident example): take the negated sum
    # of the others there, which does not.
    g = z.softmax(1) * t.sum(1, keepdim=True) - t
    top = t.argmax(1, keepdim=True)
    others = g.scatter(1, top, 0.0)
    return _norms(others.scatter(1, top, -others.sum(1, keepdim=True)))


def _one_class_each(target: Tensor, z: Tensor, ignore_index: int) -> bool:
    """Whether every example has one valid class and none can be the ignored one."""
    if target.is_floating_point() or target.shape != z.shape[:1] or len(target) == 0:
        return False
    low, high = map(int, target.aminmax())
    return low >= 0 and high < z.shape[1] and not low <= ignore_index <= high


def _one_class_norms(z: Tensor, target: Tensor) -> Tensor:
    """The common case in half the operations: g_c = p_c but for the target's, g_y = -(their sum)."""
    others = z.softmax(1).scatter_(1, target.long().unsqueeze(1), 0.0)
    total = others.sum(1)
    unit = total.clamp_min(torch.finfo(z.dtype).tiny)  # in units of g_y no square underflows
    ratio: Tensor = torch.linalg.vector_norm(others / unit.unsqueeze(1), dim=1)
    return total * (1 + ratio**2).sqrt()


def _classes(target: Tensor, kept: Tensor, C: int) -> Tensor:
    """The class indices, checked, with 0 in place of those that are ignored."""
    index = target.detach().long() * kept
    low, high = index.aminmax() if len(index) else (index.new_zeros(()), index.new_zeros(()))
    if low < 0 or high >= C:
        wrong = int(low) if low < 0 else int(high)
        raise ValueError(f"target holds class {wrong}, logits have {C} classes")
    return index


def _target_mass(z: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    """Return (K, C): the target distribution of each example, all zero where it is ignored."""
    K, C = z.shape
    if target.is_floating_point():
        if target.shape != z.shape:
            raise ValueError(
                f"target probabilities must have the logits' shape {tuple(z.shape)}, "
                f"got {tuple(target.shape)}"
            )
        return wide(target).to(z) * (1 - smoothing) + smoothing / C
    if target.shape != (K,):
        raise ValueError(f"target indices must have shape ({K},), got {tuple(target.shape)}")
    kept = target != ignore_index
    index = _classes(target, kept, C).unsqueeze(1)
    mass = torch.full_like(z, smoothing / C)
    mass.scatter_(1, index, 1 - smoothing + smoothing / C)
    return mass * kept.unsqueeze(1)


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
    return 2 * _norms(wide(output) - wide(target))


def output_norms(draw: HasWeights, output: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return ‖∂loss_k/∂output_k‖ for any loss, from the gradient that training left at `output`.

    ```python
    output = model(x)
    output.retain_grad()
    draw.mean(losses(output, y)).backward()
    score = output_norms(draw, output)
    ```

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
    return norms / c.to(norms)


def _norms(g: Tensor) -> Tensor:
    """Return the Euclidean norm of each g[k]; divided by its largest entry, no square underflows
    or overflows."""
    g = g.reshape(len(g), -1)
    if g.shape[1] == 1:
        return g.abs().squeeze(1)
    largest = g.abs().amax(1, keepdim=True) if g.shape[1] else g.new_zeros(len(g), 1)
    unit = largest.where(largest > 0, 1.0)
    norms: Tensor = largest * torch.linalg.vector_norm(g / unit, dim=1, keepdim=True)
    return norms.squeeze(1)


def _same_shape(name: str, output: Tensor, target: Tensor) -> None:
    if output.dim() == 0 or output.shape != target.shape:
        raise ValueError(
            f"{name} and target must have the same shape (K, ...), "
            f"got {tuple(output.shape)} and {tuple(target.shape)}"
        )
