"""Batches that a look has chosen for the next steps, and the candidates that they were chosen among."""

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from adambs import _check
from adambs._types import Floats, Indices, State
from adambs.candidates import choose
from adambs.draw import refuse_impossible
from adambs.epochs import Epoch
from adambs.proposals import RandomStream, Window

_NAMES = ("positions", "ratios", "p_ratios")


class Choice(NamedTuple):
    """A batch that was chosen and is still to be drawn."""

    positions: Indices
    """Among the candidates."""
    ratios: Floats
    """1 / (weight of an unbiased estimate)."""
    p_ratios: Floats
    """n p when the candidates were drawn."""


class Ready:
    """What is left of the last look: batches that were chosen then, in the order of their steps.

    Args:
        n: number of examples.
        batch_size: K.
        candidates: those of all batches of the look, each once. Another array for each look.
        looked_at: the epoch of the look, and before which batch of it: what augmentation depends on.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        candidates: Indices | None = None,
        looked_at: tuple[int, int] = (0, 0),
    ) -> None:
        self._n, self._batch_size = n, batch_size
        self.candidates = np.empty(0, np.int64) if candidates is None else candidates
        self.looked_at = looked_at
        self.choices: deque[Choice] = deque()

    def after(self, candidates: Indices, now: Epoch) -> "Ready":
        """One for the candidates of a new look."""
        return Ready(self._n, self._batch_size, candidates, (now.number, now.drawn))

    def choose(
        self, random: RandomStream, window: Window, where: Indices, scores: Floats, correction: float
    ) -> None:
        """A batch of each part of the window, by the scores; ``where`` says which candidate each of it is."""
        for part in window.parts:
            candidates, first, copies = np.unique(where[part], return_index=True, return_counts=True)
            ratios = window.ratios[part][first]
            positions, chosen = choose(
                random, ratios, scores[part][first], copies, self._batch_size, correction
            )
            self.choices.append(Choice(candidates[positions], chosen, ratios[positions]))

    def state_dict(self) -> dict[str, Any]:
        """The choices as plain numbers. No candidates where there is no choice left."""
        epoch, batch = self.looked_at
        return {
            "epoch": epoch,
            "batch": batch,
            "candidates": self.candidates.tolist() if self.choices else [],
            "choices": [[array.tolist() for array in choice] for choice in self.choices],
        }

    def with_state(self, state: State) -> "Ready":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        looked_at = _check.count(state, "epoch"), _check.count(state, "batch")
        candidates = _whole(state, "candidates", self._n)
        new = Ready(self._n, self._batch_size, candidates, looked_at)
        choices = _check.entry(state, "choices")
        if not isinstance(choices, list):
            raise ValueError(f"state['choices'] must be a list, not {type(choices).__name__}")
        for values in choices:
            if not isinstance(values, list) or len(values) != len(_NAMES):
                raise ValueError(f"a choice of the state must be a list of {len(_NAMES)} lists")
            named = dict(zip(_NAMES, values, strict=True))
            lists = [_check.numbers(named, name, length=self._batch_size, path="a choice") for name in _NAMES]
            positions = _whole(named, "positions", len(candidates))
            refuse_impossible("a choice", lists[1] + lists[2])
            ratios, p_ratios = np.array(lists[1]), np.array(lists[2])
            new.choices.append(Choice(positions, ratios, p_ratios))
        return new


def _whole(state: Any, name: str, below: int) -> Indices:
    """A list of whole numbers from 0 to ``below``."""
    values = _check.numbers(state, name)
    if not all(type(value) is int and value < below for value in state[name]):
        raise ValueError(f"state[{name!r}] must hold whole numbers below {below}")
    return np.array(values, np.int64)
