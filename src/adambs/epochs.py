"""Where a loader stands in its epoch. Saved with the sampler, so that a run can stop anywhere."""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from adambs import _check
from adambs._types import State
from adambs.draw import Draw
from adambs.processes import Processes


@dataclass(eq=False)
class Epoch:
    """One epoch: what has been delivered of it, and what is on its way."""

    number: int
    delivered: int = 0
    """Batches handed to the training loop."""
    ahead: deque[Draw] = field(default_factory=deque)
    """Draws whose batches are being prefetched, oldest first."""
    finished: bool = False

    @property
    def drawn(self) -> int:
        """Batches drawn, whether or not they have arrived."""
        return self.delivered + len(self.ahead)

    def deliver(self, number: int) -> Draw:
        """The draw of the batch that arrives now."""
        draw = self.ahead.popleft()
        if draw.number != number:
            raise RuntimeError(
                f"batch {number} has arrived where {draw.number} was due: batches must keep their order"
            )
        self.delivered += 1
        return draw

    def leave(self) -> None:
        """Nobody will ask for the rest."""
        self.ahead.clear()
        self.finished = True


class Epochs:
    """The present epoch, and after a state was loaded the one to go on with."""

    def __init__(self, n: int, batch_size: int) -> None:
        self._n, self._batch_size = n, batch_size
        self.current = Epoch(0, finished=True)
        self._resuming = False

    def begin(self) -> Epoch:
        """A new epoch, or the rest of the one that a loaded state was in."""
        if not (self._resuming and not self.current.finished):
            self.current = Epoch(self.current.number + 1)
        self._resuming = False
        return self.current

    def state_dict(self) -> dict[str, Any]:
        """The present epoch, with the draws on their way."""
        return {
            "number": self.current.number,
            "delivered": self.current.delivered,
            "finished": self.current.finished,
            "ahead": [draw.to_list() for draw in self.current.ahead],
        }

    def with_state(self, state: State) -> "Epochs":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        ahead = _check.entry(state, "ahead")
        if not isinstance(ahead, list):
            raise ValueError(f"state['ahead'] must be a list of draws, not {type(ahead).__name__}")
        new = Epochs(self._n, self._batch_size)
        epoch = new.current = Epoch(
            _check.count(state, "number"),
            _check.count(state, "delivered"),
            deque(Draw.from_list(values, self._n, self._batch_size) for values in ahead),
            _check.flag(state, "finished"),
        )
        batches = -(-self._n // self._batch_size)
        if epoch.drawn > batches:
            raise ValueError(f"state has {epoch.drawn} batches in an epoch of {batches}")
        if epoch.finished and ahead:
            raise ValueError(f"state has {len(ahead)} batches on their way in an epoch that is over")
        numbers = [draw.number for draw in epoch.ahead]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"state['ahead'] must have draws in the order of their numbers, not {numbers}")
        new._resuming = True
        return new


class InEpochs(ABC):
    """Something that draws batches, in epochs: a ``batch_sampler`` for a DataLoader."""

    n: int
    batch_size: int
    epochs: Epochs
    processes: Processes

    @abstractmethod
    def draw(self) -> Draw:
        """A mini-batch, or this process's part of one."""

    def __len__(self) -> int:
        """Batches in an epoch: ceil(n / K)."""
        return -(-self.n // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of the batches of one epoch, for ``DataLoader(dataset, batch_sampler=sampler)``.

        Their draws are awaited by number. :class:`BanditLoader` also says which batch is which draw.
        """
        refuse_to_sample_single_examples(sys._getframe(1).f_code.co_qualname)
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        epoch = self.begin_epoch()
        try:
            while epoch.delivered < len(self):
                draw = self.draw()
                epoch.delivered += 1
                yield draw._indices.tolist()
        finally:
            epoch.leave()

    def first_of(self, length: int) -> int | None:
        """The number of the first example of a data set of this length; None if it is not the sampler's."""
        return 0 if length == self.n else None

    def begin_epoch(self) -> Epoch:
        """A new epoch, or the rest of the one that a loaded state was in."""
        self.processes.unsettle(loaded=False)
        return self.epochs.begin()


def refuse_to_sample_single_examples(caller: str) -> None:
    """Raise if ``caller``, the name of a function, gathers what we yield into batches of its own."""
    if caller.startswith(("BatchSampler.", "_BatchSamplerIterator.")):  # torch's, torchdata's
        raise TypeError(
            "DataLoader(sampler=...) takes single examples, and a BanditSampler draws batches: give it as "
            "batch_sampler=, or use adambs.BanditLoader(dataset, sampler)"
        )
