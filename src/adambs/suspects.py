"""Which examples are worth a second look, and which taught least: rankings of a history's table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adambs._types import Floats, Indices

# After so many visits the evidence counts for half.
_DOUBT = 2


@dataclass(frozen=True)
class Suspect:
    """An example that is hard, rare or mislabelled."""

    index: int
    suspicion: float
    """How much higher than the median of its class its mean loss, or mean score, is."""
    label: Any
    """As it was given; None if labels were not."""
    reason: str


def ranked(table: dict[str, NDArray[Any]], labels: Any, k: int) -> list[Suspect]:
    """The k most suspicious examples, the worst first."""
    visits = table["visits"]
    given, classes = _classes(labels, len(visits))
    suspicion, usual = suspicions(table, classes)
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


def suspicions(table: dict[str, NDArray[Any]], classes: Indices) -> tuple[Floats, Floats]:
    """For each example how suspicious it is (NaN if it was not visited), and for each class what is usual.

    The measure is the mean loss, or the mean score if losses were not kept, minus the median of its class: a
    class whose examples are all hard is usual in being so. Few visits are little evidence: after v of them
    the difference counts for v / (v + 2).
    """
    measure, visits = table.get("mean_loss", table["mean_score"]), table["visits"]
    seen = visits > 0
    usual = np.full(int(classes.max()) + 1, np.nan)
    for c in np.unique(classes[seen]):
        usual[c] = np.median(measure[seen & (classes == c)])
    return (measure - usual[classes]) * (visits / (visits + _DOUBT)), usual


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
