"""What can be known from scores and gradients: pure functions of arrays.

Sampling with p from n examples of scores s has, against uniform sampling, the second moment of the gradient
lowered by mean(s^2) / mean(s^2 / r), with r = n p. The best p is in proportion to s: mean(s^2) / mean(s)^2.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from adambs._types import Floats, Indices

# As the default rule (see Calibrated), but with groups of a whole octave, and all below 2^-8 in one: a panel
# has fewer examples. What the middle of a group counts for, and the uniform share of p, are the rule's.
_OCTAVES, _PRIOR, _UNIFORM = 8, 5.0, 0.05

# What Candidates scores when it looks, in units of K.
_MULTIPLE = 3


def potential(scores: Floats) -> float:
    """By how much the best p would lower the second moment; 1 if all scores are alike, or zero."""
    mean = float(scores.mean())
    return max(float(np.square(scores).mean()) / (mean * mean), 1.0) if mean > 0 else 1.0


def reduction(scores: Floats, ratios: Floats) -> float:
    """By how much p with these ratios n p lowers it; below 1 if it raises it."""
    ours = float((np.square(scores) / ratios).mean())
    return float(np.square(scores).mean()) / ours if ours > 0 else 1.0


def remembered(old: Floats, new: Floats) -> float:
    """By how much a p that knows only ``old`` scores of the same examples lowers the second moment now.

    As the default rule does it: examples of like old scores form a group, and p is the root of the group's
    mean squared score. Half of the examples tell what a group is worth, for the other half, and the reverse:
    what is learned from an example must not be tested on it.
    """
    unit = float(old.max())
    if unit <= 0:
        return 1.0
    with np.errstate(divide="ignore"):
        groups = np.clip(np.floor(np.log2(old / unit)) + _OCTAVES, 0, _OCTAVES).astype(np.int64)
    middles = np.square(unit * 2.0 ** (np.arange(_OCTAVES + 1, dtype=np.float64) - _OCTAVES + 0.5))
    return _cross_fitted(groups, new, middles)


def told_apart(context: Indices, scores: Floats) -> float:
    """By how much a p that knows only the context of each example lowers the second moment."""
    groups = np.unique(context, return_inverse=True)[1]
    usual = float(np.square(scores).mean())
    return _cross_fitted(groups, scores, np.full(int(groups.max()) + 1, usual))


def _cross_fitted(groups: Indices, scores: Floats, prior: Floats) -> float:
    squares, ratios = np.square(scores), np.empty(len(scores))
    for here in (slice(0, None, 2), slice(1, None, 2)):
        there = slice(1 - here.start, None, 2)
        count = np.bincount(groups[there], minlength=len(prior))
        total = np.bincount(groups[there], squares[there], minlength=len(prior))
        roots = np.sqrt((total + _PRIOR * prior) / (count + _PRIOR))[groups[here]]
        ratios[here] = (1 - _UNIFORM) * roots / roots.mean() + _UNIFORM if roots.mean() > 0 else 1.0
    return reduction(scores, ratios)


def noise_to_signal(gradients: Sequence[torch.Tensor]) -> float:
    """How many times larger than its mean's the gradient's noise is: E|g - G|^2 / |G|^2, of such batches.

    From b gradients of independent batches, without bias: |G|^2 is the mean of g_i . g_j over i != j.
    Infinite if the mean drowns in the noise.
    """
    b = len(gradients)
    stacked = torch.stack([gradient.double() for gradient in gradients])
    squares = float(stacked.square().sum())
    whole = float(stacked.sum(0).square().sum())
    signal = (whole - squares) / (b * (b - 1))
    noise = squares / b - signal
    return noise / signal if signal > 0 else math.inf


def under_uniform(noise: float, lowered: float, K: int) -> float:
    """The noise of batches of K that are drawn uniformly, if that of batches from p is ``noise`` and p lowers
    the second moment of one example's weighted gradient by ``lowered``.

    In units of ‖G‖² one example's second moment is 1 + K noise under p, ``lowered`` times that uniformly.
    """
    return (lowered * (1 + K * noise) - 1) / K


def of_a_batch(value: float, noise: float) -> float:
    """What lowering the noise by ``value`` does to a second moment of which the mean is a part."""
    return value if math.isinf(noise) else (1 + noise) / (1 + noise / value)


def at_age(pairs: Sequence[tuple[int, float]], age: float) -> float:
    """What memory is worth at an age, from what it was worth at others: straight in the logarithms.

    Beyond the ages that were measured the line of least squares is continued; it never rises, nor falls
    below 1.
    """
    known = sorted((float(a), max(value, 1.0)) for a, value in pairs if a > 0)
    if not known:
        return 1.0
    if len(known) == 1 or age <= known[0][0]:
        return known[0][1]
    x, y = np.log([a for a, _ in known]), np.log([value for _, value in known])
    if age <= known[-1][0]:
        return float(np.exp(np.interp(math.log(age), x, y)))
    slope, level = np.polyfit(x, y, 1)
    return max(float(np.exp(level + slope * math.log(age) if slope < 0 else y.mean())), 1.0)


def ahead(pairs: Sequence[tuple[int, float]], step: float) -> float:
    """What something that was measured at some steps is at another, later ones included.

    The line of least squares through the logarithms, over that of the step, of what was measured within a
    factor of four before and of two after it (before the last step, if ``step`` lies beyond), or of the two
    neighbours if there is none; it never falls, and rises no faster than the step.
    """
    known = [(float(s), max(value, 1.0)) for s, value in pairs if s > 0]
    if not known:
        return 1.0
    centre = min(max(step, known[0][0]), known[-1][0])
    near = [(s, value) for s, value in known if centre / 4 <= s <= centre * 2]
    if not near:  # nothing was measured there: the one before and the one after
        k = next(k for k, (s, _) in enumerate(known) if s > centre)
        near = known[k - 1 : k + 1]
    x, y = np.log([s for s, _ in near]), np.log([value for _, value in near])
    scatter = float(np.square(x - x.mean()).sum())
    slope = float((x - x.mean()) @ y) / scatter if scatter > 0 else 0.0
    slope = min(max(slope, 0.0), 1.0)
    return max(float(np.exp(y.mean() + slope * (math.log(max(step, 1.0)) - x.mean()))), 1.0)


def race(theirs: Sequence[tuple[int, float]], ours: Sequence[tuple[int, float]]) -> float:
    """How many times fewer steps the second took to the losses of the first: a speedup in steps.

    As the lab does it (docs/measuring.md): the targets are the lowest losses of the first after 1/4, 1/2, 3/4
    and all of the steps, and the speedup is the geometric mean over them. Between two measures the loss is
    taken to be straight, its logarithm if losses are positive. What was not reached counts as all of the
    steps; a target that is no lower than the loss at the start counts as 1.
    """
    steps = np.array([float(step) for step, _ in theirs])
    first, second = (np.minimum.accumulate([value for _, value in each]) for each in (theirs, ours))
    if min(first[-1], second[-1]) > 0:
        first, second = np.log(first), np.log(second)
    found = []
    for share in (0.25, 0.5, 0.75, 1.0):
        target = float(np.interp(share * steps[-1], steps, first))
        if target >= min(first[0], second[0]):
            found.append(0.0)
            continue
        k = int(np.argmax(second <= target)) if second[-1] <= target else 0
        at = steps[-1]
        if k > 0:
            part = (second[k - 1] - target) / (second[k - 1] - second[k])
            at = steps[k - 1] + part * (steps[k] - steps[k - 1])
        found.append(math.log(share * steps[-1] / at))
    return math.exp(sum(found) / len(found))


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def updated(
    usual: float, scatter: float, own: float, x: float, seen: float, doubt: float
) -> tuple[float, float]:
    """The exponent of this problem and its offset, from those of others and from a race.

    A speedup is the exponent times ``x`` plus the offset, in the logarithms. Before the race the exponent is
    ``usual`` with a standard deviation ``scatter``, and the offset, all that x does not tell, 0 with one of
    ``own``; the race has shown ``seen``, with one of ``doubt``. The means of what is known after it, all
    being normal.
    """
    gain = (seen - usual * x) / ((scatter * x) ** 2 + own**2 + doubt**2)
    return usual + scatter**2 * x * gain, own**2 * gain


def look_gain(possible: float, kept: float) -> float:
    """By how much a look lowers the rest, if p has ``kept`` so much of what is ``possible``.

    With T = possible / kept it is 1 / (1/T + (1 - 1/T) / 3): see Candidates.
    """
    left = min(kept / possible, 1.0)
    return 1 / (left + (1 - left) / _MULTIPLE)


def look_cost(share: float) -> float:
    """How many times longer a step with a look takes, if scoring K examples takes ``share`` of a step."""
    return 1 + _MULTIPLE * share
