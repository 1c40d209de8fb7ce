"""The pieces of the page: everything that is filled in is escaped, unless it is markup made here."""

import math
import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib import resources
from string import Template

from adambs import pages
from adambs.lab.analysis import Analysis
from adambs.lab.figures import style


def esc(value: object) -> str:
    """As text in HTML, in attributes too."""
    return escape(str(value), quote=True)


def finite_numbers(values: Iterable[float]) -> list[float | None]:
    """Rounded for the page; what is not finite is null."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


# ------------------------------------------------------------------------------------------------- parts


def template_text(kind: str) -> str:
    """The text of the template, the style sheet or the script."""
    if kind == "css":
        return pages.style_sheet()
    return resources.files("adambs.lab").joinpath(f"report_template.{kind}").read_text("utf-8")


@cache
def _parts() -> dict[str, Template]:
    """The pieces of ``report_template.html``, by name."""
    _, *pieces = template_text("html").split("<!-- part: ")
    return {name: Template(text.strip()) for name, text in (piece.split(" -->", 1) for piece in pieces)}


class Markup(str):
    """A string that is HTML already."""


def fill(part: str, **values: object) -> Markup:
    """A piece with its values, each escaped unless it is :class:`Markup`."""
    shown = {name: value if isinstance(value, Markup) else esc(value) for name, value in values.items()}
    return Markup(_parts()[part].substitute(shown))


def join(pieces: Iterable[str]) -> Markup:
    """Pieces of HTML one after the other."""
    return Markup("".join(pieces))


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
