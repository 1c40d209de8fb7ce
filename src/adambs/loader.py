"""Batches of a dataset, each with the Draw that drew it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from adambs._types import Indices
from adambs.draw import Draw
from adambs.epochs import Epoch
from adambs.fetching import Fetcher, Ticket, as_it_is, seed_of
from adambs.mistakes import with_a_way_out
from adambs.sampler import BanditSampler

# DataLoader options that would choose the examples, or break the order in which batches arrive.
_REFUSED = {
    "batch_size": "the sampler has it: BanditSampler(n, batch_size)",
    "shuffle": "the sampler chooses the examples",
    "sampler": "give the BanditSampler as the second argument",
    "batch_sampler": "give the BanditSampler as the second argument",
    "in_order": "batches must arrive in the order in which they were drawn",
}

# What `BanditLoader.from_loader` takes over from a DataLoader.
_TAKEN_OVER = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class BanditLoader:
    """Iterates ``(batch, draw)`` over a ``torch.utils.data.DataLoader`` whose examples a sampler chooses.

    Takes every option of ``DataLoader`` that does not choose examples (``num_workers``,
    ``prefetch_factor``, ``collate_fn``, ``pin_memory``, ``persistent_workers``, ...). Each batch arrives
    with its own draw, however many batches have been prefetched with an older p.

    With several processes each yields its part of every batch; see :class:`BanditSampler`.

    One epoch is ceil(n/K) batches, or floor(n/K) with ``drop_last=True``, so a schedule that counts
    steps keeps its meaning. Every batch has K examples.

    The random numbers that a dataset asks for while a batch is fetched (torch's, numpy's and Python's global
    streams) depend on the sampler's seed, the epoch, the batch and where this process's part of it begins:
    augmentation is the same whoever fetches the batch, and after a resume with as many processes. Outside
    the fetching no global stream is touched.

    A ``TensorDataset`` (or a ``Subset`` of one) without a ``collate_fn`` is indexed once a batch, not
    once an example. A dataset with ``__getitems__`` is asked once a batch, too.

    Args:
        dataset: anything with ``len()`` and ``dataset[i]``.
        sampler: chooses the examples.
        drop_last: whether an epoch leaves out the batch that n / K leaves incomplete.
        score: a function from a batch to the scores of its examples, by a forward pass within
            :func:`adambs.scores.forward_only`. With it the sampler may look before it draws: see
            :class:`Candidates`. That happens in this process at the time of drawing, so it needs
            ``num_workers=0``. Candidates are fetched once: what was scored is what is trained on.
        carry: yield batches alone, each of which carries its draw as tensors: a tuple or list has one more
            entry, a :class:`Carried`; a dict has an entry for each of its fields, ``draw_number``,
            ``draw_indices``, ``draw_weights`` and so on. For frameworks that pass batches on.
        dataloader_options: for the DataLoader.

    The loader's state is the sampler's, which knows where the loader stands. After ``load_state_dict`` of
    either, the first iteration delivers the rest of the epoch that was saved. An epoch that was left early
    is over: the next iteration, or a run that is resumed then, begins a new one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: BanditSampler,
        *,
        drop_last: bool = False,
        score: Callable[[Any], Any] | None = None,
        carry: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        **dataloader_options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset must be indexable, and {type(dataset).__name__} is not: choosing examples needs "
                "dataset[i]; turn an IterableDataset into a map-style one, or draw its sources: BanditStream"
            )
        if not isinstance(sampler, BanditSampler):
            raise TypeError(f"sampler must be a BanditSampler, not {type(sampler).__name__}")
        first = sampler.first_of(len(dataset))  # type: ignore[arg-type]
        if first is None:
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
        self.dataset, self.sampler, self.drop_last, self.carry = dataset, sampler, drop_last, carry
        self._length = sampler.n // sampler.batch_size if drop_last else len(sampler)
        # DataLoader seeds its workers from this stream; without one it would use torch's global stream.
        self._own_stream = None if "generator" in dataloader_options else torch.Generator()
        dataloader_options.setdefault("generator", self._own_stream)
        self._fetcher = Fetcher(dataset, collate_fn, sampler.seed, carry=carry, first=first)
        # No part knows the loader: in a circle of references, workers would outlive it.
        self._tickets = _Tickets(sampler, self._fetcher, score, self._length)
        self.dataloader: DataLoader[Any] = DataLoader(
            self._fetcher, batch_size=None, sampler=self._tickets, collate_fn=as_it_is, **dataloader_options
        )

    @classmethod
    def from_loader(cls, loader: DataLoader[Any], sampler: BanditSampler, **options: Any) -> "BanditLoader":
        """A loader with the dataset, the collate function and the options of an existing ``DataLoader``.

        ``options`` are added, or take the place of the loader's.
        """
        if not isinstance(loader, DataLoader):
            raise TypeError(f"loader must be a torch.utils.data.DataLoader, not {type(loader).__name__}")
        order = getattr(loader.batch_sampler, "sampler", None) if loader.batch_sampler else loader.sampler
        plain = type(loader.batch_sampler) in (BatchSampler, type(None))
        if (
            not plain
            or type(order) not in (RandomSampler, SequentialSampler)
            or getattr(order, "_num_samples", None)
            or getattr(order, "replacement", False)
        ):
            raise ValueError(
                f"loader chooses its examples by {type(order if plain else loader.batch_sampler).__name__}, "
                "and only one can: take a DataLoader without a sampler of its own"
            )
        batches: Any = loader.batch_sampler or loader  # whichever knows how large they are
        if batches.batch_size != sampler.batch_size:
            raise ValueError(
                f"loader has batch_size {batches.batch_size} and the sampler {sampler.batch_size}: "
                "build the sampler with BanditSampler(len(dataset), loader.batch_size)"
            )
        taken = {name: getattr(loader, name) for name in _TAKEN_OVER}
        taken["drop_last"] = batches.drop_last
        if loader.collate_fn is not default_collate:
            taken["collate_fn"] = loader.collate_fn
        if loader.generator is None:
            del taken["generator"]
        return cls(loader.dataset, sampler, **{**taken, **options})

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        epoch = self._tickets.epoch = self.sampler.begin_epoch()
        if self._own_stream is not None:
            self._own_stream.manual_seed(seed_of(self.sampler.seed, epoch.number))
        try:
            for number, batch in self.dataloader:
                draw = self.sampler.part(epoch.deliver(number))
                yield batch if self.carry else (with_a_way_out(batch), draw)
            self.sampler.mistakes.epoch_over(self.sampler.returned())
        finally:
            epoch.leave()

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, in which the loader's place in the epoch stands."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state of the loader or of its sampler, or raise ``ValueError`` and keep the old one."""
        self.sampler.load_state_dict(state)

    def __repr__(self) -> str:
        epoch, sampler = self.sampler.epochs.current, self.sampler
        return (
            f"BanditLoader({type(self.dataset).__name__} of {sampler.n}, batch_size={sampler.batch_size}, "
            f"num_workers={self.dataloader.num_workers}: "
            f"epoch {epoch.number}, {epoch.delivered} of {len(self)} batches)"
        )


