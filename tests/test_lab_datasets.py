"""The lab's data, on small files of the publishers' formats that the tests write, and their own server."""

import gzip
import hashlib
import http.server
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab_fixtures import KDD, connection, connections, kdd_files
from rich.console import Console
from torch.utils.data import TensorDataset

from adambs.lab import datasets
from adambs.lab.datasets import DATASETS, Data, DataError, available, fetch, load
from adambs.lab.datasets import text as text_module
from adambs.lab.datasets.catalogue import Download

# ----------------------------------------------------------------------------------------------------
# Small files of each format


def idx(array: np.ndarray, magic: bytes | None = None) -> bytes:
    magic = magic if magic is not None else bytes([0, 0, 8, array.ndim])
    return magic + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def mnist_files(n_train: int = 20, n_test: int = 10) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    files = {}
    for prefix, n in (("train", n_train), ("t10k", n_test)):
        files[f"{prefix}-images-idx3-ubyte.gz"] = gzip.compress(idx(rng.integers(0, 256, (n, 28, 28))))
        files[f"{prefix}-labels-idx1-ubyte.gz"] = gzip.compress(idx(np.arange(n) % 10))
    return files


def cifar_records(n: int, classes: int, label_bytes: int) -> np.ndarray:
    records = np.random.default_rng(n).integers(0, 256, (n, label_bytes + 3072)).astype(np.uint8)
    records[:, 0] = 7
    records[:, label_bytes - 1] = np.arange(n) % classes
    return records


def cifar10_files() -> dict[str, bytes]:
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    return {name: cifar_records(10 + k, 10, 1).tobytes() for k, name in enumerate(names)}


def cifar100_files(names: bool = True) -> dict[str, bytes]:
    files = {
        "train.bin": cifar_records(200, 100, 2).tobytes(),
        "test.bin": cifar_records(100, 100, 2).tobytes(),
    }
    if names:
        files["fine_label_names.txt"] = "\n".join(f"thing_{k}" for k in range(100)).encode() + b"\n\n"
    return files


