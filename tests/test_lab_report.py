"""The report: its files, its words, and the page itself in a real browser."""

import base64
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lab_fixtures as fixtures
import matplotlib.image
import numpy as np
import pytest
from lab_fixtures import HOSTILE, write_run
from markupsafe import escape as esc
from rich.console import Console

from adambs.lab.report import figures
from adambs.lab.report.analysis import analyse
from adambs.lab.report.markup import slugs
from adambs.lab.report.page import write_report
from adambs.lab.report.phrases import points, rise, times, times_and_interval
from adambs.lab.report.tables import terminal_table
from adambs.lab.runs import records
from adambs.pages import embedded as embed

# ------------------------------------------------------------------------------------------------- files


def test_one_page_and_its_figures(tmp_path: Path):
    path = write_report([write_run(tmp_path / "run", slices=5)], tmp_path / "out")
    assert path == tmp_path / "out" / "report.html"
    names = {file.name for file in (tmp_path / "out" / "figures").iterdir()}
    kinds = ("loss", "curves", "speedup", "distribution", "sampling")
    assert names == {f"cnn-fashion-{kind}.{end}" for kind in kinds for end in ("png", "svg")}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"figures", "report.html"}
    page = path.read_text()
    for linked in re.findall(r'href="(figures/[^"]+)"', page):
        assert (tmp_path / "out" / linked).is_file()
    svg = (tmp_path / "out" / "figures" / "cnn-fashion-loss.svg").read_text()
    assert "<svg" in svg


def test_figures_say_how_they_differ_and_leave_no_state(tmp_path: Path):
    before = dict(matplotlib.rcParams)
    found = analyse(write_run(tmp_path, slices=5))
    texts = [text.get_text() for text in figures.loss_figure(found).findobj(matplotlib.text.Text)]
    assert any(text.startswith("Quick scale, not the paper's. Differs: 4 epochs") for text in texts)
    assert dict(matplotlib.rcParams) == before
    paper = analyse(write_run(tmp_path / "paper", slices=5, scale="paper", differs=""))
    assert figures.scale_note(paper) == "The paper's scale."
    for scale, words in (("paper", "Full"), ("quick", "Quick")):
        own = write_run(tmp_path / words, slices=5, scale=scale, differs="", figure="none; generated")
        assert figures.scale_note(analyse(own)) == f"{words} scale; not an experiment of the paper's."


def test_no_two_methods_look_alike():
    looks = [(style.light, style.dash) for style in figures.STYLES.values()]
    assert len(set(looks)) == len(looks)
    assert figures.style("sgd-bs") == figures.Style(figures.STYLES["sgd"].light)
    assert figures.style("my-own") == figures.style("my-own")


@pytest.mark.parametrize("colour", [False, True])
def test_thumbnails_are_the_pixels(colour: bool):
    image = fixtures.picture(3, colour=colour)
    png = base64.b64decode(figures.thumbnail(image).removeprefix("data:image/png;base64,"))
    read = matplotlib.image.imread(io.BytesIO(png), format="png")
    np.testing.assert_array_equal(np.round(read * 255).astype(int), np.array(image))
    with pytest.raises(ValueError, match="image must be"):
        figures.thumbnail([[[1, 2]]])


def test_experiments_of_one_name_get_files_of_their_own(tmp_path: Path):
    runs = [write_run(tmp_path / name, ["adam", "sgd"], slices=3, seeds=1) for name in "ab"]
    assert slugs(analyse(run) for run in runs) == ["cnn-fashion", "cnn-fashion-2"]
    hostile = write_run(tmp_path / "h", ["adam"], slices=3, seeds=1, hostile=True)
    assert re.fullmatch("[a-z0-9-]+", slugs([analyse(hostile)])[0])


