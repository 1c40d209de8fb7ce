"""Known members of a publisher's folder or ``.tar.gz``, as bytes in memory.

An archive is never unpacked onto the disk: only members that are asked for by name are read, so a path like
``../evil``, an absolute path or a link in it has nothing to act on, and nothing can be left half-unpacked.
"""

import gzip
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from adambs.lab.datasets.catalogue import DamagedError

# Far above what any dataset of the catalogue holds, and far below what fills a machine's memory.
_LIMIT = 1 << 30
DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError)


def is_archive(place: Path) -> bool:
    """Whether ``place`` is an archive, going by its name."""
    return place.name.endswith(".tar.gz")


def read_files(
    place: Path, top: str, required: list[str], optional: tuple[str, ...] = ()
) -> dict[str, bytes]:
    """The named files of ``place``: a folder, or an archive that holds them under ``top``."""
    names = {*required, *optional}
    if is_archive(place):
        found = read_archive(place, top, names.__contains__)
    else:
        found = {name: (place / name).read_bytes() for name in names if (place / name).is_file()}
    lacking = [name for name in required if name not in found]
    if lacking:
        raise DamagedError(place, f"{', '.join(lacking)} is missing in it")
    return found


def read_archive(place: Path, top: str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """The members under ``top`` whose remaining name is ``wanted``; everything else is passed over."""
    try:
        with gzip.open(place) as unzipped, tarfile.open(fileobj=unzipped, mode="r|") as tar:
            found = _collect(place, tar, top, wanted)
            _read_to_the_end(unzipped)
    except DAMAGE as error:
        raise DamagedError(place, f"the archive is damaged or cut off ({error})") from error
    return found


def _collect(place: Path, tar: tarfile.TarFile, top: str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    total = 0
    for member in tar:
        name = _below(top, member.name)
        if name is None or not wanted(name):
            continue
        total += member.size
        if not member.isreg():
            raise DamagedError(place, f"{member.name} is not a plain file in it: not the publisher's archive")
        if total > _LIMIT:
            raise DamagedError(place, f"it holds more than {_LIMIT:,} bytes: not the publisher's archive")
        content = tar.extractfile(member)
        assert content is not None  # a plain file has content
        found[name] = content.read()
    return found


def _below(top: str, name: str) -> str | None:
    """``name`` without its first part ``top``; None for what lies elsewhere, whatever tricks it plays."""
    parts = PurePosixPath(name).parts
    if len(parts) < 2 or parts[0] != top or ".." in parts:
        return None
    return "/".join(parts[1:])


def _read_to_the_end(stream: gzip.GzipFile) -> None:
    """Gzip checks its sum at the end only, and tar stops before it."""
    while stream.read(1 << 20):
        pass
