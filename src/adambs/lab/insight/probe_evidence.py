"""What probes said beside what was recorded: is the range honest? Fit, table and picture from records alone.

A folder has a JSON file for each experiment that was probed, with everything that was measured, and the
results have the speedup of AdamBS, by the clock, on the same experiment with the same examples, learning
rate, batch size and epochs::

    python -m adambs.lab.insight.probe_evidence measure cnn-fashion cnn-fashion:lr=0.002  # a minute each
    python -m adambs.lab.insight.probe_evidence  # results/probes/README.md and probes.svg from all records

The second needs no data, and puts the table into docs/data-insight.md, too, between its two marks. It uses
the constants that the library has, and prints those that a new fit gives.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from adambs.lab.report import analysis
from adambs.lab.report.overview import OTHERS
from adambs.lab.runs import records
from adambs.probing.answer import EXPONENT, WIDTH, Answer

# The methods of the lab that a probe tells something of: how each is named in a table, and what it may do.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "adambs": ("looks if it pays", {"look": True}),
    "adambs-loop": ("the loop alone", {}),
    "adambs-loop:context=1": ("the loop, class as context", {"context": "label"}),
}

# The exponent is fitted to these.
FITTED = {(name, "adambs") for name in ("cnn-fashion", "rcnn-imdb", "cnn-cifar10", "cnn-mnist")}

# Not fitted, but their speedups had been recorded and seen when the present form of the rule was chosen. What
# is in neither is a stranger.
SEEN = {
    *((name, "adambs") for name in ("cnn-cifar100", "flipped", "imbalanced", "cnn-fashion-lr-0.002")),
    *((name, "adambs") for name in ("transformer-imdb", "lm-imdb", "rnn-mnist", "rnn-fashion")),
    *((name, "adambs") for name in ("transformer-imdb-lr-0.0005", "imbalanced-lr-0.002")),
    *((name, method) for name in ("kdd", "kdd-lr-0.004") for method in METHODS if method != "adambs"),
    *(("kdd-lr-0.002", method) for method in METHODS if method != "adambs"),
    *((name, "adambs-loop") for name in ("digits", "heavy-tailed", "photograph", "balanced-digits")),
    *((name, "adambs-loop") for name in ("heavy-tailed-lr-0.003", "photograph-lr-0.003")),
    ("cnn-cifar100-lr-0.002", "adambs"),
    ("digits", "adambs"),
}

# Where the table stands on the page of the documentation.
_BEGIN, _END = "<!-- probes: begin -->", "<!-- probes: end -->"

_LISTS = ("potential", "learned", "losses", "plain_losses", "memory", "noise")
_VALUES = ("n", "batch_size", "lr", "epochs", "seconds", "steps", "interrupted")
_COSTS = ("step_seconds", "overhead", "look")

Key = tuple[str, int, float, int, float]
"""Experiment, number of examples, learning rate, batch size, epochs: what a probe and a run must share."""


@dataclass(frozen=True)
class Recorded:
    """The speedup of a method, by the clock and in steps."""

    value: float
    steps: float
    seeds: int
    bounded: bool
    """Whether some loss was never reached: then the speedup is below the value."""


@dataclass(frozen=True)
class Row:
    """An experiment and a method: the probe's answer, and the recorded speedup."""

    name: str
    method: str
    answer: Answer
    recorded: Recorded

    @property
    def used(self) -> str:
        """What it was used for."""
        key = (self.name, self.method)
        return "the fit" if key in FITTED else "seen" if key in SEEN else "the test"

    @property
    def course(self) -> list[float]:
        """By how much p was to lower the second moment, over the training."""
        return self.answer.course(**METHODS[self.method][1])

    @property
    def said(self) -> float:
        """What the library expects of this method."""
        return self.with_usual(EXPONENT)

    def with_usual(self, exponent: float) -> float:
        """What it would expect, were this the usual exponent."""
        return self.answer.expects(**METHODS[self.method][1], usual=exponent)

    @property
    def inside(self) -> bool:
        """Whether the recorded speedup lies in the range."""
        return _held(self.said, self.recorded.value)


def _held(said: float, recorded: float) -> bool:
    return said / WIDTH <= recorded <= said * WIDTH


