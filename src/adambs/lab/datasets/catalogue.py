"""What each dataset is: its files, where they may lie, who publishes them. Data, and no reading of it."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adambs.lab.errors import unknown


class DataError(RuntimeError):
    """Data is missing, damaged or cannot be had; the message names the file and the way out."""


class DamagedError(Exception):
    """``path`` is not what it should be; ``load`` turns this into a ``DataError`` with the way out."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.what = path, what


@dataclass(frozen=True)
class Download:
    """A file of the publisher's, as ``fetch`` gets it. docs/data.md says where each hash comes from."""

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """One row of the catalogue."""

    name: str
    kind: Literal["idx", "cifar", "imdb", "kddcup99", "embedded"]
    classes: tuple[str, ...]
    source: str
    licence: str
    downloads: tuple[Download, ...] = ()
    # Folders and archives, below the data folder, in the order in which they are tried.
    places: tuple[str, ...] = ()
    # The folder inside the publisher's archive.
    top: str = ""
    # What a place must hold, with the publisher's sizes; of kddcup99 the size of what is in the gzip, since
    # copies differ in how they are packed.
    members: tuple[tuple[str, int], ...] = ()
    # What a place may hold.
    extras: tuple[str, ...] = ()
    # CIFAR: label bytes before the 3,072 pixels of a record; the last one is the label.
    label_bytes: int = 0


def _idx_downloads(bases: tuple[str, ...], rows: tuple[tuple[str, int, str], ...]) -> tuple[Download, ...]:
    return tuple(Download(name, size, sha, tuple(base + name for base in bases)) for name, size, sha in rows)


_TEN_DIGITS = tuple("0123456789")

