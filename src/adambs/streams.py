"""Streams that cannot be indexed: the bandit chooses which source the next example comes from."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate

from adambs import _check
from adambs.draw import Draw
from adambs.feedback import Awaited, DrawOrNumber, Feedback
from adambs.fetching import as_it_is
from adambs.fingerprints import fingerprint
from adambs.mistakes import Mistakes
from adambs.processes import Processes
from adambs.proposals import RandomStream
from adambs.sources import Nothing, Progress, Reader, Ticket, Worth
from adambs.states import MadeOfParts

# So many sources are named where there is little room.
_NAMED = 5


class BanditStream(MadeOfParts):
    """Batches from several iterable data sets, each example's source drawn from a p that learns.

    ::

        stream = adambs.BanditStream({"books": books, "web": web}, batch_size=32)
        for batch, draw in stream:
            losses, scores = adambs.scores.causal_lm(model(batch), batch, constant=256)
            draw.mean(losses).backward()
            stream.update(draw, scores)

    Iterates ``(batch, draw)``; ``draw.indices`` are sources. A source that ends begins again. A batch may
    have more examples than there are sources.

    Each process and each worker reads its own part of every source. A state can be loaded by as many
    processes with as many workers: what was delivered is read over, so a source that yields the same again
    goes on where it was.

    Args:
        sources: iterable data sets, by name or in a list.
        batch_size: of all processes together.
        shares: what each source counts for in the objective, in any unit; all the same if nothing is given.
        seed: of the draws.
        uniform: the part of p that is the shares themselves, so that no source is forgotten.
        memory: how many batches the worth of a source is averaged over.
        sharded: whether the sources themselves yield to each process and worker its own part. If not, each
            reads all of a source and takes every m-th example; the sources do not see that a worker reads
            them, so that none divides itself as well.
        steps: batches in one iteration; endless if nothing is given.
        carry: yield batches alone that carry their draws, as :class:`BanditLoader` does.
        feedback: as in :class:`BanditSampler`.
        group: as in :class:`BanditSampler`.
        collate_fn: from a list of examples to a batch.
        dataloader_options: for the DataLoader, such as ``num_workers``.
    """

    PARTS = ("worth", "random", "awaited", "progress")

    def __init__(
        self,
        sources: Mapping[str, Iterable[Any]] | Sequence[Iterable[Any]],
        batch_size: int,
        *,
        shares: Any = None,
        seed: int = 0,
        uniform: float = 0.1,
        memory: float = 100.0,
        sharded: bool = False,
        steps: int | None = None,
        carry: bool = False,
        feedback: str = "automatic",
        group: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        **dataloader_options: Any,
    ) -> None:
        if not isinstance(sources, Mapping | Sequence) or isinstance(sources, str):
            raise TypeError(
                "sources must be a dict or a list of iterable data sets, also if there is only one, not a "
                f"{type(sources).__name__}"
            )
        named = sources if isinstance(sources, Mapping) else {str(k): s for k, s in enumerate(sources)}
        if not named:
            raise ValueError("sources is empty: give at least one iterable data set")
        for name, source in named.items():
            if not isinstance(source, Iterable) or iter(source) is source:
                raise TypeError(
                    f"source {name!r} must be iterable, and anew each time, not a {type(source).__name__}"
                )
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "in_order", "persistent_workers"):
            if name in dataloader_options:
                raise TypeError(f"BanditStream takes no {name}: the stream chooses and orders its batches")
        self.names, self.n = list(named), len(named)
        self.batch_size = _check.whole("batch_size", batch_size, least=1)
        self.seed = _check.whole("seed", seed, least=0)
        given = np.ones(self.n) if shares is None else _check.vector("shares", shares, self.n)
        if not (given > 0).all():
            raise ValueError("shares must all be positive: leave out a source that counts for nothing")
        self.steps = None if steps is None else _check.whole("steps", steps, least=1)
        self._settings = _check.fraction("uniform", uniform, "p must be able to learn"), float(memory)
        if not memory > 1:
            raise ValueError(f"memory must be above 1, not {memory}: it counts batches")
        self.worth = Worth(given / given.sum(), *self._settings)
        self.random, self.awaited = RandomStream(self.seed), Awaited(self.batch_size, names=self.names)
        self.progress = Progress(self.n, self.batch_size)
        self.feedback, self.processes = Feedback(feedback), Processes(group)
        self.mistakes = Mistakes()
        self.carry = carry
        self._reader = Reader(list(named.values()), self.names, collate_fn or default_collate, sharded, carry)
        self._options = dataloader_options
        self._lock = threading.RLock()

    def draw(self) -> Draw:
        """The sources of a batch, or of this process's part of it. O(S + B log S)."""
        with self._lock:
            self._learn_what_is_late()
            self._settle()
            p = self.worth.p()
            bounds = p.cumsum()
            u = self.random.uniform(self.batch_size) * bounds[-1]
            indices = np.minimum(np.searchsorted(bounds, u, side="right"), self.n - 1).astype(np.int64)
            ratios, p_ratios = (p / self.worth.shares)[indices], (p * self.n)[indices]
            draw = Draw(self.awaited.following, indices, ratios, self.n, p_ratios=p_ratios)
            self.awaited.following += 1
            self.awaited.add(draw)
            return self.processes.handed_out(draw)

    def update(self, draw: DrawOrNumber, scores: Any) -> None:
        """Let p learn from the ``scores`` of the examples of ``draw``, or of the draw of that number."""
        with self._lock:
            report = self.feedback.begin(draw, scores, self.awaited, None)
            arrived = self.feedback.accept(report, self.awaited)
            if arrived is not None:
                self.worth.update(arrived[0]._indices, arrived[1])

    def probabilities(self) -> dict[str, float]:
        """p of each source."""
        with self._lock:
            self._learn_what_is_late()
            return dict(zip(self.names, self.worth.p().tolist(), strict=True))

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """p of each source, and what it lowers the second moment by, as a flat dict for loggers."""
        p = {f"{prefix}p/{name}": value for name, value in self.probabilities().items()}
        return {**p, f"{prefix}variance_reduction": self.worth.variance_reduction()}

    def __iter__(self) -> Iterator[Any]:
        with self._lock:
            self._settle()
        group, progress = self.processes.group, self.progress
        ranks, rank = (1, 0) if group is None else (group.size, group.rank)
        workers = max(1, self._options.get("num_workers", 0))
        if progress.readers not in ((0, 0), (ranks, workers)):
            raise ValueError(
                f"the state was saved with {progress.readers[0]} processes of {progress.readers[1]} workers, "
                f"and there are {ranks} of {workers}: sources are cut into as many parts, so take as many"
            )
        skip = {slot: counts for (r, slot), counts in progress.taken.items() if r == rank}
        self._reader.begin(rank, ranks, skip, fresh=bool(self._options.get("num_workers", 0)))
        loader: DataLoader[Any] = DataLoader(
            self._reader, batch_size=None, sampler=self._tickets(progress, workers), collate_fn=as_it_is,
            **self._options,
        )  # fmt: skip
        left = self.steps
        for batch in loader:
            if isinstance(batch, Nothing):
                continue
            draw = self.processes.part(progress.deliver(ranks, workers))
            yield batch if self.carry else (batch, draw)
            left = None if left is None else left - 1
            if left == 0:
                return

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("the stream is endless: give it steps, or stop when you like")
        return self.steps

    def _tickets(self, progress: Progress, workers: int) -> Iterator["Ticket | None"]:
        """Draws, at the moment of asking. Nothing at first, so that batch b is always worker b mod W's."""
        for _ in range(progress.delivered % workers):
            yield None
        for draw in tuple(progress.ahead):
            yield Ticket(self.processes.part(draw).alone())
        while True:
            draw = self.draw()
            progress.ahead.append(draw.whole)
            yield Ticket(draw.alone())

    def _learn_what_is_late(self) -> None:
        for draw, scores, _ in self.feedback.collect(self.awaited):
            self.worth.update(draw._indices, scores)

    def _settle(self) -> None:
        if self.processes.settled:
            return
        self.mistakes.alone(self.processes.left_alone())
        state = {**self.state_dict(), "correction": 1.0}
        self.processes.settle(self.batch_size, lambda: fingerprint(self.identity(), state))
        if self.processes.group is not None:
            self.feedback.gather(self.processes.group, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next batches depend on, but for the sources' own state."""
        with self._lock:
            self._learn_what_is_late()
            return super().state_dict()

    def parse_state(self, state: Any) -> dict[str, Any]:
        """Read and check a state, for :meth:`adopt`; changes nothing."""
        new = super().parse_state(state)
        new["awaited"].expect(new["progress"].ahead)
        return new

    def adopt(self, parts: dict[str, Any]) -> None:
        """Take what :meth:`parse_state` has returned; cannot fail."""
        with self._lock:
            self.feedback.drop()
            for name, part in parts.items():
                setattr(self, name, part)
            self._reader.forget()
            self.processes.unsettle(loaded=True)

    def identity(self) -> dict[str, Any]:
        """What a state must share with the stream that loads it."""
        return {
            "names": "\n".join(self.names),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shares": {name: float(q) for name, q in zip(self.names, self.worth.shares, strict=True)},
            "uniform": self._settings[0],
            "memory": self._settings[1],
        }

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.names[:_NAMED])) + ", ..." * (self.n > _NAMED)
        return (
            f"BanditStream({self.n} sources: {names}; batch_size={self.batch_size}, seed={self.seed}: "
            f"{self.progress.delivered} batches delivered)"
        )
