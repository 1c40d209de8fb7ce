"""The pieces of the page: Jinja2 escapes everything that is filled in, unless it is markup made here."""

import math
import re
from collections.abc import Iterable

from markupsafe import Markup

from adambs.lab.report.analysis import Analysis
from adambs.lab.report.figures import style
from adambs.pages import macros


def fill(part: str, **values: object) -> Markup:
    """A macro of ``parts.html`` with its values."""
    made: Markup = getattr(macros("parts.html", __package__), part)(**values)
    return made.strip()


def join(pieces: Iterable[Markup]) -> Markup:
    """Pieces of HTML one after the other; a plain string among them is escaped."""
    return Markup("").join(pieces)


def finite_numbers(values: Iterable[float]) -> list[float | None]:
    """Rounded for the page; what is not finite is null."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def slugs(analyses: Iterable[Analysis]) -> list[str]:
    """A short name for each run, safe in a file name and in an address, no two alike."""
    made: list[str] = []
    for analysis in analyses:
        name = str(analysis.run.config.get("experiment", "")).lower()
        base = re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:40].strip("-") or "run"
        made.append(base if base not in made else f"{base}-{len(made) + 1}")
    return made


DASHES = {"solid": "none", "dash": "6 3", "dot": "2 2.5", "dashdot": "7 3 2 3"}


def swatch(method: str) -> Markup:
    """A short line in the colour and dash of a method."""
    look = style(method)
    return fill("swatch", light=look.light, dark=look.dark, dash=DASHES[look.dash])
