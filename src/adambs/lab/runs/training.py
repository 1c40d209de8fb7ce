"""The training loop: one, visible, the same for all methods. And the evaluation, outside the clock."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adambs
from adambs.lab.methods import Loss, Method
from adambs.lab.methods.base import FORWARD_BATCH
from adambs.lab.models.transformers import WORDS, NextWords


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
        objective = method.objective(batch, outputs, targets, losses)
        if not math.isfinite(objective.item()):  # one number: to look at all losses takes 30 µs
            raise DivergedError
        if task.schedule:
            _set_rate(method)
        method.optimizer.zero_grad()
        objective.backward()  # type: ignore[no-untyped-call]
        method.step(batch, outputs, targets, losses)
        method.done += 1
        examples += len(targets)
    return examples


# The part of a run in which the learning rate rises from zero.
_WARM_UP = 0.1


def rate(schedule: str, share: float) -> float:
    """What the learning rate is multiplied by when this share of the steps is done."""
    if schedule != "cosine":
        raise ValueError(f"schedule {schedule!r} is unknown; the known ones are none and cosine")
    if share < _WARM_UP:
        return share / _WARM_UP
    return (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP))) / 2


def _set_rate(method: Method) -> None:
    """Before a step, at the middle of it: a first step at a rate of zero would be none."""
    half_a_step = 0.5 / method.task.steps if method.task.steps else 0.0
    factor = rate(method.task.schedule, min(1.0, method.share + half_a_step))
    for group in method.optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


class Evaluation(NamedTuple):
    """How good a model is on a whole data set."""

    loss: float
    error: float
    """The share of wrong guesses; of standardised targets, the share that is not explained."""
    balanced_error: float
    """The same within each class, and then the mean over the classes that the data set has, if it has any."""


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> Evaluation:
    """Mean loss and errors over a whole data set."""
    model.eval()
    total, parts = 0.0, []
    for x, y in zip(torch.split(inputs, FORWARD_BATCH), torch.split(targets, FORWARD_BATCH), strict=True):
        outputs = model(x)
        total += loss.losses(outputs, y).cpu().double().sum().item()
        wrong_ones = loss.guesses(outputs) != y if loss.wrong is None else loss.wrong(outputs, y)
        parts.append(wrong_ones.cpu())
    targets, wrong = targets.cpu(), torch.cat(parts).double()
    if targets.is_floating_point():
        return Evaluation(total / len(targets), wrong.mean().item(), wrong.mean().item())
    sizes = torch.bincount(targets)
    within = torch.bincount(targets, weights=wrong)[sizes > 0] / sizes[sizes > 0]
    return Evaluation(total / len(targets), wrong.mean().item(), within.mean().item())


def _sigmoid_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="none")


def _sigmoid_scores(outputs: Tensor, targets: Tensor) -> Tensor:
    return adambs.scores.binary_cross_entropy_with_logits(outputs, targets.to(outputs))


def _wrong_words(outputs: NextWords) -> Tensor:
    """The share of each text's words that were guessed wrong; padding is none."""
    words = outputs.labels != 0
    wrong = (outputs.logits.argmax(2) != outputs.labels) & words
    return wrong.sum(1) / words.sum(1).clamp_min(1)


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


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
    "next-word": Loss(
        losses=lambda outputs, _: outputs.text.losses,
        scores=lambda outputs, _: outputs.text.scores,
        guesses=lambda outputs: torch.full((len(outputs.labels),), -1),  # of a class: none
        L=math.sqrt(2 / WORDS),
        wrong=lambda outputs, _: _wrong_words(outputs),
    ),
    "squares": Loss(
        losses=_squares,
        scores=adambs.scores.mse_loss,
        guesses=lambda outputs: torch.full((len(outputs),), -1),  # of a class: none
        L=20.0,  # for Algorithm 2: ten standard deviations; what is above is clipped and counted
        wrong=_squares,
    ),
}