def test_runs_without_measurements(tmp_path: Path):
    empty, good = write_run(tmp_path / "empty", seeds=0), write_run(tmp_path / "good", slices=3, seeds=1)
    page = write_report([empty, good], tmp_path / "out", figures=False).read_text()
    assert not (tmp_path / "out" / "figures").exists()
    assert "Left out:" in page
    for runs in ([], [empty]):
        with pytest.raises(ValueError, match=r"at least one|no measurement"):
            write_report(runs, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_smallest_run_that_there_can_be(tmp_path: Path):
    """One method, one slice, no test set, nothing optional: a report all the same."""
    writer = records.Writer(tmp_path / "run", {"experiment": "x"}, {})
    writer.append({"kind": "begin", "seed": 0})
    line = {"seed": 0, "method": "adam", "step": 0, "epoch": 0.0, "seconds": 0.0, "train_loss": 2.0}
    writer.append({"kind": "slice", **line, "train_error": 0.9, "test_error": None, "ess": None})
    page = write_report([records.read(tmp_path / "run")], tmp_path / "out").read_text()
    assert "No seed of this run has finished" in page


def test_what_next_stands_above_the_runs_and_values_have_no_guess(tmp_path: Path):
    """The page of a demo: several runs, one of which fits values."""
    runs = [write_run(tmp_path / name, ["adam", "adambs"], slices=3, seeds=1) for name in "ab"]
    file = runs[1].path / records.FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        for example in line.get("highest", []) + line.get("lowest", []):
            example.pop("image", None)
            example |= {"label": "", "guess": "", "text": "value 0.5"}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs[1] = records.read(runs[1].path)
    page = write_report(runs, tmp_path / "out", figures=False, closing="Do <this>.").read_text()
    assert page.count("Do &lt;this&gt;.") == 1
    overall, closing, first, second = (
        page.index(mark) for mark in ('id="overall"', "What next", 'id="cnn-fashion"', 'id="cnn-fashion-2"')
    )
    assert overall < closing < first < second
    assert "guess:" in page[first:second]
    assert "wrong label stays surprising" in page[first:second]
    values = page[second : page.index("report-data")]
    assert "value 0.5" in values
    assert "guess:" not in values
    assert "wrong label" not in values
    assert "cards texts" not in values


def test_embedded_json_cannot_end_its_script():
    text = embed({HOSTILE: [HOSTILE, 1.5, None]})
    assert json.loads(text) == {HOSTILE: [HOSTILE, 1.5, None]}
    assert not re.search("[<>&\u2028\u2029]", text)


def in_two_lines(shown: str) -> str:
    """The cell of ``1.55 (1.33 to 1.79)``."""
    value, interval = re.fullmatch(r"(.*?)(?: \((.*)\))?", shown).groups()
    return f"<td>{esc(value)}" + (f"<small>{interval}</small>" if interval else "") + "</td>"


def test_the_terminal_has_the_same_numbers(tmp_path: Path):
    run = write_run(tmp_path / "run")
    console = Console(width=250, file=io.StringIO(), record=True)
    console.print(terminal_table([run]))
    shown = console.export_text()
    page = write_report([run], tmp_path / "out", figures=False).read_text()
    found = analyse(run)
    for method, by_axis in found.speedups.items():
        assert fixtures.TITLES[method] in shown
        assert f"<td>{rise(found.steadiness[method])}</td>" in page
        if method != "adam":
            assert all(esc(times(each)) in page for each in by_axis.values())
            final, lowest = by_axis["seconds"].last, found.to_lowest_error[method]
            for each in by_axis.values():
                assert times_and_interval(each.overall, each.bounded()) in shown
            for each in (final, lowest):
                assert in_two_lines(times_and_interval(each.overall, each.bounded())) in page
            for each in (found.equal_time, found.stopped_early):
                assert in_two_lines(points(each["test_error"][method])) in page
    console.print(terminal_table([write_run(tmp_path / "h", hostile=True, seeds=1, slices=3), run]))


# ----------------------------------------------------------------------------------------------- browser


def wait(condition: Callable[[], Any]) -> Any:
    """What ``condition`` gives once it is true. The end of patience is generous: machines are shared."""
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)
    return value


def visit(driver: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get(path.as_uri())
    wait(lambda: driver.execute_script("return document.documentElement.dataset.drawn"))


def ask(driver: Any, code: str) -> Any:
    return driver.execute_script(f"return {code}")


def shown(driver: Any, method: str) -> dict[str, bool]:
    """For each plot with this method, whether it draws it."""
    code = """Object.fromEntries([...document.querySelectorAll("[data-plot]")]
        .filter((plot) => plot.data.some((trace) => trace.meta === %s))
        .map((plot) => [plot.dataset.plot, plot.data.some((t) => t.meta === %s && t.visible === true)]))"""
    found: dict[str, bool] = ask(driver, code % (json.dumps(method), json.dumps(method)))
    return found


def lines_drawn(driver: Any, kind: str) -> int:
    return int(
        ask(driver, f"document.querySelectorAll('[data-plot={kind}] .scatterlayer path.js-line').length")
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return write_report([write_run(folder / "run", slices=10)], folder / "out", figures=False)


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (375, "light"), (375, "dark"), (1280, "dark")]
)
def test_plots_are_drawn_without_complaint_on_any_screen(driver: Any, page: Path, width: int, scheme: str):
    visit(driver, page, width, scheme)
    assert driver.get_log("browser") == []
    for kind in ("curves", "ess", "variance_reduction", "distribution"):
        assert lines_drawn(driver, kind) >= 3
    assert ask(driver, "document.documentElement.scrollWidth") <= width
    assert (
        ask(
            driver, "Math.max(...[...document.querySelectorAll('.plot .main-svg')].map((s) => s.clientWidth))"
        )
        <= width
    )
    paper = ask(driver, "document.querySelector('[data-plot=curves]').layout.paper_bgcolor")
    assert paper == ("#ffffff" if scheme == "light" else "#101317")
    sent = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [
        each["params"]["request"]["url"] for each in sent if each["method"] == "Network.requestWillBeSent"
    ]
    assert all(url.startswith(("file:///", "data:", "blob:")) for url in urls)
    assert sum(url.startswith("file:") for url in urls) == 1


