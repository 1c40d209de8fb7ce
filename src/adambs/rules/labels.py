"""Labels of a context: what is known of examples before they are seen, as numbers."""

import hashlib
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int32]


def numbered(labels: Any) -> Numbers:
    """Labels of any hashable kind as numbers 0, 1, ... in the order of first appearance, one an example.

    Equal labels get equal numbers, so the same division of the examples gives the same numbers, whatever
    the labels are called. Arrays of numbers or strings are sorted, O(n log n); others are hashed, O(n).
    """
    if isinstance(labels, torch.Tensor):
        labels = labels.numpy(force=True)
    elif hasattr(labels, "__array__"):  # a column of a table is one, too
        labels = np.asarray(labels)
    if isinstance(labels, np.ndarray):
        if labels.ndim != 1:
            raise ValueError(f"context must be one label for each example, not of shape {labels.shape}")
        if labels.dtype != object:
            _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
            rank = np.empty(len(first), np.int32)
            rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
            return rank[inverse]
    elif isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise TypeError(f"context must be one label for each example, not {labels!r:.60}")
    known: dict[Hashable, int] = {}
    try:
        return np.array([known.setdefault(_plain(label), len(known)) for label in labels], np.int32)
    except TypeError:
        raise TypeError(
            "context must hold labels that can be hashed, such as numbers, strings or tuples of them"
        ) from None


def _plain(label: Any) -> Any:
    """A tensor of one number is that number: tensors hash by identity."""
    return label.item() if isinstance(label, torch.Tensor) else label


def fingerprint(labels: Numbers) -> str:
    """The same for the same division of the examples, and for no other."""
    return hashlib.sha256(labels.astype("<i4").tobytes()).hexdigest()[:32]
