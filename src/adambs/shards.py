"""The parts of a :class:`ShardedSampler`: its draws, its feedback, its group and its place in an epoch."""

import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices, State
from adambs.draw import Draw
from adambs.epochs import Epoch, Epochs
from adambs.feedback import Awaited, Policy, Report
from adambs.gathering import Parts
from adambs.processes import Group, Processes
from adambs.rules.shard_kernels import Bytes
from adambs.rules.sharded import Lesson

if TYPE_CHECKING:
    from adambs.sharded import ShardedSampler


class ShardedDraw(Draw):
    """The examples of a batch that are in the shards of one process.

    A process to which nothing of the batch has fallen has one example of weight zero: it must take part in
    the step. That example's score teaches nothing.
    """

    __slots__ = ("_counts", "_drawn", "_group_ratios", "_lesson", "_plain", "_sizes")

    _counts: Indices
    """How many the batch has of each shard, of all processes."""
    _drawn: Bytes
    """The group that each example was drawn from."""
    _group_ratios: Floats
    """The ratio of each group at the time of drawing."""
    _sizes: list[int]
    """How many the batch has of each process."""
    _lesson: Lesson | None
    """The scores of all processes, when they have arrived."""
    _plain: bool
    """Whether all of the batch, of all processes, is from a pass, or from p before anything was learned."""

    @property
    def plain(self) -> bool:
        """Whether all weights of the batch are one, in all processes."""
        return self._plain

    @property
    def _own(self) -> Indices:
        """The examples that were drawn here."""
        return self._indices[: len(self._drawn)]

    @property
    def own(self) -> Indices:
        """The examples that were drawn here. A copy."""
        return self._own.copy()

    @property
    def counts(self) -> Indices:
        """How many the batch has of each shard, of all processes. A copy."""
        return self._counts.copy()

    def same_as(self, other: Draw) -> bool:
        """Whether ``other`` is this draw or a copy of it."""
        return self is other or (
            self.number == other.number
            and np.array_equal(self._indices, other._indices)
            and np.array_equal(self._ratios, other._ratios)
        )

    def to_list(self) -> list[Any]:
        """What all processes know of it, as plain numbers."""
        return [self.number, self._plain, self._counts.tolist(), self._group_ratios.tolist()]