def test_a_button_hides_a_method_in_all_plots_at_once(driver: Any, page: Path):
    visit(driver, page)
    before = lines_drawn(driver, "curves")
    assert shown(driver, "adambs") == dict.fromkeys(
        ("curves", "distribution", "ess", "variance_reduction"), True
    )
    chip = driver.find_element("css selector", ".chip[data-method=adambs]")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    wait(lambda: not any(shown(driver, "adambs").values()))
    wait(lambda: lines_drawn(driver, "curves") < before)
    assert all(shown(driver, "adambs-exp3").values())
    driver.find_element("css selector", "[data-state=metric] label:nth-of-type(3)").click()
    wait(lambda: "test error" in ask(driver, "document.querySelector('[data-plot=curves]').textContent"))
    assert not any(shown(driver, "adambs").values())
    chip.click()
    wait(lambda: all(shown(driver, "adambs").values()))
    assert driver.get_log("browser") == []


def test_a_click_in_the_legend_hides_a_method_in_that_plot(driver: Any, page: Path):
    from selenium.webdriver import ActionChains

    visit(driver, page)
    toggles = driver.find_elements("css selector", "[data-plot=curves] .legendtoggle")
    assert len(toggles) == 5
    driver.execute_script("document.querySelector('[data-plot=curves]').scrollIntoView({block: 'center'})")
    ActionChains(driver).move_to_element(toggles[1]).click().perform()
    wait(lambda: not shown(driver, "adambs")["curves"])
    assert shown(driver, "adambs")["ess"]


def test_the_switches_change_what_is_drawn(driver: Any, page: Path):
    visit(driver, page)
    last = "Math.max(...document.querySelector('[data-plot=curves]').data.at(-1).x)"
    title = "document.querySelector('[data-plot=curves] .xtitle').textContent"
    kind = "document.querySelector('[data-plot=curves]').layout.yaxis.type"
    assert ask(driver, title) == "training time (seconds)"
    assert ask(driver, kind) == "log"
    for position, name, end in ((2, "steps", 200), (3, "epochs", 4)):
        driver.find_element("css selector", f"[data-state=axis] label:nth-of-type({position})").click()
        wait(lambda name=name: ask(driver, title) == name)
        assert ask(driver, last) == end
    for position, name in ((2, "training error"), (3, "test error")):
        driver.find_element("css selector", f"[data-state=metric] label:nth-of-type({position})").click()
        wait(
            lambda name=name: (
                ask(driver, "document.querySelector('[data-plot=curves] .ytitle').textContent") == name
            )
        )
        assert ask(driver, kind) != "log"


@pytest.mark.parametrize("policy", [True, False])
def test_strangers_strings_are_shown_and_never_run(driver: Any, tmp_path: Path, policy: bool):
    """With the page's policy and without it: escaping alone must do."""
    run = write_run(tmp_path / "run", ["adam", "adambs"], seeds=1, slices=5, hostile=True)
    path = write_report([run], tmp_path / "out", figures=policy)
    if not policy:
        text, count = re.subn(
            r'<meta http-equiv="Content-Security-Policy".*?>', "", path.read_text(), count=1
        )
        assert count == 1
        path.write_text(text)
    visit(driver, path, 375)
    assert ask(driver, "alerts") == []
    assert driver.get_log("browser") == []
    assert ask(driver, "document.scripts.length") == 3
    assert ask(driver, "document.querySelectorAll('[onerror], img:not(.card img)').length") == 0
    assert ask(driver, "document.querySelector('h1').textContent") == HOSTILE
    assert ask(driver, "document.querySelector('blockquote').textContent") == HOSTILE
    assert ask(driver, "document.querySelector('.card b').textContent") == HOSTILE
    assert HOSTILE in ask(driver, "document.querySelector('.command pre').textContent")
    assert (
        ask(driver, "document.querySelector('.chip[data-method=adam] span').textContent") == "adam" + HOSTILE
    )
    assert ask(driver, "document.documentElement.scrollWidth") <= 375
    visit(driver, path, 1280)
    legend = ask(driver, "document.querySelector('[data-plot=curves] .legend').textContent")
    assert "adambs</script><script>" in legend
    assert ask(driver, "alerts") == []


