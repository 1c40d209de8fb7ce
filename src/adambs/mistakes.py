"""The likeliest mistakes in a training loop, each warned of once, in words."""

import os
import sys
import warnings
from collections import deque
from typing import Any, NoReturn

import torch
from torch.utils import _pytree

from adambs._types import Floats
from adambs.carried import was_weighted
from adambs.draw import Draw
from adambs.epochs import Epoch

# Where the code lies that a warning is not about.
_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))

# A weighted mean may be taken some time after the feedback; so many draws later it should have been.
_PATIENCE = 16

# So many batches of equal scores are no accident.
_EQUAL_BATCHES = 5

# After so many updates, say so if most scores were above the rule's bound.
_CLIPPED_AT = 50


class Mistakes:
    """Watches what comes back and warns of what looks wrong. Changes nothing and is not saved."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        # With unequal weights, and perhaps still to be weighted: draws, and who knows of their weights.
        self._to_weight: deque[tuple[Draw, Draw | torch.Tensor]] = deque()
        self._weighted = 0
        self._equal: list[float] = []
        self._batches = 0
        # The epoch that is trained on, its batches and all updates before it began here.
        self._epoch: tuple[Epoch, int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the draws: a copy of a draw does not know what is done with the original."""
        return {**self.__dict__, "_to_weight": deque(), "_epoch": None}

    def feedback(self, draw: Draw, scores: Floats, witness: Draw | torch.Tensor | None) -> None:
        """A draw has come back with its scores. ``witness`` knows whether its weights were used."""
        if self._weighted < _PATIENCE and witness is not None and not draw.even:
            self._to_weight.append((draw, witness))
            if len(self._to_weight) > _PATIENCE:
                self._weighted += 1
                if not _used(*self._to_weight.popleft()):
                    self._weighted = _PATIENCE
                    self._warn(
                        "unweighted",
                        "batches were drawn with unequal p, and nobody asked for their weights: train on "
                        "draw.mean(losses) instead of losses.mean(), or the gradient is biased",
                    )
            if self._weighted == _PATIENCE:  # all is well, or was said
                self._to_weight.clear()
        if self._batches < _EQUAL_BATCHES and len(scores) > 1:
            self._batches += 1
            self._equal += [scores[0]] * bool((scores == scores[0]).all())
            if len(self._equal) == _EQUAL_BATCHES and len(set(self._equal)) > 1:
                self._warn(
                    "equal",
                    f"in each of the first {_EQUAL_BATCHES} batches all {len(scores)} scores are the same, "
                    "and they change from batch to batch: they look like a loss after a mean reduction. Give "
                    "one score for each example, e.g. adambs.scores.cross_entropy(logits, y)",
                )

    def alone(self, processes: int) -> None:
        """So many processes were started, and have nothing to share draws through."""
        if processes:
            self._warn(
                "alone",
                f"WORLD_SIZE is {processes} and torch.distributed is not initialised, so every process draws "
                "the same batches: call torch.distributed.init_process_group() before the first draw, or "
                "give the sampler or stream group=False if this is meant",
            )

    def epoch_begins(self, epoch: Epoch, updates: int) -> None:
        """An epoch begins, or goes on, after so many updates in all. Without gradients it is no training."""
        self._epoch = (epoch, epoch.delivered, updates) if torch.is_grad_enabled() else None

    def epoch_over(self, updates: int, least: int = 1) -> None:
        """There were so many updates in all. An epoch of less than the ``least`` batches was left early."""
        if self._epoch is None:
            return
        epoch, delivered, before = self._epoch
        batches, self._epoch = epoch.delivered - delivered, None
        if batches > 0 and epoch.delivered >= least and updates == before:
            self._warn(
                "silent",
                f"an epoch of {batches} batches is over and no scores came back, so p cannot learn: call "
                "optimizer.step(draw, scores) or sampler.update(draw, scores) for each batch",
            )

    def loaded(self) -> None:
        """A state was loaded: nobody waits for the end of the present epoch."""
        self._epoch = None

    def clipped(self, updates: int, clipped: int, scores: int, rule: object) -> None:
        """So many scores were above the rule's bound."""
        if updates == _CLIPPED_AT and 2 * clipped > scores:
            self._warn(
                "clipped",
                f"{clipped} of the first {scores} scores were above the bound of {rule!r} and were clipped, "
                "so the rule cannot tell those examples apart: give it a larger L, or scale the scores",
            )

    def _warn(self, kind: str, sentence: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(sentence, RuntimeWarning, stacklevel=_depth_of_the_caller())


def _used(draw: Draw, witness: Draw | torch.Tensor) -> bool:
    """Whether the draw's weights were used, by itself or inside its batch."""
    return draw.weighted or (isinstance(witness, torch.Tensor) and was_weighted(witness))


def _depth_of_the_caller() -> int:
    """The ``stacklevel`` of the first call that is neither ours nor torch's: the training loop."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        depth, frame = depth + 1, frame.f_back
    return depth


class _WayOut:
    """A sequence that is taken for a tensor says what was unpacked wrongly."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a batch of several tensors has no attribute {name!r}: {self._reason()}")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{getattr(func, '__name__', func)} was given a whole batch: {cls._reason()}")

    @staticmethod
    def _reason() -> str:
        return "BanditLoader yields (batch, draw), so write `for (x, y), draw in loader`"


class _ListBatch(_WayOut, list):  # type: ignore[type-arg]
    pass


class _TupleBatch(_WayOut, tuple):  # type: ignore[type-arg]
    pass


for _kind in (
    _ListBatch,
    _TupleBatch,
):  # torch's tree functions take them for the list or tuple that they are
    _pytree.register_pytree_node(
        _kind, lambda batch: (list(batch), type(batch)), lambda parts, kind: kind(parts)
    )


def with_a_way_out(batch: Any) -> Any:
    """The batch; a list or tuple of tensors that is taken for one of them says how to unpack it."""
    if type(batch) is list:
        return _ListBatch(batch)
    return _TupleBatch(batch) if type(batch) is tuple else batch
