"""accelerate: a prepared loader whose batches carry draws, registered for checkpoints.

::

    loader = prepare(accelerator, train, sampler)
    for x, y, drawn in loader:
        with accelerator.accumulate(model):
            logits = model(x)
            scores = adambs.scores.cross_entropy(logits, y)
            accelerator.backward(drawn.mean(F.cross_entropy(logits, y, reduction="none"), scores))
            sampler.update(drawn.number, scores)
            optimizer.step()
            optimizer.zero_grad()
"""

from collections.abc import Iterator
from typing import Any

import torch

from adambs.integrations._common import missing, refuse_shards, state_between_batches
from adambs.loader import BanditLoader
from adambs.sampler import BanditSampler

try:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState
    from accelerate.utils import send_to_device
except ImportError as error:
    raise missing("accelerate", "accelerate", error) from None


def prepare(
    accelerator: Any, dataset: Any, sampler: BanditSampler, *, log_every: int = 0, **options: Any
) -> "PreparedLoader":
    """The training loader, and what ``accelerator.prepare`` would do for one.

    Batches arrive on the accelerator's device, each process gets its part, the last batch of an epoch ends an
    accumulation, and ``accelerator.save_state`` saves the sampler with the place in the epoch.

    Args:
        accelerator: an ``Accelerator``.
        dataset: anything with ``len()`` and ``dataset[i]``.
        sampler: its ``batch_size`` counts the examples of all processes.
        log_every: give the sampler's diagnostics to ``accelerator.log`` every so many batches; 0 is never.
        options: for :class:`adambs.BanditLoader`.
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        raise TypeError(f"accelerator must be an Accelerator, not {type(accelerator).__name__}")
    if any(getattr(other, "sampler", None) is sampler for other in accelerator._custom_objects):
        raise ValueError(
            "sampler has a training loader already: one sampler knows the place in one epoch, so give a "
            "second loader a sampler of its own"
        )
    loader = PreparedLoader(
        BanditLoader(dataset, sampler, carry=True, **options), accelerator.device, accelerator.log, log_every
    )
    accelerator.register_for_checkpointing(loader)
    return loader


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """Batches with their draws on a device; accelerate is told which one is an epoch's last."""

    def __init__(self, loader: BanditLoader, device: Any, log: Any, log_every: int) -> None:
        refuse_shards(loader.sampler)
        self.bandit_loader, self.device = loader, device
        self._log, self._log_every = log, log_every
        self.dataset, self.sampler = loader.dataset, loader.sampler
        self.gradient_state = GradientState()
        self.reset()

    def __len__(self) -> int:
        return len(self.bandit_loader)

    def __iter__(self) -> Iterator[Any]:
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "the bandit's training loader is read under torch.no_grad, as in an evaluation: a plain mean "
                "over draws is no estimate. Evaluate with a plain DataLoader"
            )
        self.reset()
        self.gradient_state._add_dataloader(self)
        try:
            for batch in self.bandit_loader:  # none is fetched ahead: its p would be older than need be
                self.end_of_dataloader = self.sampler.epochs.current.delivered >= len(self)
                yield send_to_device(batch, self.device, non_blocking=True)
                self._log_now_and_then()
        finally:
            self.gradient_state._remove_dataloader(self)

    def _log_now_and_then(self) -> None:
        """After a batch was trained on. O(1)."""
        epoch = self.sampler.epochs.current
        batches = (epoch.number - 1) * len(self) + epoch.delivered
        if self._log_every and batches % self._log_every == 0:
            self._log(self.sampler.diagnostics().numbers("bandit/"), step=batches)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, with the place in the epoch."""
        return state_between_batches(self.sampler, len(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was saved."""
        self.sampler.load_state_dict(state)
