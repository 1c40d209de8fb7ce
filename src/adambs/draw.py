"""Draw: one mini-batch, the p it was drawn with, and the number under which the sampler knows it."""

import math
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, Indices
from adambs.carried import HALF, Carried
from adambs.shares import all_one, capped_shares, fill_capped_shares, plain_mean, usual

_WAY_OUT = "BanditLoader yields (batch, draw): write `for (x, y), draw in loader`"

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

# What nobody ever draws has less than this times the uniform probability; squares of its inverse are finite.
_NEVER_DRAWN = 1e-100


class Draw:
    """K examples drawn from p, and the probabilities with which they were drawn.

    The probabilities are those of the time of drawing and never change: they make the estimate unbiased
    however late the batch is used. The tensors are copies: what is done to them the sampler does not see.
    """

    __slots__ = (
        "_cut",
        "_even",
        "_index_tensor",
        "_indices",
        "_p_ratios",
        "_ratios",
        "_weighted",
        "capped",
        "correction",
        "learned",
        "limit",
        "n",
        "number",
        "positions",
    )

    number: int
    """How many draws the sampler had made before this one."""
    n: int
    correction: float
    """Exponent of the weights of p at the time of drawing."""
    learned: bool
    """Whether the rule has learned from it already: it was chosen among candidates, and they taught it."""
    limit: float
    """What :meth:`mean` lets weight x score be; ``capped``: whether it was given scores, so that it holds."""
    capped: bool
    positions: Indices | None
    """Which of the candidates were chosen, if there were any. Not saved."""

    def __init__(
        self,
        number: int,
        indices: Indices,
        ratios: Floats,
        n: int,
        correction: float = 1.0,
        p_ratios: Floats | None = None,
        learned: bool = False,
        limit: float = math.inf,
    ) -> None:
        self.limit, self.capped = limit, False
        self.number, self.n, self.correction, self.learned = number, n, correction, learned
        self._indices = indices
        self._ratios = ratios  # 1 / (weight of an unbiased estimate); n p_j unless chosen among candidates
        self._p_ratios = ratios if p_ratios is None else p_ratios  # n p_j
        self._index_tensor: torch.Tensor | None = None
        self._even: bool | None = None
        self._weighted = False
        self.positions = None
        self._cut: _Cut | None = None

    def part(self, start: int, stop: int, parts: int) -> "Draw":
        """The examples from ``start`` to ``stop``, for one of so many processes that share this draw.

        The mean over the processes of their :meth:`mean` is that of this draw; weights are as they are here.
        """
        part = Draw(
            self.number,
            self._indices[start:stop],
            self._ratios[start:stop],
            self.n,
            correction=self.correction,
            p_ratios=self._p_ratios[start:stop],
            learned=self.learned,
            limit=self.limit,
        )
        mean_weight = 1.0 if self.correction == 1.0 else float(self._raw_weights().mean())
        part._cut = _Cut(start, parts / len(self), mean_weight, self)
        if self.positions is not None:
            part.positions = self.positions[start:stop]
        return part

    @property
    def start(self) -> int:
        """Where this part begins in the draw of all processes; 0 if there is one process."""
        return 0 if self._cut is None else self._cut.start

    @property
    def whole(self) -> "Draw":
        """The draw of all processes, of which this is a part; this one itself if there is one process."""
        return self if self._cut is None or self._cut.whole is None else self._cut.whole

    def alone(self) -> "Draw":
        """The same without the other processes' parts: all that a worker needs, in fewer bytes."""
        if self._cut is None:
            return self
        build, (arguments, options, cut) = self.__reduce__()
        return build(arguments, options, cut._replace(whole=None))  # type: ignore[no-any-return]

    @property
    def indices(self) -> torch.Tensor:
        """Which examples: int64, shape (K,), duplicates possible."""
        if self._index_tensor is None:
            # From NumPy: torch would make it on the default device, or as torch.func's transforms want it.
            self._index_tensor = torch.from_numpy(self._indices.copy())
        return self._index_tensor

    @property
    def probabilities(self) -> torch.Tensor:
        """p_j of each drawn example: float64, shape (K,)."""
        self._weighted = True  # by whoever asks
        return torch.from_numpy(self._p_ratios / self.n)

    @property
    def weights(self) -> torch.Tensor:
        """1/(n p_j) of each drawn example: float64, shape (K,).

        After a choice among candidates they also make up for the choice. With a ``correction`` below one,
        (1/(n p_j))^correction, divided by their mean over the batch (that of all processes); a choice among
        candidates is always corrected in full.
        """
        self._weighted = True
        if self._cut is not None:
            self.whole._weighted = True
        return torch.from_numpy(self._weights())

    def _coefficients(self) -> Floats:
        """What :meth:`mean` multiplies each loss by, as long as there is no cap."""
        return self._weights() * (1 / len(self) if self._cut is None else self._cut.share)

    def _weights(self) -> Floats:
        weights = self._raw_weights()
        if self.correction != 1.0:
            weights /= weights.mean() if self._cut is None else self._cut.mean_weight
        return weights

    def _raw_weights(self) -> Floats:
        weights: Floats = 1.0 / self._ratios
        if self.correction != 1.0:
            weights *= self._p_ratios ** (1.0 - self.correction)
        return weights

    @property
    def even(self) -> bool:
        """Whether all weights are one, of this part."""
        if self._even is None:
            self._even = all_one(self._ratios)
        return self._even

    @property
    def plain(self) -> bool:
        """Whether all weights of the batch are one, in all processes: it is a plain optimizer's batch.

        What all processes must do alike, such as to clip a gradient that they share, depends on this and not
        on :attr:`even`: the parts of a batch in which a pass ends differ in that.
        """
        return self.even if self._cut is None else self.whole.even

    @property
    def weighted(self) -> bool:
        """Whether somebody has asked for the weights, or for the weighted mean."""
        return self._weighted

    def mean(self, losses: torch.Tensor, scores: Any = None) -> torch.Tensor:
        """(1/K) sum_k losses[k] / (n p_k), eq. (1): its gradient is the unbiased estimate G_hat.

        ``losses`` is one loss for each drawn example, in the order of the batch: ``reduction="none"``. With
        ``scores``, those that the sampler is told, weights are lowered where weight x score is far above its
        running mean (``BanditSampler(cap=...)``): a surprise does not throw the model.

        Of a part of a batch of B examples that W processes share: (W/B) sum_k losses[k] / (n p_k), so that
        the mean over the processes, which DDP and FSDP take of the gradients, is that over the batch.
        """
        K = len(self._indices)
        plainly = usual(losses, K)
        if not plainly:
            _check.losses(losses, K)
            losses = losses.float() if losses.dtype in HALF else losses
        cut, capped = self._cut, scores is not None
        self._weighted, self.capped = True, self.capped or capped
        if cut is not None and cut.whole is not None:
            cut.whole._weighted, cut.whole.capped = True, cut.whole.capped or capped
        if self.even and (cut is None or cut.mean_weight == 1.0):
            return plain_mean(losses) if cut is None else losses.sum() * cut.share
        return torch.dot(losses, self._shares(losses, scores, plainly))

    def _shares(self, losses: torch.Tensor, scores: Any, plainly: bool) -> torch.Tensor:
        """weights / K on the device of the losses, lowered by the cap. No device waits for a copy."""
        K = len(self._indices)
        one = 1 / K if self._cut is None else self._cut.share
        limited = scores is not None and self.limit < math.inf
        if plainly and self.correction == 1.0 and (not limited or usual(scores, K)):
            shares = torch.empty_like(losses)
            at = scores.data_ptr() if limited else 0
            fill_capped_shares(self._ratios, at, self.limit * one, one, shares.data_ptr())
            return shares
        shares = torch.from_numpy(self._coefficients()).to(losses.dtype)
        # On Apple's devices it waits: they read memory that is freed too soon (pytorch issue 189690).
        shares = shares.to(losses.device, non_blocking=losses.device.type != "mps")
        return capped_shares(shares, scores, self.limit * one, one) if limited else shares

    def carried(self) -> Carried:
        """The draw as tensors that travel in a batch."""
        K = len(self)
        unit = 1.0 if self._cut is None else self._cut.share * K  # one, unless the parts are unequal
        limit = self.limit * unit
        return Carried(
            torch.from_numpy(np.full(K, self.number, np.int64)),
            torch.from_numpy(self._indices.copy()),
            torch.from_numpy(self._weights() * unit).float(),
            torch.from_numpy(np.full(K, limit if limit < _LARGEST_FLOAT32 else np.inf, np.float32)),
            torch.from_numpy(np.full(K, unit, np.float32)),
        )

    def to_list(self) -> list[Any]:
        """The whole draw as plain numbers, for a checkpoint. A list, which no checkpoint takes apart."""
        if self.whole is not self:
            return self.whole.to_list()
        arrays = (self._indices, self._ratios, self._p_ratios)
        return [self.number, self.correction, self.learned, self.limit, *(array.tolist() for array in arrays)]

    @classmethod
    def from_list(cls, values: Any, n: int, batch_size: int) -> "Draw":
        """What :meth:`to_list` has returned, of a sampler of ``n`` with ``batch_size``; or an error."""
        names = ("number", "correction", "learned", "limit", "indices", "ratios", "p_ratios")
        if not isinstance(values, list) or len(values) != len(names):
            raise ValueError(f"a draw of the state must be a list of {len(names)}, not {values!r:.60}")
        state = dict(zip(names, values, strict=True))
        lists = {name: _check.numbers(state, name, length=batch_size, path="a draw") for name in names[4:]}
        if not all(type(j) is int and 0 <= j < n for j in state["indices"]):
            raise ValueError(f"a draw of the state has indices outside the data set of {n}")
        refuse_impossible("a draw", lists["ratios"] + lists["p_ratios"])
        return cls(
            _check.count(state, "number", path="a draw"),
            np.array(state["indices"], np.int64),
            np.array(lists["ratios"]),
            n,
            correction=_check.number(state, "correction", 0.0, 1.0, path="a draw"),
            p_ratios=np.array(lists["p_ratios"]),
            learned=_check.flag(state, "learned", path="a draw"),
            limit=_check.number(state, "limit", most=math.inf, path="a draw"),
        )

    def same_as(self, other: "Draw") -> bool:
        """Whether ``other`` is this draw, a part of it, or a copy of either."""
        if self is other or self is other.whole:
            return True
        there = slice(other.start, None if other._cut is None else other.start + len(other))
        return (
            self.number == other.number
            and np.array_equal(self._indices[there], other._indices)
            and np.array_equal(self._ratios[there], other._ratios)
        )

    def __len__(self) -> int:
        return len(self._indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (
            (self.number, self._indices, self._ratios, self.n),
            {name: getattr(self, name) for name in ("correction", "learned", "limit")}
            | {"p_ratios": self._p_ratios},
            self._cut,
        )

    def __repr__(self) -> str:
        of_whole = "" if self.whole is self else f", from {self.start} in a batch of {len(self.whole)}"
        return f"Draw({self.number}: {len(self)} of {self.n}{of_whole})"

    # A draw that is taken for a tensor has been unpacked in the wrong place.

    _TENSOR_NAMES: ClassVar[frozenset[str]] = frozenset(
        {"to", "cuda", "cpu", "shape", "size", "dim", "ndim", "dtype", "device", "long", "float", "view"}
    )

    def __getattr__(self, name: str) -> NoReturn:
        reason = f": {_WAY_OUT}" if name in self._TENSOR_NAMES else ""
        raise AttributeError(f"a Draw has no attribute {name!r}{reason}")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        raise TypeError(
            f"{getattr(func, '__name__', func)} was given a Draw in place of a tensor: {_WAY_OUT}"
        )


class _Cut(NamedTuple):
    """How a part was cut from a draw of several processes."""

    start: int
    share: float
    """What the mean takes in the place of 1 / K: the number of processes over the size of the whole."""
    mean_weight: float
    """Of the whole draw, before its weights are divided by it."""
    whole: Draw | None


def refuse_impossible(what: str, ratios: list[float]) -> None:
    """Raise if some of these ratios of a state, n times a probability, cannot come from any draw."""
    if min(ratios) < _NEVER_DRAWN or max(ratios) > 1 / _NEVER_DRAWN:
        raise ValueError(
            f"{what} of the state has ratios from {min(ratios):g} to {max(ratios):g}: nobody draws those"
        )


def _rebuilt(arguments: tuple[Any, ...], options: dict[str, Any], cut: _Cut | None = None) -> Draw:
    draw = Draw(*arguments, **options)
    draw._cut = cut
    return draw
