"""From a name to a ``Data``: find the files, read them, and say what to do where that fails."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from adambs.lab.datasets.archives import is_archive
from adambs.lab.datasets.built_in import built_in
from adambs.lab.datasets.catalogue import (
    DamagedError,
    DataError,
    Dataset,
    data_folder,
    dataset_named,
    fetch_command,
)
from adambs.lab.datasets.data import Data
from adambs.lab.datasets.images import Split, read_cifar, read_idx_pair
from adambs.lab.datasets.kdd import read_connections
from adambs.lab.datasets.on_disk import Status, find
from adambs.lab.datasets.text import TOKENS, read_imdb


def load(name: str, folder: str | os.PathLike[str] | None = None) -> Data:
    """The dataset ``name`` from the data folder: ``folder``, else ``ADAMBS_DATA``, else the user's cache.

    Raises ``DataError`` if it is missing or damaged; the message names the file and what to do.
    """
    dataset = dataset_named(name)
    if dataset.kind == "embedded":
        return built_in(name, dataset.classes)
    root = data_folder(folder)
    status = find(dataset, root)
    if status.where is None or status.state == "partial":
        raise DataError(_missing(dataset, root, status))
    try:
        return _read(dataset, status.where, root)
    except DamagedError as error:
        culprit = status.where if is_archive(status.where) else error.path
        way_out = f"Delete {culprit} and run: {fetch_command(name, root)}"
        raise DataError(f"{error.path}: {error.what}. {way_out}") from error
    except OSError as error:
        path = error.filename or status.where
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}). Check its permissions and the disk, or "
            f"delete it and run: {fetch_command(name, root)}"
        ) from error


def _read(dataset: Dataset, place: Path, root: Path) -> Data:
    if dataset.kind == "idx":
        train, test = (read_idx_pair(place, prefix, len(dataset.classes)) for prefix in ("train", "t10k"))
        return _data(dataset, train, test)
    if dataset.kind == "cifar":
        train, test, classes = read_cifar(place, dataset)
        return _data(dataset, train, test, classes)
    if dataset.kind == "kddcup99":
        found = read_connections(place, dataset.classes)
        data = _data(dataset, found.train, found.test)
        return replace(data, rows=torch.from_numpy(found.rows), texts=found.lines)
    reviews = read_imdb(place, root / "cache" / "imdb.npz")
    train = Split(reviews.train.astype(np.int64), reviews.train_labels.astype(np.int64))
    test = Split(reviews.test.astype(np.int64), reviews.test_labels.astype(np.int64))
    return replace(_data(dataset, train, test), texts=reviews.texts, tokens=TOKENS)


def _data(dataset: Dataset, train: Split, test: Split, classes: tuple[str, ...] | None = None) -> Data:
    labels = torch.from_numpy(train.labels)
    return Data(
        name=dataset.name,
        train=TensorDataset(torch.from_numpy(train.inputs), labels),
        test=TensorDataset(torch.from_numpy(test.inputs), torch.from_numpy(test.labels)),
        classes=classes or dataset.classes,
        rows=torch.arange(len(labels)),
        true_labels=labels,
    )


def _missing(dataset: Dataset, root: Path, status: Status) -> str:
    megabytes = sum(file.size for file in dataset.downloads) / 1e6
    what = f"{status.where} is incomplete ({status.detail})" if status.where else f"it is not in {root}"
    return (
        f"{dataset.name}: {what}. To download it ({megabytes:,.0f} MB) run: "
        f"{fetch_command(dataset.name, root)}\nIf you have it elsewhere, give that folder with --data or "
        f"ADAMBS_DATA; the files belong into {root / dataset.places[0]}"
    )
