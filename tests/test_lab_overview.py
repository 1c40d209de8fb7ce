"""Several runs at once: what the pictures show is what the analyses say."""

import math
import re

import numpy as np
import pytest
from lab_fixtures import write_run

from adambs.lab.experiments import sweep
from adambs.lab.report import summary
from adambs.lab.report.analysis import analyse
from adambs.lab.report.estimates import Estimate
from adambs.lab.report.overview import (
    CHOOSING,
    COLUMNS,
    FRONT,
    SideBySide,
    against_baseline,
    front_figure,
    sweep_figure,
)
from adambs.lab.report.phrases import points, times_and_interval
from adambs.lab.runs import records


def dots(axes):
    """Row to the values drawn in it."""
    found = {}
    for line in axes.lines:
        if line.get_marker() in ("o", "<"):
            found.setdefault(int(line.get_ydata()[0]), []).append(float(line.get_xdata()[0]))
    return found


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    methods = ["adam", "adambs", "adam-impt"]
    runs = [write_run(folder / name, methods, slices=8, noise=0.05 * k) for k, name in enumerate(CHOOSING)]
    runs.append(write_run(folder / "other", ["adam", "adam-impt", "sgd"], slices=8))
    return SideBySide([analyse(run) for run in runs], [run.path.name for run in runs])


def test_methods_of_one_run_only_are_left_out(side_by_side):
    assert side_by_side.methods == ["adambs", "adam-impt"]
    assert "sgd" not in "".join(side_by_side.tables()).lower()


def test_two_methods_of_one_title_are_told_apart(tmp_path):
    analyses = [
        analyse(write_run(tmp_path / name, ["adam", "adambs", "adambs-loop"], slices=8)) for name in "ab"
    ]
    for analysis in analyses:
        analysis.run.methods["adambs-loop"]["title"] = "AdamBS"
    found = SideBySide(analyses, ["a", "b"])
    assert [found.name(method) for method in found.methods] == ["AdamBS", "AdamBS (adambs-loop)"]


def test_the_mean_is_over_the_three_and_not_over_others(side_by_side):
    for method in side_by_side.methods:
        logs = [math.log(found.overall.value) for found in side_by_side.found(method)[:3]]
        mean, bounded = side_by_side.mean(method)
        assert mean.value == pytest.approx(math.exp(sum(logs) / 3))
        assert bounded == any(found.bounded() for found in side_by_side.found(method)[:3])
    row = side_by_side.tables()[0].splitlines()[2]
    assert row.endswith(f"**{times_and_interval(*side_by_side.mean('adambs'))}** |")
    without = SideBySide(side_by_side.analyses[1:], side_by_side.titles[1:])
    assert without.mean("adam-impt") is None


def test_a_method_that_did_not_run_again_is_looked_up_in_the_runs_of_other_methods(tmp_path):
    methods = {
        "cnn-fashion": ["adam", "adambs"],
        "methods-cnn-fashion": ["adam", "adambs", "adam-impt"],
        "methods-cnn-fashion-0.1": ["adam", "adambs", "adam-impt", "sgd"],
        "other": ["adam", "adambs", "adam-impt", "sgd"],
    }
    runs = [
        write_run(tmp_path / name, ran, slices=8, noise=0.02 * k)
        for k, (name, ran) in enumerate(methods.items())
    ]
    found = SideBySide([analyse(run) for run in runs], list(methods))
    rows = [line.split(" | ") for line in found.tables()[0].splitlines()[2:]]
    for k, (row, method) in enumerate(zip(rows, ("adambs", "adam-impt", "sgd"), strict=True)):
        speedup = found.analyses[k].speedups[method]["seconds"]  # each from the first run that has it
        assert row[1] == times_and_interval(speedup.overall, speedup.bounded()) + (" °" if k else "")
    assert len({row[1] for row in rows}) == 3
    assert len(found.tables()) == 2  # the runs of other methods have no columns of their own


