"""What a stream is made of: the worth of each source, how far each was read, and who reads.

With S sources of shares q_s, p_s the probability of source s, and m_s² the mean of squared scores in it, a
batch of examples that are drawn from p and weighted by q_s / p_s is unbiased for the mixture, with a second
moment of Σ_s q_s² m_s² / p_s. That is least for p_s proportional to q_s m_s.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import worker

from adambs import _check
from adambs._types import Floats, Indices, State
from adambs.draw import Draw
from adambs.fetching import carrying

# Larger and smaller scores count as these: their squares, and sums of them, can be computed with.
_LARGEST, _SMALLEST = 1e100, 1e-100

# No run counts beyond it, and no machine has so many workers.
_MOST, _MOST_WORKERS = 2.0**53, 2**20

# How many examples' worth of the common mean a source begins with.
_PRIOR = 5.0


class Worth:
    """What each source is worth now: running means of squared scores."""

    def __init__(self, shares: Floats, uniform: float, memory: float) -> None:
        self.shares, self._uniform, self._memory = shares, uniform, memory
        self._squares, self._counts = np.zeros(len(shares)), np.zeros(len(shares))

    def p(self) -> Floats:
        """(1 - u) q m / Σ q m + u q. O(S)."""
        p = self.shares * np.sqrt(self._means())
        p = (1 - self._uniform) * p / p.sum() + self._uniform * self.shares
        return np.asarray(p / p.sum())

    def variance_reduction(self) -> float:
        """Σ q m² over Σ q² m² / p: what p lowers the second moment by, against the shares. O(S)."""
        squares = self.shares * self._means()
        return float(squares.sum() / (squares * self.shares / self.p()).sum())

    def _means(self) -> Floats:
        """m² of each source; all one before anything is known."""
        total = self._counts.sum()
        common = self._squares.sum() / total if total > 0 else 0.0
        if not common > 0:
            return np.ones(len(self.shares))
        return np.asarray((self._squares + _PRIOR * common) / (self._counts + _PRIOR))

    def update(self, sources: Indices, scores: Floats) -> None:
        """Learn from the scores of one batch; older ones fade."""
        S = len(self.shares)
        keep = 1 - 1 / self._memory
        squares = np.minimum(scores, _LARGEST) ** 2
        self._squares = keep * self._squares + np.bincount(sources, squares, S)
        self._counts = keep * self._counts + np.bincount(sources, minlength=S)
        self._counts[self._counts < _SMALLEST] = 0.0  # faded
        self._squares[(self._squares < _SMALLEST**2) | (self._counts == 0)] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The running sums."""
        sums = {"squares": self._squares, "counts": self._counts}
        return {name: torch.from_numpy(value.copy()) for name, value in sums.items()}

    def with_state(self, state: State) -> "Worth":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        new = Worth(self.shares, self._uniform, self._memory)
        shape = self.shares.shape
        counts = _check.array(state, "counts", shape, most=_MOST, normal=True)
        squares = _check.array(state, "squares", shape, most=_LARGEST**2 * _MOST, normal=True)
        tiny = (counts > 0) & (counts < _SMALLEST)
        if tiny.any():
            raise ValueError(f"state['counts'] has {counts[tiny][0]}, which would have faded to zero")
        wrong = ((squares > 0) & (squares < _SMALLEST**2)) | (squares > 1.01 * _LARGEST**2 * counts)
        if wrong.any():
            raise ValueError(f"state['squares'] has {squares[wrong][0]}, which no scores add up to")
        new._squares, new._counts = squares.copy(), counts.copy()
        return new


