"""Doubly heavy-tailed data and the models on it.

The paper: z_ji in {-1, 0, +1}, P(|z_ji| = 1) = beta_3 i^-gamma j^-gamma, gamma >= 2, for examples j = 1..n
and features i = 1..d. It says nothing of the sign; here it is a fair coin. The labels are fair coins too.

The expected number of non-zero entries is beta_3 (sum_j j^-gamma)(sum_i i^-gamma) <= beta_3 zeta(gamma)^2 <
2.71, whatever n and d are. :func:`generate` therefore never looks at the n d cells, and
:func:`expected_squares` makes the companion on which one can train: z_ji = +-sqrt(beta_3 i^-gamma
j^-gamma), every square equal to its expectation in the paper's data, so that Lemmas 2 and 3 speak of it
without expectations.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adambs import _check
from adambs._types import Floats, Indices


class Sparse(NamedTuple):
    """The rows that are not all zero: row ``rows[k]`` has ``columns[starts[k]:starts[k+1]]`` (0-based)."""

    n: int
    d: int
    rows: Indices
    starts: Indices
    columns: Indices
    signs: Floats

    def margins(self, theta: Floats) -> Floats:
        """z_j . theta of the rows in ``rows``; of every other row it is 0."""
        if len(self.rows) == 0:
            return np.zeros(0)
        products: Floats = np.add.reduceat(self.signs * theta[self.columns], self.starts[:-1])
        return products

    def row_norms(self) -> Floats:
        """||z_j|| of the rows in ``rows``."""
        norms: Floats = np.sqrt(np.diff(self.starts).astype(np.float64))
        return norms

    def dense(self) -> Floats:
        """All n x d entries. For tests."""
        z = np.zeros((self.n, self.d))
        z[np.repeat(self.rows, np.diff(self.starts)), self.columns] = self.signs
        return z


class Model(NamedTuple):
    """A loss of the margin u = z . theta and the label y in {-1, +1}; the gradient is slope(u, y) z."""

    loss: Callable[[Floats, Floats], Floats]
    slope: Callable[[Floats, Floats], Floats]


def check_data(n: int, d: int, gamma: float, beta_3: float) -> None:
    """The paper's conditions."""
    _check.whole("n", n, least=1)
    _check.whole("d", d, least=1)
    if _check.positive("gamma", gamma) < 2:
        raise ValueError(
            f"gamma must be at least 2, not {gamma}: the paper's Lemmas 2 and 3 assume it; "
            "2 is the heaviest tail they cover"
        )
    if _check.positive("beta_3", beta_3) > 1:
        raise ValueError(
            f"beta_3 must lie in (0, 1], not {beta_3}: it is the probability that z_11 is not zero"
        )


def power_sum(n: int, gamma: float) -> float:
    """sum_{j=1}^n j^-gamma."""
    return float((np.arange(1, n + 1, dtype=np.float64) ** -gamma)[::-1].sum())


def zeta(s: float) -> float:
    """sum over all j of j^-s for s > 1: twenty terms and the Euler-Maclaurin tail."""
    N = 20.0
    tail = N ** (1 - s) / (s - 1) + N**-s / 2 + s * N ** (-s - 1) / 12
    return power_sum(19, s) + float(tail - s * (s + 1) * (s + 2) * N ** (-s - 3) / 720)


def generate(n: int, d: int, *, gamma: float = 2.0, beta_3: float = 1.0, seed: int = 0) -> Sparse:
    """The paper's data, exactly, in time O(number of non-zeros) expected, whatever n and d.

    A Poisson number of points with mean lambda leaves a cell empty with probability exp(-lambda): with
    lambda = -log(1 - p) the cell is hit with probability p, independently of the others. The points come
    from a Poisson process on the whole quadrant with the larger rate C beta_3 i^-gamma j^-gamma, which is a
    product, so a point's i and j are independent Zipf numbers; it is kept with probability lambda / rate,
    and if j <= n and i <= d. C = -log(1 - p)/p at p = beta_3 2^-gamma suffices, since -log(1 - p)/p grows
    with p and only cell (1, 1) has a larger p. That one gets a coin of its own.
    """
    check_data(n, d, gamma, beta_3)
    rng = np.random.default_rng(seed)
    p_top = beta_3 * 2.0**-gamma
    C = -math.log1p(-p_top) / p_top if p_top > 0 else 1.0
    points = rng.poisson(C * beta_3 * zeta(gamma) ** 2)
    j, i = rng.zipf(gamma, points), rng.zipf(gamma, points)
    keep = (j <= n) & (i <= d) & ((j > 1) | (i > 1))
    j, i = j[keep], i[keep]
    p = beta_3 * (i.astype(np.float64) * j) ** -gamma
    thinned = rng.random(len(p)) * C * p < -np.log1p(-p)
    cells = list(zip(j[thinned].tolist(), i[thinned].tolist(), strict=True))
    if rng.random() < beta_3:
        cells.append((1, 1))
    return _compress(n, d, sorted(set(cells)), rng)


