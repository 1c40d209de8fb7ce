"""Where a dataset lies on the disk, and whether it looks whole. Cheap: names and sizes, no file is read."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adambs.lab.datasets.archives import is_archive
from adambs.lab.datasets.catalogue import DATASETS, Dataset, data_folder

State = Literal["present", "suspect", "partial", "missing"]
REVIEW_FOLDERS = ("train/neg", "train/pos", "test/neg", "test/pos")
_REVIEWS_EACH = 12_500
_BEST_FIRST: tuple[State, ...] = ("present", "suspect", "partial", "missing")


@dataclass(frozen=True)
class Status:
    """A dataset as found: one row of ``adambs data``.

    ``suspect`` means that all files are there and some size is unlike the publisher's; it may still load.
    ``whole`` is False for a part that loads, like the part of CIFAR-100 with fewer records.
    """

    name: str
    state: State
    where: Path | None
    size: int
    detail: str
    source: str
    licence: str
    whole: bool = True


@dataclass(frozen=True)
class _Look:
    state: State
    size: int
    detail: str
    whole: bool = True


def available(folder: str | os.PathLike[str] | None = None) -> list[Status]:
    """The status of every dataset of the catalogue in the data folder."""
    root = data_folder(folder)
    return [find(dataset, root) for dataset in DATASETS.values()]


def find(dataset: Dataset, root: Path) -> Status:
    """The best place of ``dataset`` below ``root``: what looks whole wins, then the catalogue's order."""
    if dataset.kind == "embedded":
        return _status(dataset, None, _Look("present", 0, "comes with scikit-learn"))
    looks = [(place, _look(dataset, root / place)) for place in dataset.places]
    place, best = min(looks, key=lambda pair: (_BEST_FIRST.index(pair[1].state), not pair[1].whole))
    return _status(dataset, None if best.state == "missing" else root / place, best)


def _status(dataset: Dataset, where: Path | None, look: _Look) -> Status:
    return Status(
        dataset.name, look.state, where, look.size, look.detail, dataset.source, dataset.licence, look.whole
    )


def _look(dataset: Dataset, place: Path) -> _Look:
    try:
        if is_archive(place):
            return _look_at_archive(dataset, place)
        return _look_at_reviews(place) if dataset.kind == "imdb" else _look_at_files(dataset, place)
    except OSError as error:
        return _Look("suspect", 0, f"cannot be looked at: {error.strerror}")


def _look_at_archive(dataset: Dataset, place: Path) -> _Look:
    if not place.is_file():
        return _Look("missing", 0, "not downloaded")
    size, official = place.stat().st_size, dataset.downloads[0].size
    if size != official:
        return _Look("suspect", size, f"{place.name} has {size:,} bytes, the publisher's has {official:,}")
    return _Look("present", size, "the publisher's archive")


def _look_at_files(dataset: Dataset, place: Path) -> _Look:
    sizes = {name: _size(dataset, place / name) for name, _ in dataset.members if (place / name).is_file()}
    lacking = [name for name, _ in dataset.members if name not in sizes]
    size = sum(sizes.values())
    if not sizes:
        return _Look("missing", 0, "not downloaded")
    if lacking:
        return _Look("partial", size, f"without {', '.join(lacking)}")
    odd = [name for name, official in dataset.members if not _plausible(dataset, sizes[name], official)]
    if odd:
        return _Look("suspect", size, f"size unlike the publisher's: {', '.join(odd)}")
    whole = all(sizes[name] == official for name, official in dataset.members)
    return _Look("present", size, "all files" if whole else "a part of the records", whole)


def _size(dataset: Dataset, file: Path) -> int:
    """The file's; of kddcup99 that of what it unpacks to, which the last four bytes of a gzip tell."""
    if dataset.kind != "kddcup99":
        return file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 4))
        return int.from_bytes(stream.read(), "little")


def _plausible(dataset: Dataset, size: int, official: int) -> bool:
    if dataset.kind == "cifar":
        return size > 0 and size % (dataset.label_bytes + 3072) == 0
    return size == official


def _look_at_reviews(place: Path) -> _Look:
    counts = {part: _count_texts(place / part) for part in REVIEW_FOLDERS}
    lacking = [part for part, (count, _) in counts.items() if count == 0]
    size = sum(size for _, size in counts.values())
    if len(lacking) == len(counts):
        return _Look("missing", 0, "not downloaded")
    if lacking:
        return _Look("partial", size, f"without reviews in {', '.join(lacking)}")
    total = sum(count for count, _ in counts.values())
    if any(count != _REVIEWS_EACH for count, _ in counts.values()):
        return _Look("suspect", size, f"{total:,} reviews, the publisher has {4 * _REVIEWS_EACH:,}")
    return _Look("present", size, f"{total:,} reviews")


def _count_texts(folder: Path) -> tuple[int, int]:
    if not folder.is_dir():
        return 0, 0
    with os.scandir(folder) as entries:
        sizes = [entry.stat().st_size for entry in entries if entry.name.endswith(".txt") and entry.is_file()]
    return len(sizes), sum(sizes)
