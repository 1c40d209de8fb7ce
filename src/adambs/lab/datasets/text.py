"""IMDB's reviews as token ids, tokenised once and cached in the data folder.

Ids: 0 pads, 1 is any unknown word, 2, 3, ... are the 20,000 most frequent words of the training set, the most
frequent first. A review is its last 100 words, padded at the front: Keras' convention. Keras also spends an
id on a start token and counts the three special ids among the 20,000; we do neither.
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adambs.lab.datasets.archives import is_archive, read_archive
from adambs.lab.datasets.catalogue import DamagedError
from adambs.lab.datasets.on_disk import REVIEW_FOLDERS

VOCABULARY = 20_000
LENGTH = 100
EXCERPT = 300
PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
TOKENS = FIRST_WORD + VOCABULARY  # the rows of an embedding
_ARRAYS = ("train", "train_labels", "test", "test_labels")
_RECIPE = {"version": 1, "vocabulary": VOCABULARY, "length": LENGTH, "excerpt": EXCERPT}
# Keras' Tokenizer splits at these; the apostrophe stays, so don't is a word.
_SPLIT_AT = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~', " "))


@dataclass(frozen=True)
class Reviews:
    """Token ids (N, 100), labels (0 negative, 1 positive), and how each training review begins."""

    train: NDArray[np.uint16]
    train_labels: NDArray[np.uint8]
    test: NDArray[np.uint16]
    test_labels: NDArray[np.uint8]
    texts: tuple[str, ...]


def read_imdb(place: Path, cache: Path) -> Reviews:
    """The reviews of ``place``, from ``cache`` if that was made of the same files by the same recipe."""
    key = _fingerprint(place)
    reviews = _from_cache(cache, key)
    if reviews is None:
        reviews = tokenise(_read_reviews(place))
        with suppress(OSError):  # a read-only or full disk costs the cache, not the run
            _to_cache(cache, key, reviews)
    return reviews


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and line breaks of HTML."""
    return text.lower().replace("<br />", " ").translate(_SPLIT_AT).split()


def tokenise(texts: dict[str, list[str]]) -> Reviews:
    """Token ids for the texts of ``train/neg``, ``train/pos``, ``test/neg`` and ``test/pos``."""
    counts: Counter[str] = Counter()
    tails: dict[str, list[list[str]]] = {part: [] for part in REVIEW_FOLDERS}
    for part in REVIEW_FOLDERS:
        for text in texts[part]:
            found = words(text)
            tails[part].append(found[-LENGTH:])
            if part.startswith("train"):
                counts.update(found)
    frequent = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:VOCABULARY]
    ids = {word: FIRST_WORD + rank for rank, (word, _) in enumerate(frequent)}
    return Reviews(
        train=_ids(tails["train/neg"] + tails["train/pos"], ids),
        train_labels=_labels(tails["train/neg"], tails["train/pos"]),
        test=_ids(tails["test/neg"] + tails["test/pos"], ids),
        test_labels=_labels(tails["test/neg"], tails["test/pos"]),
        texts=tuple(_excerpt(text) for part in ("train/neg", "train/pos") for text in texts[part]),
    )


def _ids(tails: list[list[str]], ids: dict[str, int]) -> NDArray[np.uint16]:
    rows = np.full((len(tails), LENGTH), PADDING, np.uint16)
    for row, tail in zip(rows, tails, strict=True):
        if tail:
            row[-len(tail) :] = [ids.get(word, UNKNOWN) for word in tail]
    return rows


def _labels(negative: list[list[str]], positive: list[list[str]]) -> NDArray[np.uint8]:
    return np.repeat(np.array([0, 1], np.uint8), [len(negative), len(positive)])


def _excerpt(text: str) -> str:
    text = text.replace("\0", " ")  # the cache separates excerpts by it
    return text if len(text) <= EXCERPT else text[:EXCERPT] + "…"


def _read_reviews(place: Path) -> dict[str, list[str]]:
    """Reviews by folder, in the order of their file names, so that folder and archive give the same."""
    if is_archive(place):
        raw = read_archive(place, "aclImdb", _is_review)
    else:
        raw = {f"{part}/{entry.name}": Path(entry).read_bytes() for part, entry in _review_files(place)}
    texts: dict[str, list[str]] = {part: [] for part in REVIEW_FOLDERS}
    for name in sorted(raw):
        # The publisher's files are UTF-8; a stray byte must not cost the run.
        texts[name.rpartition("/")[0]].append(raw[name].decode("utf-8", errors="replace"))
    for part, found in texts.items():
        if not found:
            raise DamagedError(place, f"no reviews (*.txt) in {part}")
    return texts


def _is_review(name: str) -> bool:
    return name.endswith(".txt") and name.rpartition("/")[0] in REVIEW_FOLDERS


def _review_files(place: Path) -> list[tuple[str, os.DirEntry[str]]]:
    """Every review below ``place`` with its folder."""
    found = []
    for part in REVIEW_FOLDERS:
        if not (place / part).is_dir():
            raise DamagedError(place, f"the folder {part} is missing in it")
        with os.scandir(place / part) as entries:
            found += [(part, entry) for entry in entries if entry.name.endswith(".txt") and entry.is_file()]
    return found


def _fingerprint(place: Path) -> str:
    """Changes with the recipe and with the name, size or time of any source file."""
    digest = hashlib.sha256(json.dumps(_RECIPE, sort_keys=True).encode())
    if is_archive(place):
        files = [(place.name, place.stat())]
    else:
        files = sorted(
            ((f"{part}/{e.name}", e.stat()) for part, e in _review_files(place)), key=lambda f: f[0]
        )
    for name, stat in files:
        digest.update(
            f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", errors="surrogateescape")
        )
    return digest.hexdigest()


def _from_cache(cache: Path, key: str) -> Reviews | None:
    """What ``cache`` holds; None if it is not there, of other files, or damaged in any way."""
    try:
        with open(cache, "rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if bytes(stored["key"]).decode() != key:
                return None
            texts = tuple(bytes(stored["texts"]).decode("utf-8").split("\0"))
            reviews = Reviews(**{name: stored[name] for name in _ARRAYS}, texts=texts)
        return reviews if _consistent(reviews) else None
    except Exception:  # whatever is wrong with a cache, the cure is the same: make it again
        return None


def _consistent(reviews: Reviews) -> bool:
    return len(reviews.texts) == len(reviews.train) and all(
        ids.dtype == np.uint16
        and ids.shape == (len(labels), LENGTH)
        and ids.max() < TOKENS
        and labels.dtype == np.uint8
        and labels.max() <= 1
        for ids, labels in ((reviews.train, reviews.train_labels), (reviews.test, reviews.test_labels))
    )


def _to_cache(cache: Path, key: str, reviews: Reviews) -> None:
    """Write beside the cache and rename: a reader sees the old file or the new one, never a half."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: getattr(reviews, name) for name in _ARRAYS}
    arrays["key"] = np.frombuffer(key.encode(), np.uint8)
    arrays["texts"] = np.frombuffer("\0".join(reviews.texts).encode("utf-8"), np.uint8)
    handle, name = tempfile.mkstemp(dir=cache.parent, prefix=".imdb-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, **arrays)
        os.chmod(name, 0o644)  # a temporary file is its owner's alone; the data folder may be shared
        os.replace(name, cache)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
