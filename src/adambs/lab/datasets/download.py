"""Fetching the publishers' files: hash-checked, renamed into place only when whole, else started over."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from adambs.lab.datasets.catalogue import (
    DataError,
    Dataset,
    Download,
    data_folder,
    dataset_named,
    fetch_command,
)
from adambs.lab.datasets.on_disk import Status, find

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_CONNECT_SECONDS, _SILENT_SECONDS = 15, 60
_CHUNK = 1 << 16


def fetch(
    name: str, folder: str | os.PathLike[str] | None = None, progress: "Progress | None" = None
) -> list[Path]:
    """Download ``name`` into the data folder and return where it is; what is there and right stays.

    ``progress`` gets a bar for each file (see ``download_bar``). Raises ``DataError``, and then nothing that
    looks like a file of the dataset is left behind unless it is whole.
    """
    dataset, root = dataset_named(name), data_folder(folder)
    status, home = find(dataset, root), root / dataset.name
    if not dataset.downloads:
        return []
    if _laid_out_by_hand(dataset, status, home):
        return [status.where] if status.where else []
    try:
        with _alone_in(home, dataset) as stage:
            return [_fetch_file(dataset, file, root, stage, progress) for file in dataset.downloads]
    except OSError as error:
        raise DataError(
            f"{name}: cannot write to {home} ({error.strerror or error}). Free some space or choose another "
            "data folder with --data or ADAMBS_DATA"
        ) from error


def _laid_out_by_hand(dataset: Dataset, status: Status, home: Path) -> bool:
    """Whether a whole dataset lies where ``fetch`` would not put it. Its own place it checks by hash."""
    own = home if dataset.kind in ("idx", "kddcup99") else home / dataset.downloads[0].name
    return status.state == "present" and status.whole and status.where != own


def download_bar(console: "Console | None" = None) -> "Progress":
    """A bar for ``fetch``: use it as ``with download_bar() as bar: fetch(name, progress=bar)``."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


@contextmanager
def _alone_in(home: Path, dataset: Dataset) -> Iterator[Path]:
    """An empty staging folder inside ``home``, and no other fetch there meanwhile.

    All that is unfinished lives in the staging folder. Under the lock, whatever lies there at the start was
    left by a killed fetch, and goes.
    """
    from filelock import FileLock, Timeout

    home.mkdir(parents=True, exist_ok=True)
    stage = home / ".fetch"
    try:
        with FileLock(home / ".lock", timeout=0):
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir()
            try:
                yield stage
            finally:
                shutil.rmtree(stage, ignore_errors=True)
    except Timeout:
        raise DataError(f"{dataset.name}: another fetch into {home} is running; wait for it to end") from None


def _fetch_file(
    dataset: Dataset, file: Download, root: Path, stage: Path, progress: "Progress | None"
) -> Path:
    import pooch

    target = root / dataset.name / file.name
    if target.is_file() and pooch.file_hash(str(target), alg="sha256") == file.sha256:
        return target
    failures = []
    for url in file.urls:
        failure = _try_url(url, file, stage, progress)
        if failure is None:
            os.chmod(stage / file.name, 0o644)  # pooch's temporary file is its owner's alone
            os.replace(stage / file.name, target)
            return target
        failures.append(f"  {url}: {failure}")
    raise DataError(_by_hand(dataset, file, root, target, failures))


def _try_url(url: str, file: Download, stage: Path, progress: "Progress | None") -> str | None:
    """Download one file into ``stage``; the reason in plain words if that fails."""
    import pooch
    import requests

    with _bar(progress, file) as bar, _quiet(pooch.get_logger()):
        downloader = pooch.HTTPDownloader(
            progressbar=bar or False,
            chunk_size=_CHUNK,
            timeout=(_CONNECT_SECONDS, _SILENT_SECONDS),
            headers={"Accept-Encoding": "identity"},  # the .gz itself, not what a helpful server makes of it
        )
        try:
            pooch.retrieve(url, f"sha256:{file.sha256}", file.name, stage, downloader=downloader)
        except (requests.exceptions.RequestException, ValueError) as error:
            return _reason(error)
    return None


def _reason(error: Exception) -> str:
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, exceptions.Timeout):
        return "no answer in time"
    if isinstance(error, exceptions.ChunkedEncodingError | exceptions.ContentDecodingError):
        return "the connection broke off before the whole file had arrived"
    if isinstance(error, exceptions.ConnectionError):
        return "no connection to the server, or it was lost (no network?)"
    if isinstance(error, exceptions.RequestException):
        return f"{type(error).__name__}: {error}"
    return "what arrived is not the publisher's file (its SHA-256 is wrong)"


def _by_hand(dataset: Dataset, file: Download, root: Path, target: Path, failures: list[str]) -> str:
    tried = "\n".join(failures)
    return (
        f"{dataset.name}: {file.name} could not be downloaded; nothing half-written was kept.\n{tried}\n"
        f"Try again with: {fetch_command(dataset.name, root)}\n"
        f"Without a network: download it elsewhere from {file.urls[0]} and put it at {target} "
        f"({file.size:,} bytes, SHA-256 {file.sha256})"
    )


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Without pooch's line for each download: the bar and the errors say it."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _bar(progress: "Progress | None", file: Download) -> Iterator["_Bar | None"]:
    """A bar for one attempt; a failed attempt's bar goes."""
    if progress is None:
        yield None
        return
    bar = _Bar(progress, progress.add_task(file.name, total=file.size))
    try:
        yield bar
    finally:
        if not bar.closed:
            with suppress(KeyError):
                progress.remove_task(bar.task)


class _Bar:
    """What pooch wants of a progress bar (``total``, ``update``, ``reset``, ``close``), drawn by rich."""

    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self.progress, self.task, self.closed = progress, task, False

    @property
    def total(self) -> float | None:
        """The bytes to come."""
        return self.progress.tasks[self.progress.task_ids.index(self.task)].total

    @total.setter
    def total(self, size: int) -> None:
        self.progress.update(self.task, total=size or None)

    def update(self, size: int) -> None:
        """``size`` more bytes."""
        self.progress.update(self.task, advance=size)

    def reset(self) -> None:
        """Back to none: pooch counts in chunks and sets the exact number at the end."""
        self.progress.update(self.task, completed=0)

    def close(self) -> None:
        """The file has arrived."""
        self.closed = True