def read_answer(path: Path) -> Answer:
    """An answer from what :meth:`Answer.to_dict` has written."""
    found = json.loads(path.read_text("utf-8"))
    try:
        found.setdefault("plain_losses", [])
        lists: dict[str, Any] = {name: [(int(a), _number(b)) for a, b in found[name]] for name in _LISTS}
        values: dict[str, Any] = {name: found[name] for name in _VALUES}
        values |= {name: math.nan if found[name] is None else float(found[name]) for name in _COSTS}
        more = [float(value) for value in found.get("more_races", [])]
        # Earlier probes trained one copy only, and told of a context at their end only.
        contexts = {
            name: [
                (int(a), _number(b))
                for a, b in (told if isinstance(told, list) else [(values["steps"], told)])
            ]
            for name, told in found["contexts"].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} was not written by a probe: {error}") from error
    return Answer(**values, contexts=contexts, **lists, more_races=more)


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


def probed(probes: Path) -> dict[str, tuple[Key, Answer]]:
    """Name -> what was probed, and the answer."""
    found = {}
    for path in sorted(probes.glob("*.json")):
        answer = read_answer(path)
        experiment = str(json.loads(path.read_text("utf-8")).get("experiment", path.stem))
        key = (experiment, answer.n, answer.lr, answer.batch_size, float(answer.epochs))
        found[path.stem] = key, answer
    return found


def rows(probes: Path, results: Path) -> list[Row]:
    """All experiments and methods that were probed and recorded."""
    recorded = recorded_speedups(results)
    return [
        Row(name, method, answer, recorded[key, method])
        for name, (key, answer) in probed(probes).items()
        for method, (_, options) in METHODS.items()
        if (key, method) in recorded and options.get("context") in (None, *answer.contexts)
    ]


def recorded_speedups(results: Path) -> dict[tuple[Key, str], Recorded]:
    """The speedups of AdamBS by the clock; of several runs the geometric mean over all their seeds.

    Runs in the folder ``probes`` were made to test the probe.
    """
    found: dict[tuple[Key, str], list[Recorded]] = {}
    for file in sorted([*results.glob(f"*/{records.FILE}"), *results.glob(f"probes/*/{records.FILE}")]):
        if file.parent.name.startswith(("sweep", OTHERS)):
            continue
        run = records.read(file.parent)
        c, speedups = run.config, analysis.analyse(run).speedups
        if c["scale"] != "quick":  # other nets than the probes'
            continue
        key = (str(c["experiment"]), int(c["n"]), float(c["lr"]), int(c["batch_size"]), float(c["epochs"]))
        for method in METHODS:
            if method in speedups:
                clock, steps = (speedups[method][axis] for axis in ("seconds", "step"))
                values = (clock.overall.value, steps.overall.value, clock.overall.seeds)
                found.setdefault((key, method), []).append(Recorded(*values, clock.bounded()))
    return {key: _together(runs) for key, runs in found.items()}


def _together(runs: list[Recorded]) -> Recorded:
    seeds = sum(run.seeds for run in runs)
    clock, steps = (
        math.exp(sum(run.seeds * math.log(getattr(run, name)) for run in runs) / seeds)
        for name in ("value", "steps")
    )
    return Recorded(clock, steps, seeds, any(run.bounded for run in runs))


def fit(found: list[Row]) -> float:
    """The exponent, by least squares in the logarithms of the speedups in steps: costs are measured."""
    x = [sum(math.log(value) for value in row.course) / len(row.course) for row in found]
    y = [math.log(row.recorded.steps) for row in found]
    return sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)


def left_out(found: list[Row]) -> list[float]:
    """For each what is said of it with the exponent of a fit to all other experiments."""
    return [row.with_usual(fit([other for other in found if other.name != row.name])) for row in found]


