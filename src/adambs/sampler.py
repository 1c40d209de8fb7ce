"""BanditSampler keeps the distribution p; Draw is one mini-batch from it, with the p it was drawn with."""

import copy
import math
import uuid
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs._jit import kernel
from adambs.rules.base import Floats, Indices, Rule
from adambs.rules.exp3 import Exp3

# Memory of the running estimate of the variance reduction: about the last hundred updates.
_DECAY = 0.99

# After so many updates, warn once if most scores were above the rule's bound.
_WARN_AT = 50


class Draw:
    """K examples drawn from p, and the probabilities with which they were drawn.

    The probabilities are those of the time of drawing and never change: they make the estimate unbiased
    however late the batch is used.
    """

    __slots__ = ("_indices", "_owner", "_ratios", "n")

    def __init__(self, indices: Indices, ratios: Floats, n: int, owner: str) -> None:
        self._indices = indices
        self._ratios = ratios  # n p_j, see Rule
        self.n = n
        self._owner = owner

    @property
    def indices(self) -> torch.Tensor:
        """Which examples: int64, shape (K,), duplicates possible."""
        return torch.from_numpy(self._indices)

    @property
    def probabilities(self) -> torch.Tensor:
        """p_j of each drawn example: float64, shape (K,)."""
        return torch.from_numpy(self._ratios / self.n)

    @property
    def weights(self) -> torch.Tensor:
        """1/(n p_j) of each drawn example: float64, shape (K,)."""
        return torch.from_numpy(1.0 / self._ratios)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """(1/K) sum_k losses[k] / (n p_k), eq. (1): its gradient is the unbiased estimate G_hat.

        ``losses`` is one loss for each drawn example, in the order of the batch: ``reduction="none"``.
        """
        if not isinstance(losses, torch.Tensor):
            raise TypeError(f"losses must be a tensor, not {type(losses).__name__}")
        if losses.shape != (len(self),):
            reason = (
                'it looks reduced already; compute it with reduction="none"'
                if losses.ndim == 0
                else "reduce each example's losses to one number first, e.g. losses.flatten(1).mean(1)"
            )
            raise ValueError(
                f"losses must have shape ({len(self)},), one loss for each drawn example, "
                f"not {tuple(losses.shape)}: {reason}"
            )
        if not losses.is_floating_point():
            raise TypeError(f"losses must be floating point, not {losses.dtype}")
        if losses.dtype in (torch.float16, torch.bfloat16):
            losses = losses.float()
        return (losses * self.weights.to(losses)).mean()

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        return f"Draw({len(self)} of {self.n})"


@dataclass(frozen=True)
class Diagnostics:
    """What the distribution looks like and what it is worth."""

    draws: int
    """Batches drawn."""
    updates: int
    """Batches whose scores came back."""
    effective_sample_size: float
    """1 / sum p^2: how many examples p is spread over; n when uniform."""
    entropy: float
    """-sum p log p, in nats; log n when uniform."""
    variance_reduction: float
    """Running estimate of n sum s^2 / (sum s^2 / p): how many times smaller than under uniform sampling
    is the second moment of the gradient estimate, which the paper minimises. Above 1, p helps. NaN before
    the first positive score."""
    scores: int
    """Scores seen."""
    clipped_scores: int
    """Scores above the rule's bound L."""


@dataclass(eq=False)
class Epoch:
    """Where a loader stands in its epoch. Saved with the sampler, so that a run can stop anywhere."""

    number: int
    delivered: int = 0
    """Batches handed to the training loop."""
    ahead: deque[Draw] = field(default_factory=deque)
    """Draws whose batches are being prefetched, oldest first."""
    finished: bool = False

    def deliver(self) -> Draw:
        """The draw of the batch that arrives now."""
        self.delivered += 1
        return self.ahead.popleft()


