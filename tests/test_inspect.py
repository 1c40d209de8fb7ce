"""The page on a history, and the commands around it: hostile labels stay text, and nothing accuses."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from helpers import saved_and_loaded
from lab_fixtures import HOSTILE
from typer.testing import CliRunner

import adambs
from adambs import cli, pages
from adambs.lab import datasets
from adambs.lab.insight import inspection, mislabelled


class Page(HTMLParser):
    """The elements, attributes and texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self._inside = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("style", "script"):
            self.texts.append(data)


def history_of(n=60, steps=8, unseen=0):
    history = adambs.History(n, with_losses=True)
    rng = np.random.default_rng(0)
    for number in range(steps):
        draw = adambs.Draw(number, np.arange(n - unseen), np.ones(n - unseen), n)
        scores = rng.gamma(0.5, 0.4, n - unseen)
        scores[5] = 1.4
        history.losses(draw, torch.from_numpy(3 * scores))
        history(draw, scores)
    return history


def test_hostile_labels_and_texts_stay_text(tmp_path):
    labels = np.where(np.arange(60) % 2, HOSTILE, "=cmd|' /C calc'!A0")
    texts = [HOSTILE] * 60
    inspection.write(history_of(), tmp_path / "p.html", title=HOSTILE, labels=labels, texts=texts, k=10)
    text = (tmp_path / "p.html").read_text("utf-8")
    page = Page(text)
    assert page.tags.count("script") == 2  # the data and the page's own
    assert page.tags.count("img") == 0
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "<script>alert" not in text
    assert any("<img src=x" in found for found in page.texts)  # shown, as text
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert json.loads(data)["names"] == sorted({str(label) for label in labels})


def test_the_policy_lets_only_the_pages_own_script_run():
    import base64
    import hashlib

    text = pages.render("inspect.html", script="inspect.js", title="t", notes=[], texts=False,
                        **inspection._values(history_of(), None, 5))  # fmt: skip
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    [policy] = [value for name, value in Page(text).attributes if name == "content" and "script-src" in value]
    digests = re.findall(r"'sha256-([^']+)'", policy)
    assert len(scripts) == len(digests) == 1
    assert base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode() == digests[0]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_works_in_a_browser(driver, tmp_path, width, dark):
    labels = np.where(np.arange(60) % 2, HOSTILE, "plain")
    inspection.write(
        history_of(), tmp_path / "p.html", title="Mine", labels=labels, texts=[HOSTILE] * 60, k=10
    )
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get((tmp_path / "p.html").as_uri())
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width  # nothing sticks out
    for words, expected in (
        ("5", "example\n5"),
        ("99", "there is no example 99"),
        ("x", "there is no example"),
    ):
        field = driver.find_element("id", "index")
        field.clear()
        field.send_keys(words)
        assert expected in driver.find_element("id", "found").text
    field.clear()
    field.send_keys("1")
    assert HOSTILE[:30] in driver.find_element("id", "found").text
    assert driver.execute_script("return window.alerts") == []
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


def test_the_page_says_hard_rare_or_mislabelled_and_never_wrong(tmp_path):
    inspection.write(history_of(unseen=3), tmp_path / "p.html", title="t", labels=["a", "b", "c"] * 20, k=5)
    words = " ".join(Page((tmp_path / "p.html").read_text("utf-8")).texts).lower()
    assert "hard, rare or mislabelled" in words
    assert "wrong" not in words
    assert "57 of 60 examples were visited" in words
    assert "example 5" in words  # the one that stands out


def test_a_saved_history_is_inspected_from_the_command_line(tmp_path):
    torch.save(history_of().state_dict(), tmp_path / "mine.pt")
    found = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "mine.pt"), "--k", "4"])
    assert found.exit_code == 0, found.output
    assert "No labels were given" in (tmp_path / "inspect.html").read_text("utf-8")
    assert inspection.load(tmp_path / "mine.pt").with_losses


