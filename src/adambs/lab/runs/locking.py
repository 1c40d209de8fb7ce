"""One run in a folder at a time."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from adambs.lab.runs.records import RecordError

# The lock is on the first file, which stays: removing it would let two runs lock two files of one name.
# The second tells others who has it; it goes when the run ends, and a dead run's is never believed.
_LOCK, _HOLDER = ".lock", ".running"


@contextmanager
def alone_in(folder: Path, command: str) -> Iterator[None]:
    """Make ``folder`` and keep other runs out of it; the system frees the lock of a process that dies."""
    from filelock import FileLock, Timeout

    note = folder / _HOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise RecordError(
            f"{folder} is in use by {_holder(note)}: wait for it to end, or give this run a folder of its "
            "own (--out)"
        ) from None
    except OSError as error:
        raise RecordError(f"{folder} cannot be written: {error}") from error
    try:
        with suppress(OSError):  # a full disk: the lock holds without a note
            since = datetime.now().astimezone().isoformat(" ", "seconds")
            note.write_text(f"process {os.getpid()} on {platform.node()}, since {since}: {command}")
        yield
    finally:
        with suppress(OSError):
            note.unlink()
        lock.release()


def _holder(note: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        if text := note.read_text():
            return text
    return "another run"