def imdb_files() -> dict[str, bytes]:
    return {
        "train/neg/0_2.txt": b"Bad, bad film.<br /><br />I don't like it",
        "train/neg/1_1.txt": b"bad \xff\xfe bytes",
        "train/pos/0_9.txt": b"A GOOD film! " + b"word " * 150 + b"the end",
        "train/pos/1_8.txt": b"",
        "test/neg/0_3.txt": b"an unseen bad film",
        "test/pos/0_10.txt": b"good",
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tar_gz(top: str, files: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for info in extra or []:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
        for name, content in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def same(a: Data, b: Data) -> bool:
    pairs = zip((*a.train.tensors, *a.test.tensors), (*b.train.tensors, *b.test.tensors), strict=True)
    return all(torch.equal(x, y) for x, y in pairs) and a.texts == b.texts and a.classes == b.classes


# ----------------------------------------------------------------------------------------------------
# Reading what is right


def test_mnist(tmp_path: Path) -> None:
    write(tmp_path / "mnist", mnist_files())
    data = load("mnist", tmp_path)
    images, labels = data.train.tensors
    assert images.shape == (20, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.tolist() == [k % 10 for k in range(20)]
    raw = np.random.default_rng(0).integers(0, 256, (20, 28, 28))
    torch.testing.assert_close(images[:, 0], torch.tensor(raw / 255, dtype=torch.float32))
    assert len(data.test) == 10
    assert data.example(3) == {"label": "3", "row": 3, "image": raw[3].tolist()}


def test_fashion_mnist_where_torchvision_puts_it(tmp_path: Path) -> None:
    write(tmp_path / "FashionMNIST" / "raw", mnist_files())
    data = load("fashion-mnist", tmp_path)
    assert data.example(9)["label"] == "Ankle boot"


@pytest.mark.parametrize("place", ["cifar-10-batches-bin", "cifar10"])
def test_cifar10(tmp_path: Path, place: str) -> None:
    write(tmp_path / place, cifar10_files())
    data = load("cifar10", tmp_path)
    assert data.train.tensors[0].shape == (10 + 11 + 12 + 13 + 14, 3, 32, 32)
    assert len(data.test) == 15
    assert data.classes[9] == "truck"
    # Record 4 of the second batch: a label, then the red, green and blue planes.
    record = cifar_records(11, 10, 1)[4]
    shown = data.example(10 + 4)
    assert shown["label"] == data.classes[record[0]]
    assert shown["image"] == record[1:].reshape(3, 32, 32).transpose(1, 2, 0).tolist()


@pytest.mark.parametrize(("place", "names"), [("cifar-100-binary", True), ("cifar-100-part", False)])
def test_cifar100_takes_fine_labels(tmp_path: Path, place: str, names: bool) -> None:
    write(tmp_path / place, cifar100_files(names))
    data = load("cifar100", tmp_path)
    assert data.labels.tolist() == [k % 100 for k in range(200)]
    assert data.classes[42] == ("thing_42" if names else "42")


@pytest.mark.parametrize(
    ("name", "place", "archive", "files"),
    [
        ("cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-binary.tar.gz", cifar10_files()),
        ("cifar100", "cifar-100-binary", "cifar-100-binary.tar.gz", cifar100_files()),
        ("imdb", "aclImdb", "imdb/aclImdb_v1.tar.gz", imdb_files()),
    ],
)
def test_archive_and_folder_give_the_same(
    tmp_path: Path, name: str, place: str, archive: str, files: dict[str, bytes]
) -> None:
    write(tmp_path / "a" / place, files)
    write(tmp_path / "b", {archive: tar_gz(place, dict(reversed(files.items())))})
    assert same(load(name, tmp_path / "a"), load(name, tmp_path / "b"))


def test_what_is_fitted_is_standardised_and_always_the_same() -> None:
    for name, outputs in (("heavy-tailed", 1), ("photograph", 3)):
        data, again = load(name), load(name)
        x, y = data.train.tensors
        assert torch.equal(x, again.train.tensors[0])
        assert torch.equal(y, again.train.tensors[1])
        assert y.shape == (len(x), outputs)
        assert y.square().sum(1).mean().item() == pytest.approx(1, rel=1e-5)
        assert data.features == x.shape[1]
        assert len(data.classes) == outputs
        assert len(data.test) == pytest.approx(len(data.train) * 0.2, rel=0.3)
        assert data.classes[0] in data.example(3)["text"]


def test_heavy_tails_are_heavy() -> None:
    """One in two hundred examples has most of the squares; of a Gaussian it would have a twentieth."""
    y = load("heavy-tailed").train.tensors[1].squeeze(1).square().sort(descending=True).values
    assert y[:100].sum() > 0.5 * y.sum()


def test_augmented_digits_are_balanced_copies() -> None:
    data, digits = load("augmented-digits"), load("digits")
    assert data.train.tensors[0].shape == (4 * len(digits.train), 1, 16, 16)
    assert torch.equal(data.labels, digits.labels.repeat(4))
    assert data.test.tensors[0].shape == (len(digits.test), 1, 16, 16)
    assert torch.equal(data.test.tensors[1], digits.test.tensors[1])
    assert 0 <= data.train.tensors[0].min() < data.train.tensors[0].max() <= 1


def test_digits_need_no_files(tmp_path: Path) -> None:
    data = load("digits", tmp_path / "nowhere")
    assert data.train.tensors[0].shape == (1437, 1, 8, 8)
    assert len(data.test) == 360
    assert data.train.tensors[0].max() == 1
    assert not (tmp_path / "nowhere").exists()


def test_imdb_tokens(tmp_path: Path) -> None:
    write(tmp_path / "aclImdb", imdb_files())
    data = load("imdb", tmp_path)
    (ids, labels), (test_ids, test_labels) = data.train.tensors, data.test.tensors
    assert ids.shape == (4, 100)
    assert ids.dtype == labels.dtype == torch.int64
    assert labels.tolist() == [0, 0, 1, 1]
    assert test_labels.tolist() == [0, 1]
    # word 150 times, bad 3, film 2, then the words met once, in the order of the alphabet.
    word, bad, film, a = 2, 3, 4, 5
    once = ["a", "bytes", "don't", "end", "good", "i", "it", "like", "the"]
    known = {w: a + k for k, w in enumerate(once)}
    first = [bad, bad, film, *(known[w] for w in ("i", "don't", "like", "it"))]
    assert ids[0].tolist() == [0] * 93 + first
    assert ids[2].tolist() == [word] * 98 + [known["the"], known["end"]]
    assert ids[3].tolist() == [0] * 100
    assert test_ids[0, -4:].tolist() == [1, 1, bad, film]
    assert data.tokens == 20_002


def test_imdb_examples_show_the_raw_text(tmp_path: Path) -> None:
    write(tmp_path / "aclImdb", imdb_files())
    data = load("imdb", tmp_path)
    assert data.example(0) == {
        "label": "negative",
        "row": 0,
        "text": "Bad, bad film.<br /><br />I don't like it",
    }
    assert data.example(1)["text"] == "bad \ufffd\ufffd bytes"
    assert data.example(2)["text"].startswith("A GOOD film! word")
    assert len(data.example(2)["text"]) == 301
    with pytest.raises(IndexError, match="no training example 4"):
        data.example(4)


@given(st.lists(st.lists(st.sampled_from("abcdefg"), max_size=120), min_size=4, max_size=4))
def test_tokenise_against_a_plain_loop(texts: list[list[str]]) -> None:
    parts = dict(zip(text_module.REVIEW_FOLDERS, ([" ".join(words)] for words in texts), strict=True))
    reviews = text_module.tokenise(parts)
    both = texts[0] + texts[1]
    order = sorted(set(both), key=lambda w: (-both.count(w), w))
    for row, words in zip((*reviews.train, *reviews.test), texts, strict=True):
        ids = [2 + order.index(w) if w in order else 1 for w in words][-100:]
        assert row.tolist() == [0] * (100 - len(ids)) + ids


def test_connections_against_a_plain_loop(tmp_path: Path) -> None:
    write(tmp_path / "kddcup99", kdd_files())
    data, lines = load("kddcup99", tmp_path), connections()
    x, y = data.train.tensors
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (len(x), len(data.test)) == (48, 12)  # a fifth; 50,000 of the publisher's
    rows = data.rows.tolist()
    assert rows == sorted(rows)
    split = [line.split(",") for line in lines]
    # Of the numbers, columns 4, 22 and 36 have more than one value; then protocol, service and flag.
    logs = np.log1p([[float(row[c]) for c in (4, 22, 36)] for row in split])
    means, deviations = logs[rows].mean(0), logs[rows].std(0)
    words = [(c, word) for c in (1, 2, 3) for word in sorted({row[c] for row in split})]
    assert data.features == 3 + len(words) == 3 + 3 + 3 + 2
    for k, row in enumerate(rows):
        hot = [float(split[row][c] == word) for c, word in words]
        np.testing.assert_allclose(x[k], [*(logs[row] - means) / deviations, *hot], rtol=1e-5, atol=1e-6)
        assert data.classes[y[k]] == split[row][41].removesuffix(".")
        assert data.example(k) == {"label": data.classes[y[k]], "row": row, "text": lines[row]}
    # The test set is the rest, standardised with the training set's statistics.
    for k, row in enumerate(sorted(set(range(60)) - set(rows))):
        np.testing.assert_allclose(data.test.tensors[0][k, :3], (logs[row] - means) / deviations, rtol=1e-5)
    assert len(data.classes) == 23
    assert same(data, load("kddcup99", tmp_path))


def test_the_test_set_of_connections_is_random_and_no_larger_than_the_publishers_file_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adambs.lab.datasets.kdd.TEST_SIZE", 50)
    write(tmp_path / "kddcup99", kdd_files(connections(1000)))
    data = load("kddcup99", tmp_path)
    assert len(data.test) == 50
    left_out = np.setdiff1d(np.arange(1000), data.rows.numpy())
    assert 350 < left_out.mean() < 650
    assert len(np.unique(left_out % 4)) == 4


def test_a_context_is_the_label_of_each_training_example(tmp_path: Path) -> None:
    write(tmp_path / "kddcup99", kdd_files())
    data = datasets.subset(load("kddcup99", tmp_path), 20, seed=1)
    assert data.context.dtype == np.int64
    assert data.context.tolist() == data.labels.tolist()
    flipped = datasets.with_flipped_labels(data, 0.5)
    assert flipped.context.tolist() == flipped.labels.tolist() != data.context.tolist()
    assert load("digits").features == 0


def test_connections_packed_anew_are_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's size is of what is in the gzip: another packing of it is as good, other data is not."""
    body = kdd_files()[KDD]
    unpacked = gzip.decompress(body)
    row = replace(DATASETS["kddcup99"], members=((KDD, len(unpacked)),))
    monkeypatch.setitem(DATASETS, "kddcup99", row)
    for content in (body, gzip.compress(unpacked, 1), gzip.compress(unpacked, mtime=1)):
        write(tmp_path / "kddcup99", {KDD: content})
        assert states(tmp_path)["kddcup99"] == "present"
    for content in (gzip.compress(unpacked[:-1]), b"", b"x"):
        write(tmp_path / "kddcup99", {KDD: content})
        assert states(tmp_path)["kddcup99"] == "suspect"


# ----------------------------------------------------------------------------------------------------
# The folder


def test_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAMBS_DATA", str(tmp_path / "env"))
    assert datasets.data_folder(tmp_path) == tmp_path
    assert datasets.data_folder() == tmp_path / "env"
    monkeypatch.setenv("ADAMBS_DATA", "")
    assert datasets.data_folder().name == "adambs"
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is a file: give a folder"):
        datasets.data_folder(tmp_path / "file")


def test_unknown_names_list_the_known_ones() -> None:
    for call in (load, fetch):
        with pytest.raises(ValueError, match="dataset 'minst' is unknown; did you mean mnist"):
            call("minst")


@pytest.mark.parametrize("name", [name for name, row in DATASETS.items() if row.kind != "embedded"])
def test_missing_data_says_which_command_fetches_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"adambs data fetch {name} --data {re.escape(str(tmp_path))}"):
        load(name, tmp_path)
    (tmp_path / DATASETS[name].places[0]).mkdir()  # an empty folder is no data
    with pytest.raises(DataError, match=f"adambs data fetch {name}"):
        load(name, tmp_path)


def test_the_default_folder_needs_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAMBS_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"adambs data fetch mnist\n"):
        load("mnist")


def states(folder: Path) -> dict[str, str]:
    return {row.name: row.state for row in available(folder)}


def test_available(tmp_path: Path) -> None:
    assert set(states(tmp_path / "nowhere").values()) == {"missing", "present"}
    write(tmp_path / "mnist", mnist_files())  # all there, but not of the publisher's sizes
    write(tmp_path / "fashion-mnist", dict(list(mnist_files().items())[:3]))
    write(tmp_path / "cifar-10-batches-bin", cifar10_files())
    write(tmp_path / "cifar-100-part", {**cifar100_files(), "train.bin": b"x" * 3075})
    write(tmp_path / "aclImdb", imdb_files())
    rows = {row.name: row for row in available(tmp_path)}
    assert {name: row.state for name, row in rows.items()} == {
        "mnist": "suspect",
        "fashion-mnist": "partial",
        "cifar10": "present",
        "cifar100": "suspect",
        "imdb": "suspect",
        "kddcup99": "missing",
        "digits": "present",
        "augmented-digits": "present",
        "photograph": "present",
        "heavy-tailed": "present",
    }
    assert rows["fashion-mnist"].detail == "without t10k-labels-idx1-ubyte.gz"
    assert "train.bin" in rows["cifar100"].detail
    assert not rows["cifar10"].whole
    assert rows["cifar10"].size == sum(len(content) for content in cifar10_files().values())
    assert rows["cifar10"].where == tmp_path / "cifar-10-batches-bin"
    assert all(row.source and row.licence for row in rows.values())


def test_what_looks_whole_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar_gz("cifar-100-binary", cifar100_files())
    row = DATASETS["cifar100"]
    official = replace(row.downloads[0], size=len(archive))
    monkeypatch.setitem(DATASETS, "cifar100", replace(row, downloads=(official,)))
    write(tmp_path / "cifar-100-part", cifar100_files(names=False))
    write(tmp_path / "cifar-100-binary", {"train.bin": b"half"})
    assert load("cifar100", tmp_path).classes[0] == "0"
    write(tmp_path / "cifar100", {"cifar-100-binary.tar.gz": archive})
    assert load("cifar100", tmp_path).classes[0] == "thing_0"


# ----------------------------------------------------------------------------------------------------
# Reading what is wrong

IMAGES, LABELS = "mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz"
GOOD_IMAGES = idx(np.zeros((20, 28, 28)))
CORRUPT = {
    "empty file": ("mnist", IMAGES, b"", "not an IDX file"),
    "not gzip": ("mnist", IMAGES, b"<html>not found</html>", "gzip data is damaged"),
    "gzip cut off": ("mnist", IMAGES, gzip.compress(GOOD_IMAGES)[:-12], "damaged or cut off"),
    "gzip sum wrong": ("mnist", IMAGES, gzip.compress(GOOD_IMAGES)[:-8] + b"\0" * 8, "damaged or cut off"),
    "gzip data wrong": (
        "mnist",
        IMAGES,
        gzip.compress(GOOD_IMAGES)[:10] + b"\xff" * 40,
        "damaged or cut off",
    ),
    "wrong magic": (
        "mnist",
        IMAGES,
        gzip.compress(idx(np.zeros((20, 28, 28)), b"\0\0\x0d\x03")),
        "00 00 0d 03",
    ),
    "labels as images": ("mnist", IMAGES, gzip.compress(idx(np.zeros(20))), "not an IDX file"),
    "header cut off": ("mnist", IMAGES, gzip.compress(b"\0\0\x08\x03\0\0\0\1"), "header is cut off"),
    "body short": (
        "mnist",
        IMAGES,
        gzip.compress(GOOD_IMAGES[:-1]),
        "promises 15,680 bytes, it holds 15,679",
    ),
    "body long": ("mnist", IMAGES, gzip.compress(GOOD_IMAGES + b"x"), "promises 15,680 bytes, it holds more"),
    "no images": ("mnist", IMAGES, gzip.compress(idx(np.zeros((0, 28, 28)))), "empty or impossible"),
    "absurd header": ("mnist", IMAGES, gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12), "empty or impossible"),
    "odd size": ("mnist", IMAGES, gzip.compress(idx(np.zeros((20, 8, 8)))), r"images of \(8, 8\) pixels"),
    "too few labels": ("mnist", LABELS, gzip.compress(idx(np.zeros(19))), "19 labels for 20 images"),
    "label 10": ("mnist", LABELS, gzip.compress(idx(np.arange(20) % 11)), "label 10 of record 10"),
    "cifar empty": ("cifar10", "cifar10/data_batch_2.bin", b"", "0 bytes are not whole records"),
    "cifar cut off": ("cifar10", "cifar10/data_batch_2.bin", b"\0" * 3074, "records of 3,073 bytes"),
    "cifar label": ("cifar10", "cifar10/test_batch.bin", b"\x0a" * 3073, "label 10 of record 0"),
    "cifar100 as 10": ("cifar100", "cifar100/train.bin", b"\0" * 3073, "records of 3,074 bytes"),
    "cifar100 label": ("cifar100", "cifar100/test.bin", b"\x64" * 3074, "label 100 of record 0"),
    "class names": ("cifar100", "cifar100/fine_label_names.txt", b"apple\n", "1 class names, not 100"),
    "kdd not gzip": ("kddcup99", f"kddcup99/{KDD}", b"<html>", "gzip data is damaged"),
    "kdd cut off": ("kddcup99", f"kddcup99/{KDD}", kdd_files()[KDD][:-9], "damaged or cut off"),
    "kdd no text": ("kddcup99", f"kddcup99/{KDD}", gzip.compress(b"\xff" * 99), "not a table of connections"),
    "kdd short": ("kddcup99", f"kddcup99/{KDD}", kdd_files(connections(4))[KDD], "4 connections are too few"),
    "kdd columns": (
        *("kddcup99", f"kddcup99/{KDD}"),
        *(kdd_files([*connections(), "1,2,3"])[KDD], "line 61 has 3 columns, not 42"),
    ),
    "kdd number": (
        *("kddcup99", f"kddcup99/{KDD}"),
        *(kdd_files([*connections(), connection(1).replace("0", "many", 1)])[KDD], "holds something else"),
    ),
    "kdd negative": (
        *("kddcup99", f"kddcup99/{KDD}"),
        *(kdd_files([*connections(), connection(1, c5=-2)])[KDD], "negative or not finite"),
    ),
    "kdd kind": (
        *("kddcup99", f"kddcup99/{KDD}"),
        *(
            kdd_files([*connections(), connection(1, "mailbomb")])[KDD],
            "the kind 'mailbomb.' is none of the 23",
        ),
    ),
    "archive is html": ("imdb", "imdb/aclImdb_v1.tar.gz", b"<html>", "archive is damaged"),
    "archive empty": ("imdb", "imdb/aclImdb_v1.tar.gz", b"", "archive is damaged"),
    "archive cut off": (
        *("imdb", "imdb/aclImdb_v1.tar.gz"),
        *(tar_gz("aclImdb", imdb_files())[:-20], "damaged or cut off"),
    ),
    "archive of another": (
        *("imdb", "imdb/aclImdb_v1.tar.gz"),
        *(tar_gz("cifar-10-batches-bin", cifar10_files()), "no reviews"),
    ),
    "archive lacks a file": (
        *("cifar100", "cifar-100-binary.tar.gz"),
        *(tar_gz("cifar-100-binary", {"test.bin": b"\0" * 3074}), "train.bin is missing"),
    ),
}
HEALTHY = {
    "mnist": ("mnist", mnist_files()),
    "cifar10": ("cifar10", cifar10_files()),
    "cifar100": ("cifar100", cifar100_files()),
    "imdb": ("imdb", {}),
    "kddcup99": ("kddcup99", kdd_files()),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_named(tmp_path: Path, case: str) -> None:
    name, path, content, what = CORRUPT[case]
    if not path.endswith(".tar.gz"):
        write(tmp_path / HEALTHY[name][0], HEALTHY[name][1])
        load(name, tmp_path)
    write(tmp_path, {path: content})
    with pytest.raises(DataError, match=what) as caught:
        load(name, tmp_path)
    assert str(tmp_path / path) in str(caught.value)
    assert (
        f"Delete {tmp_path / path} and run: adambs data fetch {name}" in str(caught.value) or "names" in case
    )


def test_partial_data_names_what_lacks(tmp_path: Path) -> None:
    write(tmp_path / "cifar-10-batches-bin", dict(list(cifar10_files().items())[:4]))
    with pytest.raises(DataError, match=r"incomplete \(without data_batch_5.bin, test_batch.bin\)"):
        load("cifar10", tmp_path)
    write(tmp_path / "aclImdb", {"train/neg/0_1.txt": b"x", "train/pos/readme.md": b"x"})
    with pytest.raises(DataError, match="without reviews in train/pos, test/neg, test/pos"):
        load("imdb", tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "cifar10", cifar10_files())

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"\.bin: cannot be read \(Permission denied\)"):
        load("cifar10", tmp_path)


