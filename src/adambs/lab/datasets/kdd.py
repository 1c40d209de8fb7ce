"""KDD Cup 1999's network connections: 41 columns of numbers and words, and the kind of the connection.

Numbers become log1p of themselves, standardised with the training set's mean and deviation; those that have
one value only in the training set are left out, since they tell nothing (in the 10 % file:
``num_outbound_cmds`` and ``is_host_login``, always 0). Protocol, service and flag become one column of 0 and
1 for each word that is in the file. That makes 36 + 3 + 66 + 11 = 116 features of the 10 % file.

The publisher's test set has other kinds and other shares of them, on purpose. Here the test set is a random
part of the same file instead, so that the two have one distribution, as in the lab's other data sets.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adambs.lab.datasets.archives import DAMAGE
from adambs.lab.datasets.catalogue import DamagedError
from adambs.lab.datasets.images import Split

FILE = "kddcup.data_10_percent.gz"
TEST_SIZE = 50_000
SEED = 0
_COLUMNS = 42
_WORDS = (1, 2, 3)  # protocol, service, flag
_KIND = 41
_NUMBERS = tuple(k for k in range(_COLUMNS) if k not in (*_WORDS, _KIND))
_ROW = np.dtype([(f"{k}", np.float64 if k in _NUMBERS else "U32") for k in range(_COLUMNS)])


@dataclass(frozen=True)
class Connections:
    """A training and a test set, and the file's lines."""

    train: Split
    test: Split
    rows: NDArray[np.int64]
    """Which line of the file each training example is, counted from 0."""
    lines: tuple[str, ...]
    """All of the file."""


def read_connections(place: Path, classes: tuple[str, ...]) -> Connections:
    """The connections of ``place``; 50,000, at most a fifth, drawn under a fixed seed, are the test set."""
    path = place / FILE
    lines = _read_lines(path)
    # Seven of ten lines repeat an earlier one: each is parsed once.
    numbers: dict[str, int] = {}
    which = np.fromiter((numbers.setdefault(line, len(numbers)) for line in lines), np.int64, len(lines))
    distinct = list(numbers)
    table = _parse(path, distinct, lines)
    kinds = _kinds(path, table, classes)[which]
    order = np.random.default_rng(SEED).permutation(len(lines))
    count = min(TEST_SIZE, len(lines) // 5)
    test, train = np.sort(order[:count]), np.sort(order[count:])
    features = _features(path, table, which[train])
    return Connections(
        Split(features[which[train]], kinds[train]),
        Split(features[which[test]], kinds[test]),
        train,
        tuple(distinct[k] for k in which),
    )


def _read_lines(path: Path) -> list[str]:
    try:
        with gzip.open(path) as stream:
            lines = stream.read().decode("ascii").splitlines()
    except DAMAGE as error:
        raise DamagedError(path, f"the gzip data is damaged or cut off ({error})") from error
    except UnicodeDecodeError as error:
        raise DamagedError(path, f"not a table of connections ({error})") from error
    if len(lines) < 5:
        raise DamagedError(path, f"{len(lines)} connections are too few for a training and a test set")
    return lines


def _parse(path: Path, distinct: list[str], lines: list[str]) -> NDArray[np.void]:
    for line in distinct:
        if line.count(",") != _COLUMNS - 1:
            found = f"line {lines.index(line) + 1:,} has {line.count(',') + 1} columns, not {_COLUMNS}"
            raise DamagedError(path, found)
    try:
        return np.loadtxt(distinct, dtype=_ROW, delimiter=",", comments=None, ndmin=1)
    except ValueError as error:
        raise DamagedError(path, f"a column of numbers holds something else ({error})") from error


def _kinds(path: Path, table: NDArray[np.void], classes: tuple[str, ...]) -> NDArray[np.int64]:
    """The labels; the publisher writes a full stop behind each."""
    names, where = np.unique(table[f"{_KIND}"], return_inverse=True)
    known = {f"{name}.": k for k, name in enumerate(classes)}
    unknown = [str(name) for name in names if str(name) not in known]
    if unknown:
        raise DamagedError(path, f"the kind {unknown[0]!r} is none of the {len(classes)} that are known")
    return np.array([known[str(name)] for name in names])[where]


def _features(path: Path, table: NDArray[np.void], train: NDArray[np.int64]) -> NDArray[np.float32]:
    """Of every distinct line; ``train`` says which lines the training set has, as often as it has them."""
    raw = np.stack([table[f"{k}"] for k in _NUMBERS], axis=1)
    if not (np.isfinite(raw) & (raw >= 0)).all():
        raise DamagedError(path, "a number is negative or not finite")
    numbers = np.log1p(raw)
    mean, deviation = numbers[train].mean(axis=0), numbers[train].std(axis=0)
    telling = deviation > 0
    parts = [(numbers[:, telling] - mean[telling]) / deviation[telling]]
    for k in _WORDS:
        words, where = np.unique(table[f"{k}"], return_inverse=True)
        parts.append(np.eye(len(words))[where])
    return np.concatenate(parts, axis=1, dtype=np.float32)
