"""``--methods sweep``: every rule, and Adam's learning rate, with three settings each, in one run."""

import math

from adambs.lab.report.analysis import Analysis
from adambs.lab.report.phrases import times_and_interval
from adambs.lab.report.speedups import Speedup, across
from adambs.lab.runs import records

TRIALS: dict[str, tuple[str, str, str]] = {
    "Adam, learning rate": ("adam:lr=0.0005", "adam", "adam:lr=0.002"),
    "`Calibrated`, uniform share": (
        "adambs-calibrated:uniform=0.02",
        "adambs-calibrated:uniform=0.05",
        "adambs-calibrated:uniform=0.2",
    ),
    "`Tracking`, uniform share": (
        "adambs-tracking:uniform=0.1",
        "adambs-tracking:uniform=0.3",
        "adambs-tracking:uniform=0.5",
    ),
    "`Avare`, floor": ("adambs-avare:p_min=0.03", "adambs-avare:p_min=0.1", "adambs-avare:p_min=0.3"),
    "`VRB`, forgotten in an epoch": (
        "adambs-vrb:forgetting=0",
        "adambs-vrb:forgetting=0.5",
        "adambs-vrb:forgetting=0.9",
    ),
    "`Exp3`, step": ("adambs-exp3:step=0.03", "adambs-exp3:step=0.1", "adambs-exp3:step=0.3"),
    '`Exp3(offset="baseline")`, step': (
        "adambs-baseline:step=0.3",
        "adambs-baseline:step=1",
        "adambs-baseline:step=3",
    ),
}
"""The same number of trials for each. The rules alone: no gate, and no looking."""

DEFAULT, ORACLE = "adambs", "oracle"

# A share of less than this would be a share of noise.
_WORTH_SHARING = 1.05

METHODS = (*(trial for trials in TRIALS.values() for trial in trials), DEFAULT, ORACLE)
"""The trials, and what a sweep is read against: the library's default, and the most that p can win."""


def is_sweep(analysis: Analysis) -> bool:
    """Whether a run has tried all of this."""
    return set(METHODS) <= set(analysis.methods)


def sweep_section(sweeps: list[Analysis], titles: list[str]) -> str:
    """A row for each trial and a column for each experiment; each rule's best trial is bold."""
    head = ["what was varied", "setting", *titles, "geometric mean"]
    rows = [head, ["---"] * len(head)]
    for rule, trials in TRIALS.items():
        found = {trial: [_clock(sweep, trial) for sweep in sweeps] for trial in trials}
        best = max(trials, key=lambda trial: _mean(found[trial]))
        for trial in trials:
            mean = _shown_mean(found[trial])
            cells = map(_shown, found[trial])
            rows.append([rule, _setting(trial), *cells, f"**{mean}**" if trial == best else mean])
    for name, title in ((DEFAULT, "the library's default"), (ORACLE, "the oracle, its knowledge for free")):
        speedups = [_clock(sweep, name) for sweep in sweeps]
        rows.append([title, "", *map(_shown, speedups), _shown_mean(speedups)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    shares = "; ".join(f"{title}: {_share(sweep)}" for title, sweep in zip(titles, sweeps, strict=True))
    made = "\n".join(
        f"- {title}: `{sweep.run.sessions[-1]['command']}`, record: "
        f"[{sweep.run.path.name}/{records.FILE}]({sweep.run.path.name}/{records.FILE})"
        for title, sweep in zip(titles, sweeps, strict=True)
    )
    seeds = ", ".join(sorted({f"{len(sweep.seeds)}" for sweep in sweeps}))
    return (
        "### Sweep\n\nSpeedup over Adam by the clock, three trials for each rule and for Adam's learning "
        f"rate; number of seeds: {seeds}. Rules alone, without gate and without looking. The best of each is "
        f"bold.\n\n{table}\n\nHow much of the oracle's gain the default has, both counted in steps, as the "
        f"ratio of the logarithms of their speedups: {shares}.\n\n{made}\n"
    )


def _clock(analysis: Analysis, method: str) -> Speedup | None:
    """Its speedup by the clock; none for the baseline itself."""
    return None if method == analysis.baseline else analysis.speedups[method]["seconds"]


def _mean(speedups: list[Speedup | None]) -> float:
    """Over the experiments; the baseline, which has no speedup of its own, is at 1 in all of them."""
    found = [each for each in speedups if each is not None]
    return across(found).value if found else 1.0


def _shown(speedup: Speedup | None) -> str:
    if speedup is None:
        return "1"
    return times_and_interval(speedup.overall, speedup.bounded())


def _shown_mean(speedups: list[Speedup | None]) -> str:
    """A bound, if one of them is; with an interval, if each has more than one seed."""
    found = [each for each in speedups if each is not None]
    return times_and_interval(across(found), any(each.bounded() for each in found)) if found else "1.00"


def _setting(trial: str) -> str:
    """``adam:lr=0.002`` is lr=0.002; one without a setting is as it always is."""
    return trial.partition(":")[2] or "as always"


def _share(analysis: Analysis) -> str:
    ours, most = (analysis.speedups[name]["step"].overall.value for name in (DEFAULT, ORACLE))
    if most < _WORTH_SHARING:
        return f"there is hardly anything to win (oracle {most:.2f}, default {ours:.2f})"
    return f"{math.log(ours) / math.log(most):.0%} (oracle {most:.2f}, default {ours:.2f})"
