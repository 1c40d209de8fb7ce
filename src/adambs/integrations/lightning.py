"""Lightning: a callback that feeds the sampler and saves it, and a loader whose batches carry their draws.

::

    bandit = BanditCallback(adambs.BanditSampler(len(train), batch_size=64))
    trainer = L.Trainer(callbacks=[bandit])
    trainer.fit(model, bandit.loader(train))

and in the module::

    def training_step(self, batch, batch_idx):
        x, y, drawn = batch
        logits = self(x)
        scores = adambs.scores.cross_entropy(logits, y)
        loss = drawn.mean(F.cross_entropy(logits, y, reduction="none"), scores)
        return {"loss": loss, "scores": scores}
"""

from collections.abc import Iterator
from typing import Any

import torch

from adambs.carried import Carried
from adambs.integrations._common import (
    drawn_in,
    missing,
    refuse_evaluation,
    refuse_shards,
    state_between_batches,
)
from adambs.loader import BanditLoader
from adambs.sampler import BanditSampler

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise missing("lightning", "lightning", error) from None


class BanditCallback(Callback):  # type: ignore[misc]
    """Feeds the ``"scores"`` that ``training_step`` returns to the sampler, and saves it in checkpoints.

    Works with automatic optimisation, accumulation, any precision, clipping, schedulers and
    ``strategy="ddp"``. ``fit(ckpt_path=...)`` goes on in the middle of an epoch, bit for bit: one process
    with the random state of dropout, too, which Lightning does not save.

    Args:
        sampler: its ``batch_size`` counts the examples of all processes.
        log_every: log the sampler's diagnostics every so many batches; 0 is never.
    """

    def __init__(self, sampler: BanditSampler, *, log_every: int = 0) -> None:
        if not isinstance(sampler, BanditSampler):
            raise TypeError(f"sampler must be a BanditSampler, not {type(sampler).__name__}")
        refuse_shards(sampler)
        self.sampler, self.log_every = sampler, log_every
        self._length = len(sampler)
        self._random: dict[str, Any] | None = None  # to go on with

    def loader(self, dataset: Any, **options: Any) -> "Batches":
        """The training loader: batches of ``dataset``, each with its draw as the last entry.

        ``options`` are those of :class:`adambs.BanditLoader`.
        """
        return Batches(BanditLoader(dataset, self.sampler, carry=True, **options))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse loaders whose batches carry no draws of this sampler."""
        loader = trainer.train_dataloader
        ours = getattr(loader, "bandit_loader", loader)
        if not (isinstance(ours, BanditLoader) and ours.carry and ours.sampler is self.sampler):
            raise TypeError(
                f"the training loader is a {type(loader).__name__}, and it must be one loader that draws "
                "from the callback's sampler: trainer.fit(model, bandit.loader(train)). A second training "
                "loader needs a run of its own"
            )
        self._length = int(min(len(ours), trainer.num_training_batches))  # limit_train_batches may take fewer

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The first batch after a checkpoint finds torch's random streams as they were."""
        for entry in batch if isinstance(batch, list | tuple) else ():
            if isinstance(entry, Carried):
                entry.handed_over()
        if self._random is not None and trainer.world_size == 1:  # the state of rank 0 is not that of others
            torch.set_rng_state(self._random["cpu"])
            if len(self._random["cuda"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(self._random["cuda"])
        self._random = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The scores of each batch, also of those that are only accumulated, go to the sampler."""
        scores = outputs.get("scores") if isinstance(outputs, dict) else None
        if scores is None:
            raise ValueError(
                'training_step must return {"loss": drawn.mean(losses, scores), "scores": scores} with one '
                "score for each example, e.g. adambs.scores.cross_entropy(logits, y)"
            )
        self.sampler.update(drawn_in(batch).number, scores)
        if self.log_every and (batch_idx + 1) % self.log_every == 0:
            pl_module.log_dict(self.sampler.diagnostics().numbers("bandit/"))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to evaluate on draws."""
        refuse_evaluation(trainer.val_dataloaders)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to evaluate on draws."""
        refuse_evaluation(trainer.test_dataloaders)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to predict on draws."""
        refuse_evaluation(trainer.predict_dataloaders)

    def state_dict(self) -> dict[str, Any]:
        """The sampler, with the loader's place in the epoch, and torch's random streams."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "sampler": state_between_batches(self.sampler, self._length),
            "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was."""
        self.sampler.load_state_dict(state_dict["sampler"])
        self._random = state_dict["random"]


class Batches:
    """A loader without a state of its own, which Lightning would save a second time beside the callback's."""

    def __init__(self, loader: BanditLoader) -> None:
        self.bandit_loader, self.dataset = loader, loader.dataset  # with a sampler it would be inspected

    def __len__(self) -> int:
        return len(self.bandit_loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.bandit_loader)
