"""Which exceptions are the user's to mend: shown as one line, without a traceback."""


def user_errors() -> tuple[type[Exception], ...]:
    """Bad values, missing or broken data, unreadable or unwritable records and folders."""
    from adambs.lab.datasets import DataError
    from adambs.lab.records import RecordError

    return (ValueError, DataError, RecordError, OSError)
