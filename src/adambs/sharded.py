"""ShardedSampler: p in parts, for more examples than one process can hold p for.

Each process keeps p of the examples of its own shards, draws them and trains on them; data may be sharded
likewise. What all have in common is small: see :mod:`adambs.rules.sharded`.

    all ranks    how many of the batch fall on each shard      the same random numbers, nothing is sent
    each rank    which examples of its shards these are        drawn from its own part of p
    all ranks    every score, and the group it came from       one gathering of some ten bytes a score
    each rank    moves its own examples to their new groups
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices
from adambs.draw import Draw, _Cut
from adambs.feedback import Report
from adambs.fingerprints import fingerprint
from adambs.moments import batch_moments
from adambs.processes import refuse_empty_parts
from adambs.rules.calibrated import Calibrated
from adambs.rules.shard_kernels import FROM_A_PASS, Bytes, ratios_of
from adambs.rules.sharded import Lesson, Piece, ShardedCalibrated, SharedStream
from adambs.sampler import _GATE, BanditSampler
from adambs.shards import GatheredInShards, ShardedDraw, ShardedEpochs, ShardedProcesses, lengths_of, united


class ShardedSampler(BanditSampler):
    """A :class:`BanditSampler` whose p is kept in parts, one in each process. The same p, to rounding.

    Every process draws and trains on the examples of its own shards, so how many of a batch it has varies:
    as often as p says, or as nearly as whole numbers allow with ``stratified=True``. ``draw.mean`` takes care
    of it. Draws and p depend on the shards and not on the number of processes.

    The rule is :class:`Calibrated`. Looking before drawing, ``correction`` below one, initial weights, a
    context and a cap are not for shards.

    Args:
        n: number of training examples of all processes, or the length of each shard, such as that of each
            file, in order. The same on all ranks.
        batch_size: of all processes together.
        shards: into how many equal parts n is cut, if it is a number; as many as there are processes if
            nothing is given. A run can go on with any number of processes up to that.
        rule: :class:`Calibrated` with other settings.
        seed: of the random stream, the same on all ranks.
        stratified: draw one example from each part of the mass of p that one of the batch stands for. All
            processes then have nearly as many examples as their shards' mass deserves. Still unbiased.
        gate: see :class:`BanditSampler`. If nothing is given, 1.1; but no gate if you have given a rule.
        feedback: see :class:`BanditSampler`.
        group: as for :class:`BanditSampler`; it must be initialised already.
    """

    rule: ShardedCalibrated
    processes: ShardedProcesses
    random: SharedStream

    def __init__(
        self,
        n: int | Sequence[int],
        batch_size: int,
        *,
        shards: int | None = None,
        rule: Calibrated | None = None,
        seed: int = 0,
        stratified: bool = False,
        gate: float | None = None,
        feedback: str = "automatic",
        group: Any = None,
    ) -> None:
        processes = ShardedProcesses(group)
        refuse_empty_parts(_check.whole("batch_size", batch_size, least=1), processes.size)
        lengths = lengths_of(n, shards, processes.size)
        if rule is not None and type(rule) is not Calibrated:
            raise TypeError(f"rule must be Calibrated(...), not {rule!r}: others are not made for shards")
        W, V = processes.size, len(lengths)
        self._cuts = [r * V // W for r in range(W + 1)]
        owned = range(self._cuts[processes.rank], self._cuts[processes.rank + 1])
        super().__init__(
            int(lengths.sum()),
            batch_size,
            rule=ShardedCalibrated(lengths, owned, **({} if rule is None else rule.settings())),
            seed=seed,
            stratified=stratified,
            cap=math.inf,
            gate=(_GATE if rule is None else 0.0) if gate is None else gate,
            feedback=feedback,
            group=False,
        )
        self.processes = processes
        self.random = SharedStream(self.seed)
        self.epochs: ShardedEpochs = ShardedEpochs(self)

    @property
    def start(self) -> int:
        """The number of the first example of this process."""
        return int(self.rule.first[self.rule.owned.start])

    @property
    def stop(self) -> int:
        """The number after that of the last example of this process."""
        return int(self.rule.first[self.rule.owned.stop])

    def first_of(self, length: int) -> int | None:
        """A loader's data set is all examples, or those of this process."""
        return self.start if length == self.stop - self.start else super().first_of(length)

    @property
    def correction(self) -> float:
        """Always one: shards have unbiased weights."""
        return 1.0

    @correction.setter
    def correction(self, value: float) -> None:
        if _check.unit_interval("correction", value) != 1.0:
            raise ValueError(f"correction must be 1 with shards, not {value}: use BanditSampler for less")
        self._correction = 1.0

    @property
    def in_parts(self) -> bool:
        """Whether there are several processes, each with its shards."""
        return self.processes.size > 1

    def draw_after(self, look: Any) -> Draw:
        """A mini-batch; there is no looking."""
        if look is not None:
            raise ValueError("score is not for shards: draw without looking, or use BanditSampler")
        return super().draw_after(None)

    def sizes(self, counts: Indices) -> list[int]:
        """How many examples each process has of a batch with so many of each shard."""
        sizes: list[int] = np.add.reduceat(counts, self._cuts[:-1]).tolist()  # all have a shard
        return sizes

    def _settle(self) -> None:
        if self.processes.settled:
            return
        self.processes.settle(self.batch_size, lambda: fingerprint(self.identity(), self._shared_state()))
        if self.processes.group is not None:
            self.feedback.use(GatheredInShards(self.processes.group, self))

    def _plain(self) -> Draw:
        """A batch, from a pass if one is under way or p does not pay; as :class:`Sources` does it."""
        pieces: list[Piece] = []
        missing, reshuffled = self.batch_size, False
        plain, uniform = True, self.counters.updates == 0  # as long as nothing was learned
        while missing:
            if self.passes.under_way or not self.gate.decide():
                reshuffled |= not pieces
                count = min(missing, self.passes.left)
                pieces.append(self.rule.located(self.passes.take(count)))
            else:
                count, plain = missing, uniform
                pieces.append(self.rule.draw_piece(self.random, count, stratified=self.stratified))
            missing -= count
        self.counters.reshuffled += reshuffled
        number = self.awaited.following
        draw = self._made(number, plain, *self.rule.joined(pieces), self.rule.group_ratios)
        self.awaited.add(draw)
        self.counters.draws += 1
        return draw

    def _made(
        self,
        number: int,
        plain: bool,
        indices: Indices,
        drawn: Bytes,
        counts: Indices,
        group_ratios: Floats,
    ) -> ShardedDraw:
        """The draw of these, or of one example of weight zero if there is none."""
        p_ratios = ratios = ratios_of(drawn, group_ratios)
        if not len(indices):
            indices, ratios, p_ratios = np.array([self.start]), np.array([np.inf]), np.ones(1)
        draw = ShardedDraw(number, indices, ratios, self.n, p_ratios=p_ratios)
        draw._counts, draw._drawn, draw._group_ratios, draw._lesson = counts, drawn, group_ratios, None
        draw._sizes, draw._plain = self.sizes(counts), plain
        if self.processes.size > 1:
            before = sum(draw._sizes[: self.processes.rank])
            draw._cut = _Cut(before, self.processes.size / self.batch_size, 1.0, None)
        return draw

    def restored(self, values: Any, parts: list[Any]) -> ShardedDraw:
        """A draw of a state, from what all know of it and from the examples of our shards; or an error."""
        state = dict(zip(("number", "plain", "counts", "group_ratios"), values, strict=True))
        counts = np.array(_check.numbers(state, "counts", length=len(self.rule.lengths)), np.int64)
        ratios = np.array(_check.numbers(state, "group_ratios", length=len(self.rule.means)))
        indices = np.array([j for part in parts for j in part[0]], np.int64)
        drawn = np.array([g for part in parts for g in part[1]], np.uint8)
        owned = self.rule.owned
        given = [(len(part[0]), len(part[1])) for part in parts]
        if counts.sum() != self.batch_size or given != [(c, c) for c in counts[owned.start : owned.stop]]:
            raise ValueError(f"a draw of the state has {given} examples in our shards, and says {counts}")
        shards = np.repeat(np.arange(owned.start, owned.stop), counts[owned.start : owned.stop])
        known = (drawn < len(ratios)) | (drawn == FROM_A_PASS)
        first = self.rule.first
        if not known.all() or ((indices < first[shards]) | (indices >= first[shards + 1])).any():
            raise ValueError(
                "a draw of the state has examples that are not in their shard, or groups that do not exist"
            )
        number, plain = _check.count(state, "number"), _check.flag(state, "plain")
        return self._made(number, plain, indices, drawn, counts, ratios)

    def check(self, draw: Any, scores: Any, skipped: torch.Tensor | None = None) -> Report:
        """As for :class:`BanditSampler`; what is on its way is learned first, because it moves examples."""
        with self._lock:
            if self.processes.group is not None:
                self._learn_what_is_late()
            return super().check(draw, scores, skipped)

    def _learn(self, draw: Draw, scores: Floats, witness: Draw | torch.Tensor | None) -> None:
        assert isinstance(draw, ShardedDraw)
        lesson = draw._lesson or Lesson(scores, self.rule.beside(draw._own, draw._drawn, draw._counts))
        draw._lesson = None
        ratios = lesson.ratios(draw._group_ratios)
        self.counters.updates += 1
        uniform, squares, mean, *_ = batch_moments(ratios, lesson.scores, math.inf)
        self.counters.trained.mix(uniform, squares)
        self.candidates.scatter.mix(squares, mean)
        if self.gate.threshold > 0:
            self.gate.learn(ratios, self.rule.group_ratios[lesson.groups], lesson.scores)
        self.rule.learn(lesson, draw._counts, draw._own)
        self.counters.scores += len(lesson.scores)
        self.mistakes.feedback(draw, lesson.scores, witness)
        if len(draw._own):  # else there is only the example of weight zero
            for observer in self.observers:
                observer(draw, scores)

    def refresh(self, *_: Any, **__: Any) -> None:
        """Not for shards."""
        raise TypeError("refresh is not for shards: p learns from the batches alone")

    def probabilities(self, indices: Any = None) -> torch.Tensor:
        """p of the examples ``indices`` of this process, or of all of them. A copy, float64."""
        if indices is not None:
            indices = _check.indices("indices", indices, self.n)
            if len(indices) and not self.start <= indices.min() <= indices.max() < self.stop:
                raise ValueError(
                    f"indices must lie in {self.start}..{self.stop - 1}, the shards of this process"
                )
        with self._lock:
            self._learn_what_is_late()
            return torch.from_numpy(self.rule.ratios(indices) / self.n)

    def _shared_state(self) -> dict[str, Any]:
        """What must be the same in all processes."""
        parts = {name: getattr(self, name) for name in self.PARTS}
        shared = {name: getattr(part, "shared_state", part.state_dict)() for name, part in parts.items()}
        return {**shared, "correction": 1.0}

    def parse_state(self, state: Any) -> dict[str, Any]:
        """Read and check a state, or a list of the states of several processes; changes nothing."""
        return super().parse_state(united(state) if isinstance(state, list | tuple) else state)

    def identity(self) -> dict[str, Any]:
        """What a state must share with the sampler that loads it."""
        digest = f"{zlib.crc32(self.rule.lengths.tobytes()):08x}"
        return {**super().identity(), "shards": len(self.rule.lengths), "lengths": digest}

    def __repr__(self) -> str:
        V, owned = len(self.rule.lengths), self.rule.owned
        settings = f"rule={self.rule!r}, seed={self.seed}, stratified={self.stratified}"
        return (
            f"ShardedSampler(n={self.n}, batch_size={self.batch_size}, {settings}: shards {owned.start} to "
            f"{owned.stop - 1} of {V} here)"
        )
