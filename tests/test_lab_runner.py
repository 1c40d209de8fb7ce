"""Records, runner, plans and the command line: fair, resumable, and clear about what is wrong."""

import dataclasses
import html
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lab_fixtures import connections, kdd_files
from rich.console import Console
from typer.testing import CliRunner

import adambs
from adambs import cli
from adambs.lab import experiments, machine
from adambs.lab.experiments import demo, reproduce, sweep
from adambs.lab.report import summary
from adambs.lab.report.analysis import analyse
from adambs.lab.report.estimates import Estimate
from adambs.lab.report.tables import terminal_table
from adambs.lab.runs import records, runner

SMALL = reproduce.Overrides(methods=("adam", "adambs", "adambs-release"), epochs=0.7, slices=4, threads=1)


def small_plan(**changes):
    plan = reproduce.make_plan("digits", "paper", SMALL)
    return runner.Plan(**{**plan.__dict__, **changes})


@pytest.fixture(scope="module")
def data():
    return reproduce.prepare(small_plan(), None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    return runner.run(small_plan(), data, [0, 1], folder, command="adambs reproduce digits")


def without_time(line):
    return {key: value for key, value in line.items() if key != "seconds"}


def test_a_run_records_everything(finished, data):
    assert finished.finished == {0, 1}
    slices = list(finished.lines("slice"))
    assert len(slices) == 2 * 3 * 5
    for seed in (0, 1):
        mine = {m: [s for s in slices if (s["seed"], s["method"]) == (seed, m)] for m in SMALL.methods}
        starts = [lines[0] for lines in mine.values()]
        assert {s["train_loss"] for s in starts} == {starts[0]["train_loss"]}  # the same parameters
        for lines in mine.values():
            assert [s["step"] for s in lines] == [0, 8, 16, 24, 32]
            assert lines[0]["seconds"] == 0
            assert (np.diff([s["seconds"] for s in lines]) > 0).all()
            assert lines[-1]["examples"] == pytest.approx(32 * 32, abs=32)
            assert lines[-1]["epoch"] == lines[-1]["examples"] / len(data.train)
            assert lines[-1]["train_loss"] < lines[0]["train_loss"]
        assert mine["adam"][-1]["ess"] is None
        assert 0 < mine["adambs"][-1]["ess"] <= 1
        assert mine["adambs"][-1]["variance_reduction"] > 0
    assert finished.config["n"] == len(data.train)
    assert finished.methods["adambs-release"]["biased"] is True
    [session] = finished.sessions
    assert session["command"] == "adambs reproduce digits"
    assert session["machine"]["torch"] == machine.describe()["torch"]


def test_the_evaluation_is_over_the_whole_data(finished, data):
    """The recorded loss of the untrained model, against a loop over single examples."""
    from torch.nn.functional import cross_entropy

    from adambs.lab import models

    model = models.build("digits-cnn", classes=10, seed=0).eval()
    x, y = data.train.tensors
    losses = [cross_entropy(model(x[i : i + 1]), y[i : i + 1]).item() for i in range(len(y))]
    first = next(iter(finished.lines("slice")))
    assert first["train_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    wrong = [int(model(x[i : i + 1]).argmax()) != int(y[i]) for i in range(len(y))]
    assert first["train_error"] == pytest.approx(np.mean(wrong))
    x, y = data.test.tensors
    by_class = {int(c): [] for c in y}
    for i in range(len(y)):
        by_class[int(y[i])].append(int(model(x[i : i + 1]).argmax()) != int(y[i]))
    assert first["balanced_test_error"] == pytest.approx(
        np.mean([np.mean(each) for each in by_class.values()])
    )


def test_the_balanced_error_counts_every_class_alike():
    """Nine of class 0, all right, one of class 2, wrong, none of class 1 and of class 3."""
    import torch

    from adambs.lab.runs.training import LOSSES, evaluate

    inputs = torch.eye(4)[[0] * 10]
    targets = torch.tensor([0] * 9 + [2])
    found = evaluate(torch.nn.Identity(), inputs, targets, LOSSES["softmax"])
    assert found.error == pytest.approx(0.1)
    assert found.balanced_error == pytest.approx(0.5)


def test_a_table_is_trained_on_from_the_command_line(tmp_path):
    """The experiment kdd on a small file of the publisher's format, from the data to the report."""
    folder = tmp_path / "data" / "kddcup99"
    folder.mkdir(parents=True)
    for name, content in kdd_files(connections(400)).items():
        (folder / name).write_bytes(content)
    arguments = ["reproduce", "kdd", "--methods", "adam,adambs", "--seeds", "1", "--epochs", "3"]
    arguments += ["--batch-size", "32", "--slices", "3", "--threads", "1", "--data", str(tmp_path / "data")]
    done = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    run = records.read(tmp_path / "run")
    assert (run.config["n"], run.config["n_test"], len(run.config["classes"])) == (320, 80, 23)
    last = list(run.lines("slice"))[-1]
    assert last["train_loss"] < 3
    assert 0 <= last["test_error"] <= last["balanced_test_error"] <= 1
    shown = next(line for line in run.lines("distribution") if line["highest"])
    assert shown["highest"][0]["text"].count(",") == 41
    assert "balanced test error" in (tmp_path / "run" / "report.html").read_text().lower()


def test_records_without_a_balanced_error_are_still_read(finished, tmp_path):
    old = tmp_path / records.FILE
    with old.open("w") as file:
        for line in (finished.path / records.FILE).read_text().splitlines():
            entry = json.loads(line)
            entry.pop("balanced_test_error", None)
            file.write(json.dumps(entry) + "\n")
    assert "balanced_test_error" in analyse(finished).metrics
    without = analyse(records.read(tmp_path))
    assert "balanced_test_error" not in without.metrics
    assert without.finals["adam"]["test_error"] == analyse(finished).finals["adam"]["test_error"]


def test_p_is_shown_with_examples_at_the_end_of_the_first_seed(finished, data):
    shown = [d for d in finished.lines("distribution") if d["highest"]]
    assert {(d["seed"], d["method"]) for d in shown} == {(0, "adambs"), (0, "adambs-release")}
    for line in shown:
        ratios = [example["ratio"] for example in line["highest"] + line["lowest"][::-1]]
        assert ratios == sorted(ratios, reverse=True)
        assert len(line["quantiles"]) == 101
        assert np.mean(line["quantiles"]) == pytest.approx(1, rel=0.9)
        example = line["highest"][0]
        assert example["label"] == data.example(example["index"])["label"]
        assert np.shape(example["image"]) == (8, 8)


def test_the_same_seed_gives_the_same_numbers_whoever_else_runs(finished, data, tmp_path):
    alone = small_plan(method_names=("adambs",))
    again = runner.run(alone, data, [0], tmp_path, command="")
    theirs = [s for s in finished.lines("slice") if (s["seed"], s["method"]) == (0, "adambs")]
    assert [without_time(s) for s in again.lines("slice")] == [without_time(s) for s in theirs]


def test_a_killed_run_goes_on_and_counts_nothing_twice(finished, data, tmp_path):
    class Killed(BaseException):
        pass

    def kill_at(moment):
        seen = []

        def progress(*_):
            seen.append(1)
            if len(seen) == moment:
                raise Killed

        return progress

    for moment in (3, 7):  # in the middle of seed 0, then, one seed later, in the middle of seed 1
        with pytest.raises(Killed):
            runner.run(small_plan(), data, [0, 1], tmp_path, command="", progress=kill_at(moment))
        with (tmp_path / records.FILE).open("a") as file:
            file.write('{"kind": "slice", "se')  # a line that a crash has cut short
    assert records.read(tmp_path).finished == {0}
    whole = runner.run(small_plan(), data, [0, 1], tmp_path, command="")
    found = [without_time(s) for s in whole.lines("slice")]
    assert found == [without_time(s) for s in finished.lines("slice")]
    assert len(whole.sessions) == 3
    before = (tmp_path / records.FILE).read_bytes()
    runner.run(small_plan(), data, [0, 1], tmp_path, command="")
    assert (tmp_path / records.FILE).read_bytes() == before  # nothing to do: nothing written


def test_more_seeds_extend_a_run(data, tmp_path):
    one = small_plan(method_names=("adam",))
    runner.run(one, data, [0], tmp_path, command="")
    both = runner.run(one, data, [0, 1], tmp_path, command="")
    assert both.finished == {0, 1}


def test_a_record_of_another_configuration_is_refused(finished, data):
    file = finished.path / records.FILE
    before = file.read_bytes()
    with pytest.raises(records.RecordError, match=r"was made with methods = .* records are not mixed"):
        runner.run(small_plan(method_names=("adam",)), data, [0], finished.path, command="")
    with pytest.raises(records.RecordError, match="was made with threads = 1, not 2"):
        runner.run(small_plan(threads=2), data, [0], finished.path, command="")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no complete line"),
        ('{"kind": "run", "for', "torn"),
        ('{"kind": "slice"}\n', "line 1, is damaged"),
        ('{"kind": "run", "format": 99, "config": {}, "methods": {}}\n', "format 1"),
        ('{"kind": "run", "format": 1, "config": {}, "methods": {}}\nnonsense\n', "line 2, is damaged"),
        ('{"kind": "run", "format": 1, "config": {}, "methods": {}}\n[]\n', "line 2, is damaged"),
        (
            '{"kind": "run", "format": 1, "config": {}, "methods": {}}\n{"kind": "slice", "seed": 3}\n',
            "line 2, is damaged",
        ),
    ],
)
def test_a_broken_record_file_is_named_and_kept(tmp_path, text, words):
    file = tmp_path / records.FILE
    file.write_text(text)
    with pytest.raises(records.RecordError, match=words) as caught:
        records.read(tmp_path)
    assert str(file) in str(caught.value)
    assert file.read_text() == text


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(records.RecordError, match="holds no run"):
        records.read(tmp_path)