def markdown(found: list[Row]) -> str:
    """The table, and beneath it how many ranges hold and whether the order is right."""
    lines = [
        "| experiment | AdamBS | used for | steps probed, of planned | to win half way | p would have | "
        "bandit's cost | range | recorded (seeds) | inside | fit without it |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    without = left_out(found) if len({row.name for row in found}) > 3 else [math.nan] * len(found)
    for row, other in zip(found, without, strict=True):
        a, r = row.answer, row.recorded
        half = row.course[len(row.course) // 2]
        probe = f"{a.steps:,} of {a.planned:,.0f} | {a.foreseen:.2f} | {half:.2f} | {100 * a.overhead:.1f} %"
        said = f"{row.said / WIDTH:.2f} to {row.said * WIDTH:.2f}"
        known = f"{'< ' * r.bounded}{r.value:.2f} ({r.seeds})"
        words = (
            row.name,
            METHODS[row.method][0],
            row.used,
            probe,
            said,
            known,
            "yes" if row.inside else "no",
        )
        lines.append("| " + " | ".join((*words, f"{other:.2f}")) + " |")
    return "\n".join(lines) + "\n\n" + summary(found, without)


def summary(found: list[Row], without: list[float]) -> str:
    """Coverage and rank correlation: of each group, of all, of all with each left out of the fit."""
    parts = [f"A range is a factor of {WIDTH**2:.2f} wide."]
    groups = {
        "Not fitted, and not seen when the rule was chosen": [r for r in found if r.used == "the test"],
        "Not fitted": [r for r in found if r.used != "the fit"],
        "All": found,
    }
    pairs = {name: [(row.said, row.recorded.value) for row in group] for name, group in groups.items()}
    pairs["Each left out of the fit"] = [
        (other, row.recorded.value) for row, other in zip(found, without, strict=True)
    ]
    for name, each in pairs.items():
        inside = sum(_held(*pair) for pair in each)
        words = f"{name}: {inside} of {len(each)} recorded speedups lie in their range"
        if len({said for said, _ in each}) > 2 and len({recorded for _, recorded in each}) > 2:
            order = stats.spearmanr([said for said, _ in each], [recorded for _, recorded in each])
            words += f", rank correlation {order.statistic:.2f}"
        parts.append(f"- {words}.")
    return "\n".join(parts) + "\n"


def draw(found: list[Row], path: Path) -> None:
    """The picture: a range for each experiment and method, and a dot where the recorded speedup is."""
    from matplotlib.figure import Figure

    ordered = sorted(found, key=lambda row: row.said)
    figure = Figure(figsize=(8, 1.2 + 0.36 * len(found)), layout="constrained")
    axes = figure.subplots()
    colours = {"the fit": "#9aa5b1", "seen": "#7fb2d6", "the test": "#2f6f9f"}
    for y, row in enumerate(ordered):
        low, high = row.said / WIDTH, row.said * WIDTH
        colour = colours[row.used]
        axes.plot([low, high], [y, y], color=colour, linewidth=9, solid_capstyle="butt", alpha=0.7)
        axes.plot(row.recorded.value, y, "o", color="#111111" if row.inside else "#b3261e", markersize=6)
    axes.axvline(1.0, color="#777777", linewidth=0.8)
    names = [f"{row.name}, {METHODS[row.method][0]}" for row in ordered]
    axes.set_yticks(range(len(ordered)), names)
    axes.set_xscale("log")
    ticks = (0.8, 1.0, 1.25, 1.5, 2.0)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("speedup by the clock; grey: fitted, pale: seen, blue: the test; dots: recorded")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def insert(text: str, page: Path) -> None:
    """Put a text between the two marks of a page, in the place of what is there."""
    before, begin, rest = page.read_text("utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{page} must have the lines {_BEGIN} and {_END}, in this order")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


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
    parser.add_argument("--docs", type=Path, default=Path("docs/data-insight.md"))
    chosen = parser.parse_args()
    probes = chosen.results / "probes"
    if chosen.what == "measure":
        measure(chosen.names, probes, chosen.seconds, chosen.data)
        return
    found = rows(probes, chosen.results)
    waiting = sorted(set(probed(probes)) - {row.name for row in found})
    exponent = fit([row for row in found if row.used == "the fit"])
    shown = markdown(found)
    text = f"# Probes beside recorded runs\n\n{shown}\n![Ranges and recorded speedups](probes.svg)\n"
    if waiting:
        text += f"\nProbed, but without a record of AdamBS yet: {', '.join(waiting)}.\n"
    text += f"\nThe exponent is {EXPONENT:g}; a fit to the records of today gives {exponent:.3f}.\n"
    (probes / "README.md").write_text(text, encoding="utf-8")
    draw(found, probes / "probes.svg")
    insert(shown, chosen.docs)
    print(text)


if __name__ == "__main__":
    main()
