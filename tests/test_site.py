"""The documentation site: it builds without a warning, its examples run, and every link leads somewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("sphinx", reason="the site needs the docs extra: pip install '.[docs]'")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for builder in ("html", "doctest"):
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "--quiet",
            "--fail-on-warning",
            "--keep-going",
            "-b",
            builder,
        ]
        command += ["-d", folder / "doctrees", ROOT / "docs", folder / builder]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        if named.get("id"):
            self.anchors.add(named["id"])
        for name in ("href", "src"):
            if named.get(name):
                self.links.append(named[name])


def test_every_link_leads_somewhere(site):
    pages = {file: Page(file.read_text()) for file in site.rglob("*.html")}
    assert len(pages) > 25
    followed = 0
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data") or link == "#":
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.exists(), f"{file.relative_to(site)} links to {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{file.relative_to(site)}: {link}"
            followed += 1
    assert followed > 500


def test_pages_need_no_network(site):
    """Scripts, styles, fonts and pictures are all there."""
    for file in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", file.read_text()):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (file.name, tag)


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("DDP", "many-processes"),
        ("GPU", "training-loops"),
        ("FAQ", "faq"),
        ("checkpoint", "checkpoints"),
        ("accumulation", "training-loops"),
    ],
)
def test_the_search_finds_what_people_look_for(site, driver, word, page):
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get((site / "search.html").as_uri() + f"?q={word}")
    WebDriverWait(driver, 60).until(
        lambda _: "finished" in driver.find_element("id", "search-results").text
    )  # results come one by one
    found = driver.find_elements("css selector", "#search-results li a")
    assert f"/{page}.html" in " ".join(link.get_attribute("href") for link in found)


@pytest.mark.parametrize(("scheme", "shown"), [("light", 0), ("dark", 1)])
def test_pages_are_dark_where_the_reader_wants_it(site, driver, scheme, shown):
    """And so is the picture of the idea: there are two, of which one is shown."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get((site / "index.html").as_uri())
    pictures = driver.find_elements("css selector", "main img, article img")
    assert [picture.is_displayed() for picture in pictures] == [k == shown for k in range(2)]
    color = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = [int(part) for part in re.findall(r"\d+", color)[:3]]
    assert (max(brightness) < 100) == (scheme == "dark")


def test_pages_open_in_a_browser(site, driver):
    driver.get_log("browser")  # what the search had to say: a page from a file may not read other files
    for name in ("index", "idea", "faq", "api/sampler", "built/plot_tutorial", "results"):
        for width in (1280, 390):
            driver.set_window_size(width, 900)
            driver.get((site / f"{name}.html").as_uri())
            assert driver.find_elements("css selector", "h1"), name
            inner = driver.execute_script("return document.documentElement.scrollWidth")
            assert inner <= max(width, driver.execute_script("return window.innerWidth")) + 1, (name, width)
            errors = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
            assert not errors, (name, errors)
    driver.get((site / "idea.html").as_uri())
    assert driver.find_elements("css selector", "math mfrac")