class _Tickets:
    """A ticket for each batch of an epoch, drawn at the moment that the DataLoader asks for it."""

    epoch: Epoch

    def __init__(
        self, sampler: BanditSampler, fetcher: Fetcher, score: Callable[[Any], Any] | None, length: int
    ) -> None:
        self._sampler, self._fetcher, self._score, self._length = sampler, fetcher, score, length
        self._last_look: _Look | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket]:
        epoch = self.epoch
        # On their way when the state was saved. More are delivered while these are asked for.
        for place, draw in enumerate(tuple(epoch.ahead), epoch.delivered):
            yield Ticket(epoch.number, place, self._sampler.part(draw).alone())
        while epoch.drawn < self._length:
            batch = epoch.drawn
            look = None if self._score is None else _Look(self._fetcher, self._score, epoch.number, batch)
            draw = self._sampler.draw_after(look)
            epoch.ahead.append(draw.whole)  # to be saved: another number of processes may go on with it
            if look is not None and look.candidates is not None:
                self._last_look = look
            fetched = None if draw.positions is None or self._fetcher.in_memory else self._chosen(draw)
            yield Ticket(epoch.number, batch, draw.alone(), fetched)

    def _chosen(self, draw: Draw) -> list[Any]:
        """The examples of a batch that a look has chosen, now or some steps ago, as they were scored."""
        ready, look = self._sampler.ready, self._last_look
        if look is None or look.candidates is not ready.candidates:  # it was before a state was loaded
            look = self._last_look = _Look(self._fetcher, self._score, *ready.looked_at)
            look.fetch_again(ready.candidates, alone=draw.whole is draw)
        return look.chosen(draw, [choice.positions for choice in ready.choices])


class _Look:
    """Fetches candidates once, scores them, and keeps those that are chosen until their batches are due.

    One of several processes fetches its part of the candidates. What is chosen among the others' it fetches
    again, as they have seen it.
    """

    def __init__(self, fetcher: Fetcher, score: Callable[[Any], Any] | None, epoch: int, batch: int) -> None:
        self._fetcher, self._score, self._epoch, self._batch = fetcher, score, epoch, batch
        self._kept: dict[int, Any] = {}
        self.candidates: Indices | None = None
        """Those of all processes, once they were scored."""

    def __call__(self, candidates: Draw) -> Any:
        with self._fetcher.seeded(self._epoch, self._batch, candidates.start):
            if candidates.whole is candidates:
                examples = self._fetcher.examples(candidates._indices)
            else:
                positions = range(candidates.start, candidates.start + len(candidates))
                examples = self._again(candidates._indices, positions)
            batch = self._fetcher.collated(examples)
        scores = self._score(batch)  # type: ignore[misc]  # without a score nobody looks
        if not self._fetcher.in_memory:
            self._kept = dict(enumerate(examples, candidates.start))
        self.candidates = candidates.whole._indices
        return scores

    def fetch_again(self, candidates: Indices, *, alone: bool) -> None:
        """Those of a look before a state was saved. One of several processes waits for what it needs."""
        if alone:
            with self._fetcher.seeded(self._epoch, self._batch, 0):
                self._kept = dict(enumerate(self._fetcher.examples(candidates)))
        self.candidates = candidates

    def chosen(self, draw: Draw, later: list[Indices]) -> list[Any]:
        """The chosen examples. After this batch, those at the positions ``later`` will be asked for."""
        found = [
            self._kept[j] if j in self._kept else self._again(draw._indices[k : k + 1], [j])[0]
            for k, j in enumerate(draw.positions.tolist())  # type: ignore[union-attr]
        ]
        wanted = {j for positions in later for j in positions.tolist()}
        self._kept = {j: example for j, example in self._kept.items() if j in wanted}
        return found

    def _again(self, indices: Indices, positions: Iterable[int]) -> Any:
        return self._fetcher.candidates(indices, self._epoch, self._batch, positions)
