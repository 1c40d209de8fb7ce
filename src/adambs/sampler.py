"""BanditSampler keeps the distribution p, draws mini-batches from it and lets it learn."""

import copy
import math
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.draws import Draw, Epoch
from adambs.looking import Looking
from adambs.passes import Passes
from adambs.rules.base import Rule
from adambs.rules.calibrated import Calibrated

# Memory of the running estimate of the variance reduction: about the last hundred updates.
_DECAY = 0.99

# Unless the user says otherwise, p must lower the second moment of the gradient so much to be drawn from.
_GATE = 1.1

# After so many updates, warn once if most scores were above the rule's bound.
_WARN_AT = 50

# Share of the uniform distribution in the choice among candidates: no weight grows by more than 1/this.
_UNIFORM_CHOICE = 0.1

Score = Callable[[torch.Tensor], Any]
"""From the indices of some examples to their scores: a forward pass without gradients."""


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
    looks: int
    """Batches that were chosen among candidates."""
    reshuffled: int
    """Batches from a reshuffled pass, while p did not pay."""
    tau: float
    """Running estimate of how much scores scatter around p: what a look would win. See :class:`Looking`."""


class BanditSampler:
    """A distribution p over n examples that learns from the gradient norms of the examples it drew.

    Draws are independent and with replacement, as in the paper, as soon as p is worth it (see ``gate``). A
    draw may come back late, out of order or never: each update uses the probabilities of its own draw.

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
            have chosen a rule or initial weights yourself.
        looking: how many candidates :meth:`draw` scores first when it is given a way to, and whether that
            pays; :class:`Looking()` if nothing is given.
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
        correction: float = 1.0,
        gate: float | None = None,
        looking: Looking | None = None,
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
        if looking is not None and not isinstance(looking, Looking):
            raise TypeError(f"looking must be a Looking, not {looking!r}")
        self.correction = correction
        if gate is None:
            gate = _GATE if rule is None and initial_weights is None else 0.0
        self.gate = _check.at_least("gate", gate, 0.0)
        self.looking = copy.deepcopy(looking) if looking is not None else Looking()
        self.rule = copy.copy(rule) if rule is not None else Calibrated()
        self.rule.start(self.n, self.batch_size, initial_weights)

        self._rng = np.random.Generator(np.random.PCG64(self.seed))
        self._id = uuid.uuid4().hex  # tells our draws from another sampler's
        self._passes = Passes(self.n, self.seed)
        self._counts = np.zeros(6, np.int64)  # draws, updates, scores, clipped scores, looks, reshuffled
        # Running second moments of the gradient: under uniform sampling and as drawn, of the trained;
        # under uniform sampling and under p, of all who were scored.
        self._moments = np.zeros(4)
        self._epoch = Epoch(0, finished=True)
        self._resuming = False

    @property
    def correction(self) -> float:
        """Exponent of the weights of the draws to come."""
        return self._correction

    @correction.setter
    def correction(self, value: float) -> None:
        self._correction = _check.unit_interval("correction", value)

    def draw(self, score: Score | None = None) -> Draw:
        """A mini-batch of K examples, from p if that pays. O(K log n).

        Args:
            score: from a tensor of indices to the scores of those examples, by a forward pass without
                gradients. If it is given, and whenever it pays (see :class:`Looking`), some candidates are
                drawn from p and scored, the rule learns from them, and the batch is chosen among them.
        """
        closed = self._closed()
        if score is None:
            draw = self._drawn(self.batch_size)
        elif self.looking.pays():
            draw = self._chosen(*self._looked_at(score))
            self.looking.left()
        else:
            draw = self._drawn(self.batch_size)
            self.looking.left()
        self._counts[0] += 1
        self._counts[5] += closed
        return draw

    def _closed(self) -> bool:
        """Whether p is not worth drawing from."""
        uniform, ours = self._moments[2:]
        return self.gate > 0 and not uniform > self.gate * ours

    def _looked_at(self, score: Score) -> tuple[Draw, Floats]:
        """Candidates and their scores; if these cannot be had, nothing has happened."""
        before = self._rng.bit_generator.state, copy.copy(self._passes)
        candidates = self._drawn(min(self.looking.candidates * self.batch_size, self.n))
        start = time.perf_counter()
        try:
            scores = self.check(candidates, score(candidates.indices))
        except BaseException:
            self._rng.bit_generator.state, self._passes = before
            raise
        self.looking.looked(time.perf_counter() - start)
        self._counts[4] += 1
        return candidates, scores

    def _drawn(self, count: int) -> Draw:
        """From p, or the next of a reshuffled pass."""
        if self._closed():
            indices, ratios = self._passes.take(count), np.ones(count)
        else:
            u = self._rng.random(count)
            if self.stratified:
                u += self._rng.permutation(count)
                u /= count
            indices, ratios = self.rule.draw(u)
        return Draw(indices, ratios, self.n, self._id, correction=self.correction)

    def _chosen(self, candidates: Draw, scores: Floats) -> Draw:
        """K of the B candidates, by their scores; the candidates teach the rule.

        Candidate i came with n p_i = r_i, so s_i / r_i is its share in the sum of all norms, and it is
        taken with probability g_i, nearly in proportion to that. In the end it stands for 1 / (B g_i) of
        the candidates, each of which stands for 1 / r_i of the examples: its ratio is r_i B g_i. (For less
        correction read r_i^correction.) One is drawn from each K-th of the mass, which still draws i K g_i
        times on average.
        """
        ratios, B, K = candidates._ratios, len(candidates), self.batch_size
        self.looking.scattered(ratios, scores)
        a = scores.clip(max=1e100) / ratios**self.correction
        total = a.sum()
        g = (1 - _UNIFORM_CHOICE) * a / total + _UNIFORM_CHOICE / B if total > 0 else np.full(B, 1 / B)
        sums = g.cumsum()
        u = (self._rng.random(K) + self._rng.permutation(K)) * (sums[-1] / K)
        places = np.searchsorted(sums, u, side="right").clip(max=B - 1)
        self._teach(candidates, scores)
        return Draw(
            candidates._indices[places],
            ratios[places] * (B * g[places]),
            self.n,
            self._id,
            correction=self.correction,
            p_ratios=ratios[places],
            learned=True,
        )

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
        chosen = np.arange(self.n) if indices is None else self._places(indices)
        size = _check.whole("batch_size", batch_size, least=1)
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            scores = _check.vector("scores", score(torch.from_numpy(part)), len(part))
            self.rule.observe(part, scores)
            progress(start + len(part), len(chosen))

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
        _update_moments(self._moments[:2], draw._ratios, draw._ratios, scores)
        self._counts[1] += 1
        if not draw._learned:
            self.looking.scattered(draw._ratios, scores)
            self._teach(draw, scores)

    def _teach(self, draw: Draw, scores: Floats) -> None:
        if self.gate > 0:
            _update_moments(self._moments[2:], draw._ratios, self.rule.ratios(draw._indices), scores)
        clipped = self.rule.update(draw._indices, draw._ratios, scores)
        self._counts[2:4] += (len(draw), clipped)
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
        return torch.from_numpy(self.rule.ratios(self._places(indices)) / self.n)

    def _places(self, indices: Any) -> Indices:
        """``indices`` as an array of examples that exist, or an error."""
        array = np.asarray(indices)
        if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
            raise TypeError(f"indices must be a list of whole numbers, not {indices!r}")
        array = array.astype(np.int64)
        outside = array[(array < 0) | (array >= self.n)]
        if outside.size:
            raise ValueError(f"indices must lie in 0..{self.n - 1}, not {outside[0]}")
        return array

    def diagnostics(self) -> Diagnostics:
        """What the distribution looks like and what it is worth. O(n)."""
        mean_square, mean_r_log_r = self.rule.spread()
        uniform, ours = self._moments[:2]
        draws, updates, scores, clipped, looks, reshuffled = self._counts.tolist()
        return Diagnostics(
            draws=draws,
            updates=updates,
            effective_sample_size=self.n / mean_square,
            entropy=math.log(self.n) - mean_r_log_r,
            variance_reduction=float(uniform / ours) if ours > 0 else math.nan,
            scores=scores,
            clipped_scores=clipped,
            looks=looks,
            reshuffled=reshuffled,
            tau=self.looking.tau,
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
            "passes": self._passes.state_dict(),
            "counts": self._counts.tolist(),
            "moments": self._moments.tolist(),
            "correction": self.correction,
            "looking_state": self.looking.state_dict(),
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
                "corrections": [draw.correction for draw in ahead],
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
            rule = self.rule.with_state(state["rule_state"])
            looking = self.looking.with_state(state["looking_state"])
            passes = self._passes.with_state(state["passes"])
            correction = _check.unit_interval("state['correction']", state["correction"])
            epoch = self._restored_epoch(state["epoch"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state is damaged: {type(error).__name__}: {error}") from error
        return {
            "rule": rule,
            "looking": looking,
            "_passes": passes,
            "_correction": correction,
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
            "gate": self.gate,
            "rule": type(self.rule).__name__,
            "rule_settings": self.rule.settings(),
            "looking": self.looking.settings(),
        }

    def _restored_epoch(self, state: dict[str, Any]) -> Epoch:
        indices = state["indices"].numpy().astype(np.int64)
        ratios = state["ratios"].numpy().astype(np.float64)
        if indices.shape != ratios.shape or indices.shape[1:] != (self.batch_size,):
            raise ValueError(f"state['epoch'] has draws of shape {indices.shape}, {ratios.shape}")
        if ((indices < 0) | (indices >= self.n)).any() or not (ratios > 0).all():
            raise ValueError("state['epoch'] has draws outside the data set, or of no probability")
        corrections = [_check.unit_interval("state['epoch']['corrections']", c) for c in state["corrections"]]
        ahead = deque(
            Draw(i, r, self.n, self._id, correction=c)
            for i, r, c in zip(indices, ratios, corrections, strict=True)
        )
        return Epoch(int(state["number"]), int(state["delivered"]), ahead, bool(state["finished"]))

    def __repr__(self) -> str:
        return (
            f"BanditSampler(n={self.n}, batch_size={self.batch_size}, rule={self.rule!r}, "
            f"seed={self.seed}, stratified={self.stratified})"
        )


@kernel
def _update_moments(moments: Floats, drawn: Floats, ratios: Floats, scores: Floats) -> None:
    """Blend in the second moments of the gradient under uniform sampling and under a p with ``ratios``.

    They are the means over all examples of s^2 and of s^2 / r, here estimated from examples that were drawn
    with n times the probability ``drawn``: (1/K) sum s^2 / q and (1/K) sum s^2 / (q r).
    """
    uniform = 0.0
    ours = 0.0
    for k in range(scores.shape[0]):
        s = min(scores[k], 1e100)  # squares stay finite
        uniform += s * s / drawn[k]
        ours += s * s / (drawn[k] * ratios[k])
    moments[0] = _DECAY * moments[0] + (1.0 - _DECAY) * uniform / scores.shape[0]
    moments[1] = _DECAY * moments[1] + (1.0 - _DECAY) * ours / scores.shape[0]
