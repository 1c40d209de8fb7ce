"""Fetches the examples of a draw, in a worker or here, with random numbers that depend on the batch alone."""

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from adambs._types import Indices
from adambs.draw import Draw


class Ticket(NamedTuple):
    """What a worker needs to know to fetch a batch. Plain data: it crosses to another process."""

    epoch: int
    batch: int
    draw: Draw
    fetched: Any = None
    """The batch, if a look has fetched it already."""


class Fetcher(Dataset[Any]):
    """Fetches batches, in a worker or here, with random numbers that depend on the batch alone."""

    def __init__(self, dataset: Any, collate_fn: Any, seed: int, *, carry: bool, first: int = 0) -> None:
        self.dataset, self.seed, self._carry = dataset, seed, carry
        self._first = first  # the number of the dataset's first example, if it has only a shard of them
        self._tensors = _in_memory(dataset) if collate_fn is None else None
        self._collate = default_collate if collate_fn is None else collate_fn

    def __getitem__(self, ticket: Ticket) -> tuple[int, Any]:
        with nullcontext() if self._tensors else self.seeded(ticket.epoch, ticket.batch, ticket.draw.start):
            batch = self.collated(ticket.fetched or self.examples(ticket.draw._indices))
        return ticket.draw.number, carrying(batch, ticket.draw) if self._carry else batch

    def seeded(self, epoch: int, batch: int, start: int) -> AbstractContextManager[None]:
        """Random streams for the part of a batch that begins at ``start``; the first's are one process's."""
        return seeded(self.seed, epoch, batch, *((start,) if start else ()))

    @property
    def in_memory(self) -> bool:
        """Whether examples are tensors of all of them, and cost nothing to fetch again."""
        return self._tensors is not None

    def examples(self, indices: Indices) -> Any:
        """The examples: tensors of all of them, or a list of each."""
        if self._first:
            indices = indices - self._first
        if self._tensors is not None:
            tensors, where = self._tensors
            return tensors[indices if where is None else where[indices]]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices.tolist())
        return [self.dataset[i] for i in indices.tolist()]

    def candidates(self, indices: Indices, epoch: int, batch: int, positions: Iterable[int]) -> Any:
        """Examples whose random numbers depend on their own positions: the same whichever process asks."""
        if self._tensors is not None:
            return self.examples(indices)
        found = []
        for k, position in enumerate(positions):
            with seeded(self.seed, epoch, batch, position, 1):
                found += self.examples(indices[k : k + 1])
        return found

    def collated(self, examples: Any) -> Any:
        """A batch of them."""
        collate: Any = self._collate if self._tensors is None else default_convert
        return collate(examples)

    def __getattr__(self, name: str) -> Any:
        # A worker_init_fn finds us where it expects its dataset.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


def as_it_is(batch: Any) -> Any:
    """A collate function for what is a batch already."""
    return batch


@contextmanager
def seeded(*entropy: int) -> Iterator[None]:
    """Global random streams that depend on ``entropy`` alone; in this process, as they were afterwards."""
    seed = seed_of(*entropy)
    if get_worker_info() is not None:
        _seed_all(seed)
        yield
        return
    python, legacy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            _seed_all(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


def seed_of(*entropy: int) -> int:
    """63 bits that depend on ``entropy`` alone."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # Numpy's generator is Python's: the same seed would give the same numbers.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])  # noqa: NPY002


def carrying(batch: Any, draw: Draw) -> Any:
    """The batch with the draw in it."""
    carried = draw.carried()
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return {**batch, **{f"draw_{name}": value for name, value in carried._asdict().items()}}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)([*batch, carried])
    return (batch, carried)


def _in_memory(dataset: Any) -> tuple[TensorDataset, Indices | None] | None:
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
