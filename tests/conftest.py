import os
import shutil
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

# Shared machines stall: a slow example is not a failure. Derandomised: CI fails for a reason, not by luck.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("suite")

# Read when keras is imported, wherever that is.
os.environ.setdefault("KERAS_BACKEND", "torch")

# Two cores, small tensors: threads only add noise.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser, if there is one, that writes down whatever a page says or asks for."""
    selenium = pytest.importorskip("selenium", reason="selenium is not installed: the page is not opened")
    del selenium
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no chromium and chromedriver on this machine: the page is not opened")
    options = Options()
    options.binary_location = chromium
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync", "disable-dev-shm-usage",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(chromedriver))
    script = "window.alerts = []; window.alert = (x) => alerts.push(x);"
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    yield browser
    browser.quit()
