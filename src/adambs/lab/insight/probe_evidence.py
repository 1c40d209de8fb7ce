"""What probes said beside what was recorded: is the range honest? Fit, table and picture from records alone.

A folder has a JSON file for each experiment that was probed, with everything that was measured, and the
results have the speedup of AdamBS, by the clock, on the same experiment with the same learning rate, batch
size and epochs::

    python -m adambs.lab.insight.probe_evidence measure cnn-fashion cnn-fashion:lr=0.002  # a minute each
    python -m adambs.lab.insight.probe_evidence  # results/probes/README.md and probes.svg from all records

The second needs no data. It uses the constants that the library has, and prints those that a new fit gives.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import optimize, stats  # type: ignore[import-untyped]

from adambs.lab.report import analysis
from adambs.lab.runs import records
from adambs.probing import measures
from adambs.probing.answer import BEND, RISE, WIDTH, Answer

# The two constants are fitted to these; the others show whether they hold.
FITTED = ("cnn-fashion", "rcnn-imdb", "cnn-cifar10", "cnn-mnist")

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

Key = tuple[str, float, int, float]
"""Experiment, learning rate, batch size, epochs: what a probe and a run must share."""


@dataclass(frozen=True)
class Row:
    """An experiment: the probe's answer, and the recorded speedup."""

    name: str
    answer: Answer
    recorded: float
    seeds: int

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted to it."""
        return self.name in FITTED

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


def probed(probes: Path) -> dict[str, tuple[Key, Answer]]:
    """Name -> what was probed, and the answer."""
    found = {}
    for path in sorted(probes.glob("*.json")):
        answer = read_answer(path)
        experiment = str(json.loads(path.read_text("utf-8")).get("experiment", path.stem))
        found[path.stem] = ((experiment, answer.lr, answer.batch_size, float(answer.epochs)), answer)
    return found


def rows(probes: Path, results: Path) -> list[Row]:
    """All experiments that were probed and recorded."""
    recorded = recorded_speedups(results)
    return [
        Row(name, answer, *recorded[key]) for name, (key, answer) in probed(probes).items() if key in recorded
    ]


def recorded_speedups(results: Path) -> dict[Key, tuple[float, int]]:
    """The speedup of AdamBS by the clock, and from how many seeds; of several runs, that with the most."""
    best: dict[Key, tuple[int, float]] = {}
    for file in sorted(results.glob(f"*/{records.FILE}")):
        if file.parent.name.startswith("sweep"):
            continue
        run = records.read(file.parent)
        found = analysis.analyse(run)
        if "adambs" in found.speedups:
            c = run.config
            key = (str(c["experiment"]), float(c["lr"]), int(c["batch_size"]), float(c["epochs"]))
            candidate = (len(found.seeds), found.speedups["adambs"]["seconds"].overall.value)
            best[key] = max(best.get(key, candidate), candidate)
    return {key: (value, seeds) for key, (seeds, value) in best.items()}


def fit(found: list[Row]) -> tuple[float, float]:
    """Rise and bend, by least squares in the logarithms of the speedups."""

    def residuals(constants: Any) -> list[float]:
        return [math.log(_said(row, *constants) / row.recorded) for row in found]

    solution = optimize.least_squares(residuals, (0.25, 0.35), bounds=((0, 0), (2, 10)))
    rise, bend = solution.x
    return float(rise), float(bend)


def _said(row: Row, rise: float, bend: float) -> float:
    return measures.expected_gain(row.answer.foreseen, rise, bend) / (1 + row.answer.overhead)


def left_out(found: list[Row]) -> list[float]:
    """For each experiment what a fit to all the others says of it."""
    return [_said(row, *fit([other for other in found if other is not row])) for row in found]


def markdown(found: list[Row]) -> str:
    """The table, and beneath it how many ranges hold and whether the order is right."""
    lines = [
        "| experiment | used for | steps probed, of planned | to win half way | bandit's cost | range "
        "| recorded (seeds) | inside | fit without it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    without = left_out(found) if len(found) > 3 else [math.nan] * len(found)
    for row, other in zip(found, without, strict=True):
        low, high = row.answer.speedup
        a = row.answer
        probe = f"{a.steps:,} of {a.planned:,.0f} | {a.foreseen:.2f} | {100 * a.overhead:.1f} %"
        said = f"{low:.2f} to {high:.2f} | {row.recorded:.2f} ({row.seeds})"
        used, inside = "the fit" if row.fitted else "the test", "yes" if row.inside else "no"
        lines.append(f"| {row.name} | {used} | {probe} | {said} | {inside} | {other:.2f} |")
    return "\n".join(lines) + "\n\n" + summary(found, without)


def summary(found: list[Row], without: list[float]) -> str:
    """Coverage and rank correlation: of those not fitted, of all, of all with each left out of the fit."""
    parts = [f"A range is a factor of {WIDTH**2:.2f} wide."]
    groups = {
        "Not fitted": [(row.answer.expected, row.recorded) for row in found if not row.fitted],
        "All": [(row.answer.expected, row.recorded) for row in found],
        "Each left out of the fit": [
            (other, row.recorded) for row, other in zip(found, without, strict=True)
        ],
    }
    for name, pairs in groups.items():
        inside = sum(said / WIDTH <= recorded <= said * WIDTH for said, recorded in pairs)
        words = f"{name}: {inside} of {len(pairs)} recorded speedups lie in their range"
        if len({said for said, _ in pairs}) > 2 and len({recorded for _, recorded in pairs}) > 2:
            order = stats.spearmanr([said for said, _ in pairs], [recorded for _, recorded in pairs])
            words += f", rank correlation {order.statistic:.2f}"
        parts.append(words + ".")
    return "\n".join(parts) + "\n"


def draw(found: list[Row], path: Path) -> None:
    """The picture: a range for each experiment, and a dot where the recorded speedup is."""
    from matplotlib.figure import Figure

    ordered = sorted(found, key=lambda row: row.answer.expected)
    figure = Figure(figsize=(7.5, 1.2 + 0.36 * len(found)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(ordered):
        low, high = row.answer.speedup
        colour = "#9aa5b1" if row.fitted else "#2f6f9f"
        axes.plot([low, high], [y, y], color=colour, linewidth=9, solid_capstyle="butt", alpha=0.6)
        axes.plot(row.recorded, y, "o", color="#b3261e" if not row.inside else "#111111", markersize=6)
    axes.axvline(1.0, color="#777777", linewidth=0.8)
    axes.set_yticks(range(len(ordered)), [row.name for row in ordered])
    axes.set_xscale("log")
    ticks = (0.8, 1.0, 1.25, 1.5, 2.0)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("speedup by the clock; grey: used for the fit, blue: not; dots: recorded")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def measure(names: list[str], probes: Path, seconds: float, folder: Path | None) -> None:
    """Probe experiments, at quick scale with one thread; NAME:lr=VALUE is one with another learning rate."""
    import torch

    from adambs.lab.experiments import reproduce
    from adambs.lab.insight import probes as lab

    torch.set_num_threads(1)
    probes.mkdir(parents=True, exist_ok=True)
    for name in names:
        experiment, _, rate = name.partition(":lr=")
        changes = reproduce.Overrides(lr=float(rate) if rate else None)
        answer = lab.run(lab.from_experiment(experiment, "quick", folder, overrides=changes), seconds)
        found = {"experiment": experiment, **answer.to_dict()}
        path = probes / f"{name.replace(':', '-').replace('=', '-')}.json"
        path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        print(answer)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("show", "measure"), default="show")
    parser.add_argument("names", nargs="*", help="experiments to probe; each takes --seconds")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--data", type=Path, default=None)
    chosen = parser.parse_args()
    probes = chosen.results / "probes"
    if chosen.what == "measure":
        measure(chosen.names, probes, chosen.seconds, chosen.data)
        return
    found = rows(probes, chosen.results)
    waiting = sorted(set(probed(probes)) - {row.name for row in found})
    rise, bend = fit([row for row in found if row.fitted])
    text = (
        f"# Probes beside recorded runs\n\n{markdown(found)}\n![Ranges and recorded speedups](probes.svg)\n"
    )
    if waiting:
        text += f"\nProbed, but without a record of AdamBS yet: {', '.join(waiting)}.\n"
    text += (
        f"\nRise {RISE:g} and bend {BEND:g}; a fit to the records of today gives {rise:.3f} and {bend:.3f}.\n"
    )
    (probes / "README.md").write_text(text, encoding="utf-8")
    draw(found, probes / "probes.svg")
    print(text)


if __name__ == "__main__":
    main()
