"""The training loop: one, visible, the same for all methods. And the evaluation, outside the clock."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adambs
from adambs.lab.methods import Loss, Method
from adambs.lab.methods.base import FORWARD_BATCH


class DivergedError(ArithmeticError):
    """A loss is no longer a number."""


def train(method: Method, steps: int) -> int:
    """So many steps of a method; returns how many examples' gradients were computed."""
    task = method.task
    task.model.train()
    examples = 0
    for _ in range(steps):
        batch = method.choose()
        targets = task.targets[batch.indices]
        outputs = task.model(task.inputs[batch.indices])
        losses = task.loss.losses(outputs, targets)
        if not torch.isfinite(losses).all():
            raise DivergedError
        method.optimizer.zero_grad()
        method.objective(batch, outputs, targets, losses).backward()  # type: ignore[no-untyped-call]
        method.step(batch, outputs, targets, losses)
        examples += len(targets)
    return examples


class Evaluation(NamedTuple):
    """How good a model is on a whole data set."""

    loss: float
    error: float
    """The share of wrong guesses."""
    balanced_error: float
    """The same within each class, and then the mean over the classes that the data set has."""


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> Evaluation:
    """Mean loss and errors over a whole data set."""
    model.eval()
    total, parts = 0.0, []
    for x, y in zip(torch.split(inputs, FORWARD_BATCH), torch.split(targets, FORWARD_BATCH), strict=True):
        outputs = model(x)
        total += loss.losses(outputs, y).cpu().double().sum().item()
        parts.append((loss.guesses(outputs) != y).cpu())
    targets, wrong = targets.cpu(), torch.cat(parts).double()
    sizes = torch.bincount(targets)
    within = torch.bincount(targets, weights=wrong)[sizes > 0] / sizes[sizes > 0]
    return Evaluation(total / len(targets), wrong.mean().item(), within.mean().item())


def _sigmoid_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="none")


def _sigmoid_scores(outputs: Tensor, targets: Tensor) -> Tensor:
    return adambs.scores.binary_cross_entropy_with_logits(outputs, targets.to(outputs))


LOSSES = {
    "softmax": Loss(
        losses=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
        scores=adambs.scores.cross_entropy,
        guesses=lambda outputs: outputs.argmax(1),
        L=math.sqrt(2),
    ),
    "sigmoid": Loss(
        losses=_sigmoid_losses,
        scores=_sigmoid_scores,
        guesses=lambda outputs: (outputs > 0).long(),
        L=1.0,
    ),
}
