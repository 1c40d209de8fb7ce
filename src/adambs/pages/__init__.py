"""HTML pages of one file that load nothing: templates with autoescape, one style sheet, and a strict policy.

Whatever is filled into a template is a string of a stranger. Jinja2 escapes it; should one slip through, the
page's policy lets only the page's own scripts run, by their hashes. Needs jinja2, which comes with torch.
"""

import hashlib
import json
from base64 import b64encode
from functools import cache
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, *, script: str | None = None, **values: Any) -> str:
    """The page of a template, with its values; ``script`` is the name of the one script that it runs."""
    code = "" if script is None else _text(script)
    return (
        _environment()
        .get_template(template)
        .render(
            version=metadata.version("adambs"),
            css=style_sheet(),
            script=code,
            policy=f"'sha256-{b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
            if code
            else "'none'",
            **values,
        )
    )


def style_sheet() -> str:
    """The style sheet of all pages."""
    return _text("base.css")


def embedded(value: object) -> str:
    """As JSON inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 is escaped as well
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _text(name: str) -> str:
    return resources.files("adambs.pages").joinpath(name).read_text("utf-8")


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("adambs.pages", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    made.filters["embedded"] = lambda value: Markup(embedded(value))
    return made
