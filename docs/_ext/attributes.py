"""Docstrings of attributes stay as they are: Napoleon takes what stands before a colon for a type."""

from typing import Any

from sphinx.application import Sphinx

_AS_WRITTEN: dict[str, list[str]] = {}


def _keep(app: Sphinx, what: str, name: str, object_: Any, options: Any, lines: list[str]) -> None:
    if what in ("attribute", "data", "property"):
        _AS_WRITTEN[name] = list(lines)


def _restore(app: Sphinx, what: str, name: str, object_: Any, options: Any, lines: list[str]) -> None:
    if name in _AS_WRITTEN:
        lines[:] = _AS_WRITTEN.pop(name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Before Napoleon, whose priority is 500, and after it."""
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _restore, priority=600)
    return {"parallel_read_safe": True}