def test_ones_own_labels_and_texts_are_shown(tmp_path):
    torch.save({"history": history_of().state_dict(), "sampler": {}}, tmp_path / "run.pt")
    (tmp_path / "labels.txt").write_text("cat\n<b>dog</b>\nbird\n" * 20)
    (tmp_path / "texts.txt").write_text("".join(f"text number {j}\n" for j in range(60)))
    words = ["inspect", str(tmp_path / "run.pt"), "--labels", str(tmp_path / "labels.txt")]
    found = CliRunner().invoke(cli.app, [*words, "--texts", str(tmp_path / "texts.txt"), "--k", "4"])
    assert found.exit_code == 0, found.output
    page = Page((tmp_path / "inspect.html").read_text("utf-8"))
    shown = " ".join(page.texts)
    assert "text number 5" in shown  # the one that stands out
    assert "<b>dog</b>" in shown
    (tmp_path / "labels.txt").write_text("cat\n")
    with pytest.raises(ValueError, match="has 1 lines and the history 60 examples"):
        CliRunner().invoke(cli.app, words, catch_exceptions=False)


def test_what_is_no_history_is_refused(tmp_path):
    (tmp_path / "text.pt").write_text("no history")
    with pytest.raises(ValueError, match=r"is no file of torch\.save") as told:
        inspection.load(tmp_path / "text.pt")
    assert "weights_only" not in str(told.value)
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="holds no history: save it with"):
        inspection.load(tmp_path / "model.pt")
    torch.save({**history_of().state_dict(), "n": -1}, tmp_path / "damaged.pt")
    with pytest.raises(ValueError, match="damaged history"):
        inspection.load(tmp_path / "damaged.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        inspection.load(tmp_path / "missing.pt")
    with pytest.raises(ValueError, match="has no history"):
        inspection.inspect(tmp_path)
    torch.save(saved_and_loaded(history_of().state_dict()), tmp_path / "short.pt")
    with pytest.raises(ValueError, match="60 examples and digits has"):
        inspection.inspect(tmp_path / "short.pt", experiment="digits")


def test_a_run_with_a_history_is_inspected_with_its_pictures(tmp_path):
    run = CliRunner()
    options = ["--methods", "adam,adambs", "--seeds", "1", "--epochs", "1", "--slices", "2", "--threads", "1"]
    found = run.invoke(
        cli.app, ["reproduce", "digits", *options, "--history", "--out", str(tmp_path / "run")]
    )
    assert found.exit_code == 0, found.output
    assert [file.name for file in (tmp_path / "run").glob("*.pt")] == ["history-adambs-0.pt"]
    found = run.invoke(cli.app, ["inspect", str(tmp_path / "run"), "--k", "6"])
    assert found.exit_code == 0, found.output
    page = Page((tmp_path / "run/inspect.html").read_text("utf-8"))
    assert page.tags.count("img") == 6


@pytest.mark.parametrize(
    "experiment", [["digits", "--long-tail", "10", "--epochs", "1"], ["photograph", "--epochs", "0.1"]]
)
def test_runs_with_long_tails_and_without_classes_are_inspected(tmp_path, experiment):
    options = [
        "--methods",
        "adam,adambs-loop",
        "--seeds",
        "1",
        "--slices",
        "2",
        "--threads",
        "1",
        "--history",
    ]
    run = CliRunner()
    found = run.invoke(cli.app, ["reproduce", *experiment, *options, "--out", str(tmp_path / "run")])
    assert found.exit_code == 0, found.output
    found = run.invoke(cli.app, ["inspect", str(tmp_path / "run"), "--k", "3"])
    assert found.exit_code == 0, found.output


def test_the_template_runs_and_a_file_that_lacks_something_is_refused(tmp_path):
    run = CliRunner()
    (tmp_path / "mine.py").write_text(run.invoke(cli.app, ["probe", "--template"]).output)
    wanted = ["--seconds", "0.2", "--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "a.html")]
    found = run.invoke(cli.app, ["probe", str(tmp_path / "mine.py"), *wanted])
    assert found.exit_code == 0, found.output
    assert "verdict" in found.output
    assert json.loads((tmp_path / "a.json").read_text())["batch_size"] == 32
    (tmp_path / "less.py").write_text("model = 1")
    (tmp_path / "divides.py").write_text("model = 1\ntrain = 1 / 0\n")
    (tmp_path / "syntax.py").write_text("model = = 1\n")
    (tmp_path / "stream.py").write_text(
        "import torch\nmodel, loss = torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy\n"
        "train, batch_size = iter([1, 2]), 2\n"
    )
    for arguments, words in (
        ([str(tmp_path / "less.py")], "does not define train, loss, batch_size"),
        ([], "takes a FILE or --experiment"),
        ([str(tmp_path / "none.py")], "is no file"),
        ([str(tmp_path / "mine.py"), "--out", str(tmp_path / "no/page.html")], "there is no folder"),
        ([str(tmp_path / "divides.py")], r"divides\.py, line 2: ZeroDivisionError"),
        ([str(tmp_path / "syntax.py")], r"syntax\.py, line 1: SyntaxError"),
        ([str(tmp_path / "stream.py")], "map-style"),
    ):
        with pytest.raises(ValueError, match=words):
            run.invoke(cli.app, ["probe", *arguments], catch_exceptions=False)


def test_an_experiment_of_the_lab_is_probed():
    found = CliRunner().invoke(cli.app, ["probe", "--experiment", "digits", "--seconds", "0.2"])
    assert found.exit_code == 0, found.output
    assert "at step 449 of 898" in found.output


# ------------------------------------------------------------------------------- changed labels, and rankings


def test_precision_and_auroc_are_those_of_pairs():
    rng = np.random.default_rng(0)
    changed = rng.random(80) < 0.3
    suspicion = np.round(rng.normal(size=80) + changed, 1)  # with ties
    pairs = [(a > b) + 0.5 * (a == b) for a in suspicion[changed] for b in suspicion[~changed]]
    found = mislabelled.measured(changed, suspicion)
    assert found["auroc"] == pytest.approx(np.mean(pairs))
    best = sorted(range(80), key=lambda j: (-suspicion[j], j))[: changed.sum()]
    assert found["precision"] == pytest.approx(np.mean([changed[j] for j in best]))


def test_margins_are_those_of_a_loop():
    z, y = torch.randn(7, 4), torch.arange(7) % 4
    loop = [z[k, y[k]] - max(z[k, c] for c in range(4) if c != y[k]) for k in range(7)]
    torch.testing.assert_close(mislabelled.margins(z, y), torch.stack(loop))
    torch.testing.assert_close(mislabelled.margins(z[:, 0], y % 2), z[:, 0] * (2 * (y % 2) - 1))


def test_a_case_is_recorded_once_and_finds_what_was_changed(tmp_path):
    case = mislabelled.Case("digits", share=0.1, epochs=12)
    first = mislabelled.run(case, tmp_path)
    assert first["changed"] == round(0.1 * first["n"])
    assert first["rankings"]["history"]["auroc"] > 0.9
    size = (tmp_path / mislabelled.FILE).stat().st_size
    assert mislabelled.run(case, tmp_path) == first
    assert set(first["rankings"]) == set(mislabelled.RANKINGS) - set(mislabelled._CLEANLAB)
    for found in first["rankings"].values():
        assert 0 <= found["extra"] <= found["seconds"]
    text = mislabelled.write_tables(tmp_path).read_text("utf-8")
    assert f"| history | {first['rankings']['history']['auroc']:.3f} |" in text
    assert f"| history | {first['rankings']['history']['precision']:.3f} |" in text
    assert "| cleanlab | – |" in text
    assert (tmp_path / mislabelled.FILE).stat().st_size == size


def test_confused_labels_depend_on_the_example():
    case = mislabelled.Case("digits", noise="confusions", share=0.05)
    data = mislabelled.prepared(case, mislabelled.experiments.find("digits").at("quick"), None)
    again = mislabelled.prepared(case, mislabelled.experiments.find("digits").at("quick"), None)
    assert int(data.flipped.sum()) == round(0.05 * len(data.labels))
    assert torch.equal(data.labels, again.labels)
    assert isinstance(data, datasets.Data)


@pytest.mark.parametrize("wrong", [{"noise": "typos"}, {"share": 0.0}])
def test_bad_cases_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        mislabelled.Case("digits", **wrong)


def test_values_have_no_labels_to_change(tmp_path):
    with pytest.raises(ValueError, match="fits values, not classes"):
        mislabelled.run(mislabelled.Case("photograph"), tmp_path)