_MNIST = _idx_downloads(
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    (
        (
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
)

_FASHION = _idx_downloads(
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    (
        (
            "train-images-idx3-ubyte.gz",
            26_421_880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            29_515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            4_422_102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            5_148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
)

_CIFAR10 = Download(
    "cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    (
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
    ),
)

_CIFAR100 = Download(
    "cifar-100-binary.tar.gz",
    168_513_733,
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    (
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "https://cave.cs.toronto.edu/kriz/cifar-100-binary.tar.gz",
    ),
)

_IMDB = Download(
    "aclImdb_v1.tar.gz",
    84_125_825,
    "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
    ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
)

_KDDCUP99 = Download(
    "kddcup.data_10_percent.gz",
    2_144_903,
    "8045aca0d84e70e622d1148d7df782496f6333bf6eb979a1b0837c42a9fd9561",
    (
        "http://kdd.ics.uci.edu/databases/kddcup99/kddcup.data_10_percent.gz",
        "https://archive.ics.uci.edu/ml/machine-learning-databases/kddcup99-mld/kddcup.data_10_percent.gz",
        "https://ndownloader.figshare.com/files/5976042",
    ),
)

_ROWS = (
    Dataset(
        name="mnist",
        kind="idx",
        classes=_TEN_DIGITS,
        source="LeCun, Cortes, Burges: the MNIST database of handwritten digits",
        licence="CC BY-SA 3.0",
        downloads=_MNIST,
        places=("mnist", "MNIST/raw"),
        members=tuple((file.name, file.size) for file in _MNIST),
    ),
    Dataset(
        name="fashion-mnist",
        kind="idx",
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        source="Xiao, Rasul, Vollgraf 2017, Zalando Research",
        licence="MIT",
        downloads=_FASHION,
        places=("fashion-mnist", "FashionMNIST/raw"),
        members=tuple((file.name, file.size) for file in _FASHION),
    ),
    Dataset(
        name="cifar10",
        kind="cifar",
        classes=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
        source="Krizhevsky 2009, University of Toronto, binary version",
        licence="none stated; cite Krizhevsky 2009",
        downloads=(_CIFAR10,),
        places=(
            *("cifar-10-batches-bin", "cifar10"),
            *("cifar10/cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz"),
        ),
        top="cifar-10-batches-bin",
        members=(
            *((f"data_batch_{k}.bin", 30_730_000) for k in range(1, 6)),
            ("test_batch.bin", 30_730_000),
        ),
        label_bytes=1,
    ),
    Dataset(
        name="cifar100",
        kind="cifar",
        classes=tuple(str(k) for k in range(100)),  # the names come from fine_label_names.txt, if there
        source="Krizhevsky 2009, University of Toronto, binary version",
        licence="none stated; cite Krizhevsky 2009",
        downloads=(_CIFAR100,),
        places=(
            *("cifar-100-binary", "cifar100"),
            *("cifar100/cifar-100-binary.tar.gz", "cifar-100-binary.tar.gz", "cifar-100-part"),
        ),
        top="cifar-100-binary",
        members=(("train.bin", 153_700_000), ("test.bin", 30_740_000)),
        extras=("fine_label_names.txt",),
        label_bytes=2,
    ),
    Dataset(
        name="imdb",
        kind="imdb",
        classes=("negative", "positive"),
        source="Maas et al. 2011, Stanford, Large Movie Review Dataset v1.0",
        licence="none stated; cite Maas et al. 2011",
        downloads=(_IMDB,),
        places=("aclImdb", "imdb/aclImdb", "imdb/aclImdb_v1.tar.gz", "aclImdb_v1.tar.gz"),
        top="aclImdb",
    ),
    Dataset(
        name="kddcup99",
        kind="kddcup99",
        classes=(
            *(
                "back",
                "buffer_overflow",
                "ftp_write",
                "guess_passwd",
                "imap",
                "ipsweep",
                "land",
                "loadmodule",
            ),
            *("multihop", "neptune", "nmap", "normal", "perl", "phf", "pod", "portsweep", "rootkit", "satan"),
            *("smurf", "spy", "teardrop", "warezclient", "warezmaster"),
        ),
        source="Stolfo, Fan, Lee, Prodromidis, Chan 1999, UCI: KDD Cup 1999, the 10 % file",
        licence="CC BY 4.0",
        downloads=(_KDDCUP99,),
        places=("kddcup99",),
        members=((_KDDCUP99.name, 74_889_749),),
    ),
    Dataset(
        name="digits",
        kind="embedded",
        classes=_TEN_DIGITS,
        source="Alpaydin, Kaynak 1998, UCI; a part of scikit-learn",
        licence="CC BY 4.0",
    ),
    Dataset(
        name="augmented-digits",
        kind="embedded",
        classes=_TEN_DIGITS,
        source="digits, enlarged; 4 copies of each, turned, scaled and shifted",
        licence="CC BY 4.0",
    ),
    Dataset(
        name="photograph",
        kind="embedded",
        classes=("red", "green", "blue"),
        source="Büchele: a photograph of a temple in China; a part of scikit-learn",
        licence="CC BY 2.0",
    ),
    Dataset(
        name="heavy-tailed",
        kind="embedded",
        classes=("value",),
        source="generated: a function whose values have log-normal sizes",
        licence="none needed",
    ),
)

DATASETS: dict[str, Dataset] = {row.name: row for row in _ROWS}


def dataset_named(name: str) -> Dataset:
    """The row of the catalogue, or an error that names the nearest."""
    try:
        return DATASETS[name]
    except (KeyError, TypeError):
        raise unknown("dataset", str(name), DATASETS, "adambs data") from None


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The explicit ``folder``, else ``ADAMBS_DATA``, else the user's cache folder. Nothing is created."""
    chosen = folder if folder is not None else os.environ.get("ADAMBS_DATA") or _cache_folder()
    root = Path(chosen).expanduser()
    if root.exists() and not root.is_dir():
        raise DataError(f"the data folder {root} is a file: give a folder with --data or ADAMBS_DATA")
    return root


def fetch_command(name: str, root: Path) -> str:
    """What to type to fetch ``name`` into ``root``."""
    where = "" if root == data_folder() else f" --data {shlex.quote(str(root))}"
    return f"adambs data fetch {name}{where}"


def _cache_folder() -> str:
    from platformdirs import user_cache_dir

    return user_cache_dir("adambs", appauthor=False)
