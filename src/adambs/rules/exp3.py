"""Algorithm 2 of the paper, from the drawn examples alone."""

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.rules.tree_rule import TreeRule
from adambs.trees import LastingFloor, SumTree
from adambs.trees._floors import raised

# Weights only shrink, so the total does. It is multiplied by a power of two, which changes no
# probability by even a bit, long before it could underflow.
_SMALL_TOTAL_EXPONENT = -512

# 1 - m p_min is at least this: it may round to zero if n p_min is nearly one.
_SMALLEST_REST = 2.0**-60

OFFSETS = ("paper", "none", "baseline")

# Memory of the baseline: about the last hundred updates.
_DECAY = 0.99

# A weight grows by at most exp(300) in a step. Where one would grow by more, all drawn ones grow by so much
# less; the undrawn are then at the floor, with 130 decimal digits to spare, and there they belong.
_LARGEST_GROWTH = 300.0

# Exponents beyond this are as good as infinite, and their sum over a batch is still a number.
_LARGEST_EXPONENT = 1e290


class Exp3(TreeRule):
    """Algorithm 2, exactly: the paper's rule.

    With r_j = n p_j at the time of the draw, p_min = c/n and the dimensionless ``step``, lines 2 to 4
    multiply the weight of an example by exp(-e) each time that it stands in the batch, where

        e = alpha_p l / (K p) = (step / r) (1 - (c s / (L r))^2),    s = min(score, L).

    Line 5, the KL projection onto {p >= p_min}, sets q_j = max(p_min, c' w_j) with c' >= 1: undrawn
    examples can only rise, so only drawn ones can meet the floor and the projection needs just those
    (proof in docs/algorithm.md). O(K log n) a step.

    The 1 in e is the paper's offset, l = L^2/p_min^2 - s^2/p^2. It keeps losses from being negative. It
    also makes most of the noise where scores are far below the bound: an example then loses nearly the same
    for being drawn, whatever its gradient. With o in its place,

        e = (step / r) (o - (c s / (L r))^2).

    The expectation over the draws of sum_k 1(j = I_k) / (K p_j) is one for every j, so an offset that does
    not depend on the batch adds the same to the expected change of every log w_j, which line 5 does not
    see: it changes the noise, not the mean. Weights can then grow and undrawn examples fall to the floor;
    :class:`adambs.trees.LastingFloor` does the projection for all of them, exactly, in amortised
    O(K log n) a step.

    Args:
        L: bound on the scores. Larger ones are clipped for the rule, and counted. The default, sqrt(2),
            bounds ``adambs.scores.cross_entropy``.
        p_min: smallest probability, as a fraction of 1/n.
        step: exponent of a drawn example of zero gradient at p = 1/n, with the paper's offset; 0.1 if
            nothing is given. Other offsets leave small exponents, c^2 s^2 / L^2 of it, and can do with more.
        alpha_p: the paper's step size, instead of ``step``:
            step = alpha_p n^3 L^2 / (K c^2).
        horizon: number of steps T, instead of ``step``: Lemma 1's alpha_p, that is
            step = sqrt(2 R^2 n / T) / K with R^2 = (1 - c) log(1 + (1 - c) n / c).
        offset: o above. ``"paper"`` is 1, ``"none"`` is 0 and ``"baseline"`` the running mean of
            (c s / (L r))^2 over the examples drawn before this batch, with a memory of about a hundred
            batches. The first batch has nothing before it: it sets the baseline and moves no weight.
    """

    tree: SumTree | LastingFloor
    """The weights: with the paper's offset only drawn ones can meet the floor, otherwise all."""
    baseline: float
    """The running mean that ``offset="baseline"`` subtracts; 0 before the first batch."""

    def __init__(
        self,
        *,
        L: float = math.sqrt(2.0),
        p_min: float = 0.5,
        step: float | None = None,
        alpha_p: float | None = None,
        horizon: int | None = None,
        offset: str = "paper",
    ) -> None:
        given = {"step": step, "alpha_p": alpha_p, "horizon": horizon}
        named = [f"{name}={value}" for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(
                f"{' and '.join(named)} say the same thing twice: give one of step, alpha_p, horizon"
            )
        self.L = _check.positive("L", L)
        self.p_min = _check.fraction(
            "p_min", p_min, "it is a fraction of 1/n; for the uniform distribution use Uniform()"
        )
        self._alpha_p = None if alpha_p is None else _check.positive("alpha_p", alpha_p)
        self.horizon = None if horizon is None else _check.whole("horizon", horizon, least=1)
        self.step = _check.positive("step", 0.1 if step is None else step)
        if offset not in OFFSETS:
            raise ValueError(f"offset must be one of {', '.join(map(repr, OFFSETS))}, not {offset!r}")
        self.offset = offset

    def start(self, n: int, batch_size: int, initial_weights: Floats | None) -> None:
        """Resolve the step size, which needs n and K, and begin inside the set {p >= p_min}."""
        if initial_weights is not None:
            initial_weights = project(initial_weights, self.p_min / n)
        super().start(n, batch_size, initial_weights)
        self._raised_p_min = raised(self.p_min / n, n)
        self.baseline, self._memory = 0.0, 0.0
        c = self.p_min
        if self._alpha_p is not None:
            self.step = self._alpha_p * float(n) ** 3 * self.L**2 / (batch_size * c**2)
        elif self.horizon is not None:
            r_squared = (1 - c) * math.log1p((1 - c) * n / c)
            self.step = math.sqrt(2 * r_squared * n / self.horizon) / batch_size

    @property
    def alpha_p(self) -> float:
        """The paper's step size that ``step`` amounts to; known once a sampler has started the rule."""
        return self.step * self.batch_size * self.p_min**2 / (float(self.n) ** 3 * self.L**2)

    def plant(self, weights: Floats) -> SumTree | LastingFloor:
        """The tree that the offset needs."""
        return SumTree(weights) if self.offset == "paper" else LastingFloor(weights)

    def update(self, indices: Indices, ratios: Floats, scores: Floats) -> int:
        """Lines 2 to 5 of Algorithm 2. O(K log n)."""
        if isinstance(self.tree, LastingFloor):
            return self._update_with_offset(self.tree, indices, ratios, scores)
        tree, p_min = self.tree, self._raised_p_min
        changed, floor, clipped = _algorithm_2(
            tree.leaves, tree.total, indices, ratios, scores, self.step, self.L, self.p_min, p_min
        )
        tree.refresh(changed)
        if floor * self.n < self.p_min * tree.total:
            # So little is left of the old total that its rounding showed in the undrawn mass.
            tree.leaves[changed] = np.maximum(tree.leaves[changed], p_min * tree.total)
            tree.refresh(changed)
        exponent = math.frexp(tree.total)[1]
        if exponent < _SMALL_TOTAL_EXPONENT:
            tree.rescale(-exponent)
        return clipped

    def _update_with_offset(
        self, tree: LastingFloor, indices: Indices, ratios: Floats, scores: Floats
    ) -> int:
        """Lines 2 to 5 with another offset: weights go both ways, so the floor is for all to meet."""
        x_squared = (self.p_min * (np.minimum(scores, self.L) / self.L) / ratios) ** 2
        if self.offset == "none" or self._memory > 0:
            with np.errstate(over="ignore"):
                scale = np.minimum(self.step / ratios, _LARGEST_EXPONENT)
            self._move(tree, indices, scale * (x_squared - self.baseline))
        if self.offset == "baseline":  # after use: what is subtracted does not depend on the batch
            self._memory += (1.0 - _DECAY) * (1.0 - self._memory)
            self.baseline += (1.0 - _DECAY) / self._memory * (float(x_squared.mean()) - self.baseline)
            if self.baseline < _check.SMALLEST_NORMAL:
                self.baseline = 0.0
        return int(np.count_nonzero(scores > self.L))

    def _move(self, tree: LastingFloor, indices: Indices, growth: Floats) -> None:
        """Multiply weights by exp(growth), once for each place in the batch, and project."""
        drawn, places = np.unique(indices, return_inverse=True)
        exponent = np.zeros(len(drawn))
        np.add.at(exponent, places, growth)
        # A factor that all have in common changes no p; one of the drawn alone does not either, where the
        # undrawn are beneath notice.
        most = exponent.max()
        exponent -= most if len(drawn) == self.n else max(0.0, most - _LARGEST_GROWTH)
        tree.write(drawn, tree.weights_at(drawn) * np.exp(exponent))
        tree.project(self.p_min / self.n)

    def settings(self) -> dict[str, Any]:
        """L, p_min, the resolved step and the offset."""
        return {"L": self.L, "p_min": self.p_min, "step": self.step, "offset": self.offset}

    def state_dict(self) -> dict[str, Any]:
        """The weights and, if there is one, the baseline."""
        state = super().state_dict()
        if self.offset == "baseline":
            state |= {"baseline": self.baseline, "memory": self._memory}
        return state

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """A new rule in this state, or ``ValueError``."""
        new = super().with_state(state)
        least = float(new.ratios().min())
        if least < self.p_min * (1 - 1e-9):
            raise ValueError(f"state['weights'] make p as small as {least}/n, below p_min = {self.p_min}/n")
        if self.offset == "baseline":
            new.baseline = _check.number(state, "baseline", 0.0, 1.0, normal=True)
            new._memory = _check.number(state, "memory", 0.0, 1.0, normal=True)
        return new


def project(weights: Floats, p_min: float) -> Floats:
    """argmin over {p: sum p = 1, p >= p_min} of KL(p || weights / sum), for all n at once. O(n log n).

    p_j = max(p_min, c w_j). With the m smallest at the floor, c = (1 - m p_min) / (sum of the others);
    m is right when the smallest of the others stays at or above it. p_min is slightly :func:`raised`.
    """
    p_min = raised(p_min, len(weights))
    total = SumTree(weights).total  # checks the weights: finite, not negative, not all zero
    ascending = np.sort(weights) / total
    rest = np.cumsum(ascending[::-1])[::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        c = (1 - np.arange(len(weights)) * p_min) / rest
        fits = c * ascending >= p_min
    if not fits.any():  # only by rounding, if p_min is nearly 1/n
        return np.ones(len(weights))
    m = int(np.argmax(fits))
    projected: Floats = np.maximum(p_min, c[m] * (weights / total))
    return projected


@kernel
def _algorithm_2(
    leaves: Floats,
    total: float,
    indices: Indices,
    ratios: Floats,
    scores: Floats,
    step: float,
    L: float,
    c: float,
    p_min: float,
) -> tuple[Indices, float, int]:
    """Write the new weights of the drawn examples; return these, the floor and how many scores were clipped.

    ``p_min`` is c/n, slightly :func:`raised`, so that p_j >= c/n also holds after rounding.

    Weights are unnormalised: undrawn ones keep theirs, the total S becomes S', and p_j = w_j / S'. So
    the paper's c' is S / S' and its floor, in these units, is p_min S'.
    """
    n, K = leaves.shape[0], indices.shape[0]
    clipped = 0

    # Lines 2 and 3: one exponent for each distinct example, the sum over its places in the batch.
    # A leaf seen for the first time is replaced by -(its place in the list), to find it again.
    distinct = np.empty(K, np.int64)
    weight = np.empty(K, np.float64)
    exponent = np.empty(K, np.float64)
    m = 0
    for k in range(K):
        s = scores[k]
        if s > L:
            s = L
            clipped += 1
        x = c * s / (L * ratios[k])
        e = max(0.0, min(step / ratios[k], _LARGEST_EXPONENT) * (1.0 - x * x))
        j = indices[k]
        if leaves[j] >= 0.0:
            distinct[m] = j
            weight[m] = leaves[j]
            exponent[m] = e
            m += 1
            leaves[j] = -float(m)
        else:
            exponent[int(-leaves[j]) - 1] += e

    # The mass of the undrawn. Where they are few beside the drawn, a difference would lose digits.
    undrawn = 0.0
    if n > 4 * m:
        undrawn = total
        for i in range(m):
            undrawn -= weight[i]
        undrawn = max(undrawn, (n - m) * c / n * total)  # which it is at least
    else:
        for j in range(n):
            if leaves[j] > 0.0:
                undrawn += leaves[j]
    shift = exponent[:m].min() if m == n else 0.0  # a common factor changes no p; all zero would

    # Line 4. The floor is at most p_min S, since S' <= S: below it are the candidates for clipping.
    low = np.empty(m, np.float64)
    candidates = 0
    free = undrawn
    for i in range(m):
        weight[i] *= np.exp(shift - exponent[i])
        if weight[i] < p_min * total:
            low[candidates] = weight[i]
            candidates += 1
        else:
            free += weight[i]

    # Line 5: S' = (undrawn + free drawn) / (1 - (number at the floor) p_min). Begin with all candidates
    # at the floor and free the largest while it stands above. O(K log K).
    low = np.sort(low[:candidates])
    rest = max(1.0 - candidates * p_min, _SMALLEST_REST)
    while candidates > 0 and low[candidates - 1] * rest > p_min * free:
        candidates -= 1
        free += low[candidates]
        rest = max(1.0 - candidates * p_min, _SMALLEST_REST)
    floor = p_min * free / rest

    for i in range(m):
        leaves[distinct[i]] = max(floor, weight[i])
    return distinct[:m], floor, clipped
