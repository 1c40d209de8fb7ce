"""How a sampler learns: scores come home, and its parts are told."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats
from adambs.candidates import Candidates, Score
from adambs.cap import Cap
from adambs.carried import was_capped
from adambs.diagnostics import Counters
from adambs.draw import Draw
from adambs.feedback import Awaited, DrawOrNumber, Feedback, Observer, Report
from adambs.gate import Gate
from adambs.mistakes import Mistakes
from adambs.moments import batch_moments
from adambs.processes import Processes
from adambs.rules.base import Rule


class Learning(ABC):
    """What a sampler does with scores, with the parts that learn from them."""

    n: int
    rule: Rule
    gate: Gate
    candidates: Candidates
    cap: Cap
    awaited: Awaited
    counters: Counters
    feedback: Feedback
    processes: Processes
    mistakes: Mistakes
    observers: list[Observer]
    _lock: threading.RLock

    @abstractmethod
    def _settle(self) -> None:
        """Find out with whom draws are shared."""

    def returned(self) -> int:
        """How often scores came back, those on their way among them."""
        return self.counters.updates + len(self.feedback.late)

    def update(self, draw: DrawOrNumber, scores: Any) -> None:
        """Let p learn from the ``scores`` (gradient norms) of the examples of ``draw``. O(K log n).

        Anywhere after the forward pass of the batch, once for each draw. ``draw`` may be its number, or the
        tensor of it that a batch carries.
        """
        self.learn(self.check(draw, scores))

    def check(self, draw: DrawOrNumber, scores: Any, skipped: torch.Tensor | None = None) -> Report:
        """The first half of :meth:`update`: an error, or what :meth:`learn` wants. Changes nothing.

        ``skipped`` is a tensor, next to the scores, that says whether they are to be dropped.
        """
        with self._lock:
            return self.feedback.begin(draw, scores, self.awaited, skipped)

    def learn(self, report: Report) -> None:
        """The second half of :meth:`update`."""
        with self._lock:
            if (arrived := self.feedback.accept(report, self.awaited)) is not None:
                self._learn(*arrived)

    def _learn_what_is_late(self) -> None:
        for arrived in self.feedback.collect(self.awaited):
            self._learn(*arrived)

    def _learn(self, draw: Draw, scores: Floats, witness: Draw | torch.Tensor | None) -> None:
        counters = self.counters
        counters.updates += 1
        uniform, squares, mean, capped, taken = batch_moments(draw._ratios, scores, draw.limit)
        counters.trained.mix(uniform, squares)
        self._learn_cap(draw, scores, witness, mean, capped, taken)
        if not draw.learned:
            self.candidates.scatter.mix(squares, mean)
            self._teach(draw, scores)
        self.mistakes.feedback(draw, scores, witness)
        for observer in self.observers:
            observer(draw, scores)

    def _learn_cap(
        self, draw: Draw, scores: Floats, witness: Any, mean: float, capped: int, taken: float
    ) -> None:
        """From the mean of weight x score, and what the draw's limit takes of it if the cap is applied."""
        if draw.correction != 1.0:  # weights are not 1 / r
            _, _, mean, capped, taken = batch_moments(1.0 / draw._weights(), scores, draw.limit)
        applied: Any = draw.capped or (lambda: draw.capped or was_capped(witness))
        self.cap.learn(applied, len(scores), mean, capped, taken)

    def _teach(self, draw: Draw, scores: Floats) -> None:
        """The gate and the rule learn from examples that were drawn from p, or from a pass."""
        if self.gate.threshold > 0:
            self.gate.learn(draw._ratios, self.rule.ratios(draw._indices), scores, self.cap.limit)
        counters = self.counters
        counters.clipped += self.rule.update(draw._indices, draw._ratios, scores)
        counters.scores += len(scores)
        if counters.clipped:
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
        stay unbiased whatever is refreshed and whenever. ``score`` maps a tensor of at most ``batch_size``
        indices to scores; ``progress`` is then told how many are done, and of how many.
        """
        chosen = np.arange(self.n) if indices is None else _check.indices("indices", indices, self.n)
        size = _check.whole("batch_size", batch_size, least=1)
        with self._lock:
            self._learn_what_is_late()  # older than what is seen now, and must not overwrite it
            self._settle()
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            scores = self.processes.refreshed(part, score)
            with self._lock:
                self.rule.observe(part, scores)
            progress(start + len(part), len(chosen))
