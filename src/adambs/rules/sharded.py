"""The default rule in parts: each process keeps the examples of its shards, all know the groups.

A p of :class:`Calibrated` is made of two things. One is small, and every process has it: what each group is
worth, and how many members it has in each shard (V shards times some ninety groups). The other is large:
which examples are in which group. It is needed only by whoever draws those examples, so each process keeps it
for its own shards. After every batch all processes hear of every score and of the group its example was in,
ten bytes each, and go on with the same small part.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices
from adambs.proposals import RandomStream
from adambs.rules import grouping, shard_kernels
from adambs.rules.base import first_unit
from adambs.rules.calibrated import Calibrated
from adambs.rules.grouping import GROUP, GROUPS, SCORED, Members
from adambs.rules.shard_kernels import FROM_A_PASS, Bytes, ratios_of


class Piece(NamedTuple):
    """Some examples of a batch: those in the shards of this process, and how many are in each shard."""

    indices: Indices
    """Of this process, shard after shard."""
    groups: Bytes
    """From which they were drawn."""
    counts: Indices
    """How many the batch has of each shard, of all processes."""


class Lesson(NamedTuple):
    """What all processes know of a batch that has come back, shard after shard."""

    scores: Floats
    beside: Bytes
    """Two for each score: the group of its example now, marked if it has no later place in the batch, and
    the group that it was drawn from."""

    def ratios(self, group_ratios: Floats) -> Floats:
        """n p of each example at the time of drawing, when groups had these ratios."""
        return ratios_of(self.beside[:, 1], group_ratios)

    @property
    def groups(self) -> Bytes:
        """The group of each example now."""
        return self.beside[:, 0] & np.uint8(GROUP)


class SharedStream(RandomStream):
    """Random numbers that all processes have alike, of which each makes only those that it needs."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def uniform(self, count: int) -> Floats:
        """Independent numbers in [0, 1)."""
        return self._generator.random(count)

    def counts(self, total: int, masses: Floats) -> Indices:
        """How many of ``total`` independent draws fall on each of these masses. O(number of masses)."""
        return self._generator.multinomial(total, masses / masses.sum())

    def part(self, count: int, start: int, stop: int) -> Floats:
        """Those from ``start`` to ``stop`` of the next ``count`` numbers in [0, 1)."""
        bits: Any = self._generator.bit_generator
        bits.advance(start)
        numbers = self._generator.random(stop - start)
        bits.advance(count - stop)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """The generator's own state: plain numbers. There are no blocks."""
        return dict(self._generator.bit_generator.state)

    def with_state(self, state: Mapping[str, Any]) -> "SharedStream":
        """One that goes on where the state was taken; or an error."""
        _check.mapping(state, "state")  # before numpy looks into what may be a tensor
        new = SharedStream(0)
        try:
            new._generator.bit_generator.state = dict(state)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"state is not that of a random stream: {error!r}") from error
        return new


