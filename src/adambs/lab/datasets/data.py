"""What the lab trains on, and how a training set is thinned, unbalanced or mislabelled on purpose.

Each function returns a new ``Data`` and leaves the given one as it was; the same seed gives the same result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from adambs._check import whole


@dataclass(frozen=True, eq=False)
class Data:
    """A training and a test set of (inputs, labels).

    Images are float32 in [0, 1], shape (N, C, H, W), without augmentation; texts are int64 token ids, shape
    (N, 100), below ``tokens``; tables are float32, shape (N, ``features``); labels are int64. What is fitted
    and not classified has float32 targets, shape (N, outputs), and ``classes`` names the outputs.
    """

    name: str
    train: TensorDataset
    test: TensorDataset
    classes: tuple[str, ...]
    # Where training example i stands in the publisher's order: thinning keeps it.
    rows: Tensor
    # The training labels before with_flipped_labels.
    true_labels: Tensor
    # How each training text begins, or a table's line, by row; None for images.
    texts: Sequence[str] | None = None
    # The number of token ids, that is an embedding's rows; 0 for what is no text.
    tokens: int = 0
    # What was done to the data, in words.
    changes: tuple[str, ...] = ()

    @property
    def labels(self) -> Tensor:
        """The training labels, flipped ones included."""
        return self.train.tensors[1]

    @property
    def features(self) -> int:
        """The columns of a table; 0 for images and texts."""
        inputs = self.train.tensors[0]
        return inputs.shape[1] if inputs.ndim == 2 and inputs.is_floating_point() else 0

    @property
    def context(self) -> NDArray[np.int64]:
        """What is known of each training example before it is seen: its label, flipped ones included."""
        return self.labels.numpy()

    @property
    def flipped(self) -> Tensor:
        """Which training labels differ from the true ones: what a search for mislabelled data should find."""
        return self.labels != self.true_labels

    def example(self, index: int) -> dict[str, Any]:
        """A training example as a report shows it.

        ``label``, and ``true_label`` if that was flipped; ``row``, its place in the publisher's training set;
        ``image``, rows of pixels 0..255 (colours as [r, g, b]), or ``text``, the beginning of the review.
        """
        inputs, labels = self.train.tensors
        if not 0 <= index < len(labels):
            raise IndexError(f"there is no training example {index}: they are 0 to {len(labels) - 1}")
        if labels.is_floating_point():
            values = ", ".join(
                f"{name} {value:.3g}" for name, value in zip(self.classes, labels[index], strict=True)
            )
            return {"label": "", "row": int(self.rows[index]), "text": values}
        row, label, true = int(self.rows[index]), int(labels[index]), int(self.true_labels[index])
        shown: dict[str, Any] = {"label": self.classes[label], "row": row}
        if label != true:
            shown["true_label"] = self.classes[true]
        if self.texts is not None:
            return shown | {"text": self.texts[row]}
        return shown | {"image": _pixels(inputs[index])}


def _pixels(image: Tensor) -> Any:
    pixels = (image * 255).round().to(torch.int64)
    return (pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).tolist()


def subset(data: Data, n_train: int | None = None, n_test: int | None = None, seed: int = 0) -> Data:
    """``n_train`` and ``n_test`` examples (None: all), each class in its share, chosen by ``seed``."""
    chooser = np.random.default_rng([whole("seed", seed, least=0), 1])
    train = _stratified("n_train", data.train, len(data.classes), n_train, chooser)
    test = _stratified("n_test", data.test, len(data.classes), n_test, chooser)
    thinned = replace(data, test=_take(data.test, test))
    return _keep(thinned, train, f"{len(train):,} training and {len(test):,} test examples, seed {seed}")


def long_tailed(data: Data, factor: float, seed: int = 0) -> Data:
    """Class c of C keeps n_max * factor^(-c / (C - 1)) training examples; the test set is untouched.

    n_max is the size of the largest class. Rounded; at least one, and never more than the class has.
    """
    if isinstance(factor, bool) or not (math.isfinite(factor) and factor >= 1):
        raise ValueError(f"factor must be finite and at least 1 (1 keeps the balance), not {factor!r}")
    chooser = np.random.default_rng([whole("seed", seed, least=0), 2])
    members = _by_class(data.labels, len(data.classes))
    largest, last = max(len(group) for group in members), max(1, len(members) - 1)
    wanted = [max(1, round(largest * factor ** (-c / last))) for c in range(len(members))]
    kept = _choose(members, [min(len(g), n) for g, n in zip(members, wanted, strict=True)], chooser)
    return _keep(data, kept, f"long-tailed by {factor:g}, seed {seed}")


def with_flipped_labels(data: Data, fraction: float, seed: int = 0) -> Data:
    """A ``fraction`` of the training labels replaced by another class, uniformly; ``flipped`` tells which."""
    if isinstance(fraction, bool) or not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie between 0 and 1, not {fraction!r}")
    if len(data.classes) < 2:
        raise ValueError(f"{data.name} has one class: there is no other label to flip to")
    chooser = np.random.default_rng([whole("seed", seed, least=0), 3])
    inputs, labels = data.train.tensors
    count = round(fraction * len(labels))
    hit = torch.from_numpy(chooser.choice(len(labels), count, replace=False))
    shift = torch.from_numpy(chooser.integers(1, len(data.classes), count))
    wrong = labels.clone()
    wrong[hit] = (wrong[hit] + shift) % len(data.classes)
    change = f"{count:,} labels flipped, seed {seed}"
    return replace(data, train=TensorDataset(inputs, wrong), changes=(*data.changes, change))


def _by_class(labels: Tensor, classes: int) -> list[NDArray[np.int64]]:
    return [np.flatnonzero(labels.numpy() == c) for c in range(classes)]


def _choose(
    members: list[NDArray[np.int64]], counts: list[int], chooser: np.random.Generator
) -> NDArray[np.int64]:
    """``counts[c]`` of ``members[c]`` for each class c, in the data's order."""
    picked = [chooser.choice(g, n, replace=False) for g, n in zip(members, counts, strict=True) if n]
    return np.sort(np.concatenate(picked))


def _stratified(
    name: str, part: TensorDataset, classes: int, count: int | None, chooser: np.random.Generator
) -> NDArray[np.int64]:
    """Positions of ``count`` examples; shares by largest remainder, in whole numbers so that none is lost."""
    total = len(part)
    if count is None:
        return np.arange(total)
    if whole(name, count, least=1) > total:
        raise ValueError(f"{name} must be at most {total}, the examples that are there, not {count}")
    members = _by_class(part.tensors[1], classes)
    counts = [len(group) * count // total for group in members]
    by_remainder = sorted(range(classes), key=lambda c: -(len(members[c]) * count % total))
    for c in by_remainder[: count - sum(counts)]:
        counts[c] += 1
    return _choose(members, counts, chooser)


def _take(part: TensorDataset, positions: NDArray[np.int64]) -> TensorDataset:
    index = torch.from_numpy(positions)
    return TensorDataset(*(tensor[index] for tensor in part.tensors))


def _keep(data: Data, positions: NDArray[np.int64], change: str) -> Data:
    """Only the training examples at ``positions``, with all that is remembered of them."""
    index = torch.from_numpy(positions)
    return replace(
        data,
        train=_take(data.train, positions),
        rows=data.rows[index],
        true_labels=data.true_labels[index],
        changes=(*data.changes, change),
    )
