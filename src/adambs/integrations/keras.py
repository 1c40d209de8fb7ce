"""Keras 3 on its torch backend: a data set that draws, and a model whose ``fit`` learns p.

::

    data = BanditData((x, y), adambs.BanditSampler(len(x), batch_size=64))
    model = BanditModel(net.inputs, net.outputs)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    model.fit(data, epochs=3)
"""

import inspect
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from adambs import scores
from adambs.carried import Carried
from adambs.integrations._common import missing, refuse_evaluation, refuse_shards, state_between_batches
from adambs.loader import BanditLoader
from adambs.sampler import BanditSampler

try:
    import keras
except ImportError as error:
    raise missing("keras", "keras", error) from None

if keras.backend.backend() != "torch":
    raise ImportError(
        f"adambs.integrations.keras needs Keras on torch, and its backend is {keras.backend.backend()!r}: "
        "set the environment variable KERAS_BACKEND=torch before keras is imported"
    )


class BanditData(DataLoader):  # type: ignore[type-arg]
    """Batches (x, y, the draw) for :meth:`BanditModel.fit`; the draw stands where Keras has weights.

    Keras looks at a batch before it trains. What was not trained on is handed out again, so nothing is lost.

    Args:
        data: a pair of arrays or tensors, or a data set of pairs.
        sampler: chooses the examples.
        options: for :class:`adambs.BanditLoader`.
    """

    def __init__(self, data: Any, sampler: BanditSampler, **options: Any) -> None:
        if isinstance(data, tuple):
            data = TensorDataset(*(torch.as_tensor(entry) for entry in data))
        loader = BanditLoader(data, sampler, carry=True, **options)
        refuse_shards(sampler)
        super().__init__(data, batch_size=sampler.batch_size)
        self.bandit_loader, self.bandit = loader, sampler
        self._running: Iterator[Any] | None = None
        self._untrained: Any = None
        self.in_fit = False
        """Whether :meth:`BanditModel.fit` trains on it now."""

    def __len__(self) -> int:
        return len(self.bandit_loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self.in_fit and sys._getframe(1).f_globals.get("__name__", "").startswith("keras."):
            raise TypeError(
                "Keras reads a BanditData outside of BanditModel.fit, and would take draws for weights of "
                "examples. Train with model = BanditModel(net.inputs, net.outputs) and model.fit(data); "
                "evaluate and predict on the arrays themselves"
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        again = self._untrained
        if again is None:
            self._running = iter(self.bandit_loader)
        else:
            yield again
        assert self._running is not None
        for x, y, drawn in self._running:
            self._untrained = x, y, torch.stack([entry.double() for entry in drawn], 1)
            yield self._untrained

    def update(self, number: torch.Tensor, found: torch.Tensor) -> None:
        """The scores of the draw with this carried ``number``, whose batch is trained on now."""
        self._untrained = None
        self.bandit.update(number, found)


class BanditModel(keras.Model):  # type: ignore[misc]
    """A Keras model that weights each example by 1/(n p), up to the sampler's cap, and tells it the scores.

    ``BanditModel(net.inputs, net.outputs)`` makes one of any functional or sequential model; it can be
    subclassed like ``keras.Model``. Draws are matched by the number that travels in the batch.

    With an initialised ``torch.distributed`` group every process trains on its part of each batch, and
    gradients are averaged.
    """

    _data: BanditData | None = None

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As ``keras.Model.fit``, on a :class:`BanditData`."""
        if not isinstance(x, BanditData):
            raise TypeError(f"fit wants a BanditData, not {type(x).__name__}; use keras.Model for other data")
        given = inspect.signature(keras.Model.fit).bind(self, x, *args, **kwargs).arguments
        refuse_evaluation(given.get("validation_data"))
        for name in ("class_weight", "sample_weight", "validation_split", "steps_per_epoch"):
            if given.get(name):
                raise TypeError(
                    f"fit takes no {name} with a BanditData: the sampler has the weights and length"
                )
        if "shuffle" not in given:
            kwargs["shuffle"] = False
        self._data, x.in_fit = x, True
        hooks = self._averaging()
        try:
            with warnings.catch_warnings():  # an epoch that goes on is shorter than Keras expects
                warnings.filterwarnings("ignore", "Your input ran out of data")
                return super().fit(x, *args, **kwargs)
        finally:
            self._data, x.in_fit = None, False
            for hook in hooks:
                hook.remove()

    def evaluate(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As ``keras.Model.evaluate``; refuses to evaluate on draws."""
        refuse_evaluation(x)
        return super().evaluate(x, *args, **kwargs)

    def predict(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As ``keras.Model.predict``; refuses to predict on draws."""
        refuse_evaluation(x)
        return super().predict(x, *args, **kwargs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """The weighted loss; in training the scores go to the sampler."""
        drawn = _drawn(sample_weight)
        weights = sample_weight if drawn is None else drawn.weights
        real = isinstance(y_pred, torch.Tensor) and not y_pred.is_meta
        if training and real and self._data is not None:
            if drawn is None:
                raise ValueError("the training batch carries no draw: give fit a BanditData, as it is")
            found = self.scores(y, y_pred)
            weights = drawn.capped(found)
            self._data.update(drawn.number, found)
        return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=training)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """As ``keras.Model``'s, with the weights alone."""
        drawn = _drawn(sample_weight)
        weights = sample_weight if drawn is None else drawn.weights
        return super().compute_metrics(x, y, y_pred, sample_weight=weights)

    def scores(self, y: Any, y_pred: torch.Tensor) -> torch.Tensor:
        """One score for each example: the gradient norm at the logits, or for other losses at the output.

        Override it for a model of several outputs.
        """
        loss = keras.losses.get(self.loss)
        if getattr(loss, "reduction", "sum_over_batch_size") != "sum_over_batch_size":
            raise ValueError(
                f"the loss has reduction {loss.reduction!r}: with weights it must be "
                "'sum_over_batch_size', a mean over the batch"
            )
        name = str(getattr(loss, "name", None) or getattr(loss, "__name__", "")).lower()
        logits = _options(loss).get("from_logits", False)
        y = torch.as_tensor(y, device=y_pred.device)
        if name == "sparse_categorical_crossentropy" and y_pred.dim() == 2:
            return scores.cross_entropy(y_pred if logits else _log(y_pred), y.reshape(-1).long())
        if name == "categorical_crossentropy" and y_pred.dim() == 2:
            smoothing = _options(loss).get("label_smoothing", 0.0)
            z = y_pred if logits else _log(y_pred)
            return scores.cross_entropy(z, y.to(z.dtype), label_smoothing=smoothing)
        if name == "binary_crossentropy":
            z = y_pred.detach()
            z = z if logits else z.clamp(1e-7, 1 - 1e-7).logit()
            return scores.binary_cross_entropy_with_logits(
                z.flatten(1), y.to(z.dtype).reshape(z.flatten(1).shape)
            )
        with torch.enable_grad():
            output = y_pred.detach().requires_grad_()
            losses = _function(loss)(y, output)
            if losses.shape[:1] != output.shape[:1]:
                raise ValueError(
                    f"the loss function returned shape {tuple(losses.shape)} for {len(output)} examples: it "
                    "looks reduced already, and then no example can be weighted. Return one for each example"
                )
            (gradient,) = torch.autograd.grad(losses.sum(), output)
        norms: torch.Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
        return norms

    def _averaging(self) -> list[Any]:
        """Hooks that make each gradient the mean over the processes."""
        if not _several():
            return []

        def average(parameter: torch.nn.Parameter) -> None:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

        found = [variable.value for variable in self.trainable_weights]
        return [parameter.register_post_accumulate_grad_hook(average) for parameter in found]


class BanditBackup(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves model, optimizer and sampler every so many batches; ``fit`` then goes on from it, bit for bit.

    Args:
        path: of the file. If it is there, training goes on from it.
        data: what is trained on.
        every: batches.
    """

    def __init__(self, path: str | os.PathLike[str], data: BanditData, every: int) -> None:
        super().__init__()
        self._path, self._data, self._every, self._seen = str(path), data, every, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on where the file was saved."""
        if not os.path.isfile(self._path):
            return
        saved = torch.load(self._path, weights_only=True)
        self._data.bandit.load_state_dict(saved["sampler"])
        self._data._untrained = None  # what Keras looked at belongs to the run before
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        for variable, value in zip(self._variables(), saved["variables"], strict=True):
            variable.assign(value)
        random, rank = saved["random"], _rank()
        torch.set_rng_state(random[rank if rank < len(random) else 0])  # of dropout
        self.model._initial_epoch = saved["epoch"]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, if it is time to. One of several processes saves for all."""
        self._seen += 1
        if self._seen % self._every:
            return
        random: list[Any] = [torch.get_rng_state()]
        if _several():
            random *= dist.get_world_size()
            dist.all_gather_object(random, torch.get_rng_state())
        if _rank():
            return
        sampler, length = self._data.bandit, len(self._data)
        state = state_between_batches(sampler, length)
        number = state["epochs"]["number"]
        saved = {
            "sampler": state,
            "variables": [variable.value.detach().cpu().clone() for variable in self._variables()],
            "random": random,
            "epoch": number if state["epochs"]["finished"] else number - 1,
        }
        torch.save(saved, self._path + ".new")
        os.replace(self._path + ".new", self._path)  # whole or not at all

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.model.optimizer.variables]


class BanditLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds the sampler's diagnostics to the logs of batches and epochs, for the history and any logger.

    Those of batches are seen by the callbacks that come after it.

    Args:
        sampler: whose diagnostics.
        log_every: batches; 0 is never, and then there are only those of each epoch.
    """

    def __init__(self, sampler: BanditSampler, *, log_every: int = 1) -> None:
        super().__init__()
        self._sampler, self._log_every = sampler, log_every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """O(1)."""
        if logs is not None and self._log_every and (batch + 1) % self._log_every == 0:
            logs.update(self._sampler.diagnostics().numbers("bandit/"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """O(1)."""
        if logs is not None:
            logs.update(self._sampler.diagnostics().numbers("bandit/"))


def _several() -> bool:
    """Whether there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if _several() else 0


def _drawn(sample_weight: Any) -> Carried | None:
    """The draw, if it is there."""
    if sample_weight is None or sample_weight.shape[1:] != (len(Carried._fields),):
        return None
    number, indices, *others = sample_weight.unbind(1)
    return Carried(number.long(), indices.long(), *others)


def _log(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.detach().clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _options(loss: Any) -> dict[str, Any]:
    return getattr(loss, "_fn_kwargs", {})


def _function(loss: Any) -> Any:
    """From targets and predictions to losses that are not reduced over the batch."""
    return getattr(loss, "call", loss)
