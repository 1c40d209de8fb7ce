"""Which exceptions are the user's to mend, shown as one line, and how a wrong name is answered."""

from collections.abc import Iterable
from difflib import get_close_matches

STOPPED = 130
"""The exit code after Ctrl-C, as shells have it: 128 and the signal's number."""


def user_errors() -> tuple[type[Exception], ...]:
    """Bad values, missing or broken data, unreadable or unwritable records and folders."""
    from adambs.lab.datasets import DataError
    from adambs.lab.runs.records import RecordError

    return (ValueError, DataError, RecordError, OSError)


def unknown(what: str, name: str, known: Iterable[str], command: str) -> ValueError:
    """The error for a name that nothing has: the nearest ones, and the command that lists all."""
    nearest = get_close_matches(name, list(known), n=3, cutoff=0.5)
    hint = f"did you mean {_either(nearest)}? All" if nearest else "all"
    return ValueError(f"{what} {name!r} is unknown; {hint} of them: {command}")


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