class BanditSampler:
    """A distribution p over n examples that learns from the gradient norms of the examples it drew.

    Draws are independent and with replacement, as in the paper. A draw may come back late, out of order
    or never: each update uses the probabilities of its own draw.

    Args:
        n: number of training examples.
        batch_size: K.
        rule: how feedback changes p; :class:`Exp3`, the paper's Algorithm 2, if nothing is given.
        seed: of the sampler's own random stream. No global stream is read or changed.
        stratified: draw one example from each K-th of the mass instead of K independent ones. Still
            unbiased, with less variance. The batch is shuffled, so that any part of it is alike.
        initial_weights: n weights, for instance a teacher's opinion of how much each example matters.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        rule: Rule | None = None,
        seed: int = 0,
        stratified: bool = False,
        initial_weights: Any = None,
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
        self.rule = copy.copy(rule) if rule is not None else Exp3()
        self.rule.start(self.n, self.batch_size, initial_weights)

        self._rng = np.random.Generator(np.random.PCG64(self.seed))
        self._id = uuid.uuid4().hex  # tells our draws from another sampler's
        self._counts = np.zeros(4, np.int64)  # draws, updates, scores, clipped scores
        self._moments = np.zeros(2)  # running second moments: under uniform sampling, under p
        self._epoch = Epoch(0, finished=True)
        self._resuming = False

    def draw(self) -> Draw:
        """A mini-batch of K examples from p. O(K log n)."""
        u = self._rng.random(self.batch_size)
        if self.stratified:
            u += self._rng.permutation(self.batch_size)
            u /= self.batch_size
        indices, ratios = self.rule.draw(u)
        self._counts[0] += 1
        return Draw(indices, ratios, self.n, self._id)

    def update(self, draw: Draw, scores: Any) -> None:
        """Let p learn from the ``scores`` (gradient norms) of the examples of ``draw``. O(K log n)."""
        self.learn(draw, self.check(draw, scores))

    def check(self, draw: Draw, scores: Any) -> Floats:
        """The scores as :meth:`learn` wants them, or an error; changes nothing."""
        if not isinstance(draw, Draw):
            raise TypeError(f"draw must be a Draw, not {type(draw).__name__}: see sampler.draw()")
        if draw._owner != self._id:
            raise ValueError(f"draw {draw!r} was drawn by another sampler: give it back to that one")
        return _check.vector("scores", scores, len(draw))

    def learn(self, draw: Draw, scores: Floats) -> None:
        """:meth:`update` with scores that :meth:`check` has returned."""
        _update_moments(self._moments, draw._ratios, scores)
        clipped = self.rule.update(draw._indices, draw._ratios, scores)
        self._counts[1:] += (1, len(draw), clipped)
        if self._counts[1] == _WARN_AT and 2 * self._counts[3] > self._counts[2]:
            warnings.warn(
                f"{self._counts[3]} of the first {self._counts[2]} scores were above the bound of "
                f"{self.rule!r} and were clipped, so the rule cannot tell those examples apart: give it a "
                "larger L, or scale the scores",
                RuntimeWarning,
                stacklevel=2,
            )

    def probabilities(self, indices: Any = None) -> torch.Tensor:
        """p of the examples ``indices``, or of all n. A copy, float64."""
        if indices is None:
            return torch.from_numpy(self.rule.ratios() / self.n)
        array = np.asarray(indices)
        if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
            raise TypeError(f"indices must be a list of whole numbers, not {indices!r}")
        array = array.astype(np.int64)
        outside = array[(array < 0) | (array >= self.n)]
        if outside.size:
            raise ValueError(f"indices must lie in 0..{self.n - 1}, not {outside[0]}")
        return torch.from_numpy(self.rule.ratios(array) / self.n)

    def diagnostics(self) -> Diagnostics:
        """What the distribution looks like and what it is worth. O(n)."""
        sum_squares, sum_r_log_r = _spread(self.rule.ratios())
        uniform, ours = self._moments
        draws, updates, scores, clipped = self._counts.tolist()
        return Diagnostics(
            draws=draws,
            updates=updates,
            effective_sample_size=self.n**2 / sum_squares,
            entropy=math.log(self.n) - sum_r_log_r / self.n,
            variance_reduction=float(uniform / ours) if ours > 0 else math.nan,
            scores=scores,
            clipped_scores=clipped,
        )

    def begin_epoch(self) -> Epoch:
        """For loaders: a new epoch, or the rest of the one that a loaded state was in."""
        if self._resuming and not self._epoch.finished:
            self._resuming = False
        else:
            self._epoch = Epoch(self._epoch.number + 1)
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draws depend on, as tensors and plain numbers.

        Includes the draws that a loader has made ahead, so a run resumed in the middle of an epoch gets
        the very batches that were on their way.
        """
        ahead = self._epoch.ahead
        shape = (len(ahead), self.batch_size)
        return {
            **self._identity(),
            "rule_state": self.rule.state_dict(),
            "random": self._rng.bit_generator.state,
            "counts": self._counts.tolist(),
            "moments": self._moments.tolist(),
            "epoch": {
                "number": self._epoch.number,
                "delivered": self._epoch.delivered,
                "finished": self._epoch.finished,
                "indices": torch.from_numpy(
                    np.array([draw._indices for draw in ahead], np.int64).reshape(shape)
                ),
                "ratios": torch.from_numpy(
                    np.array([draw._ratios for draw in ahead], np.float64).reshape(shape)
                ),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise ``ValueError`` and keep the old one."""
        self.adopt(self.parse_state(state))

    def adopt(self, parsed: dict[str, Any]) -> None:
        """Take what :meth:`parse_state` has returned; cannot fail."""
        self.__dict__.update(parsed)

    def parse_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Read and check a state, for :meth:`adopt`; changes nothing."""
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict from state_dict(), not {type(state).__name__}")
        for name, ours in self._identity().items():
            if name not in state:
                raise ValueError(f"state has no {name!r}: it is not from BanditSampler.state_dict()")
            if state[name] != ours:
                raise ValueError(
                    f"state is of a sampler with {name} = {state[name]!r}, this one has {ours!r}: "
                    "build the sampler as it was when the state was saved"
                )
        try:
            rng = np.random.PCG64()
            rng.state = state["random"]
            counts = np.array(state["counts"], np.int64)
            moments = np.array(state["moments"], np.float64)
            if counts.shape != self._counts.shape or moments.shape != self._moments.shape:
                raise ValueError("state['counts'] or state['moments'] has the wrong length")
            rule = copy.copy(self.rule)
            rule.load_state_dict(state["rule_state"])
            epoch = self._restored_epoch(state["epoch"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state is damaged: {type(error).__name__}: {error}") from error
        return {
            "rule": rule,
            "_rng": np.random.Generator(rng),
            "_counts": counts,
            "_moments": moments,
            "_epoch": epoch,
            "_resuming": True,
        }

    def _identity(self) -> dict[str, Any]:
        """What a state must share with the sampler that loads it."""
        return {
            "n": self.n,
            "batch_size": self.batch_size,
            "stratified": self.stratified,
            "rule": type(self.rule).__name__,
            "rule_settings": self.rule.settings(),
        }

    def _restored_epoch(self, state: dict[str, Any]) -> Epoch:
        indices = state["indices"].numpy().astype(np.int64)
        ratios = state["ratios"].numpy().astype(np.float64)
        if indices.shape != ratios.shape or indices.shape[1:] != (self.batch_size,):
            raise ValueError(f"state['epoch'] has draws of shape {indices.shape}, {ratios.shape}")
        if ((indices < 0) | (indices >= self.n)).any() or not (ratios > 0).all():
            raise ValueError("state['epoch'] has draws outside the data set, or of no probability")
        ahead = deque(Draw(i, r, self.n, self._id) for i, r in zip(indices, ratios, strict=True))
        return Epoch(int(state["number"]), int(state["delivered"]), ahead, bool(state["finished"]))

    def __repr__(self) -> str:
        return (
            f"BanditSampler(n={self.n}, batch_size={self.batch_size}, rule={self.rule!r}, "
            f"seed={self.seed}, stratified={self.stratified})"
        )


@kernel
def _update_moments(moments: Floats, ratios: Floats, scores: Floats) -> None:
    """Blend in (1/K) sum s^2 / r, the second moment under uniform sampling, and (1/K) sum s^2 / r^2, ours."""
    uniform = 0.0
    ours = 0.0
    for k in range(scores.shape[0]):
        s = min(scores[k], 1e100)  # squares stay finite
        uniform += s * s / ratios[k]
        ours += s * s / (ratios[k] * ratios[k])
    moments[0] = _DECAY * moments[0] + (1.0 - _DECAY) * uniform / scores.shape[0]
    moments[1] = _DECAY * moments[1] + (1.0 - _DECAY) * ours / scores.shape[0]


@kernel
def _spread(ratios: Floats) -> tuple[float, float]:
    """Sum of r^2 and of r log r."""
    squares = 0.0
    r_log_r = 0.0
    for r in ratios:
        squares += r * r
        if r > 0.0:
            r_log_r += r * np.log(r)
    return squares, r_log_r
