"""BanditSampler keeps the distribution p, draws mini-batches from it and lets it learn."""

import copy
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from adambs import _check, states
from adambs._types import Floats, Indices
from adambs.candidates import Candidates, choose
from adambs.diagnostics import Counters, Diagnostics
from adambs.draw import Draw
from adambs.epochs import Epochs
from adambs.feedback import Awaited, Feedback, Report, checked
from adambs.gate import Gate
from adambs.mistakes import Mistakes
from adambs.proposals import Passes, RandomStream, independent
from adambs.rules.base import Rule
from adambs.rules.calibrated import Calibrated

# Unless the user says otherwise, p must lower the second moment of the gradient so much to be drawn from.
_GATE = 1.1

Score = Callable[[torch.Tensor], Any]
"""From the indices of some examples to their scores: a forward pass without gradients."""

Observer = Callable[[Draw, Floats], None]
"""Called with each draw that has come back and its scores, after p has learned. Must not change them."""


class BanditSampler:
    """A distribution p over n examples that learns from the gradient norms of the examples it drew.

    Draws are independent and with replacement, as in the paper, as soon as p is worth it (see ``gate``). A
    draw may come back late, out of order or never: each update uses the probabilities of its own draw.

    The sampler is wiring. Its parts each do one job and keep their own state: the ``rule`` (how feedback
    changes p), ``random``, ``passes`` (reshuffled batches), ``gate``, ``candidates`` (looking before
    drawing), ``awaited`` (draws without feedback), ``epochs`` (where a loader stands) and ``counters``.
    Draws and updates from several threads wait for each other.

    Args:
        n: number of training examples.
        batch_size: K.
        rule: how feedback changes p; :class:`Calibrated` if nothing is given. :class:`Exp3` is the paper's
            Algorithm 2.
        seed: of the sampler's own random stream. No global stream is read or changed.
        stratified: draw one example from each K-th of the mass instead of K independent ones. Still
            unbiased, with less variance. The batch is shuffled, so that any part of it is alike.
        initial_weights: n weights, for instance a teacher's opinion of how much each example matters.
        correction: exponent of the weights 1/(n p). One, the paper's, keeps the gradient unbiased. Less
            favours examples of large gradient norm, zero wholly so; see docs/choosing-a-rule.md before
            using it. A choice among candidates is always corrected in full. The attribute ``correction``
            may be changed at any time, for a schedule.
        gate: p is drawn from while it lowers the second moment of the gradient by more than this factor,
            by a running estimate. While it does not, batches come from reshuffled passes over the data, with
            weights of one, and p goes on learning from them: the optimizer does then what it would have done
            without a bandit. 0 is no gate, as in the paper. If nothing is given, 1.1; but no gate if you
            have chosen a rule or initial weights yourself. A pass that has begun is finished first.
        candidates: how many candidates :meth:`draw` scores first when it is given a way to, and whether that
            pays; :class:`Candidates()` if nothing is given.
        feedback: how scores come home. ``"at once"`` reads them in :meth:`update`; ``"late"`` copies them
            without waiting for their device and learns at the next draw, where bad scores raise;
            ``"automatic"`` is at once for scores on the CPU and late for all others. p learns the same.
    """

    rule: Rule
    random: RandomStream
    passes: Passes
    gate: Gate
    candidates: Candidates
    awaited: Awaited
    epochs: Epochs
    counters: Counters

    _PARTS = ("rule", "random", "passes", "gate", "candidates", "awaited", "epochs", "counters")

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        rule: Rule | None = None,
        seed: int = 0,
        stratified: bool = False,
        initial_weights: Any = None,
        correction: float = 1.0,
        gate: float | None = None,
        candidates: Candidates | None = None,
        feedback: str = "automatic",
    ) -> None:
        self.n = _check.whole("n", n, least=1)
        self.batch_size = _check.whole("batch_size", batch_size, least=1)
        if self.batch_size > self.n:
            raise ValueError(
                f"batch_size must be at most n = {self.n}, not {self.batch_size}: choose a smaller batch_size"
            )
        if rule is not None and not isinstance(rule, Rule):
            raise TypeError(f"rule must be a Rule such as Exp3(), not {rule!r}")
        self.seed = _check.whole("seed", seed, least=0)
        self.stratified = bool(stratified)
        if initial_weights is not None:
            initial_weights = _check.vector("initial_weights", initial_weights, self.n)
            if not initial_weights.any():
                raise ValueError("initial_weights are all zero: give some example a positive weight")
        if candidates is not None and not isinstance(candidates, Candidates):
            raise TypeError(f"candidates must be a Candidates, not {candidates!r}")
        self.correction = correction
        if gate is None:
            gate = _GATE if rule is None and initial_weights is None else 0.0

        self.gate = Gate(gate)
        self.candidates = copy.deepcopy(candidates) if candidates is not None else Candidates()
        self.rule = copy.copy(rule) if rule is not None else Calibrated()
        self.rule.start(self.n, self.batch_size, initial_weights)
        self.random = RandomStream(self.seed)
        self.passes = Passes(self.n, self.seed)
        self.awaited = Awaited(self.batch_size)
        self.epochs = Epochs(self.n, self.batch_size)
        self.counters = Counters()

        self.feedback = Feedback(feedback)
        self.observers: list[Observer] = []
        self.mistakes = Mistakes()
        self.loaded = False  # whether a state was ever loaded
        self._lock = threading.RLock()

    @property
    def correction(self) -> float:
        """Exponent of the weights of the draws to come."""
        return self._correction

    @correction.setter
    def correction(self, value: float) -> None:
        self._correction = _check.unit_interval("correction", value)

    # ----------------------------------------------------------------------------------------------
    # Drawing
    # ----------------------------------------------------------------------------------------------

    def draw(self, score: Score | None = None) -> Draw:
        """A mini-batch of K examples, from p if that pays. O(K log n).

        Args:
            score: from a tensor of indices to the scores of those examples, by a forward pass without
                gradients. If it is given, and whenever it pays (see :class:`Candidates`), some candidates
                are drawn from p and scored, the rule learns from them, and the batch is chosen among them.
        """
        with self._lock:
            self._learn_what_is_late()
            if score is None:
                return self._plain()
            self.candidates.entered()
            draw = self._look(score) if self.candidates.pays() else self._plain()
            self.candidates.left()
            return draw

    def _reshuffle(self) -> bool:
        """Whether the next batch is from a pass: because one is under way, or because p does not pay."""
        return self.passes.under_way or not self.gate.decide()

    def _plain(self) -> Draw:
        """K examples from p or from a pass. Where a pass ends within a batch, the choice is made again."""
        K = self.batch_size
        if not self._reshuffle():
            return self._numbered(*self._from_rule(K))
        self.counters.reshuffled += 1
        indices, ratios = self.passes.take(min(K, self.passes.left)), np.ones(K)
        missing = K - len(indices)
        if missing and self._reshuffle():
            indices = np.concatenate([indices, self.passes.take(missing)])
        elif missing:
            more, ratios[-missing:] = self._from_rule(missing)
            indices = np.concatenate([indices, more])
        return self._numbered(indices, ratios)

    def _from_rule(self, count: int) -> tuple[Indices, Floats]:
        return independent(self.rule, self.random, count, stratified=self.stratified)

    def _numbered(
        self, indices: Indices, ratios: Floats, p_ratios: Floats | None = None, *, learned: bool = False
    ) -> Draw:
        """The draw with the next number, awaited from now on."""
        draw = Draw(
            self.awaited.following,
            indices,
            ratios,
            self.n,
            correction=self._correction,
            p_ratios=p_ratios,
            learned=learned,
        )
        self.awaited.following += 1
        self.awaited.add(draw)
        self.counters.draws += 1
        return draw

    def _look(self, score: Score) -> Draw:
        """Candidates are scored and learned from, and the batch is chosen among them.

        They are drawn from p or, where a pass is due, they are the next of the pass, which then goes on by
        K as it does without a look: when it ends does not depend on what it shows, and it stays unbiased
        (docs/algorithm.md). Near its end too few are left to choose from.
        """
        K, B = self.batch_size, min(self.candidates.multiple * self.batch_size, self.n)
        before = self.random.state_dict(), self.gate.open
        reshuffled = self._reshuffle()
        if reshuffled and self.passes.left <= K:
            return self._plain()
        if reshuffled:
            indices = self.passes.peek(min(B, self.passes.left))
            ratios = np.ones(len(indices))
        else:
            indices, ratios = self._from_rule(B)
        candidates = Draw(self.awaited.following, indices, ratios, self.n)
        start = time.perf_counter()
        try:
            scores = checked(candidates, score(candidates.indices))
        except BaseException:  # a look that fails has not happened
            self.random, self.gate.open = self.random.with_state(before[0]), before[1]
            raise
        self.candidates.looked(time.perf_counter() - start)
        if reshuffled:
            self.passes.take(K)
        taken = K if reshuffled else B  # whether to look may depend on what the pass has shown, no more
        self.candidates.scattered(ratios[:taken], scores[:taken])
        self.counters.looks += 1
        self.counters.reshuffled += reshuffled
        positions, chosen = choose(self.random, ratios, scores, K, self._correction)
        self._teach(candidates, scores)
        draw = self._numbered(indices[positions], chosen, ratios[positions], learned=True)
        draw.positions = positions
        return draw

    # ----------------------------------------------------------------------------------------------
    # Learning
    # ----------------------------------------------------------------------------------------------

    def update(self, draw: Draw | int | torch.Tensor, scores: Any) -> None:
        """Let p learn from the ``scores`` (gradient norms) of the examples of ``draw``. O(K log n).

        Anywhere after the forward pass of the batch, once for each draw. ``draw`` may be its number, or the
        tensor of it that a batch carries.
        """
        self.learn(self.check(draw, scores))

    def check(
        self, draw: Draw | int | torch.Tensor, scores: Any, skipped: torch.Tensor | None = None
    ) -> Report:
        """The first half of :meth:`update`: an error, or what :meth:`learn` wants. Changes nothing.

        ``skipped`` is a tensor, next to the scores, that says whether they are to be dropped.
        """
        with self._lock:
            return self.feedback.begin(draw, scores, self.awaited, skipped)

    def learn(self, report: Report) -> None:
        """The second half of :meth:`update`."""
        with self._lock:
            for arrived in self.feedback.accept(report, self.awaited):
                self._learn(*arrived)

    def _learn_what_is_late(self) -> None:
        for arrived in self.feedback.collect(self.awaited):
            self._learn(*arrived)

    def _learn(self, draw: Draw, scores: Floats, by_number: bool) -> None:
        self.counters.update(draw._ratios, scores)
        if not draw.learned:
            self.candidates.scattered(draw._ratios, scores)
            self._teach(draw, scores)
        self.mistakes.feedback(draw, scores, by_number=by_number)
        for observer in self.observers:
            observer(draw, scores)

    def _teach(self, draw: Draw, scores: Floats) -> None:
        """The gate and the rule learn from examples that were drawn from p, or from a pass."""
        if self.gate.threshold > 0:
            self.gate.moments.blend(draw._ratios, self.rule.ratios(draw._indices), scores)
        counters = self.counters
        counters.clipped += self.rule.update(draw._indices, draw._ratios, scores)
        counters.scores += len(draw)
        self.mistakes.clipped(counters.updates, counters.clipped, counters.scores, self.rule)

    def refresh(
        self,
        score: Score,
        indices: Any = None,
        *,
        batch_size: int = 200,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Score all examples, or those of ``indices``, by forward passes, and let the rule remember.

        For rules that remember scores (:class:`Calibrated`, :class:`Tracking`, :class:`Avare`). The weights
        stay unbiased whatever is refreshed and whenever.

        Args:
            score: from a tensor of indices to the scores of those examples.
            indices: which examples; all if nothing is given.
            batch_size: how many to score at once.
            progress: called after each of these with how many are done, and of how many.
        """
        chosen = np.arange(self.n) if indices is None else _check.indices("indices", indices, self.n)
        size = _check.whole("batch_size", batch_size, least=1)
        with self._lock:
            self._learn_what_is_late()  # older than what is seen now, and must not overwrite it
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            scores = _check.vector("scores", score(torch.from_numpy(part.copy())), len(part))
            with self._lock:
                self.rule.observe(part, scores)
            progress(start + len(part), len(chosen))

    # ----------------------------------------------------------------------------------------------
    # Looking in
    # ----------------------------------------------------------------------------------------------

    def probabilities(self, indices: Any = None) -> torch.Tensor:
        """p of the examples ``indices``, or of all n. A copy, float64."""
        chosen = None if indices is None else _check.indices("indices", indices, self.n)
        with self._lock:
            self._learn_what_is_late()
            return torch.from_numpy(self.rule.ratios(chosen) / self.n)

    def diagnostics(self) -> Diagnostics:
        """What the distribution looks like and what it is worth. O(1) with the default rule."""
        with self._lock:
            self._learn_what_is_late()
            mean_square, mean_log = self.rule.spread()
            counters = self.counters
            return Diagnostics(
                draws=counters.draws,
                updates=counters.updates,
                effective_sample_size=self.n / mean_square,
                entropy=math.log(self.n) - mean_log,
                variance_reduction=counters.trained.reduction,
                scores=counters.scores,
                clipped_scores=counters.clipped,
                looks=counters.looks,
                reshuffled=counters.reshuffled,
                tau=self.candidates.tau,
            )

    # ----------------------------------------------------------------------------------------------
    # As the ``batch_sampler`` of a plain DataLoader
    # ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches in an epoch: ceil(n / K)."""
        return -(-self.n // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of the batches of one epoch, for ``DataLoader(dataset, batch_sampler=sampler)``.

        Their draws are awaited by number. :class:`BanditLoader` also says which batch is which draw.
        """
        caller = sys._getframe(1).f_code.co_qualname
        if caller.startswith(("BatchSampler.", "_BatchSamplerIterator.")):  # torch's, torchdata's
            raise TypeError(
                "DataLoader(sampler=...) takes single examples, and a BanditSampler draws batches: give "
                "it as batch_sampler=, or use adambs.BanditLoader(dataset, sampler)"
            )
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        epoch = self.epochs.begin()
        try:
            while epoch.delivered < len(self):
                draw = self.draw()
                epoch.delivered += 1
                yield draw._indices.tolist()
        finally:
            epoch.leave()

    # ----------------------------------------------------------------------------------------------
    # State
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draws depend on, as tensors and plain numbers.

        Includes the draws that a loader has made ahead, so a run resumed in the middle of an epoch gets
        the very batches that were on their way.
        """
        with self._lock:
            self._learn_what_is_late()
            state = states.put_together(self._identity(), self._parts())
            return {**state, "correction": self.correction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise ``ValueError`` and keep the old one."""
        self.adopt(self.parse_state(state))

    def parse_state(self, state: Any) -> dict[str, Any]:
        """Read and check a state, for :meth:`adopt`; changes nothing."""
        new = states.read(state, self._identity(), self._parts())
        new["correction"] = _check.number(state, "correction", 0.0, 1.0)
        for draw in new["epochs"].current.ahead:
            if draw.number >= new["awaited"].following:
                raise ValueError(f"state['epochs'] is damaged: draw {draw.number} was not made yet")
            new["awaited"].add(draw)
        return new

    def adopt(self, parsed: dict[str, Any]) -> None:
        """Take what :meth:`parse_state` has returned; cannot fail."""
        with self._lock:
            self.feedback.drop()
            for name, part in parsed.items():
                setattr(self, name, part)
            self.loaded = True

    def _parts(self) -> dict[str, states.Part]:
        return {name: getattr(self, name) for name in self._PARTS}

    def _identity(self) -> dict[str, Any]:
        """What a state must share with the sampler that loads it."""
        return {
            "n": self.n,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "stratified": self.stratified,
            "gate_threshold": self.gate.threshold,
            "rule_name": type(self.rule).__name__,
            "rule_settings": self.rule.settings(),
            "candidates_settings": self.candidates.settings(),
        }

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._learn_what_is_late()
            return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return (
            f"BanditSampler(n={self.n}, batch_size={self.batch_size}, rule={self.rule!r}, "
            f"seed={self.seed}, stratified={self.stratified})"
        )
