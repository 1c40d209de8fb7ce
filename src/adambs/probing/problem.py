"""What a probe is asked about: a model, a data set, and how a batch of it becomes losses and scores."""

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from adambs import _check, scores
from adambs._types import Floats, Indices
from adambs.fetching import Fetcher

# How many examples are evaluated at once.
_AT_ONCE = 200

Loss = Callable[..., Any]

Known = tuple[Loss, Loss | None]
"""(outputs, targets) -> one loss an example, and the closed form of its score if there is one."""


def _sigmoid(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, target.to(logits), reduction="none")


def _sigmoid_scores(logits: Tensor, target: Tensor) -> Tensor:
    return scores.binary_cross_entropy_with_logits(logits, target.to(logits))


def _rows(losses: Tensor) -> Tensor:
    return losses.flatten(1).sum(1) if losses.ndim > 1 else losses


_KNOWN: dict[Any, Known] = {
    F.cross_entropy: (lambda z, y: F.cross_entropy(z, y, reduction="none"), scores.cross_entropy),
    F.binary_cross_entropy_with_logits: (lambda z, y: _rows(_sigmoid(z, y)), _sigmoid_scores),
    F.mse_loss: (lambda z, y: _rows(F.mse_loss(z, y, reduction="none")), scores.mse_loss),
}
_MODULES: dict[Any, Any] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.MSELoss: F.mse_loss,
}


