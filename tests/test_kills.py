"""Runs that are killed at random moments end as the run that was left alone, bit for bit.

With workers, persistent workers or looks; with random augmentation, dropout, gradient accumulation, a
GradScaler that skips steps, a schedule, the default rule and its gate. ADAMBS_KILLS=100 kills that often.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import same


@pytest.mark.skipif(not hasattr(os, "fork"), reason="lives are forks")
def test_killed_runs_end_as_the_run_that_was_left_alone(tmp_path):
    kills = int(os.environ.get("ADAMBS_KILLS", "10"))
    script = Path(__file__).with_name("kill_script.py")
    arguments = [sys.executable, script, kills, 0, tmp_path]
    found = subprocess.run(
        [str(a) for a in arguments], check=True, timeout=600 + 60 * kills, stdout=subprocess.PIPE
    )
    report = json.loads(found.stdout)
    assert sum(part["kills"] for part in report.values()) == kills
    for configuration, part in report.items():
        expected = torch.load(tmp_path / configuration / "expected.pt", weights_only=True)
        assert part["runs"] > 0
        for run in range(part["runs"]):
            ended = torch.load(tmp_path / configuration / f"run-{run}.pt", weights_only=True)
            for name in expected:
                assert same(ended[name], expected[name]), (configuration, run, name)
        counters = expected["optimizer"]["sampler"]["counters"]
        assert counters["updates"] == 100 - 5  # five steps are skipped, and their last batch with them
        if configuration == "looking":
            assert counters["looks"] > 20
        else:
            assert 0 < counters["reshuffled"] < counters["draws"]  # the gate was closed, and open
    print(report)
