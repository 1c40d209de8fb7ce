"""The page of results is results/RESULTS.md, with its links as they are from here."""

import re
from pathlib import Path

from sphinx.application import Sphinx

RESULTS = Path(__file__).parent.parent.parent / "results" / "RESULTS.md"


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    if name == "results":
        text = (
            RESULTS.read_text(encoding="utf-8")
            .replace("](../docs/", "](")
            .replace("](figures/", "](../results/figures/")
        )
        # A site has no place for records of megabytes: their names stay, the links go.
        source[0] = re.sub(r"\[([^\]]*)\]\([^)#]*(?:\.jsonl|\.json|/)\)", r"\1", text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Put the text in when the page is read."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
