"""Every part of ``adambs bench`` measures and prints, at sizes that take a moment. No test of time."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from adambs.lab import bench
from adambs.lab.bench import processes, rules, scale, steps, trees


def printed(table):
    console = Console(width=200, record=True, quiet=False, file=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize("workload", [steps.SMALL, steps.MLP], ids=lambda workload: workload.title)
def test_steps_are_ratios_to_adam_with_an_interval(workload):
    row = steps.measure(workload, rounds=3, steps=2)
    adam, ours = row["candidates"]["Adam"], row["candidates"]["AdamBS, bound"]
    assert adam["ratio"] == 1
    assert adam["interval"] == [1, 1]
    low, high = ours["interval"]
    assert low < ours["ratio"] < high
    assert set(row["candidates"]) == {
        "Adam",
        "AdamBS, bound",
        "AdamBS, bound, with its gate",
        "Adam, weighted losses",
    }
    assert set(row["parts"]) == {"draw", "plain mean", "mean", "score", "update"}
    assert f"{workload.bar:.2f}" in printed(steps.table([json.loads(json.dumps(row))]))


def test_the_threads_of_torch_are_set_back(monkeypatch):
    seen = []
    monkeypatch.setattr(steps, "measure", lambda *_, **__: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    steps.measure_all(quick=True)
    assert seen == [1, 1, 1]
    assert torch.get_num_threads() == before


def test_the_interval_is_students_t_on_the_logarithms():
    adam, own = [1.0, 1.0, 2.0], [1.0, 2.0, 8.0]  # ratios 1, 2, 4
    result = steps._against(adam, own)
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert result["ratio"] == pytest.approx(2)
    assert result["interval"] == pytest.approx([2 * math.exp(-half), 2 * math.exp(half)], rel=1e-4)


def test_draw_and_update_of_every_rule():
    row = rules.measure(100, 8, seconds=0)
    assert set(row["microseconds"]) == set(rules.RULES)
    assert all(value > 0 for value in row["microseconds"].values())
    assert "Calibrated" in printed(rules.table([row]))


def test_the_trees_beside_their_peers():
    rows = [trees.measure(100, k, seconds=0) for k in (8, 16)]
    assert rows[0]["ratio"]["adambs.SumTree"] == 1
    assert "growth" in printed(trees.table(rows))


def test_a_large_sampler_in_a_process_of_its_own():
    result = scale.measure(70_000, 16)
    assert set(scale.ROWS) <= set(result)
    assert 4 < result["checkpoint"] < 6
    text = printed(scale.table(result))
    assert "under 10" in text
    assert "4 to 5" in text


def test_several_processes(monkeypatch):
    monkeypatch.setattr(processes, "STEP", 0.001)
    result = json.loads(json.dumps(processes.measure(quick=True)))
    rows = [(row["W"], row["kind"], row["seen"]) for row in result["rows"]]
    assert rows == [(2, kind, seen) for kind in ("BanditSampler", "ShardedSampler") for seen in (False, True)]
    assert all(row["both"] > 0 for row in result["rows"])
    assert [row["n"] for row in result["shards"]] == [10**4, 10**5]
    assert result["kernels"]["everything"] > result["kernels"]["heard"] > 0
    words = printed(processes.table(result))
    assert "at most 3%" in words
    assert "4,096" in words
    modelled = processes.model(
        {"everything": 100.0, "heard": 10.0, "fixed": 50.0, "fixed, sharded": 90.0}, 128
    )
    assert modelled[0]["replicated"] == pytest.approx(50 + 12.8)
    assert modelled[-1]["sharded"] == pytest.approx(90 + 12.8 + 4096 * 1.28 + 4096 * 0.091)
    assert modelled[-1]["bytes"] == 4096 * 1064
    assert "to hear of another's" in words


def test_what_was_measured_is_kept_if_a_later_part_fails(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("the second part")

    monkeypatch.setattr(steps, "measure_all", lambda *, quick: [])
    monkeypatch.setattr(rules, "measure", fails)
    out = tmp_path / "folder" / "bench.json"
    with pytest.raises(RuntimeError, match="the second part"):
        bench.run_bench(Console(file=io.StringIO()), out, quick=True)
    assert json.loads(out.read_text())["steps"] == []
