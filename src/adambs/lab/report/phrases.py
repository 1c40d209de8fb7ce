"""The findings of an analysis in words and rounded numbers, for the page, the figures and the terminal."""

import math

from adambs.lab.report.analysis import LEADS, Analysis
from adambs.lab.report.estimates import Estimate
from adambs.lab.report.speedups import Speedup

# A gain of this much is worth more seeds where an interval does not rule it out.
_LARGE = 1.5


def run_title(analysis: Analysis) -> str:
    """The experiment's name for people."""
    config = analysis.run.config
    return str(config.get("title") or config.get("experiment") or analysis.run.path.name)


def scale_note(analysis: Analysis) -> str:
    """What a plot must say of itself: whether the paper has it, in this size, and how it differs."""
    config = analysis.run.config
    parts, scale = [], str(config.get("scale", "")).capitalize()
    if scale and str(config.get("figure", "")).startswith("none"):
        parts.append(f"{'Full' if scale == 'Paper' else scale} scale; not an experiment of the paper's.")
    elif scale == "Paper":
        parts.append("The paper's scale.")
    elif scale:
        parts.append(f"{scale} scale, not the paper's.")
    if config.get("differs"):
        parts.append(f"Differs: {config['differs']}".rstrip(".") + ".")
    if not analysis.complete:
        parts.append("Unfinished run.")
    return " ".join(parts)


def lead(analysis: Analysis) -> str | None:
    """The method that the headline is about."""
    others = [name for name in analysis.speedups if name != analysis.baseline]
    return next((name for name in (*LEADS, *others) if name in others), None)


def headline(analysis: Analysis, method: str | None = None) -> str:
    """What was found, of ``method`` or of the one that matters most, in plain words."""
    method = method or lead(analysis)
    if method is None:
        best = min(analysis.methods, key=lambda name: _sortable(analysis.finals[name]["train_loss"].value))
        return (
            f"No speedups: {analysis.baseline} did not run beside another method here. The lowest final "
            f"training loss is {analysis.title(best)}'s, {number(analysis.finals[best]['train_loss'].value)}."
        )
    clock, steps = (analysis.speedups[method][axis] for axis in ("seconds", "step"))
    names = analysis.title(method), analysis.title(analysis.baseline)
    return (
        f"{_finding(clock, *names)} To {names[1]}'s final loss alone: {_briefly(clock.last)}. Counted in "
        f"steps: {_briefly(steps)}."
    )


def finding(analysis: Analysis, method: str) -> str:
    """The first sentence of the headline: by the clock."""
    found = analysis.speedups[method]["seconds"]
    return _finding(found, analysis.title(method), analysis.title(analysis.baseline))


def _briefly(speedup: Speedup) -> str:
    details = "; ".join(part for part in (speedup.verdict, interval_words(speedup.overall)) if part)
    return f"{times(speedup)} ({details})"


def _finding(found: Speedup, name: str, baseline: str) -> str:
    speed, interval = times(found), interval_words(found.overall)
    reached = f"{name} reached the same training losses {speed} as fast as {baseline}"
    match found.verdict:
        case "faster":
            return f"{reached} ({interval})."
        case "slower":
            longer = ("at least " if found.bounded() else "") + f"{1 / found.overall.value:.2f}× as long"
            return (
                f"No gain here: {name} took {longer} as {baseline} to reach the same training losses "
                f"(speedup {speed}; {interval})."
            )
        case "no significant difference" if (found.overall.high or 0) > _LARGE:
            return (
                f"Not known: between {name} and {baseline} there is no significant difference in time, but "
                f"a large one is possible, too (speedup {speed}; {interval}). More seeds would tell."
            )
        case "no significant difference":
            return (
                f"No gain here: between {name} and {baseline} there is no significant difference in time "
                f"(speedup {speed}; {interval})."
            )
        case "undecided":
            return (
                f"Undecided: {name} was faster than {baseline} where it got to, but did not reach all of "
                f"its losses (speedup {speed}; {interval})."
            )
        case "one seed":
            return f"{reached}, but one seed cannot tell gain from luck."
        case _:
            return f"Nothing can be said of {name}: {baseline} never lowered its training loss."


def interval_words(estimate: Estimate) -> str:
    """``95 % interval 1.07 to 1.99``, or nothing for one seed."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"95\u00a0% interval {estimate.low:.2f} to {estimate.high:.2f}"


def compared(analysis: Analysis) -> str:
    """What was compared, in plain words."""
    config, count = analysis.run.config, len(analysis.seeds)
    names = [analysis.title(name) for name in analysis.methods]
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    size = f" ({config['n']:,} examples)" if isinstance(config.get("n"), int) else ""
    what = f"on {config.get('dataset', 'an unnamed dataset')}{size}, model {config.get('model', 'unnamed')}"
    return (
        f"{listed}, {what}; "
        f"{count} {'seed' if count == 1 else 'seeds'}, all methods from the same parameters and taking turns."
    )


def warnings_of(analysis: Analysis) -> list[str]:
    """What the reader must know before believing anything."""
    notes = [scale_note(analysis)] if scale_note(analysis) else []
    if not analysis.complete:
        notes.append(
            "No seed of this run has finished: the numbers are of the part that there is, and methods may "
            "stand at different steps. Run the command again to go on."
        )
    elif analysis.left_out:
        seeds = ", ".join(map(str, analysis.left_out))
        notes.append(f"Unfinished and not used: seed {seeds}. Run the command again to finish.")
    return notes


def number(value: float, *, percent: bool = False, digits: int = 3) -> str:
    """For a table: so many significant digits, or a percentage."""
    if not math.isfinite(value):
        return "–"
    if percent:
        return f"{100 * value:.2f}\u00a0%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.{digits}g}".rstrip(".")


def times(speedup: Speedup, index: int | None = None) -> str:
    """``1.62×``, or ``< 0.80×`` where a loss was not reached."""
    value = (speedup.overall if index is None else speedup.at[index]).value
    bound = "< " if speedup.bounded(index) else ""
    return f"{bound}{value:.2f}×" if math.isfinite(value) else "–"


def times_and_interval(estimate: Estimate, bounded: bool) -> str:
    """``< 1.23 (1.10 to 1.31)``: a speedup and its interval, briefly."""
    if math.isnan(estimate.value):
        return "–"
    interval = "" if estimate.low is None else f" ({estimate.low:.2f} to {estimate.high:.2f})"
    return f"{'< ' if bounded else ''}{estimate.value:.2f}{interval}"


def points(estimate: Estimate | None) -> str:
    """``+0.71 (-0.25 to +1.67)``: a difference of errors in percentage points, with its interval."""
    if estimate is None or math.isnan(estimate.value):
        return "–"
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        interval = f" ({100 * estimate.low:+.2f} to {100 * estimate.high:+.2f})"
    return f"{100 * estimate.value:+.2f}{interval}"


def rise(steadiness: float) -> str:
    """How steady a loss was: ``1.00`` never rose above its lowest so far, ``40.0`` rose to forty times it."""
    if math.isinf(steadiness):
        return "diverged"
    return "–" if math.isnan(steadiness) else number(steadiness)


def verdict_in_full(speedup: Speedup) -> str:
    """The verdict, with what it rests on where a loss was not reached."""
    return speedup.verdict + (f" ({not_reached(speedup)})" if speedup.missed else "")


def not_reached(speedup: Speedup) -> str:
    """How many of all targets of all seeds were not."""
    return f"{speedup.missed} of {sum(map(len, speedup.ratios))} not reached"


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else math.inf