def _compress(n: int, d: int, cells: list[tuple[int, int]], rng: np.random.Generator) -> Sparse:
    table = np.array(cells, np.int64).reshape(len(cells), 2) - 1
    rows, first = np.unique(table[:, 0], return_index=True)
    starts = np.append(first, len(cells)).astype(np.int64)
    signs = rng.choice(np.array([-1.0, 1.0]), len(cells))
    return Sparse(n, d, rows, starts, table[:, 1].copy(), signs)


def expected_squares(
    n: int, d: int, *, gamma: float = 2.0, beta_3: float = 1.0, seed: int = 0
) -> tuple[Floats, Floats]:
    """Dense z with z_ji = +-sqrt(beta_3 i^-gamma j^-gamma), and labels of a logistic model on it. O(n d)."""
    check_data(n, d, gamma, beta_3)
    rng = np.random.default_rng(seed)
    j, i = np.arange(1.0, n + 1), np.arange(1.0, d + 1)
    z = rng.choice(np.array([-1.0, 1.0]), (n, d)) * np.sqrt(beta_3 * np.outer(j**-gamma, i**-gamma))
    truth = rng.normal(size=d)
    y = np.where(rng.random(n) < sigmoid(z @ truth), 1.0, -1.0)
    return z, y


def expected_norms(n: int, d: int, *, gamma: float = 2.0, beta_3: float = 1.0) -> Floats:
    """sqrt(E||z_j||^2) = sqrt(beta_3 j^-gamma sum_i i^-gamma): the norms that Lemmas 2 and 3 put for
    ||g_j||.
    """
    check_data(n, d, gamma, beta_3)
    norms: Floats = math.sqrt(beta_3 * power_sum(d, gamma)) * np.arange(1.0, n + 1) ** (-gamma / 2)
    return norms


# -------------------------------------------------------------------------------------------- models


def sigmoid(u: Floats) -> Floats:
    """1 / (1 + exp(-u)) without overflow."""
    value: Floats = 0.5 * (1 + np.tanh(u / 2))
    return value


def _softplus(u: Floats) -> Floats:
    value: Floats = np.logaddexp(0.0, u)
    return value


def _relu(u: Floats) -> Floats:
    value: Floats = np.maximum(u, 0.0)
    return value


# As printed: f_j = -y log sigma(ReLU(u)), g_j = -y (1 - sigma(ReLU(u))) 1(u > 0) z. The gradient is right
# for this loss, but for y = -1 the loss is log sigma < 0, no cross-entropy: the surer the wrong answer, the
# smaller the gradient.
PRINTED = Model(
    loss=lambda u, y: y * _softplus(-_relu(u)),
    slope=lambda u, y: -y * sigmoid(-_relu(u)) * (u > 0),
)

# The cross-entropy of the same network for y in {-1, +1}: f_j = -log sigma(y ReLU(u)).
ONE_NEURON = Model(
    loss=lambda u, y: _softplus(-y * _relu(u)),
    slope=lambda u, y: -y * sigmoid(-y * _relu(u)) * (u > 0),
)

# Its convex relative, without the ReLU: logistic regression, f_j = -log sigma(y u).
LOGISTIC = Model(loss=lambda u, y: _softplus(-y * u), slope=lambda u, y: -y * sigmoid(-y * u))


def gradient_norms(data: Sparse, model: Model, theta: Floats, y: Floats) -> Floats:
    """||g_j|| of the rows in ``data.rows``, whose labels are ``y``; every other row has 0."""
    norms: Floats = np.abs(model.slope(data.margins(theta), y)) * data.row_norms()
    return norms
