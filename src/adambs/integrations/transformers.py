"""Hugging Face's Trainer with bandit sampling, for classification and for causal language models.

::

    trainer = BanditTrainer(model, args, train_dataset=train)

in the place of ``Trainer``. For a trainer that is a subclass already, such as TRL's::

    class MyTrainer(BanditMixin, SFTTrainer):
        pass
"""

import inspect
import os
from typing import Any

import torch
import torch.nn.functional as F

from adambs import _check, scores
from adambs.fetching import seeded
from adambs.integrations._common import (
    drawn_in,
    is_a_bandits,
    missing,
    refuse_evaluation,
    refuse_shards,
    state_between_batches,
    without_draw,
)
from adambs.loader import BanditLoader
from adambs.sampler import BanditSampler

try:
    from transformers import Trainer, TrainerCallback
    from transformers.models.auto import modeling_auto
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise missing("transformers", "transformers", error) from None

_FILE = "bandit.pt"

# How many examples are looked at to find the mean number of tokens in one.
_SOME = 64


class BanditMixin:
    """Puts bandit sampling in front of a ``Trainer`` class. Evaluation and prediction are untouched.

    Each example's loss is weighted by 1/(n p), up to the sampler's cap (``cap=math.inf`` is none). A causal
    language model's is the sum of its token losses over a constant: not ``num_items_in_batch``, which depends
    on who was drawn and would bias the gradient.

    Args:
        args: as the trainer's.
        sampler: its ``batch_size`` is that of all processes together. If nothing is given,
            ``BanditSampler(len(train_dataset), ...)`` with the trainer's batch size and seed.
        tokens_per_example: the constant. If nothing is given, the mean number of labels in some examples.
        log_every: log the sampler's diagnostics every so many steps; 0 is never.
        kwargs: as the trainer's.
    """

    loss_is_scaled_for_ga = False  # a mean over one micro-batch: the trainer divides by their number

    def __init__(
        self,
        *args: Any,
        sampler: BanditSampler | None = None,
        tokens_per_example: float | None = None,
        log_every: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if sampler is not None:
            refuse_shards(sampler)
        self.sampler, self._constant = sampler, tokens_per_example
        self._loader: BanditLoader | None = None
        self.args: Any
        if self.args.dataloader_drop_last:
            raise ValueError(
                "dataloader_drop_last is True: every batch that a bandit draws is full, so there is none to "
                "drop. Set it to False"
            )
        if self.compute_loss_func is not None:  # type: ignore[attr-defined]
            raise ValueError(
                "compute_loss_func reduces the losses of a batch to one, before they could be weighted: "
                "override losses_and_scores(model, outputs, labels), which returns one for each example"
            )
        if self.args.train_sampling_strategy != "random":
            raise ValueError(
                f"train_sampling_strategy is {self.args.train_sampling_strategy!r}, and the bandit chooses "
                "the examples: leave it at 'random'"
            )
        _check_data(self.train_dataset)  # type: ignore[attr-defined]
        _check_model(self.model)  # type: ignore[attr-defined]
        self.args.ignore_data_skip = True  # the sampler knows where it was
        self.add_callback(_Callback(self, log_every))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """Batches that carry their draws, with the collator and the options of the plain loader."""
        plain = super().get_train_dataloader()  # type: ignore[misc]
        size = self.args.train_batch_size * self.args.world_size
        if self.sampler is None:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            self.sampler = BanditSampler(len(plain.dataset), size, seed=seed)
        if self.sampler.batch_size != size:
            raise ValueError(
                f"sampler.batch_size is {self.sampler.batch_size}, and the trainer's is "
                f"{self.args.train_batch_size} x {self.args.world_size} processes = {size}: build the "
                f"sampler with BanditSampler(len(train), {size})"
            )
        names = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
        options = {name: getattr(plain, name) for name in names}
        self._loader = BanditLoader(
            plain.dataset, self.sampler, carry=True, collate_fn=plain.collate_fn, **options
        )
        if self._constant is None:
            self._constant = _mean_labels(plain.dataset, plain.collate_fn, self.sampler.seed)
        return self._loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The trainer's own; refuses to evaluate on draws."""
        known: Any = self.eval_dataset  # type: ignore[attr-defined]
        named = known[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        refuse_evaluation(known if named is None else named)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The trainer's own; refuses to predict on draws."""
        refuse_evaluation(test_dataset)
        return super().get_test_dataloader(test_dataset)  # type: ignore[misc]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training the weighted mean, and feedback to the sampler; else the trainer's own."""
        if not model.training:
            return super().compute_loss(  # type: ignore[misc]
                model, without_draw(inputs), return_outputs, num_items_in_batch
            )
        drawn = drawn_in(inputs)
        inputs = without_draw(inputs)
        labels = inputs.pop("labels", None)
        if labels is None:
            raise ValueError(f"the training batch has no labels, only {', '.join(inputs)}")
        outputs = model(**inputs)
        losses, found = self.losses_and_scores(model, outputs, labels)
        _check.losses(losses, len(drawn.number))
        assert self.sampler is not None
        loss = drawn.mean(losses, found)
        self.sampler.update(drawn.number, found)
        return (loss, outputs) if return_outputs else loss

    def losses_and_scores(self, model: Any, outputs: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """One loss and one score for each example. Override it for a loss of your own."""
        if isinstance(outputs, dict) and "logits" not in outputs:
            raise ValueError(
                f"the model returns {', '.join(outputs) or 'nothing'} and no logits, so the loss of each "
                "example is unknown; one that the model has reduced cannot be weighted. Let it return "
                "logits, or override losses_and_scores(model, outputs, labels)"
            )
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        smoothing = self.args.label_smoothing_factor
        if logits.dim() == 3:
            constant = self._constant or float(logits.shape[1])
            shift = _is_causal(self.accelerator.unwrap_model(model))  # type: ignore[attr-defined]
            return scores.causal_lm(logits, labels, constant=constant, shift=shift, label_smoothing=smoothing)
        if logits.dim() == 2 and not labels.is_floating_point():
            options = {"label_smoothing": smoothing}
            losses = F.cross_entropy(logits.float(), labels, reduction="none", **options)
            return losses, scores.cross_entropy(logits, labels, **options)
        if logits.dim() == 2 and labels.shape == logits.shape and logits.shape[1] > 1:
            losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)
            return losses, scores.binary_cross_entropy_with_logits(logits, labels) / logits.shape[1]
        if logits.dim() == 2 and logits.shape[1] == 1:
            values, wanted = logits.squeeze(1).float(), labels.reshape(-1).float()
            return (values - wanted).square(), scores.mse_loss(values, wanted)
        raise ValueError(
            f"no loss is known for logits of shape {tuple(logits.shape)} and labels of shape "
            f"{tuple(labels.shape)}: override losses_and_scores(model, outputs, labels)"
        )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; the sampler goes on where the checkpoint was, in the middle of an epoch too."""
        self._resumed = False
        if resume_from_checkpoint:
            folder = resume_from_checkpoint
            folder = get_last_checkpoint(self.args.output_dir) if folder is True else folder
            if folder is not None:
                path = os.path.join(folder, _FILE)
                if not os.path.isfile(path):
                    raise ValueError(
                        f"{folder} has no {_FILE}: it was saved without a bandit, or the run was killed "
                        "while it saved. Resume from another checkpoint, or begin a new run from its model"
                    )
                self.get_train_dataloader()  # makes the sampler, if there is none
                assert self.sampler is not None
                self.sampler.load_state_dict(torch.load(path, weights_only=True))
                self._resumed = True
        return super().train(folder if self._resumed else resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch that goes on has fewer steps left."""
        assert self.sampler is not None
        epoch = self.sampler.epochs.current
        if self._resumed and not epoch.finished:
            left = kwargs["steps_in_epoch"] - epoch.delivered
            kwargs["steps_in_epoch"] = left
            kwargs["num_update_steps_per_epoch"] = -(-left // self.args.gradient_accumulation_steps)
        self._resumed = False
        return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]


class BanditTrainer(BanditMixin, Trainer):  # type: ignore[misc]
    """A ``Trainer`` with bandit sampling; see :class:`BanditMixin`."""


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Saves the sampler beside each checkpoint, and logs its diagnostics."""

    def __init__(self, trainer: Any, log_every: int) -> None:
        self._trainer, self._log_every = trainer, log_every

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Beside the rest, so that a checkpoint is whole."""
        if state.is_world_process_zero:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            found = state_between_batches(self._trainer.sampler, len(self._trainer._loader))
            path = os.path.join(folder, _FILE)
            torch.save(found, path + ".new")
            os.replace(path + ".new", path)  # whole or not at all

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The epoch as the sampler counts it, which is right after a resume, too."""
        sampler, length = self._trainer.sampler, len(self._trainer._loader)
        state.epoch = sampler.epochs.current.number - 1 + sampler.epochs.current.delivered / length
        if self._log_every and state.global_step % self._log_every == 0:
            self._trainer.log(sampler.diagnostics().numbers("bandit/"))


def _check_data(dataset: Any) -> None:
    """Raise if the bandit cannot choose among the examples."""
    if is_a_bandits(dataset):
        raise TypeError(
            "train_dataset is a bandit's loader: give the data set itself, and the sampler as sampler=; the "
            "trainer makes the loader"
        )
    if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"train_dataset ({type(dataset).__name__}) must have len() and dataset[i]: of a stream the "
            "bandit can choose the sources, with BanditStream, but not the examples"
        )


def _check_model(model: Any) -> None:
    """Raise if the model must be given the labels, with which it would reduce the loss itself."""
    labels = inspect.signature(model.forward).parameters.get("labels")
    if labels is not None and labels.default is labels.empty:
        raise ValueError(
            f"{type(model).__name__}.forward cannot do without labels, and a loss that the model has reduced "
            "cannot be weighted: let it take labels=None and return logits"
        )


def _mean_labels(dataset: Any, collate: Any, seed: int) -> float | None:
    """The mean number of labels that count in some examples, spread over the data set; None if one each."""
    n = len(dataset)
    with seeded(seed):
        batch = collate([dataset[i * n // min(n, _SOME)] for i in range(min(n, _SOME))])
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if labels is None or labels.dim() < 2 or labels.is_floating_point():
        return None
    return max(1.0, float((labels != -100).sum()) / len(labels))


# Models whose position t predicts label t + 1, and those whose labels stand at their own positions.
_NEXT = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
_IN_PLACE = {
    *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
    *modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(),
    *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
}


def _is_causal(model: Any) -> bool:
    """Whether position t predicts label t + 1, by the name of the model's class or of one that it is made of.

    Nothing is guessed: with a wrong guess the model would learn something else, in silence.
    """
    inner = getattr(getattr(model, "base_model", None), "model", None)  # of a peft model
    names = {each.__name__ for each in (*type(model).__mro__, *type(inner).__mro__)}
    if names & _NEXT:
        return True
    if names & _IN_PLACE:
        return False
    raise ValueError(
        f"whether position t of {type(model).__name__} predicts label t or t + 1 is unknown: override "
        "losses_and_scores(model, outputs, labels) with scores.causal_lm(outputs['logits'], labels, "
        "constant=..., shift=...)"
    )
