"""What the package says of itself is true in all places."""

import re
import tomllib
from pathlib import Path

import adambs

ROOT = Path(__file__).resolve().parent.parent


def test_the_lowest_versions_that_are_tested_are_those_that_are_claimed():
    """``make lowest`` installs constraints-lowest.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claims = dict(
        each.split(">=") for each in project["dependencies"] + project["optional-dependencies"]["lab"]
    )
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-lowest.txt").read_text(), re.MULTILINE))
    assert set(pins) == set(claims)
    for name, version in claims.items():
        assert (pins[name] + ".").startswith(f"{version}."), name


def test_one_version_everywhere():
    assert f"\nversion: {adambs.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{adambs.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