class Progress:
    """How far the sources have been read: batches delivered, and draws on their way."""

    def __init__(self, sources: int, batch_size: int) -> None:
        self._sources, self._batch_size = sources, batch_size
        self.delivered = 0
        self.ahead: deque[Draw] = deque()
        self.taken: dict[tuple[int, int], Indices] = {}
        """How many examples of each source each (rank, worker) has delivered."""
        self.readers = (0, 0)
        """How many ranks and workers there were; (0, 0) before the first batch."""

    def deliver(self, ranks: int, workers: int) -> Draw:
        """The oldest draw arrives now."""
        draw = self.ahead.popleft()
        self.readers = ranks, workers
        B, slot = len(draw), self.delivered % workers
        for rank in range(ranks):
            part = draw._indices[rank * B // ranks : (rank + 1) * B // ranks]
            taken = self.taken.setdefault((rank, slot), np.zeros(self._sources, np.int64))
            taken += np.bincount(part, minlength=self._sources)
        self.delivered += 1
        return draw

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "delivered": self.delivered,
            "readers": list(self.readers),
            "ahead": [draw.to_list() for draw in self.ahead],
            "taken": [[*where, *counts.tolist()] for where, counts in sorted(self.taken.items())],
        }

    def with_state(self, state: State) -> "Progress":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        new = Progress(self._sources, self._batch_size)
        new.delivered = _check.count(state, "delivered")
        new.readers = self._readers(_check.numbers(state, "readers", length=2), new.delivered)
        draws, rows = _check.entry(state, "ahead"), _check.entry(state, "taken")
        new.ahead.extend(Draw.from_list(values, self._sources, self._batch_size) for values in draws)
        for row in rows:
            numbers = _check.numbers({"taken": row}, "taken", length=2 + self._sources)
            if any(number != int(number) or number > _MOST for number in numbers):
                raise ValueError(f"state['taken'] counts examples, and {row} are not all whole numbers")
            where = int(numbers[0]), int(numbers[1])
            if where in new.taken or where[0] >= new.readers[0] or where[1] >= new.readers[1]:
                raise ValueError(f"state['taken'] has a row of rank and worker {where}: there is no such one")
            new.taken[where] = np.array(numbers[2:], np.int64)
        read = sum(int(count) for counts in new.taken.values() for count in counts)
        if read != new.delivered * self._batch_size:
            raise ValueError(
                f"state['taken'] has {read} examples, and {new.delivered} batches of {self._batch_size} were "
                "delivered"
            )
        return new

    def _readers(self, found: list[float], delivered: int) -> tuple[int, int]:
        """How many ranks and workers; none before the first batch."""
        ranks, workers = found
        least = min(delivered, 1)
        if (
            ranks != int(ranks)
            or workers != int(workers)
            or not (least <= ranks <= least * self._batch_size and least <= workers <= least * _MOST_WORKERS)
        ):
            raise ValueError(
                f"state['readers'] must be how many processes and workers have read {delivered} batches of "
                f"{self._batch_size}, not {found}"
            )
        return int(ranks), int(workers)


class Ticket(NamedTuple):
    """What a worker needs to know to read a batch."""

    draw: Draw


class Nothing:
    """What arrives for no ticket."""


class Reader(Dataset[Any]):
    """Reads the next examples of the sources of a draw, in a worker or here."""

    def __init__(
        self, sources: list[Any], names: list[str], collate: Any, sharded: bool, carry: bool
    ) -> None:
        self._sources, self._names, self._collate = sources, names, collate
        self._sharded, self._carry = sharded, carry
        self._place = 0, 1
        self._skip: dict[int, Indices] = {}
        self._open: dict[int, Iterator[Any]] = {}

    def begin(self, rank: int, ranks: int, skip: dict[int, Indices], *, fresh: bool) -> None:
        """Read as this rank, over what was taken. What is open goes on, unless all is to be ``fresh``."""
        self._place, self._skip = (rank, ranks), {slot: counts.copy() for slot, counts in skip.items()}
        if fresh:
            self.forget()

    def forget(self) -> None:
        """The sources begin anew."""
        self._open.clear()

    def __getitem__(self, ticket: Ticket | None) -> Any:
        if ticket is None:
            return Nothing()
        sources = [self._source(s) for s in ticket.draw._indices.tolist()]
        with nullcontext() if self._sharded else _as_if_in_no_worker():
            examples = [next(source) for source in sources]
        batch = self._collate(examples)
        return carrying(batch, ticket.draw) if self._carry else batch

    def _source(self, s: int) -> Iterator[Any]:
        if s not in self._open:
            info = get_worker_info()
            slot, slots = (0, 1) if info is None else (info.id, info.num_workers)
            rank, ranks = self._place
            self._open[s] = self._examples(s, rank * slots + slot, ranks * slots)
            counts = self._skip.get(slot)
            with nullcontext() if self._sharded else _as_if_in_no_worker():
                for _ in range(0 if counts is None else int(counts[s])):
                    next(self._open[s])
        return self._open[s]

    def _examples(self, s: int, part: int, parts: int) -> Iterator[Any]:
        """This reader's part of a source, again and again."""
        source, passes = self._sources[s], 0
        while True:
            if hasattr(source, "set_epoch"):
                source.set_epoch(passes)
            found = 0
            for k, example in enumerate(source):
                if self._sharded or k % parts == part:
                    found += 1
                    yield example
            if not found:
                raise ValueError(
                    f"source {self._names[s]!r} has no example for reader {part} of {parts}: give it more "
                    "examples than there are processes times workers"
                )
            passes += 1


@contextmanager
def _as_if_in_no_worker() -> Iterator[None]:
    """Hide from a source that it is read by a worker.

    Many divide themselves among workers when they see one, Hugging Face's streams for instance. Of such a
    part the reader would take a part again, and most examples would never be read.
    """
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