def test_several_runs_have_contents_and_a_table_of_all(driver: Any, tmp_path: Path):
    runs = [
        write_run(tmp_path / "a", ["adam", "adambs"], slices=5),
        write_run(
            tmp_path / "b",
            ["adam", "adambs"],
            slices=5,
            experiment="rcnn-imdb",
            title="IMDB",
            examples="text",
        ),
        write_run(tmp_path / "c", ["adam", "adambs"], slices=8, finished=0, title="CIFAR", examples="colour"),
    ]
    visit(driver, write_report(runs, tmp_path / "out", title="All of them", figures=False))
    assert driver.title == "All of them"
    links = ask(driver, "[...document.querySelectorAll('.contents a')].map((a) => a.getAttribute('href'))")
    assert links == ["#cnn-fashion", "#rcnn-imdb", "#cnn-fashion-3"]
    assert all(ask(driver, f"document.querySelector('{link}') !== null") for link in links)
    assert ask(driver, "document.querySelectorAll('#overall tbody').length") == 3
    overall = "document.querySelector('#overall .scroll')"
    assert ask(driver, f"{overall}.scrollWidth") <= ask(
        driver, f"{overall}.clientWidth"
    )  # nothing is cut off
    assert ask(driver, "document.querySelectorAll('[data-plot]').length") == 12
    assert "No seed of this run has finished" in ask(
        driver, "document.querySelector('#cnn-fashion-3').textContent"
    )
    assert ask(driver, "document.querySelectorAll('#rcnn-imdb blockquote').length") == 24
    sizes = ask(driver, "[...document.querySelectorAll('#cnn-fashion .card img')].map((i) => i.naturalWidth)")
    assert sizes == [14] * 24
    assert driver.get_log("browser") == []


def test_plots_are_drawn_for_paper_before_it_is_printed_and_for_the_screen_afterwards(
    driver: Any, page: Path
):
    """The sizes are right as soon as the event has been handled: the browser waits for nothing else."""
    sizes = "[...document.querySelectorAll('[data-plot] .main-svg:first-child')].map((s) => s.clientWidth)"
    visit(driver, page)
    on_screen = ask(driver, sizes)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        driver.execute_script("dispatchEvent(new Event('beforeprint'))")
        assert set(ask(driver, sizes)) == {660, 325}
        # No picture is larger than its box, so none hides what stands below it.
        code = """[...document.querySelectorAll("[data-plot]")].filter((plot) =>
            plot.querySelector(".main-svg").getBoundingClientRect().bottom >
            plot.parentElement.querySelector("figcaption").getBoundingClientRect().top + 1).length"""
        assert ask(driver, code) == 0
        assert ask(driver, "getComputedStyle(document.querySelector('.run')).breakBefore") == "auto"
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    driver.execute_script("dispatchEvent(new Event('afterprint'))")
    wait(lambda: ask(driver, sizes) == on_screen)


def test_the_first_page_of_paper_has_the_first_plot(driver: Any, page: Path):
    """A letter of 8.5 x 11 inches, at 96 pixels an inch, with margins of 14 mm."""
    inch, margin = 96, 2 * 14 / 25.4
    visit(driver, page, int((8.5 - margin) * inch))
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        driver.execute_script("dispatchEvent(new Event('beforeprint'))")
        bottom = ask(driver, "document.querySelector('figcaption').getBoundingClientRect().bottom + scrollY")
        assert 0.5 < bottom / ((11 - margin) * inch) < 1
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.parametrize(("width", "legend"), [(390, False), (1280, True)])
def test_a_caption_speaks_of_the_legend_that_is_there(driver: Any, page: Path, width: int, legend: bool):
    visit(driver, page, width)
    assert bool(ask(driver, "document.querySelectorAll('[data-plot=curves] .legendtoggle').length")) == legend
    caption = driver.find_element("css selector", "figcaption").text
    assert ("in the legend" in caption) == legend
