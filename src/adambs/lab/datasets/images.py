"""Readers of the image formats: IDX (MNIST's), CIFAR's binary records, scikit-learn's digits.

Pixels become float32 in [0, 1], that is byte / 255 (digits: sixteenths), shape (N, C, H, W). Nothing else is
done to them: no mean is subtracted, nothing is augmented. Sizes come from the files, not from constants.
"""

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adambs.lab.datasets.archives import DAMAGE, read_files
from adambs.lab.datasets.catalogue import DamagedError, Dataset

_SIDE = 28
_UBYTE = 0x08  # the type code of IDX for unsigned bytes


@dataclass(frozen=True)
class Split:
    """Inputs and labels of a training or test set, as arrays."""

    inputs: NDArray[np.float32] | NDArray[np.int64]
    labels: NDArray[np.int64]


def read_idx_pair(folder: Path, prefix: str, classes: int) -> Split:
    """Images and labels of MNIST's four-file layout; ``prefix`` is ``train`` or ``t10k``."""
    images_path, labels_path = (
        folder / f"{prefix}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1")
    )
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (_SIDE, _SIDE):
        raise DamagedError(images_path, f"images of {images.shape[1:]} pixels, not ({_SIDE}, {_SIDE})")
    if len(images) != len(labels):
        raise DamagedError(labels_path, f"{len(labels):,} labels for {len(images):,} images")
    _check_labels(labels_path, labels, classes)
    return Split(_unit(images[:, None]), labels.astype(np.int64))


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """A gzipped IDX file of bytes: 0, 0, type, dimensions, each size as a big-endian int32, then the data."""
    try:
        with gzip.open(path) as stream:
            header = stream.read(4 + 4 * dimensions)
            shape = _idx_shape(path, header, dimensions)
            body = stream.read(math.prod(shape) + 1)  # one more, to see the end and have gzip check its sum
    except DAMAGE as error:
        raise DamagedError(path, f"the gzip data is damaged or cut off ({error})") from error
    if len(body) != math.prod(shape):
        more = "more" if len(body) > math.prod(shape) else f"{len(body):,}"
        raise DamagedError(path, f"its header promises {math.prod(shape):,} bytes, it holds {more}")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _idx_shape(path: Path, header: bytes, dimensions: int) -> tuple[int, ...]:
    magic = bytes([0, 0, _UBYTE, dimensions])
    if header[:4] != magic:
        raise DamagedError(
            path, f"not an IDX file: it begins with {header[:4].hex(' ')}, not {magic.hex(' ')}"
        )
    if len(header) != 4 + 4 * dimensions:
        raise DamagedError(path, "the IDX header is cut off")
    shape = tuple(int(size) for size in np.frombuffer(header, ">u4", offset=4))
    if min(shape) == 0 or math.prod(shape) > 1 << 30:
        raise DamagedError(path, f"the IDX header says {shape}, which is empty or impossible")
    return shape


def read_cifar(place: Path, dataset: Dataset) -> tuple[Split, Split, tuple[str, ...]]:
    """Training set, test set and class names of CIFAR's binary version."""
    members = [name for name, _ in dataset.members]
    contents = read_files(place, dataset.top, members, dataset.extras)
    names = _class_names(place, dataset, contents)
    train = [name for name in members if not name.startswith("test")]
    test = [name for name in members if name.startswith("test")]
    return _cifar_split(place, dataset, contents, train), _cifar_split(place, dataset, contents, test), names


def _cifar_split(place: Path, dataset: Dataset, contents: dict[str, bytes], names: list[str]) -> Split:
    """The records of some files in one array, filled file by file to spare memory."""
    parts = [_cifar_records(place / name, contents[name], dataset) for name in names]
    count = sum(len(part) for part in parts)
    images = np.empty((count, 3, 32, 32), np.float32)
    labels = np.concatenate([part[:, dataset.label_bytes - 1] for part in parts]).astype(np.int64)
    start = 0
    for part in parts:
        pixels = part[:, dataset.label_bytes :].reshape(-1, 3, 32, 32)
        images[start : start + len(part)] = _unit(pixels)
        start += len(part)
    return Split(images, labels)


def _cifar_records(path: Path, content: bytes, dataset: Dataset) -> NDArray[np.uint8]:
    record = dataset.label_bytes + 3072
    if not content or len(content) % record:
        raise DamagedError(path, f"{len(content):,} bytes are not whole records of {record:,} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    _check_labels(path, records[:, dataset.label_bytes - 1], len(dataset.classes))
    return records


def _class_names(place: Path, dataset: Dataset, contents: dict[str, bytes]) -> tuple[str, ...]:
    """The names of ``fine_label_names.txt`` where it is there; numbers, or the catalogue's names, if not."""
    for extra in dataset.extras:
        if extra in contents:
            names = tuple(contents[extra].decode("utf-8", errors="replace").split())
            if len(names) != len(dataset.classes):
                raise DamagedError(place / extra, f"{len(names)} class names, not {len(dataset.classes)}")
            return names
    return dataset.classes


def read_digits() -> tuple[Split, Split]:
    """scikit-learn's digits: examples 0, 5, 10, ... are the test set, the others the training set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images[:, None] / 16).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    test = np.arange(len(labels)) % 5 == 0
    return Split(images[~test], labels[~test]), Split(images[test], labels[test])


def _unit(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.divide(pixels, 255, dtype=np.float32)


def _check_labels(path: Path, labels: NDArray[np.uint8], classes: int) -> None:
    if labels.max() >= classes:
        row = int(np.argmax(labels >= classes))
        raise DamagedError(path, f"label {labels[row]} of record {row:,} is not below {classes}")