class Problem:
    """A model with its own copy of everything that training changes, and the losses of its batches.

    Args:
        loss: ``F.cross_entropy``, ``F.binary_cross_entropy_with_logits`` or ``F.mse_loss``, or one of torch's
            modules such as ``nn.CrossEntropyLoss(weight=..., reduction="none")``, for batches ``(x, y)``; or
            ``loss(model, batch)``, which returns one loss for each example, or a pair of losses and scores
            (or a function of no arguments that returns the scores: then their cost is told apart).
    """

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        loss: Any,
        batch_size: int,
        *,
        lr: float,
        optimizer: torch.optim.Optimizer | None,
        collate_fn: Any,
        seed: int,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "model has no parameters to train: nothing would be learned, by whatever batches"
            )
        if (
            isinstance(train, IterableDataset)
            or not hasattr(train, "__getitem__")
            or not hasattr(train, "__len__")
        ):
            raise TypeError(
                f"train must have len() and train[i], and {type(train).__name__} has not: choosing examples "
                "needs a map-style data set"
            )
        self.n = len(train)
        if self.n < 2:
            raise ValueError(
                f"train has {self.n} example{'s' * (self.n != 1)}: there is nothing to choose among"
            )
        self.batch_size = _check.whole("batch_size", batch_size, least=1)
        if self.batch_size > self.n:
            raise ValueError(f"batch_size must be at most the {self.n} examples of train, not {batch_size}")
        self._known = _known(loss)
        if self._known is None and not callable(loss):
            raise TypeError(
                f"loss must be F.cross_entropy or another known loss, or a function loss(model, batch), not "
                f"{loss!r}"
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if optimizer is not None and not _trains(optimizer, model):
            raise ValueError(
                "optimizer has none of the model's parameters that are trained: give the one that was built "
                "with model.parameters(), of this very model"
            )
        self.loss = loss
        # Copied together, the optimizer's copy refers to the parameters of the model's.
        self.model, copied = copy.deepcopy((model, optimizer))
        if copied is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            copied = torch.optim.Adam(trained, lr=_check.positive("lr", lr))
        self.optimizer: torch.optim.Optimizer = copied
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.device = next(self.model.parameters()).device
        self.fetcher = Fetcher(train, collate_fn, seed, carry=False)
        self._output: Tensor | None = None
        if self._known is None:
            self.model.register_forward_hook(self._remember)

    def _remember(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._output = output if isinstance(output, Tensor) else None

    def batch(self, indices: Indices) -> Any:
        """A batch of these examples, where the model is."""
        return _moved(self.fetcher.collated(self.fetcher.examples(indices)), self.device)

    def losses(self, batch: Any, K: int) -> tuple[Tensor, Callable[[], Tensor]]:
        """One loss for each of the K examples, and what gives their scores when it is called.

        Apart, so that what scores cost can be told. A loss of the user's that returns scores, and not a
        function that computes them, has paid for them already.
        """
        if self._known is not None:
            x, y = _pair(batch)
            output, score = self.model(x), self._known[1]
            losses = self._known[0](output, y)
            _check.losses(losses, K)
            if score is None:
                return losses, lambda: _norms(losses, output, K)
            return losses, lambda: score(output.detach(), y).detach()
        self._output = None
        found = self.loss(self.model, batch)
        losses, given = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        _check.losses(losses, K)
        if given is None:
            return losses, lambda: _norms(losses, self._output, K)
        return losses, lambda: (given if isinstance(given, Tensor) else given()).detach()

    def evaluated(self, indices: Indices, size: int = _AT_ONCE) -> tuple[Floats, Floats, list[float]]:
        """The present losses and scores of some examples, without dropout, ``size`` at a time.

        Also what an example took, in seconds, for each of these times.
        """
        self.model.eval()
        found, seconds = [], []
        for start in range(0, len(indices), size):
            part, before = indices[start : start + size], time.perf_counter()
            with torch.set_grad_enabled(self._known is None or self._known[1] is None):
                losses, scores = self.losses(self.batch(part), len(part))
                pair = torch.stack([losses.detach().double(), scores().double()])
            found.append(pair.cpu())
            seconds.append((time.perf_counter() - before) / len(part))
        self.model.train()
        each, norms = torch.cat(found, 1).numpy()
        return each, norms, seconds

    def gradient(self, indices: Indices, weights: Floats) -> Tensor:
        """The gradient of the mean of the weighted losses of these examples, as one vector."""
        losses, _ = self.losses(self.batch(indices), len(indices))
        losses = losses * torch.from_numpy(weights).to(losses)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(losses.mean(), trained, allow_unused=True)
        return torch.cat([part.flatten() for part in found if part is not None])

    def labels(self, indices: Indices) -> Indices | None:
        """The classes of some examples, if batches are pairs and the second is whole numbers."""
        batch = self.fetcher.collated(self.fetcher.examples(indices))
        if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
            y = batch[1]
            if y.ndim == 1 and not y.is_floating_point() and not y.is_complex():
                return y.numpy(force=True)
        return None


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer has any parameter of the model."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(parameter.requires_grad and id(parameter) in held for parameter in model.parameters())


def _norms(losses: Tensor, output: Tensor | None, K: int) -> Tensor:
    """The norm of each example's gradient at the model's output, for a loss without a closed form."""
    if output is None or output.ndim == 0 or len(output) != K or not output.requires_grad:
        raise ValueError(
            "scores are not known for this loss: the model's output must be one tensor with a row for "
            "each example; else let loss(model, batch) return a pair, losses and scores"
        )
    [gradient] = torch.autograd.grad(losses.sum(), output, retain_graph=True)
    norms: Tensor = torch.linalg.vector_norm(
        gradient.flatten(1) if gradient.ndim > 1 else gradient[:, None], dim=1
    )
    return norms


def _known(loss: Any) -> Known | None:
    """What to do with one of torch's losses; None if it is a function of the user's."""
    if isinstance(loss, nn.modules.loss._Loss):
        if loss.reduction != "none":
            raise ValueError(
                f'loss is reduced already ({loss.reduction}): give {type(loss).__name__}(reduction="none"), '
                "for a probe needs the loss of each example"
            )
        function = _MODULES.get(type(loss))
        if function is not None and _plain(loss):
            return _KNOWN[function]
        return (lambda z, y: _rows(loss(z, y))), None
    for function, known in _KNOWN.items():
        if loss is function:
            return known
    bare = loss.func if isinstance(loss, functools.partial) else loss
    if getattr(bare, "__module__", None) == F.__name__:
        raise TypeError(
            f"loss must be F.cross_entropy or another known loss, without options, not {loss!r}: give its "
            'module, such as nn.CrossEntropyLoss(weight=..., reduction="none"), or a function '
            "loss(model, batch)"
        )
    return None


def _plain(loss: nn.Module) -> bool:
    """Whether it has no option that changes the loss."""
    return (
        getattr(loss, "weight", None) is None
        and getattr(loss, "pos_weight", None) is None
        and getattr(loss, "label_smoothing", 0.0) == 0.0
        and getattr(loss, "ignore_index", -100) == -100
    )


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise TypeError(
            f"a batch of train must be a pair (x, y) for this loss, not {type(batch).__name__}: give "
            "loss(model, batch) for any other kind of batch"
        )
    return batch[0], batch[1]


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