# ----------------------------------------------------------------------------------------------------
# Archives that mean harm


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
    return info


def test_an_evil_archive_writes_nothing(tmp_path: Path) -> None:
    evil = [
        member("../evil"),
        member("/tmp/adambs-evil"),
        member("cifar-100-binary/../../evil"),
        member("cifar-100-binary/../train.bin"),
        member("cifar-100-binary/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("cifar-100-binary/sub/train.bin"),
        member("elsewhere/train.bin"),
        member("/cifar-100-binary/train.bin"),
    ]
    home = tmp_path / "a" / "data"
    write(home, {"cifar-100-binary.tar.gz": tar_gz("cifar-100-binary", cifar100_files(), evil)})
    before = sorted(tmp_path.rglob("*"))
    data = load("cifar100", home)
    assert data.labels.tolist() == [k % 100 for k in range(200)]
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/adambs-evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_known_member_must_be_a_plain_file(tmp_path: Path, kind: bytes) -> None:
    bad = [member("cifar-100-binary/train.bin", kind, "/etc/passwd")]
    write(tmp_path, {"cifar-100-binary.tar.gz": tar_gz("cifar-100-binary", cifar100_files(), bad)})
    with pytest.raises(DataError, match="not a plain file in it: not the publisher's archive"):
        load("cifar100", tmp_path)


def test_an_archive_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adambs.lab.datasets.archives._LIMIT", 1000)
    write(tmp_path, {"cifar-100-binary.tar.gz": tar_gz("cifar-100-binary", cifar100_files())})
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        load("cifar100", tmp_path)


# ----------------------------------------------------------------------------------------------------
# The cache of tokenised text


@pytest.fixture
def tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """IMDB in ``tmp_path``, and a list that grows whenever it is tokenised."""
    write(tmp_path / "aclImdb", imdb_files())
    calls: list[int] = []
    real = text_module.tokenise

    def counted(texts: dict[str, list[str]]) -> text_module.Reviews:
        calls.append(len(texts))
        return real(texts)

    monkeypatch.setattr(text_module, "tokenise", counted)
    return calls


def test_text_is_tokenised_once(tmp_path: Path, tokenised: list[int]) -> None:
    first, second = load("imdb", tmp_path), load("imdb", tmp_path)
    assert len(tokenised) == 1
    assert same(first, second)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["imdb.npz"]


CHANGES = {
    "content": lambda folder: (folder / "test/pos/0_10.txt").write_bytes(b"better"),
    "time": lambda folder: os.utime(folder / "test/pos/0_10.txt", (1, 1)),
    "new file": lambda folder: (folder / "train/pos/2_7.txt").write_bytes(b"new"),
    "gone file": lambda folder: (folder / "train/pos/1_8.txt").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_files_are_tokenised_again(tmp_path: Path, tokenised: list[int], change: str) -> None:
    load("imdb", tmp_path)
    CHANGES[change](tmp_path / "aclImdb")
    load("imdb", tmp_path)
    load("imdb", tmp_path)
    assert len(tokenised) == 2


def test_another_recipe_tokenises_again(
    tmp_path: Path, tokenised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load("imdb", tmp_path)
    monkeypatch.setitem(text_module._RECIPE, "version", 2)
    load("imdb", tmp_path)
    assert len(tokenised) == 2


def rewritten(content: bytes, **changes: Any) -> bytes:
    out = io.BytesIO()
    with np.load(io.BytesIO(content)) as stored:
        np.savez(out, **{**stored, **changes})
    return out.getvalue()


DAMAGES = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "other file": lambda content: b"hello",
    "flipped bytes": lambda content: content[:600] + bytes(255 - b for b in content[600:900]) + content[900:],
    "a pickle": lambda content: rewritten(content, train=np.array([{}], dtype=object)),
    "ids too large": lambda content: rewritten(content, train=np.full((4, 100), 65_000, np.uint16)),
    "wrong type": lambda content: rewritten(content, train=np.zeros((4, 100))),
    "too few labels": lambda content: rewritten(content, train_labels=np.zeros(3, np.uint8)),
    "too few texts": lambda content: rewritten(content, texts=np.zeros(1, np.uint8)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(tmp_path: Path, tokenised: list[int], damage: str) -> None:
    first, cache = load("imdb", tmp_path), tmp_path / "cache" / "imdb.npz"
    cache.write_bytes(DAMAGES[damage](cache.read_bytes()))
    assert same(load("imdb", tmp_path), first)
    assert same(load("imdb", tmp_path), first)
    assert len(tokenised) == 2


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, tokenised: list[int]) -> None:
    (tmp_path / "cache").write_bytes(b"a file where the folder should be: even root cannot write there")
    assert same(load("imdb", tmp_path), load("imdb", tmp_path))
    assert len(tokenised) == 2


def test_a_full_disk_leaves_no_half_cache(
    tmp_path: Path, tokenised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(stream: Any, **arrays: Any) -> None:
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    load("imdb", tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


# ----------------------------------------------------------------------------------------------------
# Thinned, long-tailed, mislabelled


def toy(counts: list[int], n_test: int = 40) -> Data:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    inputs = torch.arange(len(labels), dtype=torch.float32).reshape(-1, 1, 1, 1) / 255
    test = TensorDataset(torch.zeros(n_test, 1, 1, 1), torch.arange(n_test) % len(counts))
    return Data(
        name="toy",
        train=TensorDataset(inputs, labels),
        test=test,
        classes=tuple(f"c{k}" for k in range(len(counts))),
        rows=torch.arange(len(labels)),
        true_labels=labels,
    )


def counts_of(data: Data) -> list[int]:
    return torch.bincount(data.labels, minlength=len(data.classes)).tolist()


def rows_agree(data: Data) -> bool:
    """Inputs of ``toy`` are their rows: they must have stayed together."""
    return torch.equal((data.train.tensors[0].flatten() * 255).round().long(), data.rows)


def test_long_tailed_counts() -> None:
    data = toy([100] * 5)
    tailed = datasets.long_tailed(data, 100)
    assert counts_of(tailed) == [round(100 * 100 ** (-c / 4)) for c in range(5)] == [100, 32, 10, 3, 1]
    assert rows_agree(tailed)
    assert tailed.test is data.test
    assert torch.equal(tailed.rows, tailed.rows.sort().values)
    assert counts_of(data) == [100] * 5
    assert tailed.changes == ("long-tailed by 100, seed 0",)


def test_long_tailed_never_asks_for_more_than_there_is() -> None:
    assert counts_of(datasets.long_tailed(toy([10, 50, 3, 0]), 10)) == [10, 23, 3, 0]
    assert counts_of(datasets.long_tailed(toy([7, 7]), 1)) == [7, 7]
    assert counts_of(datasets.long_tailed(toy([7, 7]), 1e9)) == [7, 1]
    assert counts_of(datasets.long_tailed(toy([7]), 10)) == [7]


def test_flipped_labels() -> None:
    data = toy([100] * 5)
    spoilt = datasets.with_flipped_labels(data, 0.3)
    assert spoilt.flipped.sum() == 150
    assert torch.equal(spoilt.true_labels, data.labels)
    assert not data.flipped.any()
    assert set(spoilt.labels.tolist()) == set(range(5))
    hit = int(spoilt.flipped.nonzero()[0])
    shown = spoilt.example(hit)
    assert shown["true_label"] == data.example(hit)["label"] != shown["label"]
    # Uniform over the other classes: 150 draws of 4 shifts.
    shifts = torch.bincount((spoilt.labels - spoilt.true_labels)[spoilt.flipped] % 5, minlength=5)
    assert shifts[0] == 0
    assert ((shifts[1:] - 37.5) ** 2 / 37.5).sum() < 16.3  # chi-square, 3 degrees, 0.001


def test_flips_are_remembered_by_what_comes_after() -> None:
    spoilt = datasets.with_flipped_labels(toy([50] * 4), 0.5)
    for thinned in (datasets.subset(spoilt, 60), datasets.long_tailed(spoilt, 10)):
        assert rows_agree(thinned)
        assert torch.equal(thinned.true_labels, spoilt.true_labels[thinned.rows])
        assert torch.equal(thinned.flipped, spoilt.flipped[thinned.rows])
        assert len(thinned.changes) == 2


@pytest.mark.parametrize(("fraction", "flips"), [(0, 0), (1, 20), (0.05, 1)])
def test_flipped_fractions(fraction: float, flips: int) -> None:
    assert datasets.with_flipped_labels(toy([10, 10]), fraction).flipped.sum() == flips


def test_texts_follow_their_rows(tmp_path: Path) -> None:
    write(tmp_path / "aclImdb", imdb_files())
    data = load("imdb", tmp_path)
    thinned = datasets.subset(data, 2, seed=3)
    for k, row in enumerate(thinned.rows.tolist()):
        assert thinned.example(k) == data.example(row)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any), st.data())
def test_subset_keeps_the_shares(counts: list[int], draw: st.DataObject) -> None:
    data = toy(counts)
    n = draw.draw(st.integers(1, sum(counts)))
    thinned = datasets.subset(data, n, 7, seed=1)
    assert len(thinned.train) == n
    assert len(thinned.test) == 7
    assert rows_agree(thinned)
    assert len(set(thinned.rows.tolist())) == n
    for kept, count in zip(counts_of(thinned), counts, strict=True):
        assert abs(kept - n * count / sum(counts)) < 1


MAKERS = {
    "subset": lambda data, seed: datasets.subset(data, 60, 8, seed=seed),
    "long_tailed": lambda data, seed: datasets.long_tailed(data, 10, seed=seed),
    "flipped": lambda data, seed: datasets.with_flipped_labels(data, 0.5, seed=seed),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_same_seed_same_result(maker: str) -> None:
    make, data = MAKERS[maker], toy([50] * 4)
    before = [tensor.clone() for tensor in data.train.tensors]
    first, again, other = make(data, 1), make(data, 1), make(data, 2)
    assert same(first, again)
    assert torch.equal(first.rows, again.rows)
    assert not same(first, other)
    assert all(torch.equal(a, b) for a, b in zip(before, data.train.tensors, strict=True))


BAD_ARGUMENTS = {
    "factor below 1": (lambda d: datasets.long_tailed(d, 0.5), "factor must be finite and at least 1"),
    "factor nan": (lambda d: datasets.long_tailed(d, float("nan")), "factor must be finite"),
    "fraction": (
        lambda d: datasets.with_flipped_labels(d, 1.5),
        "fraction must lie between 0 and 1, not 1.5",
    ),
    "one class": (lambda d: datasets.with_flipped_labels(toy([5]), 0.5), "no other label to flip to"),
    "none": (lambda d: datasets.subset(d, 0), "n_train must be at least 1"),
    "too many": (lambda d: datasets.subset(d, 10, 41), "n_test must be at most 40"),
    "seed": (lambda d: datasets.subset(d, 10, seed=-1), "seed must be at least 0"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments(case: str) -> None:
    call, message = BAD_ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        call(toy([10, 10]))


# ----------------------------------------------------------------------------------------------------
# Downloads, from a server of our own


@dataclass
class Server:
    """What each path answers: (status, body, Content-Length). A path in ``stall`` stops in the middle."""

    answers: dict[str, tuple[int, bytes, int]] = field(default_factory=dict)
    stall: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    reached: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)
    base: str = ""

    def serve(self, path: str, body: bytes) -> str:
        self.answers[path] = (200, body, len(body))
        return self.base + path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            status, body, length = state.answers.get(self.path, (404, b"gone", 4))
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            if self.path in state.stall:
                self.wfile.flush()
                state.reached.set()
                state.resume.wait(20)
                return
            self.wfile.write(body[len(body) // 2 :])

        def log_message(self, *args: Any) -> None:
            pass

    monkeypatch.setenv("NO_PROXY", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        state.base = f"http://127.0.0.1:{httpd.server_port}"
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield state
        state.resume.set()
        httpd.shutdown()
        thread.join()


def download(name: str, body: bytes, *urls: str) -> Download:
    return Download(name, len(body), hashlib.sha256(body).hexdigest(), urls)


@pytest.fixture
def tiny_mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """MNIST's row of the catalogue with small files, served at /a/ and, as a mirror, at /b/."""
    files = mnist_files()
    downloads = [
        download(name, body, server.serve(f"/a/{name}", body), server.serve(f"/b/{name}", body))
        for name, body in files.items()
    ]
    members = tuple((file.name, file.size) for file in downloads)
    row = replace(DATASETS["mnist"], downloads=tuple(downloads), members=members)
    monkeypatch.setitem(DATASETS, "mnist", row)
    return files


def files_in(folder: Path) -> set[str]:
    """All that lies below ``folder`` except the lock."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock"}


FIRST = "train-images-idx3-ubyte.gz"


def test_fetch_and_load(tmp_path: Path, server: Server, tiny_mnist: dict[str, bytes]) -> None:
    home = tmp_path / "new" / "mnist"
    assert fetch("mnist", tmp_path / "new") == [home / name for name in tiny_mnist]
    assert files_in(home) == set(tiny_mnist)
    assert all((home / name).read_bytes() == body for name, body in tiny_mnist.items())
    assert states(tmp_path / "new")["mnist"] == "present"
    assert len(load("mnist", tmp_path / "new").train) == 20
    assert {path.stat().st_mode & 0o777 for path in home.glob("*.gz")} == {0o644}
    asked = len(server.asked)
    fetch("mnist", tmp_path / "new")
    assert len(server.asked) == asked == 4


def test_fetch_repairs_only_what_is_wrong(
    tmp_path: Path, server: Server, tiny_mnist: dict[str, bytes]
) -> None:
    fetch("mnist", tmp_path)
    (tmp_path / "mnist" / FIRST).write_bytes(b"spoilt")
    server.asked.clear()
    fetch("mnist", tmp_path)
    assert server.asked == [f"/a/{FIRST}"]
    assert (tmp_path / "mnist" / FIRST).read_bytes() == tiny_mnist[FIRST]


def test_fetch_draws_a_bar(tmp_path: Path, tiny_mnist: dict[str, bytes], server: Server) -> None:
    del server.answers[f"/a/{FIRST}"]  # the bar of a failed attempt goes
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with datasets.download_bar(console) as bar:
        fetch("mnist", tmp_path, progress=bar)
    assert [task.description for task in bar.tasks] == list(tiny_mnist)
    assert [task.completed for task in bar.tasks] == [len(body) for body in tiny_mnist.values()]
    assert all(task.finished for task in bar.tasks)


def test_fetch_is_silent_without_a_bar(
    tmp_path: Path, tiny_mnist: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    fetch("mnist", tmp_path)
    assert capfd.readouterr() == ("", "")


def test_fetch_an_archive(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = tar_gz("cifar-100-binary", cifar100_files())
    row = DATASETS["cifar100"]
    file = download("cifar-100-binary.tar.gz", body, server.serve("/cifar-100-binary.tar.gz", body))
    monkeypatch.setitem(DATASETS, "cifar100", replace(row, downloads=(file,)))
    write(tmp_path / "cifar-100-part", cifar100_files(names=False))  # a part does not keep from the whole
    assert fetch("cifar100", tmp_path) == [tmp_path / "cifar100" / "cifar-100-binary.tar.gz"]
    assert load("cifar100", tmp_path).classes[1] == "thing_1"
    fetch("cifar100", tmp_path)
    assert len(server.asked) == 1


def test_what_is_laid_out_by_hand_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = cifar10_files()
    members = tuple((name, len(content)) for name, content in files.items())
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], members=members))
    write(tmp_path / "cifar-10-batches-bin", files)
    assert fetch("cifar10", tmp_path) == [tmp_path / "cifar-10-batches-bin"]
    assert fetch("digits", tmp_path) == []


def test_fetch_connections(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = kdd_files()[KDD]
    row, file = DATASETS["kddcup99"], download(KDD, body, server.serve(f"/{KDD}", body))
    members = ((KDD, len(gzip.decompress(body))),)
    monkeypatch.setitem(DATASETS, "kddcup99", replace(row, downloads=(file,), members=members))
    assert fetch("kddcup99", tmp_path) == [tmp_path / "kddcup99" / KDD]
    assert states(tmp_path)["kddcup99"] == "present"
    assert len(load("kddcup99", tmp_path).train) == 48
    fetch("kddcup99", tmp_path)
    assert len(server.asked) == 1


def cut_short(server: Server, path: str) -> None:
    status, body, _ = server.answers[path]
    server.answers[path] = (status, body[: len(body) // 2], len(body))


def other_body(server: Server, path: str) -> None:
    server.answers[path] = (200, b"<html>welcome</html>", 20)


def not_found(server: Server, path: str) -> None:
    del server.answers[path]


def broken_server(server: Server, path: str) -> None:
    server.answers[path] = (503, b"", 0)


FAILURES = {
    "truncated": (cut_short, "the connection broke off before the whole file had arrived"),
    "wrong hash": (other_body, "what arrived is not the publisher's file (its SHA-256 is wrong)"),
    "404": (not_found, "the server answered 404 Not Found"),
    "503": (broken_server, "the server answered 503 Service Unavailable"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_download_leaves_nothing(
    tmp_path: Path, server: Server, tiny_mnist: dict[str, bytes], case: str
) -> None:
    spoil, reason = FAILURES[case]
    last = list(tiny_mnist)[-1]
    for mirror in "ab":
        spoil(server, f"/{mirror}/{last}")
    with pytest.raises(DataError) as caught:
        fetch("mnist", tmp_path)
    message = str(caught.value)
    for mirror in "ab":
        assert f"{server.base}/{mirror}/{last}: {reason}" in message
    assert f"put it at {tmp_path / 'mnist' / last}" in message
    assert hashlib.sha256(tiny_mnist[last]).hexdigest() in message
    assert f"adambs data fetch mnist --data {tmp_path}" in message
    assert files_in(tmp_path / "mnist") == set(tiny_mnist) - {last}  # the whole files before it stay
    for mirror in "ab":
        server.serve(f"/{mirror}/{last}", tiny_mnist[last])
    fetch("mnist", tmp_path)
    assert len(load("mnist", tmp_path).test) == 10


@pytest.mark.parametrize("case", FAILURES)
def test_the_mirror_helps(tmp_path: Path, server: Server, tiny_mnist: dict[str, bytes], case: str) -> None:
    FAILURES[case][0](server, f"/a/{FIRST}")
    fetch("mnist", tmp_path)
    assert f"/b/{FIRST}" in server.asked
    assert files_in(tmp_path / "mnist") == set(tiny_mnist)


def test_a_wrong_download_never_replaces_a_file(
    tmp_path: Path, server: Server, tiny_mnist: dict[str, bytes]
) -> None:
    write(tmp_path / "mnist", {FIRST: b"what was here"})
    for mirror in "ab":
        other_body(server, f"/{mirror}/{FIRST}")
    with pytest.raises(DataError):
        fetch("mnist", tmp_path)
    assert (tmp_path / "mnist" / FIRST).read_bytes() == b"what was here"


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    file = download(FIRST, b"body", url)
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], downloads=(file,)))


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:  # a port where nobody listens
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/{FIRST}"
    monkeypatch.setenv("NO_PROXY", "*")
    point_at(monkeypatch, url)
    with pytest.raises(DataError, match="no network") as caught:
        fetch("mnist", tmp_path)
    assert f"Without a network: download it elsewhere from {url}" in str(caught.value)
    assert files_in(tmp_path / "mnist") == set()


def test_a_silent_server(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adambs.lab.datasets.download._SILENT_SECONDS", 0.2)
    url = server.serve("/silent", b"body" * 100)
    server.stall.add("/silent")
    point_at(monkeypatch, url)
    with pytest.raises(DataError, match=r"it was lost|no answer in time"):
        fetch("mnist", tmp_path)
    assert files_in(tmp_path / "mnist") == set()


def test_ctrl_c_leaves_nothing(tmp_path: Path, tiny_mnist: dict[str, bytes]) -> None:
    bar = datasets.download_bar(Console(file=io.StringIO()))

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    bar.update = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fetch("mnist", tmp_path, progress=bar)
    assert files_in(tmp_path / "mnist") == set()


def test_a_killed_download_starts_over(tmp_path: Path, server: Server, tiny_mnist: dict[str, bytes]) -> None:
    path = f"/a/{FIRST}"
    server.stall.add(path)
    script = f"""
from dataclasses import replace
from adambs.lab.datasets import DATASETS, fetch
from adambs.lab.datasets.catalogue import Download
row = DATASETS["mnist"]
DATASETS["mnist"] = replace(row, downloads={DATASETS["mnist"].downloads!r})
fetch("mnist", {str(tmp_path)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        assert server.reached.wait(60)
        for _ in range(1000):  # until its unfinished file is on the disk
            if list((tmp_path / "mnist" / ".fetch").glob("*")):
                break
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "mnist" / FIRST).exists()
    assert list((tmp_path / "mnist" / ".fetch").iterdir())
    assert states(tmp_path)["mnist"] == "missing"
    server.stall.clear()
    fetch("mnist", tmp_path)
    assert files_in(tmp_path / "mnist") == set(tiny_mnist)


def test_two_fetches_do_not_meet(tmp_path: Path, tiny_mnist: dict[str, bytes]) -> None:
    (tmp_path / "mnist").mkdir()
    with (
        filelock.FileLock(tmp_path / "mnist" / ".lock"),
        pytest.raises(DataError, match=r"another fetch into .*mnist is running"),
    ):
        fetch("mnist", tmp_path)
    fetch("mnist", tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path, tiny_mnist: dict[str, bytes]) -> None:
    (tmp_path / "mnist").write_bytes(b"a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot write to .*mnist.*--data or ADAMBS_DATA"):
        fetch("mnist", tmp_path)


def test_the_catalogue_is_sound() -> None:
    for row in DATASETS.values():
        assert row.source
        assert row.licence
        assert (row.kind == "embedded") == (not row.downloads) == (not row.places)
        for file in row.downloads:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert file.size > 0
            assert all(re.match("https?://", url) for url in file.urls)
            assert file.urls[0].endswith(file.name)  # a mirror may have another name for it
            own = [row.name, f"{row.name}/{file.name}"]
            assert set(own) & set(row.places)  # what is fetched is found
