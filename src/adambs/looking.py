"""How a sampler looks: candidates are scored, p learns from them, and batches are chosen among them."""

import time
from abc import ABC, abstractmethod

import numpy as np

from adambs._types import Floats, Indices
from adambs.candidates import Candidates, Look
from adambs.diagnostics import Counters
from adambs.draw import Draw
from adambs.epochs import Epochs
from adambs.feedback import Awaited, checked
from adambs.processes import Processes
from adambs.proposals import Passes, RandomStream, Sources
from adambs.ready import Ready


class Looking(ABC):
    """What a sampler does when it looks, with the parts that it needs for that."""

    n: int
    batch_size: int
    random: RandomStream
    passes: Passes
    candidates: Candidates
    ready: Ready
    awaited: Awaited
    epochs: Epochs
    counters: Counters
    processes: Processes
    _sources: Sources
    _correction: float

    @abstractmethod
    def _numbered(
        self, indices: Indices, ratios: Floats, p_ratios: Floats | None = None, learned: bool = False
    ) -> Draw:
        """The draw with the next number, awaited from now on."""

    @abstractmethod
    def _teach(self, draw: Draw, scores: Floats) -> None:
        """The gate and the rule learn from examples that were drawn from p, or from a pass."""

    def _look(self, look: Look) -> None:
        """Candidates are scored and learned from, and the next batches are chosen among them."""
        start = time.perf_counter()
        K, B = self.batch_size, min(self.candidates.multiple * self.batch_size, self.n)
        before = self._sources.position()
        window = self._sources.candidates(B, self.candidates.ahead)
        number = self.awaited.following
        distinct, where = self._distinct(window.indices)
        candidates = Draw(number, distinct, np.ones(len(distinct)), self.n)
        try:
            found = look(self.processes.part(candidates))
            found = checked(candidates, self.processes.scores_of_all(candidates, found))
        except BaseException:  # a look that fails has not happened
            self._sources.rewind(before)
            raise
        scores = found[where]
        for part in window.parts:
            self.candidates.scatter.add(window.ratios[part], scores[part])
        self.ready = self.ready.after(distinct, self.epochs.current)
        self.ready.choose(self.random, window, where, scores, self._correction)
        drawn = Draw(number, window.indices, window.ratios, self.n)
        for first in range(0, len(scores), B):
            self._teach(drawn.part(first, first + B, 1), scores[first : first + B])
        self.candidates.looked(time.perf_counter() - start, K / len(distinct), self.processes.first)

    def _distinct(self, drawn: Indices) -> tuple[Indices, Indices]:
        """What is to be scored, and where each candidate is among it: what was drawn twice is scored once.

        Each process has one to score at least: if there are too few, some are scored more than once.
        """
        distinct, where = np.unique(drawn, return_inverse=True)
        group = self.processes.group
        if group is not None and len(distinct) < group.size:
            return drawn, np.arange(len(drawn))
        return distinct, where

    def _chosen(self) -> Draw:
        """The next batch that a look has chosen."""
        positions, ratios, p_ratios = self.ready.choices.popleft()
        self.counters.looks += 1
        draw = self._numbered(self.ready.candidates[positions], ratios, p_ratios, learned=True)
        draw.positions = positions
        return draw
