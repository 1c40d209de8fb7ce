"""Budgets of steps and of seconds, and tuned against tuned: the same grid and time for all, resumable."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from adambs import cli
from adambs.lab.experiments import reproduce, tune
from adambs.lab.report import summary, tuned
from adambs.lab.report.analysis import analyse
from adambs.lab.runs import records, runner
from adambs.lab.runs.budgets import Seconds, Steps

METHODS = ("adam", "adam:clip=1.5", "adambs")
PLAN = reproduce.make_plan("digits", "paper", reproduce.Overrides(METHODS, slices=4, threads=1))
GRID = tune.Grid((0.001, 0.004), (16, 32), 0.05)


@pytest.fixture(scope="module")
def data():
    return reproduce.prepare(PLAN, None)


def running(data, parts):
    """How the command runs a part, and a list of what was run."""

    def run(plan, seeds, folder):
        before = records.begun(folder)
        parts.append((folder.name, sorted(set(seeds) - (before.finished if before else set()))))
        return runner.run(plan, data, list(seeds), folder, command="adambs reproduce digits --tune")

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("results") / "tune-digits"
    parts = []
    best = tune.tune(PLAN, GRID, data, range(2), folder, running(data, parts))
    return folder, best, parts


# ------------------------------------------------------------------------------------------- budgets


def test_a_budget_of_steps_goes_in_turns_of_twenty():
    budget = Steps(50)
    assert [budget.at(share) for share in (0, 0.25, 1)] == [0, 12, 50]
    assert [budget.turn(step, 9.0, 50) for step in (0, 20, 40, 50, 60)] == [20, 20, 10, 0, 0]
    assert budget.charged(20, 3.0, 40) == (40, 6.0)
    assert budget.config() == {"steps": 50}
    assert budget.most_slices() == 50


def test_a_budget_of_seconds_gives_equal_times_at_each_methods_own_pace():
    budget = Seconds(60.0)
    assert budget.at(0.25) == 15.0
    assert budget.turn(0, 0.0, 15.0) == 1  # the pace is not known yet
    assert budget.turn(100, 1.0, 15.0) == 50  # half a second
    assert budget.turn(10, 5.0, 15.0) == 1
    assert budget.turn(1000, 14.9, 15.0) == 7  # what is left of the slice
    assert budget.turn(1000, 15.0, 15.0) == 0
    assert budget.charged(20, 3.0, 40.0) == (20, 40.0)
    assert budget.config() == {"steps": 0, "seconds": 60.0}


def test_a_run_of_seconds_stops_each_method_by_its_own_clock(tmp_path, data):
    plan = dataclasses.replace(PLAN, method_names=("adam", "adam:batch_size=8"), seconds=0.2)
    run = runner.run(plan, data, [0], tmp_path, command="")
    assert run.config["seconds"] == 0.2
    assert "0.2 s for each method" in run.config["title"]
    for name, size in (("adam", plan.experiment.batch_size), ("adam:batch_size=8", 8)):
        lines = [line for line in run.lines("slice") if line["method"] == name]
        assert len(lines) == 5
        assert lines[-1]["examples"] == size * lines[-1]["step"]
        for k, line in enumerate(lines):
            assert line["seconds"] >= 0.2 * k / 4  # each slice is used up, and not less


def test_a_method_that_diverges_is_charged_for_the_rest_of_its_time(tmp_path, data):
    plan = dataclasses.replace(PLAN, method_names=("adam", "adam:lr=1e30"), seconds=0.3)
    run = runner.run(plan, data, [0], tmp_path, command="")
    last = [line for line in run.lines("slice") if line["method"] == "adam:lr=1e30"][-1]
    assert last["train_loss"] == 1e300
    assert last["seconds"] >= 0.3


# ---------------------------------------------------------------------------------------------- grid


def test_the_grid_is_the_experiments_or_what_is_asked_for():
    experiment = PLAN.experiment
    usual = tune.make_grid(experiment, 60)
    assert usual.lrs == tuple(experiment.lr * factor for factor in (1, 2, 4))
    assert usual.batch_sizes == tuple(round(experiment.batch_size * factor) for factor in (0.5, 1, 2))
    asked = tune.make_grid(experiment, 5, "1e-3,4e-3", "32,64,32")
    assert asked == tune.Grid((0.001, 0.004), (32, 64), 5)
    assert asked.cells() == [(0.001, 32), (0.001, 64), (0.004, 32), (0.004, 64)]
    wide = tune.Grid((1, 2, 3), (8,), 1)
    assert wide.at_the_edge(2, 8) == ""
    assert wide.at_the_edge(3, 8) == "largest learning rate"
    assert asked.at_the_edge(0.001, 64) == "smallest learning rate and largest batch size"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0,), "tune-seconds must be positive, not 0"),
        ((1.0, "a,b"), "tune-lrs must be positive numbers with commas between, not 'a,b'"),
        ((1.0, "-1"), "tune-lrs must be positive"),
        ((1.0, None, "32.5"), "tune-batch-sizes must be positive whole numbers"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        tune.make_grid(PLAN.experiment, *arguments)


@pytest.mark.parametrize(
    ("changes", "grid", "seeds", "words"),
    [
        ({"method_names": ("adambs",)}, {}, range(2), "add adam to --methods"),
        ({"method_names": ("adam", "adambs:lr=0.1")}, {}, range(2), "'adambs:lr=0.1' has a lr of its own"),
        ({}, {"batch_sizes": (16, 10_000)}, range(2), "tune-batch-sizes has 10000, but there are only"),
        ({}, {}, range(999, 1002), "seed 1000 is that of the grid"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(tmp_path, data, changes, grid, seeds, words):
    plan, grid = dataclasses.replace(PLAN, **changes), dataclasses.replace(GRID, **grid)
    with pytest.raises(ValueError, match=words):
        tune.tune(plan, grid, data, seeds, tmp_path / "out", running(data, []))
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------- tuned against tuned


def test_the_best_of_each_is_the_cell_with_the_lowest_loss(finished):
    folder, best, _ = finished
    assert [each.method for each in best] == list(METHODS)
    for each in best:
        losses = {}
        for lr, size in GRID.cells():
            run = records.read(tune.cell_folder(folder, lr, size))
            assert (run.config["lr"], run.config["batch_size"]) == (lr, size)
            assert run.finished == {tune.SEED}
            assert run.config["slices"] == 2  # a third of the run's four, rounded up
            assert not any(line["highest"] or line["lowest"] for line in run.lines("distribution"))
            lines = [line for line in run.lines("slice") if line["method"] == each.method]
            losses[lr, size] = min(line["train_loss"] for line in lines)
        assert each.loss == min(losses.values()) == losses[each.lr, each.batch_size]


def test_the_best_are_run_again_on_other_seeds_for_the_same_time(finished):
    folder, best, parts = finished
    run = records.read(folder)
    assert run.finished == {0, 1}
    assert parts[-1] == ("tune-digits", [0, 1])
    assert [part[1] for part in parts[:-1]] == [[tune.SEED]] * 4
    assert run.config["methods"] == [each.variant for each in best]
    assert run.config["seconds"] == GRID.seconds
    assert run.config["baseline"] == best[0].variant
    assert any(line["highest"] for line in run.lines("distribution"))
    assert run.config["grid"] == {"lrs": [0.001, 0.004], "batch_sizes": [16, 32], "seed": tune.SEED}
    for each in best:
        lines = [line for line in run.lines("slice") if line["method"] == each.variant]
        assert lines[-1]["examples"] == each.batch_size * lines[-1]["step"]
    assert analyse(run).baseline == best[0].variant


def test_a_command_that_was_stopped_goes_on(finished, tmp_path, data):
    folder = tmp_path / "tune-digits"
    parts = []
    run = running(data, parts)

    def stopped(plan, seeds, where):
        if len(parts) == 2:
            raise KeyboardInterrupt
        return run(plan, seeds, where)

    with pytest.raises(KeyboardInterrupt):
        tune.tune(PLAN, GRID, data, range(2), folder, stopped)
    assert len(parts) == 2
    first = tune.cell_folder(folder, *GRID.cells()[0]) / records.FILE
    kept = first.read_text()
    parts.clear()
    best = tune.tune(PLAN, GRID, data, range(2), folder, run)
    assert [part[1] for part in parts] == [[], [], [tune.SEED], [tune.SEED], [0, 1]]
    assert first.read_text() == kept
    whole = (folder / records.FILE).read_text()
    parts.clear()
    assert tune.tune(PLAN, GRID, data, range(2), folder, run) == best  # nothing is left to do
    assert all(part[1] == [] for part in parts)
    assert (folder / records.FILE).read_text() == whole


def test_the_summary_has_a_section_of_its_own(finished):
    folder, best, _ = finished
    analysis = analyse(records.read(folder))
    head, *rows = tuned.tuned_rows(analysis)
    assert len(rows) == 3
    assert {len(row) for row in rows} == {len(head)}
    assert [row[0].split(" (")[0] for row in rows] == ["Adam", "Adam, clip=1.5", "AdamBS"]
    assert [row[1:3] for row in rows] == [[f"{each.lr:g}", str(each.batch_size)] for each in best]
    assert rows[0][4:6] == ["1", "1"]
    text = summary.write_summary(folder.parent).read_text()
    assert text.count("## Tuned against tuned") == 1
    assert "2 seeds, 0.05 s each; learning rates 0.001, 0.004, batch sizes 16, 32." in text
    assert "Side by side" not in text  # it is not among the others
    told = analyse(records.read(folder))
    told.run.config["tuned"][best[2].variant]["method"] = "adambs:context=1"
    assert [row[0] for row in tuned.mean_rows([analysis, told])] == ["method", "Adam, clip=1.5", "AdamBS"]
    assert "Geometric mean over a, b" in tuned.tuned_section([analysis, analysis], ["a", "b"])
    note = tuned.how_chosen(analysis)
    assert "same grid" in note
    assert "At the edge" in note  # a grid of two by two is nothing but edges


def test_the_command_tunes_and_writes_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["adambs", "reproduce", "digits", "--tune"])
    options = ["--methods", "adam,adambs", "--seeds", "2", "--slices", "2", "--threads", "1"]
    grid = ["--tune", "--tune-seconds", "0.03", "--tune-lrs", "0.001", "--tune-batch-sizes", "16,32"]
    command = ["reproduce", "digits", *options, *grid, "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    for words in ("Grid, 2 of 2: learning rate 0.001", "Tuned against tuned, 2 seeds", "of the grid"):
        assert words in " ".join(result.output.split())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Tuned against tuned" in page
    lines = (tmp_path / "run" / records.FILE).read_text().splitlines()
    assert json.loads(lines[0])["config"]["tuned"].keys() == set(json.loads(lines[0])["config"]["methods"])
    refused = CliRunner().invoke(cli.app, [*command, "--lr", "0.1"])
    assert isinstance(refused.exception, ValueError)
    assert "leave out --lr" in str(refused.exception)