def test_the_figure_shows_the_runs_of_the_default_and_the_mean(side_by_side):
    figure = side_by_side.figure()
    assert figure.get_suptitle() == "Times as fast as Adam, by the clock"
    panels = figure.axes
    shown = [axes for axes in panels if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown[:3]] == list(CHOOSING)
    assert len(shown) == 4
    for row, method in enumerate(side_by_side.methods):
        values = [found.overall.value for found in side_by_side.found(method)[:3]]
        values.append(side_by_side.mean(method)[0].value)
        assert [dots(axes)[row] for axes in shown] == [[pytest.approx(max(v, 0.6))] for v in values]


def test_without_the_default_there_is_no_figure(side_by_side):
    other = side_by_side.analyses[3]
    assert SideBySide([other, other], ["a", "b"]).figure() is None


def test_a_very_slow_method_stands_at_the_edge_with_its_number(tmp_path):
    run = write_run(tmp_path / "run", ["adam", "adambs"], slices=8)
    for line in (path := run.path / records.FILE).read_text().splitlines():
        if '"method": "adambs"' in line and '"kind": "slice"' in line:
            seconds = line.partition('"seconds": ')[2].partition(",")[0]
            slower = line.replace(f'"seconds": {seconds}', f'"seconds": {9 * float(seconds)}')
            path.write_text(path.read_text().replace(line, slower))
    analysis = analyse(records.read(run.path))
    assert analysis.speedups["adambs"]["seconds"].overall.value < 0.6
    axes = SideBySide([analysis, analysis], ["a", "b"]).figure().axes[0]
    assert dots(axes) == {0: [0.6]}
    assert [text.get_text() for text in axes.texts] == [
        f"{analysis.speedups['adambs']['seconds'].overall.value:.2f}"
    ]


def test_the_sweep_figure_has_a_dot_for_every_trial_and_lines_for_default_and_oracle(tmp_path):
    analysis = analyse(write_run(tmp_path / "sweep", list(sweep.METHODS), slices=8, seeds=1))
    (axes,) = sweep_figure([analysis], ["a title"]).axes
    for row, trials in enumerate(sweep.TRIALS.values()):
        values = [analysis.speedups[trial]["seconds"].overall.value for trial in trials]
        assert dots(axes)[row] == [pytest.approx(max(value, 0.6)) for value in values]
    lines = {line.get_label(): line.get_xdata()[0] for line in axes.lines}
    for label, name in (("default", "adambs"), ("oracle", "oracle")):
        assert lines[label] == pytest.approx(analysis.speedups[name]["seconds"].overall.value)


def test_a_cell_is_short():
    assert times_and_interval(Estimate(1.234, 1.1, 1.31, 3), True) == "< 1.23 (1.10 to 1.31)"
    assert times_and_interval(Estimate(1.0, None, None, 1), False) == "1.00"
    assert times_and_interval(Estimate(np.nan, None, None, 0), False) == "–"


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_no_table_is_wide_and_every_number_stands_in_one(side_by_side):
    other = side_by_side.analyses[3]
    many = SideBySide([*side_by_side.analyses, *[other] * 6], [*side_by_side.titles, *"abcdef"])
    tables = [cells(table) for table in many.tables()]
    assert [table[0] for table in tables] == [
        ["method", *CHOOSING, "mean of the three"],
        ["method", "other", "a", "b", "c", "d"],
        ["method", "e", "f"],
    ]
    assert max(len(table[0]) for table in tables) <= COLUMNS + 2
    assert [row[0] for row in tables[0][2:]] == ["AdamBS", "Adam-impt"]
    assert [row[0] for row in tables[1][2:]] == ["Adam-impt", "SGD"]  # AdamBS did not run there
    clock = other.speedups["adam-impt"]["seconds"]
    assert tables[2][2][1:] == [times_and_interval(clock.overall, clock.bounded())] * 2


