"""Where indices come from: passes over all examples in a random order, or independent draws from a rule."""

import copy
from typing import Any, NamedTuple

import numpy as np

from adambs import _check
from adambs._types import Floats, Indices, State
from adambs.gate import Gate
from adambs.permutation import Permutation
from adambs.rules.base import Rule

# What growing passes take of all examples, each a quarter more than the one before, until they take all.
_FIRST_PASSES = tuple(1.25**number / 8 for number in range(10))

# Random numbers are made so many at a time.
_BLOCK = 4096


class Passes:
    """Every example once in a random order, then all again in a new one: what ``shuffle=True`` does.

    The order depends on the seed and the number of the pass alone, and is computed as it is needed, so a
    state is two numbers and a new pass costs nothing.

    A pass is unbiased as a whole. Which of its examples have come tells what is left, so whoever leaves it
    half way because of what it has shown is biased: begin another way to draw only when none is under way.
    A pass that was meant from its start to end early is not: its examples are a random choice from all. So
    where there may be something else to do between passes, they *grow*: the first takes an eighth of the
    examples, each of the next a quarter more than the one before, and each ends with a whole batch.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        batch_size: int = 1,
        number: int = 0,
        position: int = 0,
        growing: bool = False,
    ) -> None:
        self._n, self._seed, self._batch_size = n, seed, batch_size
        self._number = number
        self.position = position
        """How many examples of the present pass have come; 0 if none is under way."""
        self.growing = growing
        """Whether passes grow. To be set only while none is under way."""
        self._order = self._shuffled()
        self._order.warm_up()

    def _shuffled(self) -> Permutation:
        """The order of the present pass.

        The numbers of its key begin with one: (seed, 0) has the very random bits of :class:`RandomStream`,
        and independence would hang on which of these bits NumPy uses for what.
        """
        return Permutation(self._n, self._seed, self._number + 1)

    @property
    def under_way(self) -> bool:
        """Whether a pass has begun and is not finished."""
        return self.position > 0

    @property
    def length(self) -> int:
        """After how many examples the present pass ends."""
        if not self.growing:
            return self._n
        share = _FIRST_PASSES[self._number] if self._number < len(_FIRST_PASSES) else 1.0
        return max(int(share * self._n) // self._batch_size, 1) * self._batch_size

    @property
    def left(self) -> int:
        """How many examples the present pass still has, or the next one if none is under way."""
        return self.length - self.position

    def take(self, count: int) -> Indices:
        """The next ``count`` examples. Where a pass ends the next begins. O(count)."""
        parts = []
        while count > 0:
            length = self.length
            stop = min(self.position + count, length)
            parts.append(self._order.take(self.position, stop))
            count -= stop - self.position
            self.position = stop
            if stop == length:
                self._number, self.position = self._number + 1, 0
                self._order = self._shuffled()
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"number": self._number, "position": self.position, "growing": self.growing}

    def with_state(self, state: State) -> "Passes":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        number, growing = _check.count(state, "number"), _check.flag(state, "growing")
        passes = Passes(self._n, self._seed, self._batch_size, number, growing=growing)
        passes.position = _check.count(state, "position", most=passes.length - 1)
        return passes


class RandomStream:
    """The sampler's own random numbers. No global stream is read or changed.

    They are made in blocks: a call of NumPy's generator for each small batch costs more than the numbers.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._refill(_BLOCK)

    def _refill(self, size: int) -> None:
        """A new block, and how to make it again."""
        self._before: dict[str, Any] = dict(self._generator.bit_generator.state)
        self._block, self._used = self._generator.random(size), 0

    def uniform(self, count: int) -> Floats:
        """Independent numbers in [0, 1). To be read, not to be changed."""
        start, stop = self._used, self._used + count
        if stop > self._block.size:  # what is left of the block is not used
            self._refill(max(_BLOCK, count))
            start, stop = 0, count
        self._used = stop
        return self._block[start:stop]

    def stratified(self, count: int) -> Floats:
        """One number from each ``count``-th of [0, 1), in random order."""
        order = self.uniform(count).argsort(kind="stable")  # ties are as rare as 2^-53
        return (self.uniform(count) + order) / count

    def state_dict(self) -> dict[str, Any]:
        """The generator's state before the block, in plain numbers, and how much of the block is used."""
        return {**self._before, "size": self._block.size, "used": self._used}

    def with_state(self, state: State) -> "RandomStream":
        """One that goes on where the state was taken; or an error."""
        size = _check.count(state, "size", least=_BLOCK, most=2**31)
        used = _check.count(state, "used", most=size)
        _check.mapping(state, "state")  # before numpy looks into what may be a tensor
        bits = np.random.PCG64()
        try:
            bits.state = dict(state)  # type: ignore[assignment]  # it checks what it is given
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"state is not that of a random stream: {type(error).__name__}: {error}"
            ) from error
        stream = copy.copy(self)
        stream._generator = np.random.Generator(bits)
        stream._refill(size)
        stream._used = used
        return stream

    def rewind(self, state: State) -> None:
        """Be again as the state was taken."""
        self.__dict__.update(self.with_state(state).__dict__)


Proposal = tuple[Indices, Floats, bool]
"""Examples to train on or to score, n times the probability of each, and whether they are from a pass (or at
least the first of them)."""


class Window(NamedTuple):
    """Candidates for some batches to come."""

    indices: Indices
    ratios: Floats
    """n times the probability of each."""
    parts: list[slice]
    """Those to choose from, for each batch."""


class Sources:
    """Where examples come from: a pass that has to be finished first, else p if it pays, else a new pass."""

    def __init__(
        self, rule: Rule, random: RandomStream, passes: Passes, gate: Gate, stratified: bool
    ) -> None:
        if stratified and rule.distinct:
            raise ValueError(
                f"stratified must be False with {type(rule).__name__}, which draws distinct examples from "
                "independent numbers, one from each K-th of the mass as it is: leave it out"
            )
        self.rule, self.random, self.passes, self.gate = rule, random, passes, gate
        self.stratified = stratified

    def batch(self, K: int) -> Proposal:
        """K examples to train on. Where a pass ends within a batch, the choice is made again."""
        if self.passes.position == 0 and self.gate.decide():
            random = self.random
            indices, ratios = self.rule.draw(random.stratified(K) if self.stratified else random.uniform(K))
            return indices, ratios, False
        indices, ratios = self.passes.take(min(K, self.passes.left)), np.ones(K)
        missing = K - len(indices)
        if missing:
            more, ratios[-missing:], _ = self.batch(missing)
            indices = np.concatenate([indices, more])
        return indices, ratios, True

    def candidates(self, B: int, ahead: int) -> Window:
        """B examples to choose from, for each of the next ``ahead`` batches, drawn from p.

        Only where no pass is under way. Draws from p are unbiased whenever they begin and end, so whether to
        look may depend on anything that was seen.
        """
        self.gate.head_start = max(0, self.gate.head_start - ahead)
        uniform = self.random.stratified if self.stratified else self.random.uniform
        drawn = [self.rule.draw(uniform(B)) for _ in range(ahead)]
        indices, ratios = (np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
        return Window(indices, ratios, [slice(k * B, (k + 1) * B) for k in range(ahead)])

    def position(self) -> tuple[State, tuple[bool, int]]:
        """Where the random stream and the gate stand, for :meth:`rewind`."""
        return self.random.state_dict(), (self.gate.open, self.gate.head_start)

    def rewind(self, position: tuple[State, tuple[bool, int]]) -> None:
        """Go back to before some candidates were proposed; a pass has not moved for them."""
        self.random.rewind(position[0])
        self.gate.open, self.gate.head_start = position[1]
