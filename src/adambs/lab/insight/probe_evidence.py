"""What probes said beside what was recorded: is the range honest?

A folder has ``NAME.json`` for each experiment that was probed (``adambs probe --experiment NAME --json``),
and the results have the speedup of AdamBS, by the clock, on the same experiment.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from adambs.lab.report import analysis
from adambs.lab.runs import records
from adambs.probing.answer import EXPONENT, Answer

# The exponent was fitted to the recorded runs of these; the others show whether it holds.
FITTED = ("cnn-fashion", "cnn-cifar10", "rcnn-imdb")

_LISTS = ("potential", "learned", "losses", "memory", "noise")
_VALUES = (
    "n",
    "batch_size",
    "lr",
    "epochs",
    "seconds",
    "steps",
    "interrupted",
    "contexts",
    "step_seconds",
    "overhead",
    "look",
)


@dataclass(frozen=True)
class Row:
    """An experiment: the probe's answer, and the recorded speedup."""

    experiment: str
    answer: Answer
    recorded: float

    @property
    def inside(self) -> bool:
        """Whether the recorded speedup lies in the range."""
        low, high = self.answer.speedup
        return low <= self.recorded <= high


def read_answer(path: Path) -> Answer:
    """An answer from what :meth:`Answer.to_dict` has written."""
    found = json.loads(path.read_text("utf-8"))
    try:
        lists: dict[str, Any] = {name: [(int(a), _number(b)) for a, b in found[name]] for name in _LISTS}
        values: dict[str, Any] = {
            name: _number(found[name]) if found[name] is None else found[name] for name in _VALUES
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} was not written by a probe: {error}") from error
    return Answer(**values, **lists)


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


def rows(probes: Path, results: Path) -> list[Row]:
    """All experiments that were probed and recorded."""
    recorded = recorded_speedups(results)
    found = {path.stem: read_answer(path) for path in sorted(probes.glob("*.json"))}
    return [Row(name, answer, recorded[name]) for name, answer in found.items() if name in recorded]


def recorded_speedups(results: Path) -> dict[str, float]:
    """Experiment -> the speedup of AdamBS by the clock; of several runs, that with the most seeds."""
    best: dict[str, tuple[int, float]] = {}
    for file in sorted(results.glob(f"*/{records.FILE}")):
        if file.parent.name.startswith(("sweep", "tuned")):
            continue
        run = records.read(file.parent)
        found = analysis.analyse(run)
        if "adambs" in found.speedups:
            name = str(run.config["experiment"])
            candidate = (len(found.seeds), found.speedups["adambs"]["seconds"].overall.value)
            best[name] = max(best.get(name, candidate), candidate)
    return {name: value for name, (_, value) in best.items()}


def from_records(results: Path) -> list[tuple[str, float, float, float]]:
    """Experiment, variance reduction at half of the budget, the speedup in steps that follows, that recorded.

    The half of the forecast that needs no probe: whether a speedup follows from a variance reduction.
    """
    table = []
    for file in sorted(results.glob(f"*/{records.FILE}")):
        if file.parent.name.startswith(("sweep", "tuned")):
            continue
        run = records.read(file.parent)
        found = analysis.analyse(run)
        if "adambs" in found.speedups:
            series = found.series["adambs"].values()
            halfway = float(np.mean([each["variance_reduction"][len(each["step"]) // 2] for each in series]))
            steps = found.speedups["adambs"]["step"].overall.value
            table.append((str(run.config["experiment"]), halfway, max(halfway, 1.0) ** EXPONENT, steps))
    return table


def markdown(found: list[Row]) -> str:
    """The table, and beneath it how many ranges hold and whether the order is right."""
    lines = [
        "| experiment | used for | steps probed | to win | kept | range | recorded | inside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        low, high = row.answer.speedup
        used = "the fit" if row.experiment in FITTED else "the test"
        values = f"{row.answer.steps:,} | {row.answer.possible:.2f} | {row.answer.kept:.2f}"
        said = f"{low:.2f} to {high:.2f} | {row.recorded:.2f} | {'yes' if row.inside else 'no'}"
        lines.append(f"| {row.experiment} | {used} | {values} | {said} |")
    inside = sum(row.inside for row in found)
    text = f"\n{inside} of {len(found)} recorded speedups lie in their range"
    if len({row.answer.expected for row in found}) > 2 and len({row.recorded for row in found}) > 2:
        order = stats.spearmanr([row.answer.expected for row in found], [row.recorded for row in found])
        text += f"; rank correlation {order.statistic:.2f}"
    return "\n".join(lines) + "\n" + text + ".\n"