@pytest.mark.parametrize("method", ["adambs", "adam-impt"])
def test_a_method_has_a_row_for_each_run_that_has_it(side_by_side, method):
    head, _, *rows = cells(against_baseline(side_by_side.analyses, side_by_side.titles, {method: ""}))
    assert len(head) == 6
    assert [row[0] for row in rows] == [*CHOOSING, *(["other"] if method == "adam-impt" else [])]
    analysis = side_by_side.analyses[1]
    clock = analysis.speedups[method]["seconds"]
    assert rows[1][1:] == [
        "3",
        times_and_interval(clock.overall, clock.bounded()),
        times_and_interval(clock.at[3], clock.bounded(3)),
        points(analysis.equal_time["test_error"][method]),
        clock.verdict,
    ]


def test_a_method_that_no_run_has_is_not_mentioned(side_by_side):
    assert against_baseline(side_by_side.analyses[3:], ["other"], {"adambs": ""}) == ""


def test_the_sections_come_in_order_and_no_table_is_wide(tmp_path, monkeypatch):
    """The default, the paper's Algorithm 2, everything else; each table speaks of its own method."""
    saved = []
    monkeypatch.setattr(
        summary, "save_png", lambda figure, folder, stem: saved.append(f"{folder.name}/{stem}.png")
    )
    write_run(tmp_path / "a", ["adam", "adambs"], slices=8, balanced=True)
    write_run(tmp_path / "b", ["adam", "adambs-exp3"], slices=8, title="Another title")
    write_run(tmp_path / "c", ["adam", "adambs"], slices=8, scale="paper")
    more = ["adam", "adambs", "adam-impt", "infobatch", "rs2"]
    write_run(tmp_path / "d", more, slices=8, scale="paper")
    write_run(tmp_path / "e", ["adam", "adambs"], slices=8, scale="paper")
    text = summary.write_summary(tmp_path).read_text()
    headings = ["## The library's default", "## The paper's Algorithm 2", "## Everything else"]
    _, default, algorithm_2, rest = re.split(
        "|".join(f"^{heading}" for heading in headings), text, flags=re.M
    )
    assert "[CNN on Fashion-MNIST](" in default
    whole = "CNN on Fashion-MNIST, at the paper's scale"
    for title in (whole, f"{whole}, with Adam-impt, infobatch and 1 more", f"{whole}, e"):
        assert f"[{title}](" in default
    assert "Another title" not in default
    assert "Another title" in algorithm_2
    assert "CNN on Fashion-MNIST" not in algorithm_2
    for heading in re.findall(r"\]\(#([^)]*)\)", default + algorithm_2):
        assert heading in [summary._anchor(found) for found in re.findall(r"^### (.*)$", rest, re.M)]
    assert rest.count("balanced test error") == 1
    assert set(re.findall(r"\]\((figures/[^)]*)\)", text)) == set(saved)
    assert max(line.count("|") for line in text.splitlines()) - 1 <= COLUMNS + 2


def test_the_readmes_picture_shows_adam_and_the_default_alone(side_by_side):
    panels = front_figure(side_by_side.analyses).axes
    shown = {analysis.run.path.name: analysis for analysis in side_by_side.analyses}
    assert len(panels) == len(FRONT)
    for axes, name in zip(panels, FRONT, strict=True):
        curves = {each.method: each for each in shown[name].curves("train_loss", "seconds")}
        for line, method in zip(axes.lines, ("adam", "adambs"), strict=True):
            assert line.get_label() == shown[name].title(method)
            np.testing.assert_array_equal(line.get_ydata(), curves[method].mean)
        clock = shown[name].speedups["adambs"]["seconds"]
        said = f"{clock.overall.value:.2f}" if clock.verdict == "faster" else clock.verdict
        assert said in axes.get_title(loc="left")
    assert front_figure(side_by_side.analyses[3:]) is None
