"""Which examples are worth a second look, and which taught least: rankings of a history's table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adambs._types import Floats, Indices

# What an e-fold number of visits counts for, in standard deviations of the excess: p has found it hard.
_VISITS = 0.2
# How much of what is usual in a class is subtracted. All of it would hide labels that were moved into a rare
# class, of which they are a large part.
_OF_CLASS = 0.5


@dataclass(frozen=True)
class Suspect:
    """An example that is hard, rare or mislabelled."""

    index: int
    suspicion: float
    """How much harder it was than the examples of its class, in standard deviations."""
    label: Any
    """As it was given; None if labels were not."""
    reason: str


def ranked(table: dict[str, NDArray[Any]], labels: Any, k: int, final: Floats | None = None) -> list[Suspect]:
    """The k most suspicious examples, the worst first."""
    visits = table["visits"]
    given, classes = _classes(labels, len(visits))
    suspicion, usual = suspicions(table, classes, final)
    seen = np.flatnonzero(visits > 0)
    # Ties: who was visited more often has had more chances to be learned; then by index.
    order = seen[np.lexsort((seen, -visits[seen], -suspicion[seen]))][:k]
    return [
        Suspect(
            int(j),
            float(suspicion[j]),
            None if given is None else given[j].item(),
            _reason(table, int(j), usual[classes[j]]),
        )
        for j in order
    ]


def suspicions(
    table: dict[str, NDArray[Any]], classes: Indices, final: Floats | None = None
) -> tuple[Floats, Floats]:
    """For each example how suspicious it is (NaN if it was not visited), and for each class what is usual.

    The measure is a sum of

    1.  its excess, in standard deviations: the mean over its visits of the loss (or score) minus what was
        usual at that step, so that it does not matter when it was visited;
    2.  0.2 times the logarithm of how many times more often than others it was visited;
    3.  with ``final``, its loss under the trained model, in standard deviations, times r^2. Here r is the
        mean of the final losses over the mean of those seen in training: near 1 while the model generalises,
        near 0 when it has learned everything by heart and its losses tell nothing.

    Half of the class's lower quartile of it is subtracted: a class whose examples are all hard is usual in
    being so, and the quartile moves little when a part of a class was labelled wrongly.
    """
    mean = table.get("mean_loss", table["mean_score"])
    seen = np.flatnonzero(table["visits"] > 0)
    suspicion, usual = np.full(len(mean), np.nan), np.full(int(classes.max()) + 1, np.nan)
    if not len(seen):
        return suspicion, usual
    visits = table["visits"][seen]
    found = _standard(table["excess"][seen]) + _VISITS * np.log(visits / visits.mean())
    if final is not None:
        before = float(mean[seen].mean())
        left = min(max(float(final[seen].mean()) / before, 0.0), 1.0) if before > 0 else 0.0
        found += left * left * _standard(final[seen])
    of = classes[seen]
    for c in np.unique(of):
        here = of == c
        found[here] -= _OF_CLASS * np.quantile(found[here], 0.25)
        usual[c] = np.median(mean[seen[here]])
    suspicion[seen] = found
    return suspicion, usual


def _standard(values: Floats) -> Floats:
    scatter = float(values.std())
    return (values - values.mean()) / scatter if scatter > 0 else np.zeros(len(values))


def checked_final(final: Any, n: int) -> Floats:
    """``final`` as an array, or an error."""
    if isinstance(final, torch.Tensor):
        final = final.numpy(force=True)
    values = np.asarray(final)
    if values.shape != (n,) or values.dtype.kind != "f":
        raise ValueError(
            f"final must be {n} floats, one an example of the history, not {values.dtype} of shape "
            f"{values.shape}"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"final[{int(np.argmin(np.isfinite(values)))}] is not finite")
    return values.astype(np.float64)


def easiest(table: dict[str, NDArray[Any]], k: int) -> Indices:
    """The k that were learned, never forgotten since, and have the smallest mean score; ties by index."""
    fit = (table["learned_at"] > 0) & (table["forgotten"] == 0) & (table["visits"] > 1)
    found = np.flatnonzero(fit)
    return found[np.lexsort((found, table["mean_score"][found]))][:k]


def _classes(labels: Any, n: int) -> tuple[NDArray[Any] | None, Indices]:
    """The labels as they were given, and the same as numbers from 0 on."""
    if labels is None:
        return None, np.zeros(n, np.int64)
    if isinstance(labels, torch.Tensor):
        labels = labels.numpy(force=True)
    given = np.asarray(labels)
    if given.shape != (n,):
        raise ValueError(
            f"labels must have shape ({n},), one label an example of the history, not {given.shape}"
        )
    if given.dtype.kind not in "iuUSb":
        raise TypeError(f"labels must be whole numbers or words, not {given.dtype}")
    return given, np.unique(given, return_inverse=True)[1].astype(np.int64)


def _reason(table: dict[str, NDArray[Any]], j: int, usual: float) -> str:
    visits, first, forgotten = (int(table[name][j]) for name in ("visits", "learned_at", "forgotten"))
    times = "visit" if visits == 1 else "visits"
    if first == 0:
        learned = f"never learned in {visits} {times}"
    elif forgotten:
        learned = (
            f"learned at visit {first} of {visits} and forgotten {forgotten} time{'s' * (forgotten > 1)}"
        )
    else:
        learned = f"learned only at visit {first} of {visits}"
    name = "loss" if "mean_loss" in table else "score"
    return f"{learned}; mean {name} {table[f'mean_{name}'][j]:.2g}, usual in its class is {usual:.2g}"
