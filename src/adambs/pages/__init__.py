"""HTML pages of one file that load nothing: templates with autoescape, one style sheet, and a strict policy.

Whatever is filled into a template is a string of a stranger. Jinja2 escapes it; should one slip through, the
page's policy lets only the page's own scripts run, by their hashes. Needs jinja2, which comes with torch.
"""

import hashlib
import json
from base64 import b64encode
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(
    template: str, *, package: str = __name__, script: str | None = None, library: str = "", **values: Any
) -> str:
    """The page of a template of some package, with its values.

    ``script`` is the name of the one script of the package that it runs, ``library`` the text of what that
    script needs before it.
    """
    from adambs import __version__

    codes = [code for code in (library, "" if script is None else _text(script, package)) if code]
    page = _environment(package).get_template(template)
    return page.render(
        version=__version__,
        css=style_sheet(),
        scripts=codes,
        policy=" ".join(map(_allowed, codes)) or "'none'",
        **values,
    )


def macros(template: str, package: str) -> Any:
    """The macros of a template: each returns markup, with whatever it was given escaped."""
    return _environment(package).get_template(template).module


def _allowed(code: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


def style_sheet() -> str:
    """The style sheet of all pages."""
    return _text("base.css")


def embedded(value: object) -> str:
    """As JSON inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 is escaped as well
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _text(name: str, package: str = __name__) -> str:
    return resources.files(package).joinpath(name).read_text("utf-8")


@cache
def _environment(package: str) -> "Environment":
    """The templates of a package, and behind them those here, which the others extend."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=ChoiceLoader([PackageLoader(name, "") for name in dict.fromkeys([package, __name__])]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    made.filters["embedded"] = lambda value: Markup(embedded(value))
    return made