class ShardedCalibrated(Calibrated):
    """:class:`Calibrated` over shards, of which this process keeps some. The same p, to rounding.

    O(K + V groups) a step, where K is this process's part of the batch, plus O(1) for every score of the
    others; 8 bytes for each example of its own.

    Args:
        lengths: examples in each of the V shards.
        owned: the shards of this process.
        settings: those of :class:`Calibrated`.
    """

    sizes: Indices
    """[V, groups]: members of each group in each shard."""
    masses: Floats
    """[V]: n times the probability of each shard."""

    def __init__(self, lengths: Indices, owned: range, **settings: float) -> None:
        super().__init__(**settings)
        self.lengths, self.owned = lengths, owned
        self.first = np.concatenate([[0], np.cumsum(lengths)])

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Nothing seen. O(V groups)."""
        self.n, self.batch_size, self.unit = n, batch_size, 0.0
        self._worth = grouping.nothing_known()
        self.sizes = np.zeros((len(self.lengths), GROUPS), np.int64)
        self.sizes[:, SCORED] = self.lengths
        self.shards = {v: Members(int(self.lengths[v])) for v in self.owned}
        self._settle()

    @property
    def group_sizes(self) -> Indices:
        """How many examples are in each group, in all shards."""
        return self._totals

    def _settle(self) -> None:
        """The ratio of each group, as if there was one shard, and the mass of each shard."""
        self._totals = shard_kernels.add_up(self.sizes)
        super()._settle()
        self.masses = shard_kernels.masses_of(self.sizes, self.group_ratios)

    def draw_piece(self, random: SharedStream, B: int, *, stratified: bool) -> Piece:
        """B draws from p. How many fall on each shard all know; which ones, its owner. O(V + K)."""
        if stratified:
            wanted = (np.arange(B) + random.uniform(B)) * (self.masses.sum() / B)
            ends = np.cumsum(self.masses)
            stops = np.searchsorted(wanted, ends)
            stops[-1] = B
            counts = np.diff(stops, prepend=0)
            u = (wanted - np.repeat(ends - self.masses, counts)) / np.repeat(self.masses, counts)
            u = np.clip(u[self._ours(counts)], 0.0, 1.0)  # rounding
        else:
            counts = random.counts(B, self.masses)
            ours = self._ours(counts)
            u = random.part(B, ours.start, ours.stop)
        found, done = [np.empty(0, np.int64)], 0
        worth = self._worth.copy()
        for v in self.owned:
            count = int(counts[v])
            if count:
                worth[grouping.SUMS] = np.cumsum(self.sizes[v] * self.group_ratios)
                local, _ = self.shards[v].draw(worth, u[done : done + count])
                found.append(local + self.first[v])
            done += count
        indices = np.concatenate(found)
        return Piece(indices, self._groups_of(indices, counts), counts)

    def located(self, indices: Indices) -> Piece:
        """Some examples of a pass, numbered over all shards. O(their number)."""
        shards = np.searchsorted(self.first, indices, side="right") - 1
        ours = (shards >= self.owned.start) & (shards < self.owned.stop)
        kept = indices[ours][np.argsort(shards[ours], kind="stable")]
        counts = np.bincount(shards, minlength=len(self.lengths))
        return Piece(kept, np.full(len(kept), FROM_A_PASS, np.uint8), counts)

    def joined(self, pieces: list[Piece]) -> Piece:
        """One batch of several pieces, shard after shard."""
        if len(pieces) == 1:
            return pieces[0]
        indices = np.concatenate([piece.indices for piece in pieces])
        order = np.argsort(np.searchsorted(self.first, indices, side="right"), kind="stable")
        groups = np.concatenate([piece.groups for piece in pieces])
        counts: Indices = np.sum([piece.counts for piece in pieces], axis=0)
        return Piece(indices[order], groups[order], counts)

    def _ours(self, counts: Indices) -> slice:
        """Where the examples of this process are in a batch with so many of each shard."""
        start = int(counts[: self.owned.start].sum())
        return slice(start, start + int(counts[self.owned.start : self.owned.stop].sum()))

    def _groups_of(self, indices: Indices, counts: Indices) -> Bytes:
        """The groups of the examples of this process, shard after shard, in a batch with these counts."""
        found, done = np.empty(len(indices), np.uint8), 0
        for v in self.owned:
            here = slice(done, done + int(counts[v]))
            found[here] = self.shards[v].groups(indices[here], int(self.first[v]))
            done = here.stop
        return found

    def beside(self, indices: Indices, drawn: Bytes, counts: Indices) -> Bytes:
        """What is told of the examples of this process beside their scores: see :class:`Lesson`."""
        return shard_kernels.told(indices, self._groups_of(indices, counts), drawn)

    def learn(self, lesson: Lesson, counts: Indices, indices: Indices) -> None:
        """All that :meth:`Calibrated.observe` does. ``indices`` are those of this process."""
        if not self.unit:
            self.unit = first_unit(lesson.scores)
        targets = grouping.absorb(
            lesson.scores, lesson.beside, counts, self.sizes, self._worth, self.unit, self.memory
        )
        targets, done = targets[self._ours(counts)], 0
        for v in self.owned:
            count = int(counts[v])
            if count:
                part = slice(done, done + count)
                self.shards[v].move(indices[part], int(self.first[v]), targets[part])
            done += count
        self._settle()

    def groups(self, indices: Indices | None = None) -> Indices:
        """The group of some examples of this process, or of all of them."""
        if indices is None:
            indices = np.arange(self.first[self.owned.start], self.first[self.owned.stop])
        found, shards = np.empty(len(indices), np.int64), np.searchsorted(self.first, indices, side="right")
        for v in self.owned:
            here = shards == v + 1
            found[here] = self.shards[v].groups(indices[here], int(self.first[v]))
        return found

    def ratios(self, indices: Indices | None = None) -> Floats:
        """n p of some examples of this process, or of all of them."""
        return self.group_ratios[self.groups(indices)]

    def shared_state(self) -> dict[str, Any]:
        """What is the same in all processes."""
        return {
            "sizes": torch.from_numpy(self.sizes.copy()),
            "means": torch.from_numpy(self.means.copy()),
            "draws": torch.from_numpy(self.draws.copy()),
            "unit": self.unit,
        }

    def state_dict(self) -> dict[str, Any]:
        """That, and the order of the examples in the shards of this process, 4 bytes each."""
        orders = {str(v): torch.from_numpy(members.listed()) for v, members in self.shards.items()}
        return {**self.shared_state(), "shards": orders}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, which must have the shards of this process; or ``ValueError``."""
        new = copy.copy(self)
        new.sizes = _check.array(state, "sizes", (len(self.lengths), GROUPS), "int64", least=0).copy()
        if (new.sizes.sum(axis=1) != self.lengths).any():
            raise ValueError(f"state['sizes'] must have the lengths of the shards as sums, {self.lengths}")
        new._worth = self._worth_of(state)
        new.unit = _check.number(state, "unit", normal=True)
        orders, new.shards = _check.mapping(state, "shards"), {}
        for v, own in self.shards.items():
            order = _check.array(orders, str(v), (own.n,), own.order.dtype.name, path="state['shards']")
            new.shards[v] = Members.of(order, new.sizes[v], f"state['shards']['{v}']")
        new._settle()
        return new