class GatheredInShards(Policy):
    """Gather the scores of all processes, and the groups of their examples, without waiting."""

    def __init__(self, group: Group, sampler: "ShardedSampler") -> None:
        self._group, self._sampler = group, sampler
        room = self._room(0)
        group.room = room - (-2 * room // 8)  # with two bytes beside each score

    def begin(self, draw: Any, scores: Any, awaited: Awaited, skipped: torch.Tensor | None) -> Report:
        """The gathering is started; the shape of this process's part is checked."""
        found: Any = awaited.find(draw)
        own = len(found._own)
        if not own:  # the score of the example of weight zero is not sent
            scores = scores if isinstance(scores, torch.Tensor) else np.asarray(scores)
            if scores.shape != (len(found),):
                raise ValueError(f"scores must have shape ({len(found)},), not {tuple(scores.shape)}")
            scores = scores[:0]  # on the device that the others gather on
        sizes = found._sizes
        parts = Parts.of(sizes, self._room(max(sizes)))
        gathering = self._group.gather(
            "an update",
            scores,
            parts,
            number=found.number,
            draws=awaited.following,
            skipped=skipped,
            beside=self._sampler.rule.beside(found._own, found._drawn, found._counts),
        )

        def fetch() -> tuple[Any, Any]:
            values = gathering.wait()
            if not gathering.skipped:
                _refuse_bad(values, sizes, found.number)
                found._lesson = Lesson(values, gathering.beside())
            start = sum(sizes[: self._group.rank])
            return found, values[start : start + own] if own else np.zeros(len(found))

        return Report(found, fetch=fetch, skipped=lambda: gathering.skipped)

    def _room(self, most: int) -> int:
        """Nearly always the same, however many a rank has: else ranks that are out of step could not be told.

        Messages of different lengths end the process, or wait for ever, before anybody can compare them.
        """
        part = -(-self._sampler.batch_size // self._group.size)
        room = part + 5 * math.isqrt(part) + 8
        while room < most:
            room *= 2
        return min(room, self._sampler.batch_size)


def _refuse_bad(scores: Floats, sizes: list[int], number: int) -> None:
    """Raise the same error on all ranks if a score of any is bad."""
    good = (scores >= 0.0) & (scores < np.inf)
    if not good.all():
        bad = int(good.argmin())
        rank = int(np.searchsorted(np.cumsum(sizes), bad, side="right"))
        raise ValueError(
            f"scores[{bad - sum(sizes[:rank])}] of rank {rank} is {scores[bad]} (draw {number}): every score "
            f"must be finite and not negative. It came late: draw {number} has taught nothing"
        )


class ShardedProcesses(Processes):
    """The group, which must be there from the beginning: it decides which shards a process keeps."""

    def __init__(self, wanted: Any = None) -> None:
        super().__init__(wanted)
        if self.left_alone():
            raise RuntimeError(
                f"WORLD_SIZE is {self.left_alone()} and torch.distributed is not initialised: call "
                "torch.distributed.init_process_group() before ShardedSampler(...): it must know its shards"
            )
        self.group = self.found()
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank, self.group.size)

    def settle(self, batch_size: int, entries: Any) -> None:
        """Make sure that all are alike, and as many as in the beginning."""
        found = self.found() if self.group is None else self.group
        if (1 if found is None else found.size) != self.size:
            raise RuntimeError(
                f"there are {1 if found is None else found.size} processes and the sampler was built for "
                f"{self.size}: build it anew, and load its state"
            )
        self.group = found
        super().settle(batch_size, entries)

    def handed_out(self, draw: Draw) -> Draw:
        """The draw as it is; what all know of it goes into the digest that is compared."""
        if self.group is not None and isinstance(draw, ShardedDraw):
            for array in (draw._counts, draw._group_ratios):
                self.group.digest = zlib.crc32(array.tobytes(), self.group.digest)
        return draw

    def part(self, draw: Draw) -> Draw:
        """The draw as it is."""
        return draw

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps the same shards, and finds its group anew."""
        return {**super().__getstate__(), "rank": self.rank, "size": self.size}


class ShardedEpochs(Epochs):
    """Where the loader stands; of draws on their way each process saves the examples of its shards."""

    def __init__(self, sampler: "ShardedSampler") -> None:
        super().__init__(sampler.n, sampler.batch_size)
        self._sampler = sampler

    def shared_state(self) -> dict[str, Any]:
        """What is the same in all processes."""
        return super().state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The present epoch, and for each shard the examples and groups of the draws on their way."""
        shards: dict[str, list[Any]] = {str(v): [] for v in self._sampler.rule.owned}
        for draw in self.current.ahead:
            assert isinstance(draw, ShardedDraw)
            done = 0
            for v in self._sampler.rule.owned:
                here = slice(done, done + int(draw._counts[v]))
                shards[str(v)].append([draw._own[here].tolist(), draw._drawn[here].tolist()])
                done = here.stop
        return {**self.shared_state(), "shards": shards}

    def with_state(self, state: State) -> "ShardedEpochs":
        """One like this, in a state that has the shards of this process; or an error."""
        shards, ahead = _check.mapping(state, "shards"), _check.entry(state, "ahead")
        plain = super().with_state({**state, "ahead": []}).current
        new = ShardedEpochs(self._sampler)
        draws: deque[Draw] = deque(
            self._sampler.restored(
                values, [_check.entry(shards, str(v))[k] for v in self._sampler.rule.owned]
            )
            for k, values in enumerate(ahead)
        )
        new.current = Epoch(plain.number, plain.delivered, draws, plain.finished)
        batches = -(-self._sampler.n // self._sampler.batch_size)
        if new.current.drawn > batches or (plain.finished and ahead):
            raise ValueError(f"state has {new.current.drawn} batches in an epoch of {batches}, or after it")
        numbers = [draw.number for draw in draws]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"state['ahead'] must have draws in the order of their numbers, not {numbers}")
        new._resuming = True
        return new


def united(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state with the shards of all of these, which must be of the same moment."""
    if not states:
        raise ValueError("state must be a state or a list of states, not an empty list")
    for state in states:
        for name in ("awaited", "random", "passes"):
            if _check.mapping(state, name) != _check.mapping(states[0], name):
                raise ValueError(f"the states of the processes differ in {name!r}: load those of one moment")
    whole = dict(states[0])
    for name in ("rule", "epochs"):
        parts = [_check.mapping(state, name) for state in states]
        shards = {v: kept for part in parts for v, kept in _check.mapping(part, "shards").items()}
        whole[name] = {**parts[0], "shards": shards}
    return whole


def lengths_of(n: Any, shards: int | None, processes: int) -> Indices:
    """Of each shard."""
    if isinstance(n, Sequence) or (isinstance(n, np.ndarray) and n.ndim):
        lengths = [_check.whole(f"n[{v}]", length, least=1) for v, length in enumerate(n)]
        if shards not in (None, len(lengths)):
            raise ValueError(f"shards is {shards} and n has the lengths of {len(lengths)}: leave shards out")
    else:
        V = processes if shards is None else _check.whole("shards", shards, least=1)
        total = _check.whole("n", n, least=V)
        lengths = [(v + 1) * total // V - v * total // V for v in range(V)]
    if len(lengths) < processes:
        raise ValueError(
            f"there are {len(lengths)} shards and {processes} processes: every process needs one of its own"
        )
    return np.array(lengths, np.int64)