def test_an_unwritable_folder(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(records.RecordError, match="cannot be written"):
        records.Writer(blocked / "run", {}, {})


def test_a_full_disk_loses_no_record(tmp_path, monkeypatch):
    writer = records.Writer(tmp_path, {"a": 1}, {})
    writer.append({"kind": "begin", "seed": 0})
    before = writer.file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(records.RecordError, match="No space left on device; what it held is safe"):
        writer.append({"kind": "slice", "seed": 0})
    assert writer.file.read_bytes() == before


@pytest.mark.parametrize(
    "left",
    [
        "",
        '{"kind": "run", "for',  # a first line that a crash has cut short
        '{"kind": "run", "format": 1, "config": {"another": 1}, "methods": {}}\n{"kind": "session"}\n',
        '{"kind": "run", "format": 1, "config": {}, "methods": {}}\n{"kind": "begin", "seed": 0}\n{"ki',
    ],
)
def test_a_record_without_a_slice_is_begun_anew(left, data, tmp_path):
    (tmp_path / records.FILE).write_text(left)
    plan = small_plan(method_names=("adam",))
    assert records.same_config(tmp_path, plan.config(data))
    assert runner.run(plan, data, [0], tmp_path, command="").finished == {0}
    assert records.read(tmp_path).config["methods"] == ["adam"]


def test_nothing_is_written_before_the_first_slice(data, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no memory on the device")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_measure", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            runner.run(small_plan(), data, [0], tmp_path, command="")
    assert not (tmp_path / records.FILE).exists()
    runner.run(small_plan(method_names=("adam",)), data, [0], tmp_path, command="")


@pytest.mark.parametrize("room", [200, 3000])  # within the first line, and within a slice
def test_a_run_goes_on_after_the_disk_was_full(room, finished, data, tmp_path):
    """A limit on the size of files stands for the disk: it cuts a line short as a full disk does."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(records.RecordError, match="run the same command again to go on"):
            runner.run(small_plan(), data, [0, 1], tmp_path, command="")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    left = (tmp_path / records.FILE).read_text()
    assert left.endswith("\n") == ('"slice"' in left) == (room > 200)
    whole = runner.run(small_plan(), data, [0, 1], tmp_path, command="")
    assert list(map(without_time, whole.lines("slice"))) == list(map(without_time, finished.lines("slice")))


def test_a_second_run_in_the_folder_is_told_who_has_it(data, tmp_path):
    def second(*_):
        with pytest.raises(records.RecordError, match=rf"is in use by process {os.getpid()} on .*the first"):
            runner.run(small_plan(), data, [1], tmp_path, command="the second")

    first = runner.run(small_plan(), data, [0], tmp_path, command="the first", progress=second)
    assert first.finished == {0}
    assert len(first.sessions) == 1
    assert runner.run(small_plan(), data, [1], tmp_path, command="").finished == {0, 1}
    assert not (tmp_path / ".running").exists()


def test_a_diverged_run_is_still_json(tmp_path):
    assert runner._finite(float("nan")) == runner._finite(float("inf")) == 1e300
    writer = records.Writer(tmp_path, {}, {})
    with pytest.raises(ValueError, match="JSON"):
        writer.append({"kind": "slice", "train_loss": float("nan")})


def test_a_method_that_diverges_ends_alone_and_its_clock_goes_on(tmp_path, monkeypatch):
    """The others finish; its loss is very large from then on, and it is charged for all of the budget."""
    from adambs.lab.methods import METHODS

    class Diverges(METHODS["adam"]):
        name = "diverges"

        def step(self, batch, outputs, targets, losses):
            super().step(batch, outputs, targets, losses)
            self.taken = getattr(self, "taken", 0) + 1
            if self.taken == 10:
                next(iter(self.task.model.parameters())).data.fill_(float("nan"))

    monkeypatch.setitem(METHODS, "diverges", Diverges)
    plan = reproduce.make_plan(
        "digits", "paper", reproduce.Overrides(methods=("adam", "diverges"), epochs=1, slices=4)
    )
    run = runner.run(plan, reproduce.prepare(plan, None), [0], tmp_path, command="")
    assert run.finished == {0}
    theirs, adams = (
        [line for line in run.lines("slice") if line["method"] == name] for name in ("diverges", "adam")
    )
    assert [line["train_loss"] == 1e300 for line in theirs] == [False, *[True] * 4]
    assert [line["step"] for line in theirs] == [line["step"] for line in adams]
    assert all(later["seconds"] > line["seconds"] for line, later in itertools.pairwise(theirs))
    assert adams[-1]["train_loss"] < adams[0]["train_loss"]


def test_the_summary_says_what_the_records_say(finished, tmp_path):
    (tmp_path / "results" / "digits").mkdir(parents=True)
    record = (finished.path / records.FILE).read_text()
    (tmp_path / "results" / "digits" / records.FILE).write_text(record)
    (tmp_path / "results" / "digits-again").mkdir()
    (tmp_path / "results" / "digits-again" / records.FILE).write_text(record)
    (tmp_path / "results" / "NOTES.md").write_text("Made on a rainy day.\n")
    text = summary.write_summary(tmp_path / "results").read_text()
    final = [s["train_loss"] for s in finished.lines("slice") if (s["method"], s["step"]) == ("adam", 32)]
    assert f"| Adam | {np.mean(final):.3g}" in text
    assert "AdamBS (published code) (biased)" in text
    assert "`adambs reproduce digits`" in text
    assert "Made on a rainy day." in text
    side_by_side = text[text.index("## Side by side") :].split("##")[1]
    row = next(line for line in side_by_side.splitlines() if line.startswith("| AdamBS (published code)"))
    speedups = [cell.strip() for cell in row.split("|")[2:4]]
    assert speedups[0] == speedups[1]
    assert re.match(r"(< )?\d\.\d\d", speedups[0])
    assert (tmp_path / "results" / "figures" / "digits-curves.png").exists()
    with pytest.raises(records.RecordError, match="holds no folder with"):
        summary.write_summary(tmp_path / "results" / "digits")


# ---------------------------------------------------------------------- plans and the command line


def test_labels_are_flipped_where_the_experiment_says_so():
    plan = reproduce.make_plan("digits", "paper", reproduce.Overrides())
    wrong = dataclasses.replace(plan, experiment=dataclasses.replace(plan.experiment, flipped=0.25))
    right, flipped = reproduce.prepare(plan, None), reproduce.prepare(wrong, None)
    changed = right.train.tensors[1] != flipped.train.tensors[1]
    assert changed.float().mean().item() == pytest.approx(0.25, abs=1e-3)
    assert (right.test.tensors[1] == flipped.test.tensors[1]).all()
    assert wrong.config(flipped)["flipped"] == 0.25
    assert "flipped" not in plan.config(right)


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
@pytest.mark.parametrize("scale", ["paper", "quick"])
def test_every_experiment_has_a_plan(name, scale):
    plan = reproduce.make_plan(name, scale, reproduce.Overrides())
    experiment = experiments.EXPERIMENTS[name]
    assert plan.experiment.paper
    assert plan.experiment.ours
    assert plan.method_names == experiment.methods
    assert plan.differs == (experiment.quick_differs if scale == "quick" else "")
    if scale == "paper":
        assert plan.experiment == experiment


def test_overrides_are_said_in_words():
    changes = reproduce.Overrides(epochs=2, lr=0.01, batch_size=64, long_tail=10)
    plan = reproduce.make_plan("cnn-fashion", "paper", changes)
    assert plan.one_lr
    assert plan.title() == (
        "CNN on Fashion-MNIST, 2 epochs, batches of 64, learning rate 0.01, long-tailed by 10"
    )
    assert reproduce.make_plan("cnn-fashion", "quick", reproduce.Overrides(lr=0.001)).title() == (
        "CNN on Fashion-MNIST"
    )
    once = reproduce.make_plan("kdd", "quick", reproduce.Overrides(epochs=1)).title()
    assert once == "MLP on KDD Cup 1999, a single pass"
    assert plan.differs == (
        "epochs 2 instead of 10; batch size 64 instead of 128; lr 0.01 instead of 0.001; "
        "long tail 10 instead of 1"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reproduce", "cnn-cifar"], "experiment 'cnn-cifar' is unknown; did you mean cnn-cifar10"),
        (["reproduce", "digits", "--methods", "adam,adambs-trackin"], "did you mean adambs-tracking"),
        (["reproduce", "digits", "--methods", "xyz"], "is unknown; all of them: adambs methods"),
        (["reproduce", "digits", "--device", "cuda:77"], "device 'cuda:77' cannot be used here"),
        (["reproduce", "digits", "--device", "gpu"], "device 'gpu' cannot be used here"),
        (["reproduce", "digits", "--methods", "adam,adam"], "each may stand there once"),
        (["reproduce", "digits", "--epochs", "-1"], "epochs must be positive"),
        (["reproduce", "digits", "--batch-size", "0"], "batch-size must be positive"),
        (["reproduce", "digits", "--batch-size", "5000"], "batch_size 5000 is more than the 1437"),
        (["reproduce", "cnn-fashion"], "adambs data fetch fashion-mnist"),
        (["report", "nowhere"], "holds no run"),
    ],
)
def test_bad_input_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADAMBS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("sys.argv", ["adambs", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/**/*"))


def test_reproduce_and_report_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["reproduce", "digits", "--methods", "adam,adambs", "--seeds", "1", "--epochs", "0.3"]
    monkeypatch.setattr("sys.argv", ["adambs", *arguments])
    done = CliRunner().invoke(cli.app, [*arguments, "--slices", "3", "--threads", "1"])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "runs" / "digits-quick"
    assert (folder / "report.html").stat().st_size > 10_000
    assert json.loads((folder / records.FILE).read_text().splitlines()[1])["command"].startswith(
        "adambs reproduce digits"
    )
    (folder / "report.html").unlink()
    assert CliRunner().invoke(cli.app, ["report", str(folder)]).exit_code == 0
    assert (folder / "report.html").exists()


def test_ctrl_c_keeps_what_is_done_and_writes_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    original = runner._run_seed

    def stop_in_the_second(plan, data, seed, *rest):
        if seed == 1:
            raise KeyboardInterrupt
        original(plan, data, seed, *rest)

    monkeypatch.setattr(runner, "_run_seed", stop_in_the_second)
    arguments = ["reproduce", "digits", "--methods", "adam,adambs", "--seeds", "2", "--epochs", "0.3"]
    done = CliRunner().invoke(cli.app, [*arguments, "--slices", "3", "--threads", "1"])
    assert done.exit_code == 130, done.output
    assert "the same command goes on from here" in " ".join(done.output.split())
    assert (tmp_path / "runs" / "digits-quick" / "report.html").exists()


@pytest.fixture
def short_panels(monkeypatch):
    for panel in demo.PANELS:
        short = dataclasses.replace(experiments.EXPERIMENTS[panel.experiment], epochs=0.1, slices=2)
        monkeypatch.setitem(experiments.EXPERIMENTS, panel.experiment, short)


@pytest.mark.parametrize("processors", [1, 2])
def test_the_demo_has_three_panels_and_says_what_to_do_next(tmp_path, monkeypatch, short_panels, processors):
    monkeypatch.setattr(demo, "processors", lambda: processors)
    done = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--seeds", "1"])
    assert done.exit_code == 0, done.output
    printed = " ".join(done.output.split())
    page = (tmp_path / "report.html").read_text()
    for panel in demo.PANELS:
        run = records.read(tmp_path / panel.experiment)
        assert run.finished == {0}
        assert {line["method"] for line in run.lines("slice")} == {"adam", "adambs-loop"}
        assert panel.about in printed
        assert panel.about in html.unescape(page)
    assert printed.count("A step took") == 3
    for text in (printed, page):
        assert "What next" in text
        assert "adambs.probe(model, train" in text
        assert "adambs.BanditLoader(train, sampler)" in text


def test_a_panel_that_fails_in_its_process_says_why(tmp_path, monkeypatch, short_panels):
    monkeypatch.setattr(demo, "processors", lambda: 2)
    (tmp_path / "photograph").write_text("a file where a folder belongs")
    done = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--seeds", "1"])
    assert done.exit_code != 0
    assert "photograph" in str(done.exception)


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_ctrl_c_in_the_demo_ends_its_processes_without_a_word_of_theirs(tmp_path):
    """A terminal sends it to all of them, here while they still import."""
    script = tmp_path / "two_lanes.py"
    script.write_text(
        "import signal\nfrom adambs import cli\nfrom adambs.lab.experiments import demo\n"
        "demo.processors = lambda: 2\n"
        # A shell that runs the tests in the background has it ignored, and that is inherited.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "if __name__ == '__main__':\n    cli.app(['demo', '--out', 'out', '--seeds', '1'])\n"
    )
    running = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    if not children.exists():
        running.kill()
        pytest.skip("only Linux tells who has started whom")
    while len(started := children.read_text().split()) < 3 and running.poll() is None:
        time.sleep(0.05)  # two lanes, and the process of multiprocessing that tidies up
    os.killpg(running.pid, signal.SIGINT)
    said = running.communicate()[0]
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert "Stopped. What is done is kept" in said
    while any(map(alive, started)):
        time.sleep(0.05)  # the one that tidies up is the last to go


def test_the_demo_keeps_what_another_version_left(tmp_path, monkeypatch, short_panels):
    monkeypatch.setattr(demo, "processors", lambda: 1)
    older = records.Writer(tmp_path / "photograph", {"experiment": "an older one"}, {})
    older.append({"kind": "begin", "seed": 0})
    older.append({"kind": "slice", "seed": 0})
    done = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--seeds", "1"])
    assert done.exit_code == 0, done.output
    assert records.read(tmp_path / "photograph").config == {"experiment": "an older one"}
    assert records.read(tmp_path / "photograph-2").finished == {0}
    assert (tmp_path / "report.html").exists()


def test_freed_memory_is_kept_for_the_next_step():
    """Once it has been asked for, hardly a page of it is touched anew."""
    script = """if True:
        import resource, torch
        from adambs.lab import machine
        kept = machine.keep_memory()
        def steps(count):
            for _ in range(count):
                torch.ones(1_500_000).sum() + torch.ones(1_500_000).sum()
        steps(200)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        steps(300)
        print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    kept, pages = map(int, done.stdout.split())
    if not kept:
        pytest.skip("this C library has no mallopt")
    assert pages < 0.03 * 300 * 2 * 6_000_000 / 4096


def test_other_seeds_can_be_run_and_join_the_first(tmp_path):
    arguments = ["reproduce", "digits", "--methods", "adam", "--epochs", "0.2", "--slices", "2"]
    arguments += ["--threads", "1", "--out", str(tmp_path)]
    for options, finished in ((["--seeds", "1"], {0}), (["--seeds", "2", "--first-seed", "5"], {0, 5, 6})):
        done = CliRunner().invoke(cli.app, [*arguments, *options])
        assert done.exit_code == 0, done.output
        assert records.read(tmp_path).finished == finished


def test_a_sweep_gives_every_rule_the_same_trials_and_names_the_best_of_each(tmp_path):
    assert {len(trials) for trials in sweep.TRIALS.values()} == {3}
    folder = tmp_path / "results" / "sweep-digits"
    arguments = ["reproduce", "digits", "--methods", "sweep", "--epochs", "0.3", "--slices", "4"]
    arguments += ["--seeds", "1", "--threads", "1", "--out", str(folder)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    analysis = analyse(records.read(folder))
    text = summary.write_summary(tmp_path / "results").read_text()
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]
    for rule, trials in sweep.TRIALS.items():
        rows = [row for row in cells if row[0] == rule]
        values = [
            1.0 if trial == "adam" else analysis.speedups[trial]["seconds"].overall.value for trial in trials
        ]
        assert [row[-1].strip("*").removeprefix("< ") for row in rows] == [f"{value:.2f}" for value in values]
        assert ["<" in row[-1] for row in rows] == ["<" in row[-2] for row in rows]
        assert [row[-1].startswith("**") for row in rows] == [value == max(values) for value in values]
    ours, most = (analysis.speedups[name]["step"].overall.value for name in ("adambs", "oracle"))
    assert f"(oracle {most:.2f}, default {ours:.2f})" in text
    assert "adambs-avare" not in text.partition("## Sweep")[0]  # a sweep is no experiment of its own
    assert (tmp_path / "results" / "figures" / "sweep.png").exists()


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("command", ["methods", "experiments", "data"])
def test_lists_fit_the_terminal(command, width, tmp_path, monkeypatch):
    """No line is too long, and no word that matters was cut."""
    monkeypatch.setenv("ADAMBS_DATA", "data")
    monkeypatch.setattr(cli, "console", Console(width=width))
    done = CliRunner().invoke(cli.app, [command])
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= width
    assert "…" not in done.output
    known = {
        "methods": ["selective-backprop", "adambs-release-unbiased", "Kingma and Ba, ICLR 2015"],
        "experiments": ["rcnn-imdb", "batch 128"],
        "data": ["fashion-mnist", "missing"],
    }
    for words in known[command]:
        assert words in " ".join(done.output.split())


@pytest.mark.parametrize("width", [40, 80])
def test_the_numbers_fit_the_terminal(width, finished):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal_table([finished]))
    said = console.export_text()
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said
    analysis = analyse(finished)
    for method in analysis.methods[1:]:
        assert f"{analysis.speedups[method]['seconds'].overall.value:.2f}" in said


def test_the_version():
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == f"adambs {adambs.__version__}"


def test_the_help_is_whole_in_80_columns_and_shows_choices():
    """No name of an option and no summary of a command is cut short, and no type is one of Python's."""
    names = [each.name or each.callback.__name__ for each in cli.app.registered_commands]
    for command in ([], *([name] for name in names), ["data"], ["data", "fetch"]):
        done = CliRunner().invoke(cli.app, [*command, "--help"], terminal_width=80)
        assert done.exit_code == 0
        usage, *lines = done.output.splitlines()
        assert usage.startswith("Usage: ")
        assert not [line for line in lines if "list[" in line or "…" in line or "..." in line]
        assert max(map(len, lines)) <= 80
    said = CliRunner().invoke(cli.app, ["reproduce", "--help"], terminal_width=80).output
    assert "--tune-batch-sizes" in said
    for command, option, choices in (
        (["reproduce", "digits"], "--scale", ("quick", "paper")),
        (["probe"], "--scale", ("quick", "paper")),
        (["mislabelled", "digits"], "--noise", ("flips", "confusions")),
    ):
        wrong = CliRunner().invoke(cli.app, [*command, option, "huge"])
        assert wrong.exit_code == 2
        assert all(choice in wrong.output + wrong.stderr for choice in choices)


def test_ctrl_c_before_the_first_slice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_contestant", stop)
    done = CliRunner().invoke(cli.app, ["reproduce", "digits", "--seeds", "1", "--threads", "1"])
    assert done.exit_code == 130, done.output
    assert not list(tmp_path.rglob(records.FILE))
    monkeypatch.setattr(demo, "_run", stop)  # its panels run in processes of their own
    assert CliRunner().invoke(cli.app, ["demo", "--seeds", "1"]).exit_code == 130


@pytest.mark.parametrize(
    ("most", "ours", "said"),
    [(1.9, 1.64, "77% (oracle 1.90, default 1.64)"), (1.03, 1.04, "there is hardly anything to win")],
)
def test_the_default_has_a_share_of_the_oracles_gain_where_there_is_one(most, ours, said):
    speedups = {
        name: {"step": SimpleNamespace(overall=Estimate(value, None, None, 1))}
        for name, value in (("oracle", most), ("adambs", ours))
    }
    assert sweep._share(SimpleNamespace(speedups=speedups)).startswith(said)


def test_anchors_are_those_of_github():
    assert summary._anchor("CNN on Fashion-MNIST, 20 % of it, learning rate 0.002") == (
        "cnn-on-fashion-mnist-20--of-it-learning-rate-0002"
    )


ON_THE_CLOCK = """
import sys
from numba.core.dispatcher import Dispatcher
from adambs.lab import methods
from adambs.lab.experiments import reproduce
from adambs.lab.runs import runner, training

def compiled():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("adambs.")]
    kernels = {f for module in modules for f in vars(module).values() if isinstance(f, Dispatcher)}
    return {(f.__name__, str(signature)) for f in kernels for signature in f.signatures}

plan = reproduce.make_plan("digits", "quick", reproduce.Overrides((sys.argv[1],), threads=1))
data = reproduce.prepare(plan, None)
tensors = [*data.train.tensors, *data.test.tensors]
chosen = runner._contestant(plan, methods.find(sys.argv[1]), data, 0, plan.config(data), tensors)
before = compiled()
assert len(before) > 5
training.train(chosen.method, 250)
print("late:", sorted(compiled() - before))
assert chosen.method.sampler.counters.reshuffled < 250
"""


@pytest.mark.parametrize("method", ["adambs", "adambs-loop:context=1"])
def test_nothing_compiles_on_the_clock(method):
    """In a process of its own: here most kernels have been used before."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_THE_CLOCK, method], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "late: []"
