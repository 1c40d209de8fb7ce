"""Batches of a dataset, each with the Draw that drew it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from adambs.draws import Draw, Epoch
from adambs.sampler import BanditSampler, Score

# DataLoader options that would choose the examples, or break the order in which batches arrive.
_REFUSED = {
    "batch_size": "the sampler has it: BanditSampler(n, batch_size)",
    "shuffle": "the sampler chooses the examples",
    "sampler": "give the BanditSampler as the second argument",
    "batch_sampler": "give the BanditSampler as the second argument",
    "in_order": "batches must arrive in the order in which they were drawn",
}


class BanditLoader:
    """Iterates ``(batch, draw)`` over a ``torch.utils.data.DataLoader`` whose examples a sampler chooses.

    Takes every option of ``DataLoader`` that does not choose examples (``num_workers``,
    ``prefetch_factor``, ``collate_fn``, ``pin_memory``, ``persistent_workers``, ...). Each batch arrives
    with its own draw, however many batches have been prefetched with an older p.

    One epoch is ceil(n/K) batches, or floor(n/K) with ``drop_last=True``, so a schedule that counts
    steps keeps its meaning. Every batch has K examples.

    A ``TensorDataset`` (or a ``Subset`` of one) without a ``collate_fn`` is indexed once a batch, not
    once an example.

    With ``score``, a function from a batch to the scores of its examples (a forward pass without gradients,
    in eval mode if you like), the sampler may look before it draws: see :class:`Looking`. That happens in
    this process at the time of drawing, so it needs ``num_workers=0``.

    After ``load_state_dict`` the first iteration delivers the rest of the epoch that was saved.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: BanditSampler,
        *,
        drop_last: bool = False,
        score: Callable[[Any], Any] | None = None,
        **dataloader_options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset must be indexable, and {type(dataset).__name__} is not: choosing examples needs "
                "dataset[i]; turn an IterableDataset into a map-style one first"
            )
        if not isinstance(sampler, BanditSampler):
            raise TypeError(f"sampler must be a BanditSampler, not {type(sampler).__name__}")
        if len(dataset) != sampler.n:  # type: ignore[arg-type]
            raise ValueError(
                f"dataset has {len(dataset)} examples but sampler.n is {sampler.n}: "  # type: ignore[arg-type]
                "build the sampler with BanditSampler(len(dataset), ...)"
            )
        for name in _REFUSED.keys() & dataloader_options.keys():
            raise TypeError(f"BanditLoader takes no {name}: {_REFUSED[name]}")
        if score is not None and dataloader_options.get("num_workers", 0):
            raise ValueError(
                f"score needs num_workers=0, not {dataloader_options['num_workers']}: workers fetch batches "
                "ahead, and a look must be made with the model as it is now"
            )

        self.dataset = dataset
        self.sampler = sampler
        self.drop_last = drop_last
        length = sampler.n // sampler.batch_size
        if not drop_last and sampler.n % sampler.batch_size:
            length += 1
        # DataLoader seeds its workers from this stream; without one it would use torch's global stream.
        self._own_stream = "generator" not in dataloader_options
        self._stream = dataloader_options.setdefault("generator", torch.Generator())

        in_memory = None
        if dataloader_options.get("collate_fn") is None:
            in_memory = _in_memory(dataset)
        if in_memory is not None:
            tensors, where = in_memory
            self._batches = _Batches(sampler, length, where)
            self.dataloader = DataLoader(
                tensors, batch_size=None, sampler=self._batches, **dataloader_options
            )
        else:
            self._batches = _Batches(sampler, length, None, as_list=True)
            self.dataloader = DataLoader(dataset, batch_sampler=self._batches, **dataloader_options)
        if score is not None:
            self._batches.score = lambda indices: score(self._fetch(indices.numpy()))

    def _fetch(self, indices: np.ndarray[Any, Any]) -> Any:
        """The examples as the DataLoader would have them."""
        data, where = self.dataloader.dataset, self._batches.places(indices)
        examples: Any = [data[i] for i in where] if isinstance(where, list) else data[where]
        return self.dataloader.collate_fn(examples)

    def __len__(self) -> int:
        return self._batches.length

    def __iter__(self) -> Iterator[tuple[Any, Draw]]:
        epoch = self._batches.epoch = self.sampler.begin_epoch()
        if self._own_stream:
            entropy = [self.sampler.seed, epoch.number, epoch.delivered]
            self._stream.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        for batch in self.dataloader:
            yield batch, epoch.deliver()
        epoch.finished = True


class _Batches(torch.utils.data.Sampler[Any]):
    """The indices of each batch, drawn at the moment that the DataLoader asks for them."""

    epoch: Epoch
    score: Score | None = None

    def __init__(
        self,
        sampler: BanditSampler,
        length: int,
        where: np.ndarray[Any, Any] | None,
        *,
        as_list: bool = False,
    ) -> None:
        self.sampler, self.length = sampler, length
        self._where = where  # position in the underlying tensors, for a Subset
        self._as_list = as_list  # datasets expect Python's own integers

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        for draw in tuple(epoch.ahead):  # on their way when the state was saved
            yield self.places(draw.indices.numpy())
        while epoch.delivered + len(epoch.ahead) < self.length:
            draw = self.sampler.draw(self.score)
            epoch.ahead.append(draw)
            yield self.places(draw.indices.numpy())

    def places(self, indices: np.ndarray[Any, Any]) -> Any:
        """Where the DataLoader finds the examples."""
        if self._as_list:
            return indices.tolist()
        return indices if self._where is None else self._where[indices]


def _in_memory(dataset: Any) -> tuple[TensorDataset, np.ndarray[Any, Any] | None] | None:
    """The tensors behind ``dataset`` and where its examples lie in them, if that is all that it is."""
    if type(dataset) is TensorDataset:
        return dataset, None
    if type(dataset) is Subset:
        below = _in_memory(dataset.dataset)
        if below is not None:
            tensors, where = below
            chosen = np.asarray(dataset.indices, np.int64)
            return tensors, chosen if where is None else where[chosen]
    return None
