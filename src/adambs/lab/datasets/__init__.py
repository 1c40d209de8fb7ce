"""The lab's data: read from the publishers' own files, never unpickled; fetched with a hash check.

    data = load("fashion-mnist")            # from --data, ADAMBS_DATA or the user's cache folder
    data = long_tailed(data, factor=100)    # a new Data; the test set stays as it was
    data.example(0)                         # {"label": "Ankle boot", "image": [[0, ...]], ...}

``catalogue`` is the table of datasets, ``on_disk`` finds them on the disk, ``archives``, ``images``, ``text``
and ``kdd`` read them, ``download`` fetches them, ``data`` is what comes out and how it is thinned or
spoilt.
"""

from adambs.lab.datasets.catalogue import DATASETS, DataError, data_folder
from adambs.lab.datasets.data import Data, long_tailed, subset, with_flipped_labels
from adambs.lab.datasets.download import download_bar, fetch
from adambs.lab.datasets.loading import load
from adambs.lab.datasets.on_disk import Status, available

__all__ = [
    "DATASETS",
    "Data",
    "DataError",
    "Status",
    "available",
    "data_folder",
    "download_bar",
    "fetch",
    "load",
    "long_tailed",
    "subset",
    "with_flipped_labels",
]
