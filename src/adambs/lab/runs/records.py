"""Records of a run: one JSON object a line, appended as they come, never rewritten.

Nothing is written before the first slice: a run that fails at its start leaves no record.

A run is a folder with ``records.jsonl``. Its lines, in the order in which they appear, by ``"kind"``:

``run``
    The first line: ``format`` (1), ``config`` (everything that the numbers depend on: ``experiment``,
    ``title``, ``scale``, ``differs`` (how it differs from the paper, a sentence or ""), ``dataset``,
    ``model``, ``n``, ``classes`` (their names), ``batch_size``, ``lr``, ``epochs``, ``steps``, ``slices``,
    ``methods`` (names), ``threads``, ``device``, ...) and ``methods`` (name -> ``title``, ``summary``,
    ``citation``, ``biased``).
``session``
    One for each time that the command was run: ``command`` (to repeat it), ``machine`` (versions too).
``begin``
    A seed begins: ``seed``. What an earlier, unfinished attempt at the same seed has left is void.
``slice``
    One method has trained for one more slice: ``seed``, ``method``, ``step``, ``epoch`` (a fraction),
    ``seconds`` (of training, this method's own overhead included, from its start), ``examples`` (whose
    gradients were computed so far), ``train_loss``, ``train_error``, ``test_loss``, ``test_error`` (errors
    are fractions of 1), ``balanced_test_error`` (the mean over classes of the test error within the class;
    older records do not have it), ``ess`` (effective sample size of p over n, in (0, 1]) and
    ``variance_reduction``; the last two are null for a method without a distribution over examples. Step 0,
    before training, too.
``distribution``
    How p looked, a few times a run, for methods that have one: ``seed``, ``method``, ``step``,
    ``quantiles`` (n p at 101 evenly spaced quantiles, ascending), ``highest`` and ``lowest``: lists of
    ``{"index": i, "ratio": n p_i, "label": "...", "guess": "..." (what the model says), "image": [[...]]
    or [[[r, g, b], ...]] of 0..255, or "text": "..."}``.
``end``
    The seed is done: ``seed``.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
FILE = "records.jsonl"

Line = dict[str, Any]


class RecordError(Exception):
    """A record file that cannot be read, written, or continued; the message says why and what to do."""


@dataclass
class Run:
    """What a record file says."""

    path: Path
    config: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    sessions: list[Line] = field(default_factory=list)
    seeds: dict[int, list[Line]] = field(default_factory=dict)
    """The lines of each seed, of its latest attempt only."""
    finished: set[int] = field(default_factory=set)

    def lines(self, kind: str, *, unfinished: bool = False) -> Iterator[Line]:
        """The ``slice`` or ``distribution`` lines of all finished seeds, or of all."""
        for seed, lines in sorted(self.seeds.items()):
            if unfinished or seed in self.finished:
                yield from (line for line in lines if line["kind"] == kind)


def read(folder: Path) -> Run:
    """Read the run in ``folder``. A last line cut short by a crash is ignored; any other damage is not."""
    file = folder / FILE
    try:
        text = file.read_text()
    except FileNotFoundError:
        raise RecordError(f"{folder} holds no run: there is no {FILE} in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} cannot be read: {error}") from error
    run: Run | None = None
    *complete, rest = text.split("\n")
    for number, line in enumerate(complete, start=1):
        try:
            entry = json.loads(line)
            kind = entry["kind"]
            if run is None:
                if kind != "run" or entry["format"] != FORMAT:
                    raise ValueError(f"it does not begin with a run of format {FORMAT}")
                run = Run(folder, entry["config"], entry["methods"])
            elif kind == "session":
                run.sessions.append(entry)
            elif kind == "begin":
                run.seeds[entry["seed"]] = []
                run.finished.discard(entry["seed"])
            elif kind == "end":
                run.finished.add(entry["seed"])
            else:
                run.seeds[entry["seed"]].append(entry)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(
                f"{file}, line {number}, is damaged ({type(error).__name__}: {error}): "
                "restore the file, or move it away to start over"
            ) from error
    if run is None:
        raise RecordError(f"{file} has no complete line" + (": it begins with a torn one" if rest else ""))
    return run


def begun(folder: Path) -> Run | None:
    """The run in ``folder``, if there is one with a complete line."""
    file = folder / FILE
    return read(folder) if file.exists() and b"\n" in file.read_bytes() else None


def same_config(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the run in ``folder`` was made with this configuration, or holds nothing yet."""
    run = begun(folder)
    return run is None or not any(run.seeds.values()) or run.config == json.loads(json.dumps(config))


def save_history(state: dict[str, Any], path: Path) -> None:
    """Write the state of a history beside the records; what is there is whole, old or new."""
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)


class Writer:
    """Appends lines to a run's file; each is on the disk before the next begins."""

    def __init__(self, folder: Path, config: dict[str, Any], methods: dict[str, dict[str, Any]]) -> None:
        """Continue the run in ``folder``, or begin one; refuse one with another configuration.

        A file without a single slice holds nothing: it is begun anew, whatever was to be run there. What is
        begun is on the disk only with the first line that is appended.
        """
        self.file = folder / FILE
        ours = json.loads(json.dumps(config))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = read(folder) if self._drop_torn_line() else None
        except OSError as error:
            raise RecordError(f"{self.file} cannot be written: {error}") from error
        self._new = found is None or not any(found.seeds.values())
        if found is None or self._new:
            found = Run(folder, ours, methods)
        self.run = found
        header = {"kind": "run", "format": FORMAT, "config": config, "methods": methods}
        self._waiting: list[Line] = [header] if self._new else []
        for name in sorted(ours.keys() | self.run.config.keys()):
            theirs = self.run.config.get(name)
            if theirs != ours.get(name):
                raise RecordError(
                    f"{self.file} was made with {name} = {theirs!r}, not {ours.get(name)!r}: "
                    "records are not mixed; give this run a folder of its own (--out)"
                )

    def later(self, line: Line) -> None:
        """Keep a line that means nothing alone, and write it together with the next that is appended."""
        self._waiting.append(line)

    def append(self, line: Line) -> None:
        """Write one line, and those that wait, whole or not at all as far as :func:`read` is concerned."""
        lines = [*self._waiting, line]
        data = "".join(json.dumps(each, allow_nan=False) + "\n" for each in lines).encode()
        try:
            # Unbuffered: a buffer would try once more when it is closed, after the file has been mended.
            with self.file.open("wb" if self._new else "ab", buffering=0) as stream:
                size = stream.tell()
                try:
                    written = 0
                    while written < len(data):
                        written += stream.write(data[written:])
                    os.fsync(stream.fileno())
                except OSError:
                    os.ftruncate(stream.fileno(), size)
                    raise
        except OSError as error:
            raise RecordError(
                f"{self.file} cannot be written: {error}; what it held is safe, run the same command "
                "again to go on"
            ) from error
        self._new, self._waiting = False, []

    def _drop_torn_line(self) -> int:
        """Cut off what a crash has left of a last line, so that the next begins on its own; the size left."""
        if not self.file.exists():
            return 0
        data = self.file.read_bytes()
        size = data.rfind(b"\n") + 1
        if size < len(data):
            with self.file.open("rb+") as stream:
                stream.truncate(size)
        return size
